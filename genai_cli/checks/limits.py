"""How close is equal. One table; every number has a source, none is tuned to pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from genai_cli.ops.dtypes import is_16_bit

Precision = Literal["f32", "f16", "bf16", "q_f32", "q_int8", "f8"]
"""What a package computes in: q_f32 block weights with f32 activations, q_int8 block weights with int8 activations."""

KAPPA = 4.0  # how many floors wide a limit is, in amplitude: correct engines that sum in another order stay inside
TOST_MARGIN = 0.01  # nat/token; a choice, printed with every use
TOST_TOKENS = 1000  # fewer tokens say nothing about a mean; llama.cpp's perplexity tool refuses below 100
POWER_ODDS = 3.0  # "rule of three": 0 of n mismatches bounds the rate below 3/n at 95 %


@dataclass(frozen=True)
class Limit:
    """Elementwise |Δ| <= atol + rtol·|want|, or NMSE where `nmse` is set (ops that sum)."""

    rtol: float
    atol: float
    nmse: float
    source: str


@dataclass(frozen=True)
class Ceiling:
    """The widest worst-row NMSE a logits or layer comparison may have; None: judged statistically only."""

    nmse: float | None
    source: str


_OPS: dict[Precision, Limit] = {
    "f32": Limit(1.3e-6, 1e-5, 1e-7, "torch.testing 1.3e-6/1e-5; ggml test-backend-ops NMSE 1e-7"),
    "f16": Limit(1e-3, 2.5e-3, 5e-4, "torch.testing 1e-3, ONNX Runtime op tests 2.5e-3; ggml mul_mat 5e-4"),
    "bf16": Limit(1.6e-2, 2e-2, 5e-4, "torch.testing 1.6e-2, ONNX Runtime op tests 2e-2; ggml mul_mat 5e-4"),
    "q_f32": Limit(1e-4, 1e-5, 5e-4, "ONNX Runtime f32; ggml mul_mat 5e-4"),
    "q_int8": Limit(
        1e-4, 1e-5, 1e-12, "same integers on both sides: float additions alone differ (measured <= 7.4e-14)"
    ),
    "f8": Limit(1e-1, 1.0, 1e-2, "JAX 1e-1"),
}
_CEILINGS: dict[Precision, Ceiling] = {
    "f32": Ceiling(1e-6, "JAX 1e-6; llama-results NMSE 1e-6"),
    "f16": Ceiling(1e-4, "ggml; IREE 1e-3 relative"),
    "bf16": Ceiling(1e-3, "IREE, JAX 1e-2 relative"),
    "q_f32": Ceiling(1e-6, "llama-results NMSE 1e-6"),
    "q_int8": Ceiling(1e-2, "llama.cpp check-nmse 1e-2; ORT against its own f32-activation twin 1.4e-2"),
    "f8": Ceiling(None, "statistical only"),
}
# One f32 rounding of a logit: the least that two orders of summation can differ by (unit roundoff 2^-24, squared)
ROUNDOFF_NMSE = 2.0**-48


def op_limit(precision: Precision) -> Limit:
    """The limit of one op on identical inputs."""
    return _OPS[precision]


def ceiling(precision: Precision) -> Ceiling:
    """The widest limit a comparison of logits or layers may have."""
    return _CEILINGS[precision]


def precision_of(dtypes: set[np.dtype], accuracy_levels: set[int], has_block_weights: bool) -> Precision:
    """A package's class from the dtypes of its float weights and values, and its MatMulNBits' accuracy levels."""
    if has_block_weights:
        return "q_int8" if 4 in accuracy_levels else "q_f32"
    narrow = sorted(dtype.name for dtype in dtypes if is_16_bit(dtype))
    if narrow:
        return "bf16" if "bfloat16" in narrow else "f16"
    return "f32"


@dataclass(frozen=True)
class Bound:
    """min(ceiling, kappa x floor). In NMSE, a square: kappa counts amplitudes and is squared."""

    floor: float
    kappa: float
    ceiling: float | None

    @property
    def value(self) -> float:
        """The limit used."""
        wide = self.kappa**2 * self.floor
        return wide if self.ceiling is None else min(self.ceiling, wide)

    @property
    def too_noisy(self) -> bool:
        """The oracle's own noise, kappa times, is beyond the ceiling: a pass would not be evidence."""
        return self.ceiling is not None and self.kappa**2 * self.floor > self.ceiling

    @property
    def source(self) -> str:
        """In words."""
        return f"{self.kappa:g} x the oracle's own noise" if not self.too_noisy else "ceiling"
