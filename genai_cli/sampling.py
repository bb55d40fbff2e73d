"""Logits -> token. The order is fixed: minimum length, repetition penalty, repeated n-grams, then greedy, or top-k on raw
logits, softmax at temperature, top-p inside what top-k kept, min-p, one draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from genai_cli.errors import GenaiError

HEAD = 1024  # candidates that are sorted first; the others only when they matter
MAX_SEED = 2**63 - 1  # the generator takes words of 64 bits


@dataclass(frozen=True)
class SamplingOptions:
    """Effective options; `greedy` also when temperature is 0 or top_k is 1."""

    greedy: bool = True
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0
    min_new_tokens: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, np.inf), ("top_k", 0, np.inf), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0),
            ("no_repeat_ngram", 0, np.inf), ("min_new_tokens", 0, np.inf), ("seed", 0, MAX_SEED),
        ):  # fmt: skip
            value = getattr(self, name)
            if not low <= value <= high:
                raise GenaiError(f"--{name.replace('_', '-')} is {value}; wanted {low} to {high}")
        if not self.repetition_penalty > 0:
            raise GenaiError(f"--repetition-penalty is {self.repetition_penalty}; wanted more than 0")

    @property
    def is_greedy(self) -> bool:
        """No draw is made."""
        return self.greedy or self.temperature == 0 or self.top_k == 1


@dataclass(frozen=True)
class Logprob:
    """A token and its log-probability under the raw logits (before any option)."""

    id: int
    logprob: float


def check_finite(logits: np.ndarray, position: int) -> None:
    """GenaiError when a row holds NaN or +inf, or nothing but -inf: argmax would print token 0 for ever."""
    if np.isnan(logits).any() or np.isposinf(logits).any() or not np.isfinite(logits).any():
        bad = int((~np.isfinite(logits)).sum())
        raise GenaiError(
            f"the logits at position {position} are not finite ({bad} of {logits.size} values)",
            hint="run `genai parity MODEL` to find the first bad layer",
        )


def adjusted(
    logits: np.ndarray, options: SamplingOptions, history: Sequence[int], num_new: int, eos_ids: Sequence[int]
) -> np.ndarray:
    """A copy of logits [V] after minimum length, repetition penalty and n-gram ban. `history` is prompt and output."""
    row = np.array(logits, np.float32)
    if num_new < options.min_new_tokens:
        row[[token for token in eos_ids if token < row.size]] = -np.inf
    if options.repetition_penalty != 1.0 and history:
        seen = np.unique(np.asarray(history, np.int64))
        values = row[seen]
        row[seen] = np.where(values > 0, values / options.repetition_penalty, values * options.repetition_penalty)
    if options.no_repeat_ngram:
        row[_banned(history, options.no_repeat_ngram)] = -np.inf
    return row


def _banned(history: Sequence[int], size: int) -> list[int]:
    """Tokens that would complete an n-gram that history already holds."""
    if len(history) < size:
        return []
    prefix = tuple(history[len(history) - size + 1 :])
    starts = range(len(history) - size + 1)
    return sorted({history[i + size - 1] for i in starts if tuple(history[i : i + size - 1]) == prefix})


def sample(
    logits: np.ndarray, options: SamplingOptions, history: Sequence[int], num_new: int, eos_ids: Sequence[int] = ()
) -> int:
    """The next token of f32 logits [V]. Equal logits, options and position give the same token on every backend.

    GenaiError when the logits are not finite. Ties go to the lowest id."""
    check_finite(logits, len(history))
    row = adjusted(logits, options, history, num_new, eos_ids)
    if options.is_greedy:
        return int(row.argmax())
    return _drawn(*(_head(row, options, len(history)) or candidates(row, options)), options, len(history))


def enough(options: SamplingOptions) -> int:
    """How many of the largest logits decide the token; 0: all of them, or more than the values themselves."""
    if options.repetition_penalty != 1.0 or options.no_repeat_ngram or options.min_new_tokens:
        return 0
    return 1 if options.is_greedy else options.top_k


def sample_top(ids: np.ndarray, values: np.ndarray, options: SamplingOptions, position: int) -> int:
    """`sample` when only the `enough(options)` largest logits are at hand: ids [k], f32 values [k], best first, ties by
    id, NaN before all. The same token from the same draw. GenaiError when the logits are not finite."""
    check_finite(values, position)
    if options.is_greedy:
        return int(ids[0])
    return _drawn(*_weighed(ids, values, options), options, position)


def _draw(options: SamplingOptions, position: int) -> float:
    """Uniform in [0, 1): one of its own for every seed and position."""
    return float(np.random.Generator(np.random.Philox(key=[options.seed, position])).random())


def _drawn(kept: np.ndarray, probabilities: np.ndarray, options: SamplingOptions, position: int) -> int:
    target = _draw(options, position) * probabilities.sum()
    index = int(np.searchsorted(np.cumsum(probabilities), target, side="right"))
    return int(kept[min(index, len(kept) - 1)])


def _head(row: np.ndarray, options: SamplingOptions, position: int) -> tuple[np.ndarray, np.ndarray] | None:
    """`candidates`, when the most probable ones decide: top-p or min-p ends among them, or the draw falls on one of them
    (then the rest is one last candidate). Sorting a whole vocabulary costs more than a decode step. None: sort it."""
    if options.top_k or row.size <= 4 * HEAD:
        return None
    weights = np.exp((row.astype(np.float64) - float(row.max())) / options.temperature)
    kept = np.flatnonzero(row >= np.partition(row, row.size - HEAD)[row.size - HEAD])  # with all ties of the last
    kept = kept[np.argsort(-row[kept], kind="stable")]
    probabilities = weights[kept] / weights.sum()
    if probabilities.sum() >= options.top_p or (
        options.min_p > 0 and probabilities[-1] < options.min_p * probabilities[0]
    ):
        return _cut(kept, probabilities, options)
    if options.top_p == 1.0 and options.min_p == 0 and _draw(options, position) < probabilities.sum() * (1 - 1e-12):
        rest = 1.0 - probabilities.sum()
        return np.append(kept, kept[-1]), np.append(probabilities, rest)
    return None


def candidates(row: np.ndarray, options: SamplingOptions) -> tuple[np.ndarray, np.ndarray]:
    """(ids, probabilities f64) that may be drawn, most probable first, ties by id. Probabilities need not sum to 1."""
    count = options.top_k if 0 < options.top_k < row.size else row.size
    if count < row.size:
        kept = np.flatnonzero(row >= np.partition(row, row.size - count)[row.size - count])
    else:
        kept = np.flatnonzero(np.isfinite(row))
    kept = kept[np.argsort(-row[kept], kind="stable")][:count]
    return _weighed(kept, row[kept], options)


def _weighed(kept: np.ndarray, values: np.ndarray, options: SamplingOptions) -> tuple[np.ndarray, np.ndarray]:
    """What top-k left, best first, after temperature, top-p and min-p."""
    scaled = values.astype(np.float64) / options.temperature
    probabilities = np.exp(scaled - scaled[0])
    return _cut(kept, probabilities / probabilities.sum(), options)


def _cut(kept: np.ndarray, probabilities: np.ndarray, options: SamplingOptions) -> tuple[np.ndarray, np.ndarray]:
    """What top-p and min-p leave of candidates, best first."""
    first = kept[:1]
    if options.top_p < 1.0:  # the smallest set whose mass reaches top_p: at least one token
        before = np.cumsum(probabilities) - probabilities
        kept, probabilities = kept[before < options.top_p], probabilities[before < options.top_p]
        if not len(kept):  # top_p 0
            return first, np.ones(1)
    if options.min_p > 0.0:
        inside = probabilities >= options.min_p * probabilities[0]
        kept, probabilities = kept[inside], probabilities[inside]
    return kept, probabilities


def logprobs(logits: np.ndarray, token: int, count: int) -> tuple[Logprob, list[Logprob]]:
    """The chosen token and the `count` most probable ones under the raw logits [V]."""
    row = logits.astype(np.float64)
    row = row - (row.max() + np.log(np.exp(row - row.max()).sum()))
    top = np.argsort(-row, kind="stable")[:count]
    return Logprob(token, float(row[token])), [Logprob(int(i), float(row[i])) for i in top]
