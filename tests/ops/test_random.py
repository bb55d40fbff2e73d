"""Shapes nobody thought of: random calls of the ops that move data, reference and kernel against ORT."""

from __future__ import annotations

from typing import Any

import numpy as np
from cases import Array, Case, accepted, reference, run_kernel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import judge
from standard import case
from test_kernels import CONFIGS, backend
from tolerance import difference

SIZES = st.sampled_from((0, 1, 2, 5, 17))
KINDS = st.sampled_from(("float32", "int64", "float16"))
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def agree(one: Case) -> None:
    """ORT, the reference and (where its rule accepts) the kernel give the same."""
    outputs = reference(one)
    wanted = judge(one, outputs)
    for got, want in zip(outputs, wanted, strict=True):
        assert want is not None
        assert difference(one.op, got, want, one.attrs) is None
    on = backend(*CONFIGS[-1])
    if accepted(one, on):
        for got, want in zip(run_kernel(one, on), wanted, strict=True):
            assert want is not None
            assert difference(one.op, got, want, one.attrs) is None


def shapes(low: int = 0, high: int = 4) -> Any:
    return st.lists(SIZES, min_size=low, max_size=high).map(tuple)


@st.composite
def arrays(draw: Any, low: int = 0, high: int = 4, kind: str | None = None) -> Array:
    shape, dtype = draw(shapes(low, high)), kind or draw(KINDS)
    seed = draw(st.integers(0, 2**16))
    return np.random.default_rng(seed).integers(-8, 8, shape).astype(dtype)


@quick
@given(arrays(1), st.data())
def test_slice(x: Array, data: Any) -> None:
    axes = data.draw(st.lists(st.integers(0, x.ndim - 1), min_size=1, max_size=x.ndim, unique=True))
    bound = st.integers(-20, 20)
    starts, ends = ([data.draw(bound) for _ in axes] for _ in range(2))
    steps = [data.draw(st.sampled_from((-3, -1, 1, 2))) for _ in axes]
    agree(case("Slice", (x, *(np.array(v, np.int64) for v in (starts, ends, axes, steps))), "random"))


@quick
@given(arrays(1), st.data())
def test_transpose(x: Array, data: Any) -> None:
    agree(case("Transpose", (x,), "random", perm=data.draw(st.permutations(range(x.ndim)))))


@quick
@given(arrays(1, 3), st.data())
def test_concat_and_split(x: Array, data: Any) -> None:
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    agree(case("Concat", (x, x[:0] if axis % x.ndim == 0 else x, x), "random", axis=axis))
    if x.shape[axis] > 1:
        cut = data.draw(st.integers(0, x.shape[axis]))
        agree(case("Split", (x, np.array([cut, x.shape[axis] - cut])), "random", 2, axis=axis))


@quick
@given(arrays(1), st.data())
def test_gather(x: Array, data: Any) -> None:
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    size = x.shape[axis]
    number = data.draw(st.integers(0, 4)) if size else 0
    ids = np.array([data.draw(st.integers(-size, size - 1)) for _ in range(number)], np.int64)
    agree(case("Gather", (x, ids), "random", axis=axis))


@quick
@given(arrays(1, 3), st.data())
def test_broadcast(x: Array, data: Any) -> None:
    thin = tuple(data.draw(st.sampled_from((n, 1))) for n in x.shape)
    y = np.ones(thin[data.draw(st.integers(0, x.ndim)) :], x.dtype) * x.dtype.type(3)
    for op in ("Add", "Mul", "Sub"):
        agree(case(op, (x, y), "random"))
        agree(case(op, (y, x), "random"))
    agree(case("Where", (np.broadcast_to(x, x.shape) > 0, x, y), "random"))
    agree(case("Expand", (y, np.array(x.shape, np.int64)), "random"))


@quick
@given(arrays(1, 3, "float32"), st.data())
def test_reduce(x: Array, data: Any) -> None:
    x = x[tuple(slice(None) if n else None for n in x.shape)] if x.size else np.ones((2, 5), np.float32)
    axes = data.draw(st.lists(st.integers(-x.ndim, x.ndim - 1), unique_by=lambda a: a % x.ndim, max_size=x.ndim))
    keep = data.draw(st.integers(0, 1))
    for op in ("ReduceSum", "ReduceMax", "ReduceMean"):
        agree(
            case(
                op,
                (x, np.array(axes, np.int64)),
                "random",
                keepdims=keep,
                noop_with_empty_axes=data.draw(st.integers(0, 1)),
            )
        )


@quick
@given(arrays(1, 3), st.data())
def test_tile(x: Array, data: Any) -> None:
    agree(case("Tile", (x, np.array([data.draw(st.integers(0, 3)) for _ in x.shape])), "random"))


@quick
@given(st.lists(st.sampled_from((1, 2, 3, 17)), min_size=3, max_size=3), st.integers(0, 2), st.integers(0, 9))
def test_matmul(dims: list[int], batch: int, seed: int) -> None:
    m, k, n = dims
    r = np.random.default_rng(seed)
    a, b = (r.standard_normal((*([2] * batch), *shape)).astype(np.float32) for shape in ((m, k), (k, n)))
    agree(case("MatMul", (a, b[0] if batch == 2 else b), "random"))
