"""Constants, copies and dtype conversion."""

from __future__ import annotations

from typing import Any

import numpy as np

from genai_cli.errors import GenaiError
from genai_cli.ops.dtypes import ONNX_DTYPES, SMALL_FLOAT, SMALL_INT, DType, is_float
from genai_cli.ops.infer import Attrs, Inputs, same, shape, values
from genai_cli.ops.registry import Spec, op

Array = np.ndarray[Any, Any]


def onnx_dtype(code: int) -> DType:
    """The numpy dtype of a TensorProto.DataType."""
    if code not in ONNX_DTYPES:
        raise GenaiError(f"the tensor type `{code}` is not supported (strings and complex numbers are not)")
    return ONNX_DTYPES[code]


def cast(x: Array, to: DType, saturate: bool = True) -> Array:
    """Rounds floats to nearest even, truncates floats to integers, and saturates 8-bit and smaller floats if asked."""
    if to == np.bool_:
        return x.astype(np.float32) != 0 if is_float(x.dtype) else x.astype(np.int64) != 0
    if to in SMALL_INT:
        return _to_small_int(x, to)
    if x.dtype in SMALL_FLOAT or x.dtype in SMALL_INT:
        return cast(x.astype(np.float32), to, saturate) if to in SMALL_FLOAT else x.astype(np.float32).astype(to)
    return _to_small_float(x, to, saturate) if to in SMALL_FLOAT else x.astype(to)


def _to_small_int(x: Array, to: DType) -> Array:
    """Keeps the low bits of an integer (ORT and the specification's cases agree)."""
    bits = int(np.dtype(to).name[-1])
    low = x.astype(np.float64).astype(np.int64) & ((1 << bits) - 1)
    signed = not np.dtype(to).name.startswith("u")
    return np.where(signed & (low >= 1 << (bits - 1)), low - (1 << bits), low).astype(np.int8).astype(to)


def _to_small_float(x: Array, to: DType, saturate: bool) -> Array:
    import ml_dtypes

    wide = x.astype(np.float32)
    result = wide.astype(to)
    if not saturate or not _has_negative(to):
        return result
    largest = np.float32(ml_dtypes.finfo(to).max)  # type: ignore[no-untyped-call]
    limited = np.where(np.isnan(wide), wide, np.clip(wide, -largest, largest))
    return limited.astype(to)


def _has_negative(to: DType) -> bool:
    return "e8m0" not in to.name


@op(since=6, infer=lambda inputs, attrs: [(shape(inputs[0]), onnx_dtype(attrs["to"]))], raw=True, like=None)
def Cast(x: Array, *, to: int, saturate: int = 1, round_mode: str = "up") -> Array:
    if to == 24:
        return _to_e8m0(x, bool(saturate), round_mode)
    return cast(x, onnx_dtype(to), bool(saturate))


def _to_e8m0(x: Array, saturate: bool, round_mode: str) -> Array:
    """A power of two: `up`, `down` or `nearest` (half up) in the exponent; the sign is dropped."""
    wide = np.abs(x.astype(np.float32))
    mantissa, exponent = np.frexp(wide)  # wide = mantissa * 2^exponent, mantissa in [0.5, 1)
    bump = {"up": mantissa > 0.5, "down": np.zeros(wide.shape, bool), "nearest": mantissa >= 0.75}[round_mode]
    code = exponent.astype(np.int64) - 1 + bump + 127
    limited = np.clip(code, 0, 254) if saturate else np.where((code < 0) | (code > 254), 255, code)
    special = np.where(np.isnan(wide) | (np.isinf(wide) & (not saturate)), 255, np.where(np.isinf(wide), 254, limited))
    return np.where(wide == 0, 0, special).astype(np.uint8).view(onnx_dtype(24))


@op(since=15, infer=lambda inputs, attrs: [(shape(inputs[0]), inputs_dtype(inputs, 1))], raw=True, like=1)
def CastLike(x: Array, target_type: Array, *, saturate: int = 1, round_mode: str = "up") -> Array:
    if target_type.dtype == onnx_dtype(24):
        return _to_e8m0(x, bool(saturate), round_mode)
    return cast(x, target_type.dtype, bool(saturate))


def inputs_dtype(inputs: Inputs, index: int) -> DType:
    """Dtype of a required input."""
    value = inputs[index]
    if value is None:
        raise GenaiError("a required input is missing")
    return value.dtype if isinstance(value, np.ndarray) else value[1]


@op(since=26, infer=lambda inputs, attrs: [(shape(inputs[0]), onnx_dtype(attrs["to"]))], raw=True, like=None)
def BitCast(input: Array, *, to: int) -> Array:
    """The same bits as another dtype of equal width."""
    if input.dtype.itemsize != onnx_dtype(to).itemsize:
        raise GenaiError(f"`BitCast` of {input.dtype.name} to {onnx_dtype(to).name}: the widths differ")
    return input.view(onnx_dtype(to))


@op(infer=same, raw=True)
def Identity(x: Array) -> Array:
    return x


@op(since=12, raw=True, like=(0, None))
def Dropout(
    data: Array, ratio: Array | None = None, training_mode: Array | None = None, *, seed: int = 0
) -> tuple[Array, Array]:
    """Inference only: the identity and an all-true mask."""
    if training_mode is not None and training_mode.any() and (ratio is None or ratio.any()):
        raise GenaiError("`Dropout` in training mode is not supported")
    return data, np.ones(data.shape, np.bool_)


@op(raw=True, like=None)
def Constant(
    *,
    value: Array | None = None,
    value_float: float | None = None,
    value_floats: list[float] | None = None,
    value_int: int | None = None,
    value_ints: list[int] | None = None,
) -> Array:
    if value is not None:
        return value
    floats = value_float if value_float is not None else value_floats
    if floats is not None:
        return np.array(floats, np.float32)
    integers = value_int if value_int is not None else value_ints
    if integers is None:
        raise GenaiError("`Constant` without a numeric value is not supported (strings and sparse tensors are not)")
    return np.array(integers, np.int64)


def _constant_of_shape(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    value = attrs.get("value")
    return [(tuple(values(inputs, 0) or ()), np.dtype(np.float32) if value is None else value.dtype)]


@op(since=9, infer=_constant_of_shape, raw=True, like=None, host_inputs=(0,))
def ConstantOfShape(input: Array, *, value: Array | None = None) -> Array:
    fill = np.zeros(1, np.float32) if value is None else value
    return np.full(tuple(int(n) for n in input), fill.reshape(-1)[0], fill.dtype)


def _count(start: Array, limit: Array, delta: Array) -> int:
    first, last, step = (np.float64(value.reshape(())[()]) for value in (start, limit, delta))
    return max(int(np.ceil((last - first) / step)), 0)


def _range_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    known = [value for value in inputs if isinstance(value, np.ndarray)]
    if len(known) < 3:
        raise GenaiError("`Range`: how many elements there are depends on values that are not known yet")
    return [((_count(*known),), known[0].dtype)]


@op(since=11, raw=True, infer=_range_infer, host_inputs=(0, 1, 2))
def Range(start: Array, limit: Array, delta: Array) -> Array:
    """max(ceil((limit - start) / delta), 0) elements; element i is start + i * delta."""
    first, _, step = (value.reshape(())[()] for value in (start, limit, delta))
    count = _count(start, limit, delta)
    dtype = start.dtype if not is_float(start.dtype) or start.dtype.itemsize >= 4 else np.dtype(np.float32)
    return dtype.type(first) + np.arange(count).astype(dtype) * dtype.type(step)


@op(since=9, raw=True, like=None)
def EyeLike(input: Array, *, dtype: int | None = None, k: int = 0) -> Array:
    to = input.dtype if dtype is None else onnx_dtype(dtype)
    return np.eye(input.shape[0], input.shape[1], k=k, dtype=np.float32).astype(to)
