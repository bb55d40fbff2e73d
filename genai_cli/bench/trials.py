"""One timed trial of one phase on one engine, and the order in which trials run."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from genai_cli.errors import GenaiError
from genai_cli.sampling import SamplingOptions, sample

FILL_TOKENS = 512
Clock = Callable[[], float]
PhaseKind = Literal["load", "prefill", "decode"]


class Info(Protocol):
    """Read back from the live engine."""

    @property
    def threads(self) -> int: ...


class Timed(Protocol):
    """What a trial asks of an engine; every `runners.base.Runner` is one. `step` returns when the logits lie on the
    host: waiting for a device is part of it."""

    @property
    def length(self) -> int: ...
    @property
    def info(self) -> Info: ...
    def reset(self) -> None: ...
    def step(self, ids: np.ndarray) -> np.ndarray: ...
    def rewind(self, length: int) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Arm:
    """An engine under test: `open` makes a runner without a prefix cache."""

    name: str
    open: Callable[[], Timed]


@dataclass(frozen=True)
class Meters:
    """What is read before and after: a clock in seconds and, where there is one, a counter of joules."""

    clock: Clock = time.perf_counter
    joules: Callable[[], float] | None = None

    def start(self) -> tuple[float, float]:
        """Readings now; the clock last."""
        joules = self.joules() if self.joules else 0.0
        return self.clock(), joules

    def stop(self, started: tuple[float, float]) -> tuple[float, float | None]:
        """Seconds and joules since; the clock first."""
        seconds = self.clock() - started[0]
        return seconds, self.joules() - started[1] if self.joules else None


@dataclass(frozen=True)
class Phase:
    """What is timed. `n_context` tokens lie in past, untimed; `n_prompt` or `n_new` tokens are timed."""

    kind: PhaseKind
    n_prompt: int = 0
    n_context: int = 0
    n_new: int = 0

    @property
    def num_ids(self) -> int:
        """Ids one trial feeds."""
        return self.n_prompt + self.n_context + self.n_new

    @property
    def is_timed(self) -> bool:
        """Whether anything happens while the clock runs; without it there is no noise and no ratio."""
        return self.n_prompt + self.n_new > 0


@dataclass(frozen=True)
class Trial:
    """What was measured: `num_tokens` is what the engine's own length says was processed while the clock ran."""

    arm: str
    pair: int
    seconds: float
    num_tokens: int
    num_cached: int
    ids_sha256: str
    threads: int
    joules: float | None = None

    @property
    def tok_s(self) -> float | None:
        """None where nothing was generated, or where a prefix hit voids the figure."""
        if self.num_tokens <= 0 or self.num_cached or self.seconds <= 0:
            return None
        return self.num_tokens / self.seconds


def phases(context_len: int | None, prompts: tuple[int, ...], contexts: tuple[int, ...], n_new: int) -> list[Phase]:
    """Load, prefill and decode, each length cut to what the context holds, none of them twice."""
    room = context_len or max(*prompts, *(context + n_new for context in contexts))
    n_new = min(n_new, max(0, room - 1))
    lengths = dict.fromkeys(min(n, room) for n in prompts)
    depths = dict.fromkeys(min(n, room - n_new) for n in contexts)
    prefills = [Phase("prefill", n_prompt=n) for n in lengths]
    return [Phase("load", n_prompt=1), *prefills, *(Phase("decode", n_context=n, n_new=n_new) for n in depths)]


def of_kinds(found: list[Phase], kinds: Container[str]) -> list[Phase]:
    """Those of the kinds asked for."""
    return [phase for phase in found if phase.kind in kinds]


def in_turn(arms: Sequence[str], rounds: int) -> Iterator[tuple[str, int]]:
    """(arm, pair): a b b a, with three a b c c b a, so that a drift of the machine falls on all alike."""
    for pair in range(0, 2 * rounds, 2):
        yield from ((arm, pair) for arm in arms)
        yield from ((arm, pair + 1) for arm in reversed(arms))


def draw_ids(phase: Phase, vocab_size: int, seed: int, number: int) -> np.ndarray:
    """Fresh random ids, int64 [num_ids]: the same for the same seed and number, for no other number."""
    entropy = [seed, phase.n_prompt, phase.n_context, phase.n_new, number]
    return np.random.default_rng(entropy).integers(0, vocab_size or 256, phase.num_ids)


def without(ids: np.ndarray, avoid: int | None) -> np.ndarray:
    """The ids with another in place of one (which stands for a picture, and there is none)."""
    return ids if avoid is None else np.where(ids == avoid, avoid - 1, ids)


def digest(ids: np.ndarray) -> str:
    """sha256 of the ids as little-endian int64."""
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()


def prefill_trial(arm: str, pair: int, runner: Timed, ids: np.ndarray, meters: Meters) -> Trial:
    """Empty KV -> first token's logits on the host and sampled."""
    runner.reset()
    cached = runner.length
    started = meters.start()
    _sampled(runner.step(ids))
    seconds, joules = meters.stop(started)
    return Trial(arm, pair, seconds, runner.length - cached, cached, digest(ids), runner.info.threads, joules)


def fill(runner: Timed, ids: np.ndarray) -> int:
    """Put a context into an empty KV, in parts that bound what attention keeps; the tokens that came from a cache."""
    runner.reset()
    cached = runner.length
    for start in range(0, len(ids), FILL_TOKENS):
        _sampled(runner.step(ids[start : start + FILL_TOKENS]))
    return cached


def decode_trial(
    arm: str, pair: int, runner: Timed, context: np.ndarray, ids: np.ndarray, cached: int, meters: Meters
) -> Trial:
    """Single-token steps behind a context that `fill` put there; it is left as it was found. The ids are given, not
    sampled: both engines get the same."""
    before, started = runner.length, meters.start()
    for token in ids:
        _sampled(runner.step(np.array([token], np.int64)))
    seconds, joules = meters.stop(started)
    num_tokens, fed = runner.length - before, digest(np.concatenate([context, ids]))
    try:
        runner.rewind(before)
    except GenaiError:  # recurrent state cannot go back
        fill(runner, context)
    return Trial(arm, pair, seconds, num_tokens, cached, fed, runner.info.threads, joules)


def load_trial(arm: Arm, pair: int, ids: np.ndarray, meters: Meters) -> Trial:
    """Open and answer one token, so that work put off until the first step counts as loading."""
    started = meters.start()
    runner = arm.open()
    runner.step(ids)
    seconds, joules = meters.stop(started)
    threads = runner.info.threads
    runner.close()
    return Trial(arm.name, pair, seconds, 0, 0, digest(ids), threads, joules)


def _sampled(logits: np.ndarray) -> int:
    if not logits.size:
        raise GenaiError("the engine returned no logits, wanted those of the last token")
    return sample(logits[-1], SamplingOptions(), [], 0)
