"""The phase `batch`: many prompts to the end, in shared steps, one after another, and on a peer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from genai_cli.bench.report import Noise, Ratio, Result, Unavailable, difference_of, spread
from genai_cli.bench.trials import Meters, in_turn, without
from genai_cli.errors import GenaiError
from genai_cli.generate import Limits
from genai_cli.model import Ask, Model

Prompts = list[list[int]]
ALONE = "native one by one"


class BatchEngine(Protocol):
    """Answers all prompts with exactly `n_new` tokens each, in their order."""

    threads: int

    def answer(self, prompts: Prompts, n_new: int) -> list[list[int]]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class BatchArm:
    """`num_rows` prompts share a step."""

    name: str
    num_rows: int
    open: Callable[[], BatchEngine]


@dataclass(frozen=True)
class BatchSize:
    """`count` prompts of `shortest` to `longest` tokens."""

    count: int = 16
    shortest: int = 64
    longest: int = 512
    n_new: int = 128
    avoid: int | None = None  # a token that stands for a picture

    def cut_to(self, context_len: int | None) -> BatchSize:
        """The same with lengths that a context holds."""
        if context_len is None or self.longest + self.n_new <= context_len:
            return self
        n_new = min(self.n_new, context_len // 2)
        longest = min(self.longest, context_len - n_new)
        return BatchSize(self.count, min(self.shortest, longest), longest, n_new, self.avoid)

    def prompts(self, vocab_size: int, seed: int, number: int) -> Prompts:
        """Fresh random prompts, lengths evenly from the shortest to the longest, in an order of their own."""
        rng = np.random.default_rng([seed, self.count, self.longest, self.n_new, number])
        lengths = rng.permutation(np.linspace(self.shortest, self.longest, self.count).astype(int))
        drawn = [rng.integers(0, vocab_size or 256, length) for length in lengths]
        return [without(ids, self.avoid).tolist() for ids in drawn]


@dataclass(frozen=True)
class BatchTrial:
    """One arm on one set of prompts."""

    arm: str
    pair: int
    seconds: float
    joules: float | None
    num_prompt: int
    answers: list[list[int]]
    ids_sha256: str
    threads: int

    @property
    def num_new(self) -> int:
        return sum(map(len, self.answers))


@dataclass(frozen=True)
class BatchFound:
    """What goes into the report."""

    results: list[Result]
    ratios: list[Ratio]
    noise: list[Noise]
    withheld: str | None
    unavailable: list[Unavailable]
    ids_sha256: list[str]
    num_ids: int


class NativeBatch:
    """`Model.ask_all` with up to `max_rows` prompts in one step."""

    def __init__(self, model: Model, max_rows: int) -> None:
        if max_rows > 1:
            gate = model.rows(None)
            if not gate.supported:
                raise GenaiError(gate.reason)
        self._model, self._max_rows = model, max_rows
        self.threads = model.runner.info.threads

    def answer(self, prompts: Prompts, n_new: int) -> list[list[int]]:
        """Greedy, past every end token."""
        limits = Limits(max_new_tokens=n_new, ignore_eos=True)
        asks = [partial(Ask, prompt_ids=tuple(ids), limits=limits) for ids in prompts]
        answers: list[list[int]] = [[] for _ in prompts]
        for number, answer in self._model.ask_all(asks, self._max_rows):
            if isinstance(answer, GenaiError):
                raise answer
            answers[number] = answer.generated.token_ids
        return answers

    def close(self) -> None:
        """Nothing but the runner."""
        self._model.runner.close()


def bench_batch(
    arms: Sequence[BatchArm], size: BatchSize, vocab_size: int, meters: Meters, settle: Callable[[], None],
    *, seed: int, parity: str, progress: Callable[[str | None], None],
) -> BatchFound:  # fmt: skip
    """`arms[0]` is the one that others are compared with. Every arm twice, in turn, on the same two sets of prompts."""
    engines, unavailable = _opened(arms)
    there = [arm for arm in arms if arm.name in engines]
    trials: list[BatchTrial] = []
    for name, pair in in_turn([arm.name for arm in there], 1):
        if any(failed.engine == name for failed in unavailable):
            continue
        progress(f"batch of {size.count} ({name})")
        progress(None)
        settle()
        try:
            trials.append(_trial(name, pair, engines[name], size.prompts(vocab_size, seed, pair), size.n_new, meters))
        except GenaiError as error:
            unavailable.append(Unavailable(name, error.message, "batch"))
    gone = {failed.engine for failed in unavailable}
    there, trials = [a for a in there if a.name not in gone], [t for t in trials if t.arm not in gone]
    for engine in engines.values():
        engine.close()
    results = [_result(arm, [t for t in trials if t.arm == arm.name], size) for arm in there]
    withheld, ratios, noise = _compared(arms[0].name, there, trials, size, parity)
    return BatchFound(
        results, ratios, noise, withheld, unavailable, [t.ids_sha256 for t in trials], sum(t.num_prompt for t in trials)
    )


def _opened(arms: Sequence[BatchArm]) -> tuple[dict[str, BatchEngine], list[Unavailable]]:
    """Warmed up by two short prompts."""
    engines: dict[str, BatchEngine] = {}
    unavailable = []
    for arm in arms:
        try:
            engines[arm.name] = arm.open()
            engines[arm.name].answer([[1, 2, 3], [4, 5]][: arm.num_rows], 2)
        except GenaiError as error:
            engines.pop(arm.name, None)
            unavailable.append(Unavailable(arm.name, error.message, "batch"))
    return engines, unavailable


def _trial(
    arm: str, pair: int, engine: BatchEngine, prompts: Prompts, n_new: int, meters: Meters
) -> BatchTrial:  # fmt: skip
    flat = np.array([token for ids in prompts for token in ids], "<i8")
    started = meters.start()
    answers = engine.answer(prompts, n_new)
    seconds, joules = meters.stop(started)
    digest = hashlib.sha256(flat.tobytes()).hexdigest()
    return BatchTrial(arm, pair, seconds, joules, len(flat), answers, digest, engine.threads)


def _result(arm: BatchArm, trials: list[BatchTrial], size: BatchSize) -> Result:
    joules = [trial.joules for trial in trials if trial.joules is not None]
    tok_s = [trial.num_new / trial.seconds for trial in trials if trial.seconds > 0 and trial.num_new]
    return Result(
        arm.name, "batch", trials[0].num_prompt, 0, size.n_new, arm.num_rows, 0,
        spread(tok_s) if len(tok_s) == len(trials) else None, spread([trial.seconds for trial in trials]),
        joules_per_token=sum(joules) / sum(t.num_new for t in trials) if len(joules) == len(trials) else None,
    )  # fmt: skip


def _compared(
    first: str, arms: Sequence[BatchArm], trials: list[BatchTrial], size: BatchSize, parity: str
) -> tuple[str | None, list[Ratio], list[Noise]]:
    own = sorted((t for t in trials if t.arm == first), key=lambda t: t.pair)
    if not own or len(arms) < 2:
        return None, [], []
    speeds = [t.num_prompt / t.seconds for t in own]
    floor = max(speeds) / min(speeds) - 1  # of two sets of equally many tokens, one at either end of the run
    noise = [Noise("batch", own[0].num_prompt, 0, floor)]
    if parity != "passed":
        return f"parity {parity}", [], noise
    ratios = []
    for arm in arms:
        others = {t.pair: t for t in trials if t.arm == arm.name}
        if arm.name == first:
            continue
        if reason := _unequal(own, others, exactly=arm.name == ALONE):
            return reason, [], noise
        found = spread([others[t.pair].seconds / t.seconds for t in own])
        ratios.append(
            Ratio("batch", own[0].num_prompt, 0, first, arm.name, found.median, found.p5, found.p95,
                  difference_of(found, floor))
        )  # fmt: skip
    return None, ratios, noise


def _unequal(own: list[BatchTrial], others: dict[int, BatchTrial], *, exactly: bool) -> str | None:
    """Why the pairs must not be compared; `exactly`: a row must be what its prompt gives alone."""
    for trial in own:
        other = others[trial.pair]
        if trial.threads != other.threads:
            return f"settings differ: {trial.arm} ran on {trial.threads} threads, {other.arm} on {other.threads}"
        if trial.ids_sha256 != other.ids_sha256 or trial.num_new != other.num_new:
            return f"settings differ: {trial.arm} made {trial.num_new} tokens, {other.arm} {other.num_new}"
        if exactly and trial.answers != other.answers:
            wrong = [
                number
                for number, pair in enumerate(zip(trial.answers, other.answers, strict=True))
                if pair[0] != pair[1]
            ]
            return f"rows {wrong} of a batch differ from the same prompts alone"
    return None
