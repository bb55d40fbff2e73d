"""How close is equal, by dtype and kind of op. Every number has a source; nothing is tuned to pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from cases import Array, Case, as_float

from genai_cli.ops.dtypes import is_16_bit, is_float


@dataclass(frozen=True)
class Limit:
    """Elementwise |got - want| <= atol + rtol |want|; where `nmse` is set, the mean square error decides instead."""

    rtol: float
    atol: float
    nmse: float | None = None


# (rtol, atol) and, for ops that sum (products, attention, norms), NMSE.
#   f32   torch.testing.assert_close 1.3e-6, 1e-5; ggml test-backend-ops NMSE 1e-7
#   f16   torch.testing 1e-3, ONNX Runtime's own op tests 2.5e-3; ggml 5e-4 for products
#   bf16  torch.testing 1.6e-2, ONNX Runtime's own op tests 2e-2; ggml 5e-4 for products
#   f64   ONNX backend tests 1e-7 absolute; the ops compute in f64
SOURCES = {
    "float32": (1.3e-6, 1e-5, 1e-7),
    "float16": (1e-3, 2.5e-3, 5e-4),
    "bfloat16": (1.6e-2, 2e-2, 5e-4),
    "float64": (1e-7, 1e-7, 1e-14),
}
QUANTIZED_NMSE = 5e-4  # block weights, f32 activations: ggml's mul_mat limit
INT8_NMSE = 1e-12  # int8 activations: both sides sum the same integers; a wrong rounding rule is 5e-9 or more
SUMMING = frozenset(
    {
        *("MatMul", "Gemm", "MatMulNBits", "FusedMatMul", "Einsum", "Conv", "MoE", "QMoE", "LinearAttention"),
        *("Attention", "GroupQueryAttention", "MultiHeadAttention", "CausalConvWithState", "EmbedLayerNormalization"),
        *("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization"),
        *("SkipSimplifiedLayerNormalization", "GatedRMSNorm"),
    }
)


def limit_of(op: str, dtype: Any, attrs: dict[str, Any]) -> Limit:
    """The limit for one output."""
    rtol, atol, nmse = SOURCES[np.dtype(dtype).name]
    if op in ("MatMulNBits", "QMoE") and dtype == np.float32:
        int8 = attrs.get("accuracy_level") == 4 or (attrs.get("expert_weight_bits") == 8 and attrs.get("block_size"))
        return Limit(1e-4, 1e-5, INT8_NMSE if int8 else QUANTIZED_NMSE)
    return Limit(rtol, atol, nmse if op in SUMMING else None)


def nmse(got: Array, want: Array) -> float:
    """Mean square error over mean square."""
    error = float(np.square(got - want).sum())
    return error if error == 0 else error / max(float(np.square(want).sum()), 1e-300)


def of_onnx(case: Case, want: Array) -> Limit | None:
    """ONNX's own tolerance for its own cases; for 16-bit outputs, which ONNX computes step by step in 16 bits, ours."""
    return None if is_16_bit(want.dtype) else Limit(case.rtol, case.atol)


def difference(
    op: str, got: Array | None, want: Array, attrs: dict[str, Any], limit: Limit | None = None
) -> str | None:
    """None when equal enough, else what differs. Integers and bools must be equal; so must non-finite values."""
    if got is None:
        return "no such output"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"found {got.dtype.name}{list(got.shape)}, wanted {want.dtype.name}{list(want.shape)}"
    if not is_float(got.dtype):
        same = bool(np.array_equal(got, want))
        return None if same else f"{int((got != want).sum())} of {got.size} values differ"
    a, b = as_float(got), as_float(want)
    if not np.array_equal(np.isnan(a), np.isnan(b)) or not np.array_equal(a[np.isinf(a)], b[np.isinf(b)]):
        return "NaN or infinity in different places"
    finite = np.isfinite(b)
    if got.dtype.name not in SOURCES:
        return None if np.array_equal(a[finite], b[finite]) else "small floats differ"
    return beyond(a[finite], b[finite], limit or limit_of(op, got.dtype, attrs))


def beyond(a: Array, b: Array, limit: Limit) -> str | None:
    """What is beyond the limit, or None."""
    if limit.nmse is not None:
        found = nmse(a, b)
        return None if found <= limit.nmse else f"NMSE {found:.2e}, limit {limit.nmse:.0e}"
    error = np.abs(a - b) - limit.rtol * np.abs(b)
    if error.size == 0 or error.max() <= limit.atol:
        return None
    worst = int(error.argmax())
    bad = int((error > limit.atol).sum())
    return f"{a[worst]!r} for {b[worst]!r} (limit {limit.rtol}, {limit.atol}); {bad} of {a.size}"
