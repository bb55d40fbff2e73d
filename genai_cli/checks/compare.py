"""Metrics between two float arrays. Non-finite values are never equal to anything, not even to themselves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BLOCK = 8  # rows of logits worked on at once: a vocabulary's f64 rows then stay near the core
TINY = 1e-300  # keeps 0 / 0 out of ratios: an all-zero row that agrees has the NMSE 0


@dataclass(frozen=True)
class RowMetrics:
    """What two logit matrices [T, V] differ by, row by row. A row with a non-finite value on a side counts as inf."""

    max_abs: np.ndarray  # f64 [T]: max |Δ| over all V tokens
    pair: np.ndarray  # f64 [T]: max |Δ| over the tokens that decide the row (see `pair_delta`)
    nmse: np.ndarray  # f64 [T]: sum Δ² / sum want²
    margin: np.ndarray  # f64 [T]: first minus second largest of want; 0 on an exact tie
    top_got: np.ndarray  # int64 [T]: first maximum
    top_want: np.ndarray
    finite: np.ndarray  # bool [T]: both rows wholly finite

    @property
    def flips(self) -> np.ndarray:
        """Positions whose first maximum differs."""
        return np.flatnonzero(self.top_got != self.top_want)


def row_metrics(got: np.ndarray, want: np.ndarray) -> RowMetrics:
    """Compare logits `got` with `want`, both [T, V]. Shapes must agree: comparing other shapes is a caller's error."""
    if got.shape != want.shape or got.ndim != 2:
        raise ValueError(f"logits of shapes {got.shape} and {want.shape} cannot be compared")
    blocks = [_metrics(got[i : i + BLOCK], want[i : i + BLOCK]) for i in range(0, max(len(got), 1), BLOCK)]
    return RowMetrics(*(np.concatenate(columns) for columns in zip(*blocks, strict=True)))


def _metrics(got: np.ndarray, want: np.ndarray) -> tuple[np.ndarray, ...]:
    """The fields of RowMetrics, in order, of a few rows."""
    finite = np.isfinite(got).all(axis=1) & np.isfinite(want).all(axis=1)
    safe_got, safe_want = _zero_rows(got, finite), _zero_rows(want, finite)
    delta = np.abs(safe_got - safe_want)
    top_got, top_want, runner_up = first_max(got), first_max(want), second_of(safe_want)
    rows = np.arange(len(delta))
    pair = np.max([delta[rows, top] for top in (top_got, top_want, runner_up)], axis=0) if len(rows) else delta.sum(1)
    energy = np.maximum(np.einsum("tv,tv->t", safe_want, safe_want), TINY)
    return (
        _or_inf(delta.max(axis=1, initial=0.0), finite),
        _or_inf(pair, finite),
        _or_inf(np.einsum("tv,tv->t", delta, delta) / energy, finite),
        safe_want[rows, top_want] - safe_want[rows, runner_up],
        top_got,
        top_want,
        finite,
    )


def _zero_rows(array: np.ndarray, keep: np.ndarray) -> np.ndarray:
    return np.where(keep[:, None], array, 0).astype(np.float64)


def _or_inf(values: np.ndarray, finite: np.ndarray) -> np.ndarray:
    return np.where(finite, values, np.inf)


def first_max(logits: np.ndarray) -> np.ndarray:
    """Index of the first maximum of every row, int64 [T]; NaN never wins (an all-NaN row gives 0 and is not finite)."""
    top = np.asarray(np.argmax(logits, axis=1), np.int64)  # numpy gives the first NaN where there is one
    for row in np.flatnonzero(np.isnan(logits[np.arange(len(top)), top])):
        top[row] = np.argmax(np.where(np.isnan(logits[row]), -np.inf, logits[row]))
    return top


def second_of(logits: np.ndarray) -> np.ndarray:
    """Index of the second largest of every row [T, V >= 2], the first maximum left out; int64 [T]."""
    masked = logits.copy()
    masked[np.arange(len(masked)), first_max(logits)] = -np.inf
    return np.asarray(np.argmax(masked, axis=1), np.int64)


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    """sum (got - want)² / sum want² over everything; inf when either side has a non-finite value."""
    if got.shape != want.shape:
        raise ValueError(f"arrays of shapes {got.shape} and {want.shape} cannot be compared")
    a, b = got.astype(np.float64), want.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    return float(np.square(a - b).sum() / max(np.square(b).sum(), TINY))


def nmse_rows(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """NMSE of every row of [T, width], f64 [T]; inf where either side has a non-finite value.

    The energy is the mean row's: one nearly empty row is not held to a relative error of its own.
    """
    if got.shape != want.shape:
        raise ValueError(f"arrays of shapes {got.shape} and {want.shape} cannot be compared")
    finite = np.asarray(np.isfinite(np.stack([got, want]).astype(np.float32)).all(axis=(0, 2)))
    a, b = _zero_rows(got, finite), _zero_rows(want, finite)
    energy = max(float(np.square(b).sum(axis=1).mean()) if len(b) else 0.0, TINY)
    return _or_inf(np.square(a - b).sum(axis=1) / energy, finite)


def max_abs(got: np.ndarray, want: np.ndarray) -> float:
    """max |got - want|; inf when either side has a non-finite value; 0 for empty arrays."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    return float(np.abs(a - b).max(initial=0.0))


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Distance in representable values of the common dtype (f16, bf16 or f32), int64; -0 and +0 are 0 apart.

    Non-finite values are as far apart as int64 goes, also from themselves.
    """
    if got.dtype != want.dtype:
        raise ValueError(f"ULPs between {got.dtype} and {want.dtype} are not defined")
    distance = np.abs(_ordinal(got) - _ordinal(want))
    finite = np.isfinite(got.astype(np.float32)) & np.isfinite(want.astype(np.float32))
    return np.where(finite, distance, np.iinfo(np.int64).max)


def _ordinal(array: np.ndarray) -> np.ndarray:
    """Integers in the order of the floats."""
    width = array.dtype.itemsize * 8
    bits = array.view(np.dtype(f"u{array.dtype.itemsize}")).astype(np.int64)
    sign = np.int64(1) << (width - 1)
    return np.where(bits & sign, sign - bits, bits)


def ulp_size(value: float) -> float:
    """The spacing of f32 at `value`."""
    return float(np.spacing(np.float32(abs(value))))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """f64 [T, V]."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return np.asarray(wide)


def kl(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """KL(want || got) in nats for every row, f64 [T]; inf where a side is not finite."""
    blocks = [_kl(got[i : i + BLOCK], want[i : i + BLOCK]) for i in range(0, max(len(got), 1), BLOCK)]
    return np.concatenate(blocks)


def _kl(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    finite = np.isfinite(got).all(axis=1) & np.isfinite(want).all(axis=1)
    p, q = log_softmax(_zero_rows(want, finite)), log_softmax(_zero_rows(got, finite))
    return _or_inf(np.maximum(np.einsum("tv,tv->t", np.exp(p), p - q), 0.0), finite)


def nll(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Negative log likelihood in nats of `targets` [T] under `logits` [T, V], f64 [T]."""
    blocks = [_nll(logits[i : i + BLOCK], targets[i : i + BLOCK]) for i in range(0, max(len(logits), 1), BLOCK)]
    return np.concatenate(blocks)


def _nll(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    top = logits.max(axis=1, keepdims=True)
    total = np.exp(logits - top).sum(axis=1, dtype=np.float64)  # f32 terms: 1e-7 of a nat, a millionth of the margin
    return np.asarray(np.log(total) + top[:, 0] - logits[np.arange(len(targets)), targets], np.float64)


def top_overlap(got: np.ndarray, want: np.ndarray, k: int) -> float:
    """Mean share of the k largest tokens that both rows have."""
    k = min(k, got.shape[1])
    ours, theirs = _largest(got, k), _largest(want, k)
    return float(np.mean([len(set(a) & set(b)) / k for a, b in zip(ours.tolist(), theirs.tolist(), strict=True)]))


def _largest(logits: np.ndarray, k: int) -> np.ndarray:
    """Indices [T, k] of the k largest of every row; k is small."""
    left, rows, made = logits.copy(), np.arange(len(logits)), []
    for _ in range(k):
        made.append(first_max(left))
        left[rows, made[-1]] = -np.inf
    return np.stack(made, axis=1)


@dataclass(frozen=True)
class NonFinite:
    """The first non-finite value of an array, and how many there are."""

    count: int
    position: int  # along the first axis
    kind: str  # "NaN", "+inf", "-inf"


def non_finite(array: np.ndarray) -> NonFinite | None:
    """None when every value is finite."""
    bad = ~np.isfinite(array.astype(np.float32))
    if not bad.any():
        return None
    first = tuple(int(i) for i in np.argwhere(bad)[0])
    value = float(array[first])
    kind = "NaN" if np.isnan(value) else "+inf" if value > 0 else "-inf"
    return NonFinite(int(bad.sum()), first[0], kind)
