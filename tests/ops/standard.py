"""Cases of standard ops at sizes ONNX's own do not have: rows shorter, longer and no multiple of a vector; all dtypes.

The judge is ORT (oracle.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from cases import Array, Case
from contrib import KINDS, normal, rng

OPSET = 22
LENGTHS = (1, 7, 16, 33, 100, 1000)
BINARY = ("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max")
COMPARE = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
UNARY = ("Abs", "Neg", "Relu", "Sigmoid", "Tanh", "Exp", "Reciprocal", "Erf", "Sin", "Cos", "Softplus", "Gelu", "Sign")
POSITIVE = ("Sqrt", "Log")
BROADCASTS = (((3, 5), (5,)), ((3, 5), (3, 1)), ((1, 17), (4, 1)), ((2, 1, 33), (1, 3, 33)), ((), (9,)), ((0, 4), (4,)))

_FAMILIES: list[Callable[[], Iterator[Case]]] = []


def family(function: Callable[[], Iterator[Case]]) -> Callable[[], Iterator[Case]]:
    """Add a generator of cases."""
    _FAMILIES.append(function)
    return function


def case(
    op: str,
    inputs: tuple[Array | None, ...],
    name: str,
    outputs: int = 1,
    opset: int = OPSET,
    constants: tuple[int, ...] = (),
    **attrs: Any,
) -> Case:
    """An ai.onnx case."""
    return Case(op, "", opset, inputs, attrs, (True,) * outputs, None, f"{op}:{name}", constants)


@family
def elementwise() -> Iterator[Case]:
    for kind in KINDS:
        for n in LENGTHS:
            r = rng("elementwise", kind, n)
            x, y = normal(r, n, kind=kind, scale=3), normal(r, n, kind=kind)
            for op in UNARY:
                yield case(op, (x,), f"{kind}-{n}")
            for op in POSITIVE:
                yield case(op, (np.abs(x),), f"{kind}-{n}")
            for op in BINARY:
                yield case(op, (np.abs(x) if op == "Pow" else x, y), f"{kind}-{n}")
            for op in COMPARE:
                yield case(op, (np.rint(x), np.rint(y)), f"{kind}-{n}")
        for a, b in BROADCASTS:
            r = rng("broadcast", kind, a, b)
            x, y = normal(r, *a, kind=kind), normal(r, *b, kind=kind)
            for op in ("Add", "Div", "Max"):
                yield case(op, (x, y), f"{kind}-{a}-{b}")


@family
def integers() -> Iterator[Case]:
    for dtype in (np.int32, np.int64):
        r = rng("integers", dtype.__name__)
        x, y = r.integers(-50, 50, 37).astype(dtype), r.integers(1, 9, 37).astype(dtype)
        for op in ("Add", "Sub", "Mul", "Div", "Min", "Max", "Mod", "Equal", "Less", "GreaterOrEqual"):
            yield case(op, (x, y), dtype.__name__)
        for op in ("Abs", "Neg", "Sign"):
            yield case(op, (x,), dtype.__name__)
    p, q = rng("bool").random((2, 3, 7)) > 0.5
    for op in ("And", "Or", "Xor"):
        yield case(op, (p, q), "bool")
    yield case("Not", (p,), "bool")


@family
def casts() -> Iterator[Case]:
    codes = {"float32": 1, "float16": 10, "bfloat16": 16, "int32": 6, "int64": 7, "bool": 9, "uint8": 2, "float64": 11}
    r = rng("casts")
    values = np.concatenate((r.integers(0, 100, 41), [0, 1, 2])).astype(np.float32)
    from genai_cli.ops.dtypes import ONNX_DTYPES

    for source, one in codes.items():
        for target, other in codes.items():
            if "bfloat16" not in (source, target):
                yield case("Cast", (values.astype(ONNX_DTYPES[one]),), f"{source}-{target}", to=other)


@family
def rows() -> Iterator[Case]:
    for kind in KINDS:
        for n in LENGTHS:
            r = rng("rows", kind, n)
            x, scale, bias = normal(r, 2, 3, n, kind=kind), normal(r, n, kind=kind), normal(r, n, kind=kind)
            name = f"{kind}-{n}"
            yield case("LayerNormalization", (x, scale, bias), name, axis=-1, epsilon=1e-5)
            yield case("RMSNormalization", (x, scale), name, opset=23, axis=-1, epsilon=1e-5)
            yield case("Softmax", (x,), name, axis=-1)
            yield case("Softmax", (x,), name + "-axis1", axis=1)
            yield case("ArgMax", (x,), name, axis=-1, keepdims=0)
            for op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceSumSquare", "ReduceL2"):
                yield case(op, (x, np.array([-1])), name)
                yield case(op, (x, np.array([0, 2])), name + "-0-2", keepdims=0)


@family
def products() -> Iterator[Case]:
    shapes = (
        ((1, 1), (1, 1)), ((3, 17), (17, 5)), ((1, 64), (64, 33)), ((1, 7, 100), (100, 9)), ((2, 3, 8), (2, 8, 5)),
        ((2, 1, 4, 16), (3, 16, 4)), ((5,), (5, 3)), ((4, 5), (5,)), ((1, 70, 96), (96, 65)), ((0, 4), (4, 3)),
        ((2, 0), (0, 3)),
    )  # fmt: skip
    for kind in KINDS:
        for a, b in shapes:
            r = rng("products", kind, a, b)
            x, w = normal(r, *a, kind=kind), normal(r, *b, kind=kind)
            yield case("MatMul", (x, w), f"{kind}-{a}-{b}")
            if len(b) == 2:
                yield case("MatMul", (x, w), f"{kind}-{a}-{b}-weight", constants=(1,))
        r = rng("gemm", kind)
        x, w, c = normal(r, 5, 33, kind=kind), normal(r, 17, 33, kind=kind), normal(r, 17, kind=kind)
        yield case("Gemm", (x, w, c), f"{kind}-transB", transB=1)
        yield case("Gemm", (x, w, c), f"{kind}-transB-weight", constants=(1, 2), transB=1)
        yield case("Gemm", (x, np.ascontiguousarray(w.T), c), f"{kind}-plain", alpha=0.5, beta=2.0)
        yield case("Gemm", (np.ascontiguousarray(x.T), np.ascontiguousarray(w.T)), f"{kind}-transA", transA=1)


@family
def movement() -> Iterator[Case]:
    for kind in (*KINDS, "i64"):
        r = rng("movement", kind)

        def some(*shape: int, kind: str = kind, r: Any = r) -> Array:
            return r.integers(-9, 9, shape) if kind == "i64" else normal(r, *shape, kind=kind)

        x = some(3, 5, 7)
        yield case("Gather", (x, np.array([[4, -1], [0, 2]])), f"{kind}-axis1", axis=1)
        yield case("Gather", (some(50, 33), r.integers(0, 50, (2, 3)).astype(np.int32)), f"{kind}-rows")
        yield case("Transpose", (x,), f"{kind}-021", perm=[0, 2, 1])
        yield case("Transpose", (some(2, 3, 4, 5),), f"{kind}-0213", perm=[0, 2, 1, 3])
        yield case("Transpose", (some(33, 18),), f"{kind}-2d")
        yield case("Concat", (x, some(3, 2, 7), some(3, 0, 7)), f"{kind}-axis1", axis=1)
        yield case("Concat", (x, some(3, 5, 1)), f"{kind}-last", axis=-1)
        yield case("Split", (x, np.array([2, 3])), f"{kind}-axis1", 2, axis=1)
        yield case("Split", (some(3, 12),), f"{kind}-equal", 3, axis=-1, num_outputs=3)
        bounds = (np.array([1, 0]), np.array([5, 6]), np.array([1, 2]), np.array([2, 3]))
        yield case("Slice", (x, *bounds), f"{kind}-steps")
        yield case("Slice", (x, np.array([-1]), np.array([-100]), np.array([2]), np.array([-2])), f"{kind}-backwards")
        yield case("Expand", (some(3, 1, 7), np.array([2, 1, 5, 1])), kind)
        yield case("Tile", (x, np.array([2, 1, 3])), kind)
        condition = r.random((3, 1, 7)) > 0.5
        yield case("Where", (condition, x, some(7)), kind)
        yield case("Trilu", (some(6, 9), np.array(1)), kind, upper=0)
        yield case("CumSum", (x, np.array(2)), kind)


def attention(
    name: str, t: int, keys: int, opset: int = 23, *, d: int = 16, kind: str = "f32", mask: str = "", past: int = 0,
    valid: int = 0, **attrs: Any,
) -> Case:  # fmt: skip
    """One ai.onnx Attention of 4 query and 2 key heads, packed [B, T, heads * D]; `valid` keys of a static cache."""
    r = rng("attention", name)
    q, k, v = (
        normal(r, 1, t, 4 * d, kind=kind),
        normal(r, 1, keys, 2 * d, kind=kind),
        normal(r, 1, keys, 2 * d, kind=kind),
    )
    total = past + keys
    masks = {"bool": r.random((t, total)) > 0.3, "float": normal(r, 1, 1, t, total, kind=kind), "": None}
    pasts = (normal(r, 1, 2, past, d, kind=kind), normal(r, 1, 2, past, d, kind=kind)) if past else (None, None)
    inputs: tuple[Array | None, ...] = (q, k, v, masks[mask], *pasts, np.array([valid]) if valid else None)
    while inputs[-1] is None:
        inputs = inputs[:-1]
    return case("Attention", inputs, name, 3 if past else 1, opset, q_num_heads=4, kv_num_heads=2, **attrs)


@family
def attentions() -> Iterator[Case]:
    """Without past and lengths a causal mask is aligned to the upper left; with either, to the lower right."""
    for kind in KINDS:
        yield attention(f"{kind}-prompt", 7, 7, kind=kind, is_causal=1)
        yield attention(f"{kind}-past", 1, 1, kind=kind, past=9, is_causal=1)
        yield attention(f"{kind}-cross", 3, 11, kind=kind)
    for d in (4, 33, 64, 80):
        yield attention(f"size-{d}", 5, 5, d=d, is_causal=1)
    yield attention("upper-left", 1, 5, is_causal=1)
    yield attention("lengths", 2, 12, 24, valid=7, is_causal=1)
    yield attention("lengths-decode", 1, 12, 24, valid=7, is_causal=1)
    yield attention("lengths-all-seen", 2, 12, 24, valid=7)
    yield attention("past-chunk", 3, 3, past=6, is_causal=1)
    for mask in ("bool", "float"):
        for causal in (0, 1):
            yield attention(f"{mask}-{causal}", 4, 4, mask=mask, is_causal=causal)
            yield attention(f"{mask}-{causal}-past", 2, 2, mask=mask, past=5, is_causal=causal)
            yield attention(f"{mask}-{causal}-softcap", 4, 6, mask=mask, is_causal=causal, softcap=2.0)
    yield attention("scale", 4, 4, scale=0.4)
    yield attention("long", 33, 200)


@cache
def standard_cases() -> tuple[Case, ...]:
    """All of them."""
    made = [one for generate in _FAMILIES for one in generate()]
    names = [one.id for one in made]
    assert len(set(names)) == len(names), "two cases have one name"
    return tuple(made)
