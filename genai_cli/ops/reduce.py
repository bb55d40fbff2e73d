"""Reductions, softmax and order statistics along axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from genai_cli.ops.dtypes import is_float
from genai_cli.ops.infer import Attrs, Inputs, axis_of, dtype, same, shape, values
from genai_cli.ops.registry import OpDef, Spec, op, register

Array = np.ndarray[Any, Any]
Reduce = Callable[[Array, tuple[int, ...], bool], Array]


def log_sum_exp(x: Array, axes: tuple[int, ...], keep: bool) -> Array:
    """log(sum(exp(x))), shifted by the maximum."""
    top = np.max(x, axis=axes, keepdims=True, initial=-np.inf)
    shift = np.where(np.isfinite(top), top, 0)
    total = np.log(np.sum(np.exp(x - shift), axis=axes, keepdims=True)) + shift
    return total if keep else np.squeeze(total, axes)


def _lowest(x: Array) -> Any:
    if x.dtype == np.bool_:
        return False
    return -np.inf if is_float(x.dtype) else np.iinfo(x.dtype).min


def _highest(x: Array) -> Any:
    if x.dtype == np.bool_:
        return True
    return np.inf if is_float(x.dtype) else np.iinfo(x.dtype).max


# name -> (the first opset whose axes are an input, what is computed). Sums stay in the input's dtype (f32 for 16-bit).
_FAMILY: dict[str, tuple[int, Reduce]] = {
    "ReduceSum": (13, lambda x, axes, keep: np.sum(x, axis=axes, keepdims=keep, dtype=x.dtype)),
    "ReduceMean": (18, lambda x, axes, keep: np.mean(x, axis=axes, keepdims=keep)),
    "ReduceMax": (18, lambda x, axes, keep: np.max(x, axis=axes, keepdims=keep, initial=_lowest(x))),
    "ReduceMin": (18, lambda x, axes, keep: np.min(x, axis=axes, keepdims=keep, initial=_highest(x))),
    "ReduceProd": (18, lambda x, axes, keep: np.prod(x, axis=axes, keepdims=keep, dtype=x.dtype)),
    "ReduceL1": (18, lambda x, axes, keep: np.sum(np.abs(x), axis=axes, keepdims=keep)),
    "ReduceL2": (18, lambda x, axes, keep: np.sqrt(np.sum(np.square(x), axis=axes, keepdims=keep))),
    "ReduceLogSum": (18, lambda x, axes, keep: np.log(np.sum(x, axis=axes, keepdims=keep))),
    "ReduceLogSumExp": (18, log_sum_exp),
    "ReduceSumSquare": (18, lambda x, axes, keep: np.sum(np.square(x), axis=axes, keepdims=keep)),
}


def reduce_axes(rank: int, axes: Sequence[int] | None, noop: int) -> tuple[int, ...]:
    """Non-negative axes; none given means all, or none at all with noop_with_empty_axes."""
    if not axes:
        return () if noop else tuple(range(rank))
    return tuple(sorted({axis_of(a, rank) for a in axes}))


def _reduced(dims: tuple[int, ...], axes: tuple[int, ...], keepdims: int) -> tuple[int, ...]:
    return tuple(1 if i in axes else n for i, n in enumerate(dims) if keepdims or i not in axes)


def _reduce_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    dims = shape(inputs[0])
    wanted = attrs["axes"] if "axes" in attrs else values(inputs, 1)
    axes = reduce_axes(len(dims), wanted, attrs.get("noop_with_empty_axes", 0))
    return [(_reduced(dims, axes, attrs.get("keepdims", 1)), dtype(inputs[0]))]


def _register(name: str, since: int, compute: Reduce) -> None:
    def with_attribute(data: Array, *, axes: list[int] | None = None, keepdims: int = 1) -> Array:
        return compute(data, reduce_axes(data.ndim, axes, 0), bool(keepdims))

    def with_input(
        data: Array, axes: Array | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Array:
        wanted = None if axes is None else axes.reshape(-1).tolist()
        chosen = reduce_axes(data.ndim, wanted, noop_with_empty_axes)
        return compute(data, chosen, bool(keepdims))

    register(OpDef(name, "", 1, with_attribute, _reduce_infer))
    register(OpDef(name, "", since, with_input, _reduce_infer, host_inputs=(1,)))


for _name, (_since, _compute) in _FAMILY.items():
    _register(_name, _since, _compute)


def _arg_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    dims = shape(inputs[0])
    axis = axis_of(attrs.get("axis", 0), len(dims))
    return [(_reduced(dims, (axis,), attrs.get("keepdims", 1)), np.dtype(np.int64))]


def _arg(find: Callable[..., Array], data: Array, axis: int, keepdims: int, last: int) -> Array:
    if last:
        flipped = find(np.flip(data, axis), axis=axis, keepdims=bool(keepdims))
        return (data.shape[axis] - 1 - flipped).astype(np.int64)
    return find(data, axis=axis, keepdims=bool(keepdims)).astype(np.int64)


@op(infer=_arg_infer, like=None)
def ArgMax(data: Array, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Array:
    return _arg(np.argmax, data, axis, keepdims, select_last_index)


@op(infer=_arg_infer, like=None)
def ArgMin(data: Array, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Array:
    return _arg(np.argmin, data, axis, keepdims, select_last_index)


def softmax(x: Array, axis: int = -1) -> Array:
    """exp(x - max) / sum along one axis."""
    if x.size == 0:
        return x
    raised = np.exp(x - x.max(axis=axis, keepdims=True))
    return raised / raised.sum(axis=axis, keepdims=True)


def log_softmax(x: Array, axis: int = -1) -> Array:
    """x - max - log(sum(exp(x - max)))."""
    if x.size == 0:
        return x
    shifted = x - x.max(axis=axis, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))


def hardmax(x: Array, axis: int = -1) -> Array:
    """One at the first maximum, zero elsewhere."""
    top = np.argmax(x, axis=axis, keepdims=True)
    out = np.zeros_like(x)
    np.put_along_axis(out, top, np.ones((), x.dtype), axis)
    return out


def _flattened(function: Callable[[Array, int], Array], x: Array, axis: int) -> Array:
    """Before opset 13 the input is seen as 2-D, cut at `axis`."""
    rows = int(np.prod(x.shape[: axis_of(axis, x.ndim)], dtype=np.int64))
    flat = x.reshape(rows, -1) if x.size else x
    return function(flat, -1).reshape(x.shape)


@op(since=13, infer=same)
def Softmax(input: Array, *, axis: int = -1) -> Array:
    return softmax(input, axis)


@op(since=13, infer=same)
def LogSoftmax(input: Array, *, axis: int = -1) -> Array:
    return log_softmax(input, axis)


@op(since=13, infer=same)
def Hardmax(input: Array, *, axis: int = -1) -> Array:
    return hardmax(input, axis)


@op(name="Softmax", infer=same)
def Softmax_1(input: Array, *, axis: int = 1) -> Array:
    return _flattened(softmax, input, axis)


@op(name="LogSoftmax", infer=same)
def LogSoftmax_1(input: Array, *, axis: int = 1) -> Array:
    return _flattened(log_softmax, input, axis)


@op(name="Hardmax", infer=same)
def Hardmax_1(input: Array, *, axis: int = 1) -> Array:
    return _flattened(hardmax, input, axis)


@op(since=11, infer=same, host_inputs=(1,))
def CumSum(x: Array, axis: Array, *, exclusive: int = 0, reverse: int = 0) -> Array:
    where = int(axis.reshape(-1)[0])
    ahead = np.flip(x, where) if reverse else x
    total = np.cumsum(ahead, axis=where, dtype=x.dtype)
    if exclusive:
        total = total - ahead
    return np.flip(total, where) if reverse else total


@op(since=26, infer=same)
def CumProd(x: Array, axis: Array, *, exclusive: int = 0, reverse: int = 0) -> Array:
    where = int(axis.reshape(-1)[0])
    ahead = np.flip(x, where) if reverse else x
    if exclusive:  # one step later, starting from 1
        ones = np.ones_like(np.take(ahead, [0], where))
        ahead = np.concatenate((ones, np.delete(ahead, -1, where)), where)
    total = np.cumprod(ahead, axis=where, dtype=x.dtype)
    return np.flip(total, where) if reverse else total


def _topk_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    dims, k = list(shape(inputs[0])), values(inputs, 1) or [0]
    dims[axis_of(attrs.get("axis", -1), len(dims))] = k[0]
    return [(tuple(dims), dtype(inputs[0])), (tuple(dims), np.dtype(np.int64))]


@op(since=11, infer=_topk_infer, like=(0, None), host_inputs=(1,))
def TopK(x: Array, k: Array, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Array, Array]:
    """Equal values keep the order of their indices."""
    keys = np.flip(x, axis) if largest else x
    order = np.argsort(keys, axis=axis, kind="stable")
    if largest:  # ascending and stable on the flipped array, read backwards: descending, lowest index first
        order = x.shape[axis] - 1 - np.flip(order, axis)
    chosen = np.take(order, np.arange(int(k.reshape(-1)[0])), axis).astype(np.int64)
    return np.take_along_axis(x, chosen, axis), chosen
