"""Ops that move or describe elements without computing on them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from genai_cli.errors import GenaiError
from genai_cli.ops.infer import Attrs, Inputs, axis_of, dtype, same, shape, spec, values
from genai_cli.ops.registry import Spec, op

Array = np.ndarray[Any, Any]
INT64 = np.dtype(np.int64)


def _shape_range(rank: int, start: int, end: int | None) -> slice:
    low, high = (min(max(v + rank if v < 0 else v, 0), rank) for v in (start, rank if end is None else end))
    return slice(low, max(low, high))


@op(raw=True, like=None, infer=lambda inputs, attrs: [((len(_shape_of(shape(inputs[0]), **attrs)),), INT64)])
def Shape(data: Array, *, start: int = 0, end: int | None = None) -> Array:
    return np.array(_shape_of(data.shape, start, end), np.int64)


def _shape_of(dims: tuple[int, ...], start: int = 0, end: int | None = None) -> tuple[int, ...]:
    return dims[_shape_range(len(dims), start, end)]


@op(raw=True, like=None, infer=lambda inputs, attrs: [((), INT64)])
def Size(data: Array) -> Array:
    return np.array(data.size, np.int64)


def reshaped(dims: Sequence[int], wanted: Sequence[int], allowzero: int) -> tuple[int, ...]:
    """ONNX Reshape: 0 copies the old dim (unless allowzero), one -1 takes what is left."""
    filled = [dims[i] if n == 0 and not allowzero else n for i, n in enumerate(wanted)]
    known = prod(n for n in filled if n != -1)
    size = prod(dims)
    if -1 in filled:
        filled[filled.index(-1)] = size // known if known else 0
    if prod(filled) != size:
        raise GenaiError(f"`Reshape` of {list(dims)} to {list(wanted)}: {size} elements do not fit")
    return tuple(filled)


def _reshape(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    wanted = values(inputs, 1) or []
    return [(reshaped(shape(inputs[0]), wanted, attrs.get("allowzero", 0)), dtype(inputs[0]))]


@op(since=5, raw=True, infer=_reshape, host_inputs=(1,))
def Reshape(data: Array, shape: Array, *, allowzero: int = 0) -> Array:
    return data.reshape(reshaped(data.shape, [int(n) for n in shape], allowzero))


def _flattened(dims: tuple[int, ...], axis: int) -> tuple[int, int]:
    split = axis + len(dims) if axis < 0 else axis
    return prod(dims[:split]), prod(dims[split:])


@op(raw=True, infer=lambda inputs, attrs: [(_flattened(shape(inputs[0]), attrs.get("axis", 1)), dtype(inputs[0]))])
def Flatten(input: Array, *, axis: int = 1) -> Array:
    return input.reshape(_flattened(input.shape, axis))


def _squeezed(dims: tuple[int, ...], axes: Sequence[int] | None) -> tuple[int, ...]:
    chosen = {i for i, n in enumerate(dims) if n == 1} if axes is None else {axis_of(a, len(dims)) for a in axes}
    if any(dims[i] != 1 for i in chosen):
        raise GenaiError(f"`Squeeze` of axes {sorted(chosen)} in {list(dims)}: a dimension is not 1")
    return tuple(n for i, n in enumerate(dims) if i not in chosen)


def _unsqueezed(dims: tuple[int, ...], axes: Sequence[int]) -> tuple[int, ...]:
    rank = len(dims) + len(axes)
    chosen = {axis_of(a, rank) for a in axes}
    rest = iter(dims)
    return tuple(1 if i in chosen else next(rest) for i in range(rank))


def _axes(axes: Array | None) -> list[int] | None:
    return None if axes is None else [int(a) for a in axes.reshape(-1)]


@op(
    since=13,
    raw=True,
    host_inputs=(1,),
    infer=lambda inputs, attrs: [(_squeezed(shape(inputs[0]), values(inputs, 1)), dtype(inputs[0]))],
)
def Squeeze(data: Array, axes: Array | None = None) -> Array:
    return data.reshape(_squeezed(data.shape, _axes(axes)))


@op(
    name="Squeeze",
    raw=True,
    infer=lambda inputs, attrs: [(_squeezed(shape(inputs[0]), attrs.get("axes")), dtype(inputs[0]))],
)
def Squeeze_1(data: Array, *, axes: list[int] | None = None) -> Array:
    return data.reshape(_squeezed(data.shape, axes))


@op(
    since=13,
    raw=True,
    host_inputs=(1,),
    infer=lambda inputs, attrs: [(_unsqueezed(shape(inputs[0]), values(inputs, 1) or []), dtype(inputs[0]))],
)
def Unsqueeze(data: Array, axes: Array) -> Array:
    return data.reshape(_unsqueezed(data.shape, _axes(axes) or []))


@op(
    name="Unsqueeze",
    raw=True,
    infer=lambda inputs, attrs: [(_unsqueezed(shape(inputs[0]), attrs["axes"]), dtype(inputs[0]))],
)
def Unsqueeze_1(data: Array, *, axes: list[int]) -> Array:
    return data.reshape(_unsqueezed(data.shape, axes))


def _transpose(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    dims = shape(inputs[0])
    return [(tuple(dims[i] for i in attrs.get("perm") or range(len(dims))[::-1]), dtype(inputs[0]))]


@op(raw=True, infer=_transpose)
def Transpose(data: Array, *, perm: list[int] | None = None) -> Array:
    return np.transpose(data, perm)


def _expand(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    return [(np.broadcast_shapes(shape(inputs[0]), tuple(values(inputs, 1) or ())), dtype(inputs[0]))]


@op(since=8, raw=True, infer=_expand, host_inputs=(1,))
def Expand(input: Array, shape: Array) -> Array:
    return np.broadcast_to(input, np.broadcast_shapes(input.shape, tuple(int(n) for n in shape)))


def _tile(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    dims = zip(shape(inputs[0]), values(inputs, 1) or [], strict=True)
    return [(tuple(n * times for n, times in dims), dtype(inputs[0]))]


@op(since=6, raw=True, infer=_tile, host_inputs=(1,))
def Tile(input: Array, repeats: Array) -> Array:
    return np.tile(input, tuple(int(n) for n in repeats))


def _concat(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    dims = list(shape(inputs[0]))
    axis = axis_of(attrs["axis"], len(dims))
    dims[axis] = sum(shape(value)[axis] for value in inputs)
    return [(tuple(dims), dtype(inputs[0]))]


@op(since=4, raw=True, infer=_concat)
def Concat(*inputs: Array, axis: int) -> Array:
    return np.concatenate(inputs, axis)


def split_sizes(total: int, split: Sequence[int] | None, parts: int) -> list[int]:
    """Given sizes, or `parts` equal ones, the last smaller when it does not divide."""
    if split is not None:
        return list(split)
    size = -(-total // parts)
    return [max(min(size, total - i * size), 0) for i in range(parts)]


def _split_specs(value: Spec, axis: int, sizes: Sequence[int]) -> list[Spec]:
    dims, kind = value
    where = axis_of(axis, len(dims))
    return [((*dims[:where], size, *dims[where + 1 :]), kind) for size in sizes]


def _cut(data: Array, axis: int, sizes: Sequence[int]) -> tuple[Array, ...]:
    if sum(sizes) != data.shape[axis]:
        raise GenaiError(f"`Split` into {list(sizes)} of a dimension of {data.shape[axis]}")
    return tuple(np.split(data, np.cumsum(sizes)[:-1].tolist(), axis))


def _split_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    value, axis = spec(inputs[0]), attrs.get("axis", 0)
    wanted = attrs["split"] if "split" in attrs else values(inputs, 1)
    parts = attrs.get("num_outputs") or attrs.get("num_node_outputs") or 1
    return _split_specs(value, axis, split_sizes(value[0][axis], wanted, parts))


@op(name="Split", since=2, raw=True, infer=_split_infer, like=None)
def Split_2(input: Array, *, axis: int = 0, split: list[int] | None = None, num_node_outputs: int = 1) -> Any:
    return _cut(input, axis, split_sizes(input.shape[axis], split, num_node_outputs))


@op(name="Split", since=13, raw=True, infer=_split_infer, like=None, host_inputs=(1,))
def Split_13(input: Array, split: Array | None = None, *, axis: int = 0, num_node_outputs: int = 1) -> Any:
    return _cut(input, axis, split_sizes(input.shape[axis], _axes(split), num_node_outputs))


@op(since=18, raw=True, infer=_split_infer, like=None, host_inputs=(1,))
def Split(
    input: Array,
    split: Array | None = None,
    *,
    axis: int = 0,
    num_outputs: int | None = None,
    num_node_outputs: int = 1,
) -> Any:
    return _cut(input, axis, split_sizes(input.shape[axis], _axes(split), num_outputs or num_node_outputs))


def slices(
    dims: tuple[int, ...],
    starts: Sequence[int],
    ends: Sequence[int],
    axes: Sequence[int] | None,
    steps: Sequence[int] | None,
) -> tuple[slice, ...]:
    """Python slices for ONNX Slice: clamped the same way, except that a backward slice may end before element 0."""
    cut = [slice(None)] * len(dims)
    for i, axis in enumerate(range(len(starts)) if axes is None else axes):
        where = axis_of(axis, len(dims))
        cut[where] = slice(*_bounds(dims[where], starts[i], ends[i], steps[i] if steps else 1))
    return tuple(cut)


def _bounds(size: int, start: int, end: int, step: int) -> tuple[int, int | None, int]:
    """slice(start, end, step) arguments that are never negative indices."""
    first, last = (v + size if v < 0 else v for v in (start, end))
    if step > 0:
        return min(max(first, 0), size), min(max(last, 0), size), step
    stop = min(max(last, -1), size - 1)
    return min(max(first, 0), size - 1), None if stop < 0 else stop, step


def _sliced(dims: tuple[int, ...], cut: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(len(range(*part.indices(n))) for n, part in zip(dims, cut, strict=True))


def _slice_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    starts, ends, axes, steps = (values(inputs, i) for i in range(1, 5))
    dims = shape(inputs[0])
    return [(_sliced(dims, slices(dims, starts or [], ends or [], axes, steps)), dtype(inputs[0]))]


@op(since=10, raw=True, infer=_slice_infer, host_inputs=(1, 2, 3, 4))
def Slice(data: Array, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None) -> Array:
    return data[slices(data.shape, _axes(starts) or [], _axes(ends) or [], _axes(axes), _axes(steps))]


def _slice_1_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    dims = shape(inputs[0])
    return [(_sliced(dims, slices(dims, attrs["starts"], attrs["ends"], attrs.get("axes"), None)), dtype(inputs[0]))]


@op(name="Slice", raw=True, infer=_slice_1_infer)
def Slice_1(data: Array, *, starts: list[int], ends: list[int], axes: list[int] | None = None) -> Array:
    return data[slices(data.shape, starts, ends, axes, None)]


def padded(data: Array, pads: Sequence[int], axes: Sequence[int] | None, mode: str, fill: Any) -> Array:
    """ONNX Pad: all beginnings, then all ends; negative pads cut."""
    widths = [(0, 0)] * data.ndim
    chosen = list(range(data.ndim)) if axes is None else [axis_of(a, data.ndim) for a in axes]
    for i, axis in enumerate(chosen):
        widths[axis] = (pads[i], pads[i + len(chosen)])
    cut = tuple(slice(max(-a, 0), n - max(-b, 0)) for (a, b), n in zip(widths, data.shape, strict=True))
    positive = [(max(a, 0), max(b, 0)) for a, b in widths]
    if mode == "constant":
        return np.pad(data[cut], positive, "constant", constant_values=fill)
    return np.pad(data[cut], positive, {"edge": "edge", "reflect": "reflect", "wrap": "wrap"}[mode])  # type: ignore[call-overload]


def _pad_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    dims, pads, axes = list(shape(inputs[0])), values(inputs, 1) or [], values(inputs, 3)
    chosen = list(range(len(dims))) if axes is None else [axis_of(a, len(dims)) for a in axes]
    for i, axis in enumerate(chosen):
        dims[axis] += pads[i] + pads[i + len(chosen)]
    return [(tuple(dims), dtype(inputs[0]))]


@op(since=11, raw=True, infer=_pad_infer, host_inputs=(1, 3))
def Pad(
    data: Array,
    pads: Array,
    constant_value: Array | None = None,
    axes: Array | None = None,
    *,
    mode: str = "constant",
) -> Array:
    fill = np.zeros((), data.dtype) if constant_value is None else constant_value.reshape(())
    return padded(data, _axes(pads) or [], _axes(axes), mode, fill)


@op(name="Pad", since=2, raw=True)
def Pad_2(data: Array, *, pads: list[int], mode: str = "constant", value: float = 0.0) -> Array:
    return padded(data, pads, None, mode, value)


@op(since=13, raw=True)
def DepthToSpace(input: Array, *, blocksize: int, mode: str = "DCR") -> Array:
    b, c, h, w = input.shape
    s = blocksize
    if mode == "DCR":
        split = input.reshape(b, s, s, c // s**2, h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        split = input.reshape(b, c // s**2, s, s, h, w).transpose(0, 1, 4, 2, 5, 3)
    return split.reshape(b, c // s**2, h * s, w * s)


@op(raw=True)
def SpaceToDepth(input: Array, *, blocksize: int, mode: str = "DCR") -> Array:
    b, c, h, w = input.shape
    s = blocksize
    split = input.reshape(b, c, h // s, s, w // s, s)
    split = split.transpose(0, 3, 5, 1, 2, 4) if mode == "DCR" else split.transpose(0, 1, 3, 5, 2, 4)
    return split.reshape(b, c * s * s, h // s, w // s)


@op(since=14, raw=True, infer=same, host_inputs=(1,))
def Trilu(input: Array, k: Array | None = None, *, upper: int = 1) -> Array:
    diagonal = 0 if k is None else int(k.reshape(-1)[0])
    rows, columns = input.shape[-2:]
    offset = np.arange(columns)[None, :] - np.arange(rows)[:, None]
    keep = offset >= diagonal if upper else offset <= diagonal
    return np.where(keep, input, np.zeros((), input.dtype))


@op(name="Trilu", domain="com.microsoft", raw=True, infer=same, host_inputs=(1,))
def ms_Trilu(input: Array, k: Array | None = None, *, upper: int = 1) -> Array:
    return Trilu(input, k, upper=upper)


@op(since=10, raw=True, infer=same)
def ReverseSequence(input: Array, sequence_lens: Array, *, batch_axis: int = 1, time_axis: int = 0) -> Array:
    moved = np.moveaxis(input, (batch_axis, time_axis), (0, 1)).copy()
    for row, length in zip(moved, sequence_lens, strict=True):
        row[:length] = row[:length][::-1].copy()
    return np.moveaxis(moved, (0, 1), (batch_axis, time_axis))
