"""Positions whose greedy token differs, judged by a bound that the engine under test had no part in.

If the argmax flips then margin <= |Δi| + |Δj| always, so a margin about as large as the delta proves nothing. The
margin is compared with 2B and the delta with B, where B = kappa x the oracle's own noise.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from genai_cli.checks.compare import RowMetrics, row_metrics, ulp_size
from genai_cli.checks.limits import POWER_ODDS
from genai_cli.report.parity import Flip

FlipClass = Literal["TIE", "NEAR-TIE", "DRIFT", "DEFECT"]
PASSING = ("TIE", "NEAR-TIE")


def classify(margin: float, pair_delta: float, bound: float, ceiling: float, same_tie: bool) -> FlipClass:
    """TIE: both sides hold equal logits for both tokens. NEAR-TIE: margin <= 2B and Δ <= B. DRIFT: Δ above B, up to
    `ceiling`. DEFECT: beyond it, or non-finite. All in logits."""
    if not np.isfinite(pair_delta):
        return "DEFECT"
    if same_tie:
        return "TIE"
    if pair_delta <= bound and margin <= 2 * bound:
        return "NEAR-TIE"
    return "DRIFT" if pair_delta <= ceiling else "DEFECT"


def flips_of(
    got: np.ndarray, want: np.ndarray, bound: float, ceiling: float, *, input_id: str = "0", offset: int = 0,
    arbiter: np.ndarray | None = None, metrics: RowMetrics | None = None,
) -> list[Flip]:  # fmt: skip
    """Every flipped row of logits [T, V]; `offset` is the position of row 0; `arbiter` [T, V] takes a side; `metrics`
    where they are known."""
    metrics = metrics or row_metrics(got, want)
    return [_flip(int(row), got, want, metrics, bound, ceiling, input_id, offset, arbiter) for row in metrics.flips]


def _flip(
    row: int, got: np.ndarray, want: np.ndarray, metrics: RowMetrics, bound: float, ceiling: float, input_id: str,
    offset: int, arbiter: np.ndarray | None,
) -> Flip:  # fmt: skip
    ours, theirs = int(metrics.top_got[row]), int(metrics.top_want[row])
    margin = float(want[row, theirs]) - float(want[row, ours])
    pair = [abs(float(got[row, token]) - float(want[row, token])) for token in (ours, theirs)]
    delta = max(pair) if metrics.finite[row] else float("inf")
    same_tie = margin == 0 and got[row, ours] == got[row, theirs]
    return Flip(
        input=input_id,
        pos=row + offset,
        native=ours,
        oracle=theirs,
        margin=margin,
        pair_delta=delta,
        bound=bound,
        ulps=margin / ulp_size(float(want[row, theirs])) if np.isfinite(margin) else float("inf"),
        class_=classify(margin, delta, bound, ceiling, same_tie),
        arbiter=_side(arbiter, row, ours, theirs),
    )


def _side(arbiter: np.ndarray | None, row: int, ours: int, theirs: int) -> str:
    if arbiter is None:
        return "none"
    top = int(np.argmax(arbiter[row]))
    return "native" if top == ours else "oracle" if top == theirs else "neither"


def decisive(metrics: RowMetrics, bound: float) -> np.ndarray:
    """bool [T]: rows where the oracle itself could not have flipped: margin > 2B, both sides finite."""
    return np.asarray(metrics.finite & (metrics.margin > 2 * bound))


def mismatch_bound(num_decisive: int) -> float:
    """95 % upper bound on the true mismatch rate after 0 mismatches in n decisive positions; 1 when n is 0."""
    return min(1.0, POWER_ODDS / num_decisive) if num_decisive else 1.0
