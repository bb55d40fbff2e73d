"""Indexing: gather, scatter, selection by condition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from genai_cli.errors import GenaiError
from genai_cli.ops.infer import Attrs, Inputs, axis_of, dtype, same, shape
from genai_cli.ops.registry import Spec, op

Array = np.ndarray[Any, Any]


def check_indices(indices: Array, size: int, what: str) -> Array:
    """Indices in [-size, size) as non-negative ones; an error names the first that is not."""
    bad = (indices < -size) | (indices >= size)
    if bad.any():
        raise GenaiError(f"`{what}`: index `{indices[bad].reshape(-1)[0]}` is outside a dimension of {size}")
    return np.where(indices < 0, indices + size, indices)


def _gather_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    dims = shape(inputs[0])
    axis = axis_of(attrs.get("axis", 0), len(dims))
    return [((*dims[:axis], *shape(inputs[1]), *dims[axis + 1 :]), dtype(inputs[0]))]


@op(raw=True, infer=_gather_infer)
def Gather(data: Array, indices: Array, *, axis: int = 0) -> Array:
    return np.take(data, check_indices(indices, data.shape[axis], "Gather"), axis)


@op(since=11, raw=True, infer=lambda inputs, attrs: [(shape(inputs[1]), dtype(inputs[0]))])
def GatherElements(data: Array, indices: Array, *, axis: int = 0) -> Array:
    return np.take_along_axis(data, check_indices(indices, data.shape[axis], "GatherElements"), axis)


def _gather_nd_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    data, indices = shape(inputs[0]), shape(inputs[1])
    rest = data[attrs.get("batch_dims", 0) + indices[-1] :]
    return [((*indices[:-1], *rest), dtype(inputs[0]))]


@op(since=11, raw=True, infer=_gather_nd_infer)
def GatherND(data: Array, indices: Array, *, batch_dims: int = 0) -> Array:
    batch = data.shape[:batch_dims]
    depth = indices.shape[-1]
    grid: Any = np.indices(batch) if batch else []
    extra = indices.ndim - 1 - batch_dims
    lead = tuple(np.asarray(g).reshape(batch + (1,) * extra) for g in grid)
    return data[(*lead, *(indices[..., i] for i in range(depth)))]


_REDUCTIONS: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}


def _write(out: Array, where: tuple[Array, ...], updates: Array, reduction: str) -> None:
    if reduction == "none":
        out[where] = updates
    else:
        _REDUCTIONS[reduction].at(out, where, updates)  # type: ignore[attr-defined]


@op(since=11, infer=same)
def ScatterElements(data: Array, indices: Array, updates: Array, *, axis: int = 0, reduction: str = "none") -> Array:
    out = data.copy()
    grid: list[Any] = list(np.indices(indices.shape, sparse=True))
    grid[axis] = check_indices(indices, data.shape[axis], "ScatterElements")
    _write(out, tuple(np.broadcast_arrays(*grid)), updates, reduction)
    return out


@op(since=11, infer=same)
def ScatterND(data: Array, indices: Array, updates: Array, *, reduction: str = "none") -> Array:
    out = data.copy()
    _write(out, tuple(np.moveaxis(indices, -1, 0)), updates, reduction)
    return out


@op(name="Scatter", since=9, infer=same)
def Scatter_9(data: Array, indices: Array, updates: Array, *, axis: int = 0) -> Array:
    return ScatterElements(data, indices, updates, axis=axis)


@op(since=24, infer=same, raw=True)
def TensorScatter(
    past_cache: Array,
    update: Array,
    write_indices: Array | None = None,
    *,
    axis: int = -2,
    mode: str = "linear",
) -> Array:
    """Rows `write_indices[b] + t` of `axis` become update[b, ..., t, ...]; `circular` wraps at the capacity."""
    out = np.moveaxis(past_cache.copy(), axis, 1)  # [B, capacity, ...]
    rows = np.moveaxis(update, axis, 1)
    capacity, new = out.shape[1], rows.shape[1]
    starts = np.zeros(out.shape[0], np.int64) if write_indices is None else write_indices
    for b, start in enumerate(starts):
        slots = int(start) + np.arange(new)
        if mode == "linear" and (slots.size and (slots[0] < 0 or slots[-1] >= capacity)):
            raise GenaiError(f"`TensorScatter` of {new} rows at `{start}` does not fit a capacity of {capacity}")
        out[b, slots % capacity if mode == "circular" else slots] = rows[b]
    return np.moveaxis(out, 1, axis)


@op(since=9, raw=True, like=None)
def NonZero(x: Array) -> Array:
    return np.array(np.nonzero(x.reshape(-1) if x.ndim == 0 else x), np.int64)


@op(since=9, raw=True)
def Compress(input: Array, condition: Array, *, axis: int | None = None) -> Array:
    return np.compress(condition, input, axis)


@op(since=9, raw=True, like=2)
def OneHot(indices: Array, depth: Array, values: Array, *, axis: int = -1) -> Array:
    """values = [off, on]; an index outside [-depth, depth) gives a row of off."""
    size = int(depth.reshape(-1)[0])
    where = np.where(indices < 0, indices + size, indices)
    on = np.expand_dims(where, axis) == np.arange(size).reshape(
        [size if i == axis % (indices.ndim + 1) else 1 for i in range(indices.ndim + 1)]
    )
    return np.where(on, values[1], values[0])


@op(since=11, raw=True, like=(0, None, None, None))
def Unique(x: Array, *, axis: int | None = None, sorted: int = 1) -> tuple[Array, ...]:
    found, first, inverse, counts = np.unique(x, True, True, True, axis=axis)
    inverse = inverse.reshape(-1)
    if not sorted:
        order = np.argsort(first)
        found = np.take(found, order, axis or 0)
        inverse = np.argsort(order)[inverse]
        first, counts = first[order], counts[order]
    return found, first.astype(np.int64), inverse.astype(np.int64), counts.astype(np.int64)
