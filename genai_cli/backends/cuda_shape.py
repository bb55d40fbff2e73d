"""Launches of kernels that move elements (native/cuda/shape.cu)."""

from __future__ import annotations

from collections.abc import Sequence

from genai_cli.backends.base import Tensor
from genai_cli.backends.cuda_launch import (
    Call,
    Launch,
    Strided,
    address,
    axis_of,
    broadcast_strides,
    contiguous_strides,
    ctype,
    flag,
    flat,
    integers,
    plans,
    pointer,
    size,
    walk_args,
)

SOURCE = "shape"
UNITS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}


def _unit(tensor: Tensor) -> str:
    return UNITS[tensor.dtype.itemsize]


def _copy(call: Call, x: Tensor, y: Tensor, walk: Strided, start: int = 0, to: int = 0) -> list[Launch]:
    count, merged = size(walk.dims), walk.merged()
    args = (address(x), address(y), *integers(count, start, to), *walk_args(merged, call.kernel))
    return flat(SOURCE, f"strided_copy<{_unit(x)}>", count, args)


def _values(call: Call, index: int) -> list[int] | None:
    """The integers of an input that is known while recording."""
    tensor = call.optional(index)
    if tensor is None:
        return None
    if tensor.host is None:
        raise call.refuse(f"an input {index} that only a step knows", "one known while recording")
    return [int(value) for value in tensor.host.reshape(-1)]


@plans("Transpose")
def _transpose(call: Call) -> list[Launch]:
    x, y = call.input(0), call.output()
    rank = len(x.shape)
    order = list(call.attrs.get("perm") or range(rank - 1, -1, -1))
    strides = contiguous_strides(x.shape)
    return _copy(call, x, y, Strided(list(y.shape), [[strides[i] for i in order], contiguous_strides(y.shape)]))


@plans("Identity", "Flatten", "Reshape", "Squeeze", "Unsqueeze")
def as_is(call: Call) -> list[Launch]:
    """The first input's elements, in order."""
    x, y, count = call.input(0), call.output(), size(call.input(0).shape)
    return _copy(call, x, y, Strided([count], [[1], [1]]))


@plans("Expand")
def _expand(call: Call) -> list[Launch]:
    x, y = call.input(0), call.output()
    strides = [broadcast_strides(x.shape, y.shape), contiguous_strides(y.shape)]
    return _copy(call, x, y, Strided(list(y.shape), strides))


@plans("Tile")
def _tile(call: Call) -> list[Launch]:
    """Every dimension becomes (repeats, dim), the first standing still in x."""
    x, y, strides = call.input(0), call.output(), contiguous_strides(call.input(0).shape)
    repeats = _values(call, 1) or []
    dims = [n for pair in zip(repeats, x.shape, strict=True) for n in pair]
    still = [n for stride in strides for n in (0, stride)]
    return _copy(call, x, y, Strided(dims, [still, contiguous_strides(dims)]))


@plans("Concat")
def _concat(call: Call) -> list[Launch]:
    y = call.output()
    axis = axis_of(int(call.attrs["axis"]), len(y.shape))
    out, launches, to = contiguous_strides(y.shape), [], 0
    for index in range(len(call.inputs)):
        x = call.input(index)
        launches += _copy(call, x, y, Strided(list(x.shape), [contiguous_strides(x.shape), out]), 0, to)
        to += x.shape[axis] * out[axis]
    return launches


@plans("Split")
def _split(call: Call) -> list[Launch]:
    """Output shapes say where the cuts are."""
    x = call.input(0)
    axis = axis_of(int(call.attrs.get("axis", 0)), len(x.shape))
    strides, launches, start = contiguous_strides(x.shape), [], 0
    for index, cut in enumerate(_cuts(call, x.shape[axis])):
        y = call.optional_output(index)
        if y is not None:
            launches += _copy(call, x, y, Strided(list(y.shape), [strides, contiguous_strides(y.shape)]), start)
        start += cut * strides[axis]
    return launches


def _cuts(call: Call, total: int) -> Sequence[int]:
    given = call.attrs.get("split") or _values(call, 1)
    if given:
        return [int(value) for value in given]
    part = -(-total // len(call.outputs))
    return [min(part, total - i * part) for i in range(len(call.outputs))]


@plans("Slice")
def _slice(call: Call) -> list[Launch]:
    x, y = call.input(0), call.output()
    starts = call.attrs.get("starts") or _values(call, 1) or []
    axes = call.attrs.get("axes") or _values(call, 3) or range(len(starts))
    steps = _values(call, 4) or [1] * len(starts)
    strides, begin = contiguous_strides(x.shape), 0
    walk = list(strides)
    for start, axis, step in zip(starts, axes, steps, strict=True):
        at = axis_of(int(axis), len(x.shape))
        begin += _first(int(start), x.shape[at], step) * strides[at]
        walk[at] = strides[at] * step
    return _copy(call, x, y, Strided(list(y.shape), [walk, contiguous_strides(y.shape)]), begin)


def _first(start: int, dim: int, step: int) -> int:
    """ONNX's clamping of a start: [0, dim] forwards, [0, dim - 1] backwards."""
    at = start + dim if start < 0 else start
    return min(max(at, 0), dim if step > 0 else dim - 1)


def _gathered(call: Call, function: str) -> list[Launch]:
    data, indices, y = call.input(0), call.input(1), call.output()
    axis = axis_of(int(call.attrs.get("axis", 0)), len(data.shape))
    inner = size(data.shape[axis + 1 :])
    count = size(indices.shape) if function == "gather" else indices.shape[axis]
    pointers = (address(data), address(indices), address(y), pointer(call.fault_address))
    args = (*pointers, *integers(size(y.shape), data.shape[axis], inner, count))
    return flat(SOURCE, f"{function}<{_unit(data)}, {ctype(indices)}>", size(y.shape), args)


@plans("Gather")
def _gather(call: Call) -> list[Launch]:
    return _gathered(call, "gather")


@plans("GatherElements")
def _gather_elements(call: Call) -> list[Launch]:
    """Only the axis may differ from the data's shape (the rule sees to it)."""
    return _gathered(call, "gather_elements")


@plans("Trilu")
def _trilu(call: Call) -> list[Launch]:
    x, y = call.input(0), call.output()
    diagonal = (_values(call, 1) or [0])[0]
    count = size(x.shape)
    args = (address(x), address(y), *integers(count, x.shape[-2], x.shape[-1], diagonal))
    return flat(SOURCE, f"trilu<{_unit(x)}>", count, (*args, flag(call.attrs.get("upper", 1))))
