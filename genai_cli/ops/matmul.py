"""Matrix products of dense operands."""

from __future__ import annotations

from typing import Any

import numpy as np

from genai_cli.errors import GenaiError
from genai_cli.ops.infer import Attrs, Inputs, dtype, shape
from genai_cli.ops.registry import Spec, op

Array = np.ndarray[Any, Any]


def matmul_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """numpy.matmul's shape; an error when the inner dimensions differ."""
    left = (1, *a) if len(a) == 1 else a
    right = (*b, 1) if len(b) == 1 else b
    if left[-1] != right[-2]:
        raise GenaiError(f"`MatMul` of {list(a)} and {list(b)}: {left[-1]} columns meet {right[-2]} rows")
    full = (*np.broadcast_shapes(left[:-2], right[:-2]), left[-2], right[-1])
    return tuple(
        n for i, n in enumerate(full) if (i != len(full) - 2 or len(a) > 1) and (i != len(full) - 1 or len(b) > 1)
    )


def _matmul(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    return [(matmul_shape(shape(inputs[0]), shape(inputs[1])), dtype(inputs[0]))]


@op(infer=_matmul)
def MatMul(a: Array, b: Array) -> Array:
    matmul_shape(a.shape, b.shape)
    return np.matmul(a, b)


def _gemm(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    rows = shape(inputs[0])[1 if attrs.get("transA", 0) else 0]
    columns = shape(inputs[1])[0 if attrs.get("transB", 0) else 1]
    return [((rows, columns), dtype(inputs[0]))]


@op(since=7, infer=_gemm)
def Gemm(
    a: Array,
    b: Array,
    c: Array | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Array:
    """alpha * A' @ B' + beta * C."""
    product = alpha * np.matmul(a.T if transA else a, b.T if transB else b)
    return product if c is None else product + beta * c


@op(since=12)
def Einsum(*inputs: Array, equation: str) -> Array:
    return np.einsum(equation, *inputs)


def _centred(x: Array, zero_point: Array | None, per_row: bool) -> Array:
    """Integers minus their zero point, as i32; a 1-D zero point of A is one a row."""
    if zero_point is None:
        return x.astype(np.int32)
    zero = zero_point.astype(np.int32)
    return x.astype(np.int32) - (zero[..., None] if per_row and zero.ndim == 1 and zero.size > 1 else zero)


@op(since=10, like=None)
def MatMulInteger(a: Array, b: Array, a_zero_point: Array | None = None, b_zero_point: Array | None = None) -> Array:
    return np.matmul(_centred(a, a_zero_point, True), _centred(b, b_zero_point, False), dtype=np.int32)


def _fused_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    a, b = shape(inputs[0]), shape(inputs[1])
    left = (*a[:-2], a[-1], a[-2]) if attrs.get("transA", 0) and len(a) > 1 else a
    right = (*b[:-2], b[-1], b[-2]) if attrs.get("transB", 0) and len(b) > 1 else b
    return [(matmul_shape(left, right), dtype(inputs[0]))]


@op(domain="com.microsoft", infer=_fused_infer)
def FusedMatMul(
    a: Array,
    b: Array,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Array:
    """alpha * A' @ B' with the last two axes swapped where asked."""
    if transBatchA or transBatchB:
        raise GenaiError("`FusedMatMul` with transBatchA or transBatchB is not supported")
    left = np.swapaxes(a, -1, -2) if transA and a.ndim > 1 else a
    right = np.swapaxes(b, -1, -2) if transB and b.ndim > 1 else b
    return alpha * np.matmul(left, right)
