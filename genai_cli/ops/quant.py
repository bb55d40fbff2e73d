"""Block-quantized weights, and the standard quantize and dequantize ops."""

from __future__ import annotations

from typing import Any

import numpy as np

from genai_cli.errors import GenaiError
from genai_cli.ops.cast import cast, onnx_dtype
from genai_cli.ops.dtypes import SMALL_FLOAT, SMALL_INT, DType
from genai_cli.ops.infer import Attrs, Inputs, axis_of, dtype, optional, shape
from genai_cli.ops.registry import Spec, op

Array = np.ndarray[Any, Any]
F32 = np.dtype(np.float32)


def unpack_bits(packed: Array, bits: int, count: int) -> Array:
    """The first `count` unsigned integers of each last-dimension row of bytes, low bits first."""
    if bits == 8:
        return packed[..., :count].astype(np.int32)
    if 8 % bits == 0:
        lanes = (packed[..., None] >> np.arange(0, 8, bits, dtype=np.uint8)) & ((1 << bits) - 1)
        return lanes.reshape(*packed.shape[:-1], -1)[..., :count].astype(np.int32)
    flat = np.unpackbits(packed, axis=-1, bitorder="little")[..., : count * bits].reshape(
        *packed.shape[:-1], count, bits
    )
    return (flat.astype(np.int32) << np.arange(bits)).sum(-1)


def block_zeros(zero_points: Array | None, bits: int, rows: int, blocks: int) -> Array:
    """Zero points [rows, blocks]: packed bytes, one float a block, or the middle of the range."""
    if zero_points is None:
        return np.full((rows, blocks), 1 << (bits - 1), F32)
    if zero_points.dtype == np.uint8:
        return unpack_bits(zero_points.reshape(rows, -1), bits, blocks).astype(F32)
    return zero_points.reshape(rows, blocks).astype(F32)


def dequantize_blocks(
    packed: Array, scales: Array, zero_points: Array | None, rows: int, columns: int, bits: int, block_size: int
) -> Array:
    """Weights [rows, columns] in f32: (q - zero) * scale, one scale for block_size columns of a row."""
    blocks = -(-columns // block_size)
    levels = unpack_bits(packed.reshape(rows, blocks, -1), bits, block_size).astype(F32)
    zeros = block_zeros(zero_points, bits, rows, blocks)
    weights = (levels - zeros[..., None]) * scales.reshape(rows, blocks, 1).astype(F32)
    return weights.reshape(rows, blocks * block_size)[:, :columns]


def quantize_rows(a: Array, block_size: int) -> tuple[Array, Array]:
    """Rows [M, K] as int8 levels [M, blocks, block_size] and scales [M, blocks]; K is padded with zeros.

    ORT's rule for accuracy_level 4: scale = max|a| of the block / 127, level = round half even(a * (127 / max|a|)):
    1 / scale would round twice and move ties.
    """
    blocks = -(-a.shape[1] // block_size)
    padded = np.pad(a.astype(F32), ((0, 0), (0, blocks * block_size - a.shape[1]))).reshape(-1, blocks, block_size)
    largest = np.abs(padded).max(-1, initial=0)
    scales = largest / np.float32(127)
    inverse = np.where(scales == 0, 0, np.float32(127) / np.where(scales == 0, 1, largest)).astype(F32)
    return np.clip(np.rint(padded * inverse[..., None]), -128, 127), scales


def matmul_int8(
    a: Array, packed: Array, scales: Array, zero_points: Array | None, columns: int, bits: int, block_size: int
) -> Array:
    """[M, N]: integer sums within a block, times both scales, added up over the blocks in f32."""
    rows, blocks = scales.reshape(columns, -1).shape
    levels = unpack_bits(packed.reshape(rows, blocks, -1), bits, block_size).astype(F32)
    centred = levels - block_zeros(zero_points, bits, rows, blocks)[..., None]
    quantized, a_scales = quantize_rows(a, block_size)
    sums = np.einsum("mbk,nbk->bmn", quantized, centred, optimize=True)  # exact: |sum| < 2^24
    factors = np.einsum("mb,nb->bmn", a_scales, scales.reshape(rows, blocks).astype(F32))
    return (sums * factors).sum(0, dtype=F32)


def _nbits_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    return [((*shape(inputs[0])[:-1], attrs["N"]), dtype(inputs[0]))]


@op(domain="com.microsoft", infer=_nbits_infer)
def MatMulNBits(
    a: Array,
    b: Array,
    scales: Array,
    zero_points: Array | None = None,
    g_idx: Array | None = None,
    bias: Array | None = None,
    *,
    K: int,
    N: int,
    block_size: int,
    accuracy_level: int = 0,
    bits: int = 4,
    weight_prepacked: int = 0,
) -> Array:
    """a [..., K] times the quantized weight [N, K] transposed; accuracy_level 4 rounds a to int8 block by block.

    Float zero points keep f32 activations at every level, as in ORT.
    """
    if weight_prepacked:
        raise GenaiError(f"`MatMulNBits` with weight_prepacked={weight_prepacked} holds another device's layout")
    rows = a.reshape(-1, K)
    whole = zero_points is None or zero_points.dtype == np.uint8
    if accuracy_level == 4 and g_idx is None and whole:
        y = matmul_int8(rows, b, scales, zero_points, N, bits, block_size)
    else:
        y = np.matmul(rows, _weights(b, scales, zero_points, g_idx, N, K, bits, block_size).T)
    return (y if bias is None else y + bias).reshape(*a.shape[:-1], N)


def _weights(
    b: Array, scales: Array, zero_points: Array | None, g_idx: Array | None, n: int, k: int, bits: int, block_size: int
) -> Array:
    if g_idx is None:
        return dequantize_blocks(b, scales, zero_points, n, k, bits, block_size)
    blocks = -(-k // block_size)  # g_idx[i] is the group whose scale and zero point column i uses
    levels = unpack_bits(b.reshape(n, blocks, -1), bits, block_size).reshape(n, -1)[:, :k].astype(F32)
    zeros = block_zeros(zero_points, bits, n, blocks)[:, g_idx[:k]]
    return (levels - zeros) * scales.reshape(n, blocks).astype(F32)[:, g_idx[:k]]


def _gather_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    data, kind = shape(inputs[0]), dtype(inputs[0])
    lanes = 8 // attrs.get("bits", 4) if kind == np.uint8 else 1
    dims = (*data[:-1], data[-1] * lanes)
    axis = axis_of(attrs.get("gather_axis", 0), len(dims))
    return [((*dims[:axis], *shape(inputs[1]), *dims[axis + 1 :]), dtype(inputs[2]))]


@op(domain="com.microsoft", infer=_gather_infer, like=2)
def GatherBlockQuantized(
    data: Array,
    indices: Array,
    scales: Array,
    zero_points: Array | None = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
) -> Array:
    """Gather, then (q - zero) * scale; an index outside gives zeros, unlike Gather.

    uint8 data holds 8 / bits levels a byte along the last axis and its zero is 2^(bits-1); 4-bit data has zero 0.
    """
    if data.dtype == np.uint8:
        levels = unpack_bits(data, bits, data.shape[-1] * 8 // bits).astype(F32)
        zeros = np.full(1, 1 << (bits - 1), F32)
    else:
        levels, zeros = data.astype(F32), np.zeros(1, F32)
    axis = axis_of(quantize_axis, levels.ndim)
    if zero_points is not None:
        packed = zero_points.dtype == np.uint8
        zeros = unpack_bits(zero_points, bits, scales.shape[-1]) if packed else zero_points
        zeros = _spread(zeros.astype(F32), axis, block_size, levels.shape[axis])
    weights = (levels - zeros) * _spread(scales, axis, block_size, levels.shape[axis])
    where = axis_of(gather_axis, weights.ndim)
    size = weights.shape[where]
    inside = (indices >= -size) & (indices < size)
    found = np.take(weights, np.where(inside, indices, 0), where)
    return np.where(inside.reshape(inside.shape + (1,) * (weights.ndim - where - 1)), found, 0)


def _spread(values: Array, axis: int, block_size: int, size: int) -> Array:
    """One value a block as one value an element along the axis."""
    return np.take(np.repeat(values, block_size, axis), np.arange(size), axis)


def _along(values: Array, x: Array, axis: int, block_size: int) -> Array:
    """A scale or zero point as something that broadcasts to x: per tensor, per axis, or blocked."""
    if values.ndim == 0 or (values.size == 1 and values.ndim <= 1):
        return values.reshape(())
    where = axis_of(axis, x.ndim)
    if block_size:
        return _spread(values, where, block_size, x.shape[where])
    return values.reshape([-1 if i == where else 1 for i in range(x.ndim)])


def _dequantize_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    code = attrs.get("output_dtype", 0)
    return [(shape(inputs[0]), onnx_dtype(code) if code else dtype(inputs[1]))]


@op(since=10, infer=_dequantize_infer, like=None, raw=True)
def DequantizeLinear(
    x: Array,
    x_scale: Array,
    x_zero_point: Array | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Array:
    """(x - zero) * scale in f32, rounded to the scale's dtype or the one asked for."""
    kind = onnx_dtype(output_dtype) if output_dtype else x_scale.dtype
    wide = x.astype(np.int64).astype(F32) if x.dtype.kind in "iu" else x.astype(F32)
    zero = np.zeros((), F32) if x_zero_point is None else _along(x_zero_point.astype(F32), x, axis, block_size)
    return ((wide - zero) * _along(x_scale.astype(F32), x, axis, block_size)).astype(kind)


def _quantize_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    zero, code = optional(inputs, 2), attrs.get("output_dtype", 0)
    kind = dtype(zero) if zero is not None else onnx_dtype(code or 2)
    return [(shape(inputs[0]), kind)]


@op(since=10, infer=_quantize_infer, like=None, raw=True)
def QuantizeLinear(
    x: Array,
    y_scale: Array,
    y_zero_point: Array | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
) -> Array:
    """round half even(x / scale) + zero, saturated; 8-bit and smaller floats are rounded as Cast does."""
    kind = y_zero_point.dtype if y_zero_point is not None else onnx_dtype(output_dtype or 2)
    scaled = x.astype(F32) / _along(y_scale.astype(F32), x, axis, block_size)
    if kind in SMALL_FLOAT:
        return cast(scaled, kind, bool(saturate))
    low, high = _limits(kind)
    zero = 0 if y_zero_point is None else _along(y_zero_point.astype(F32), x, axis, block_size)
    return np.clip(np.rint(scaled) + zero, low, high).astype(np.int32).astype(kind)


def _limits(kind: DType) -> tuple[int, int]:
    if kind in SMALL_INT:
        bits, signed = int(kind.name[-1]), not kind.name.startswith("u")
        return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    limits = np.iinfo(kind)
    return int(limits.min), int(limits.max)


@op(since=11, like=None)
def DynamicQuantizeLinear(x: Array) -> tuple[Array, Array, Array]:
    """uint8 over the range of x, widened to hold 0; returns levels, scale, zero point."""
    low, high = min(float(x.min(initial=0)), 0.0), max(float(x.max(initial=0)), 0.0)
    scale = np.float32((np.float32(high) - np.float32(low)) / np.float32(255))
    if scale == 0:
        scale = np.float32(1)
    zero = np.clip(np.rint(-np.float32(low) / scale), 0, 255).astype(np.uint8)
    levels = np.clip(np.rint(x / scale) + zero.astype(F32), 0, 255).astype(np.uint8)
    return levels, np.asarray(scale, F32), zero


@op(since=10, like=7, raw=True)
def QLinearMatMul(
    a: Array,
    a_scale: Array,
    a_zero_point: Array,
    b: Array,
    b_scale: Array,
    b_zero_point: Array,
    y_scale: Array,
    y_zero_point: Array,
) -> Array:
    """Dequantize both, multiply exactly in f64, quantize."""
    left = (a.astype(np.float64) - _column(a_zero_point)) * _column(a_scale)
    right = (b.astype(np.float64) - b_zero_point.astype(np.float64)) * b_scale.astype(np.float64)
    scaled = np.rint(np.matmul(left, right) / y_scale.astype(np.float64)) + y_zero_point.astype(np.float64)
    return np.clip(scaled, *_limits(y_zero_point.dtype))


def _column(values: Array) -> Array:
    """A row's scale or zero point stands at the end of its row."""
    wide = values.astype(np.float64)
    return wide[..., None] if wide.ndim == 1 and wide.size > 1 else wide


for _name, _function, _infer in (
    ("DequantizeLinear", DequantizeLinear, _dequantize_infer),
    ("QuantizeLinear", QuantizeLinear, _quantize_infer),
):
    op(name=_name, domain="com.microsoft", infer=_infer, like=None, raw=True)(_function)
