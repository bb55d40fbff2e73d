"""One benchmark: A/A noise, the machine, then native and a peer in turn, then parity, which alone releases ratios."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from genai_cli.bench.batch import BatchFound
from genai_cli.bench.machine import Ceilings, Operations
from genai_cli.bench.report import (
    BenchReport,
    Noise,
    Parity,
    Ratio,
    Result,
    Unavailable,
    noise,
    ratio,
    result,
    unequal,
)
from genai_cli.bench.trials import (
    Arm,
    Meters,
    Phase,
    Timed,
    Trial,
    decode_trial,
    draw_ids,
    fill,
    in_turn,
    load_trial,
    prefill_trial,
)
from genai_cli.errors import GenaiError

Progress = Callable[[str | None], None]  # what runs now, or None: one more trial is done
SETTLE_S = 0.02  # between trials, so that one engine's spinning threads are asleep when the other is timed
AA, WARM_UP, CONTEXT = (
    1_000,
    2_000,
    3_000,
)  # trial numbers: ids of these runs are drawn from other streams than the pairs'


@dataclass(frozen=True)
class Subject:
    """What is measured. `bytes_per_token` maps a context length to the bytes one token reads, or None."""

    model: Path
    isa: str
    threads: int
    phases: list[Phase]
    bytes_per_token: Callable[[int], int | None]
    operations: dict[int, Operations]  # of a prefill of that length
    vocab_size: int


@dataclass(frozen=True)
class Tools:
    """Everything that touches the world, so that tests can replace it."""

    ceilings: Callable[[], Ceilings]
    peak_rss_bytes: Callable[[], int]
    parity: Callable[[], Parity]
    meters: Meters = field(default_factory=Meters)
    energy: str = "not available"
    collect: Callable[[], object] = gc.collect
    settle: Callable[[], None] = lambda: time.sleep(SETTLE_S)
    batch: Callable[[Parity], BatchFound] | None = None


@dataclass(frozen=True)
class Context:
    """What lies before the timed tokens, and how much of it each arm took from a cache."""

    ids: np.ndarray
    cached: dict[str, int] = field(default_factory=dict)


class ArmFailed(GenaiError):
    """An engine stopped with a GenaiError of its own."""

    def __init__(self, arm: str, error: GenaiError) -> None:
        super().__init__(error.message, hint=error.hint, exit_code=error.exit_code)
        self.arm = arm


T = TypeVar("T")


def named(arm: str, call: Callable[[], T]) -> T:
    """The call's result; its error says whose it is."""
    try:
        return call()
    except GenaiError as error:
        raise ArmFailed(arm, error) from error


@dataclass
class Bench:
    """Runs trials and keeps every id that was fed."""

    subject: Subject
    tools: Tools
    seed: int
    rounds: int
    progress: Progress
    _fed: list[str] = field(default_factory=list)
    num_ids: int = 0
    _warm_ups: int = 0

    def trial(self, arm: Arm, runner: Timed | None, phase: Phase, pair: int, context: Context) -> Trial:
        """One trial; `pair` also names the ids."""
        ids = draw_ids(phase, self.subject.vocab_size, self.seed, pair)[phase.n_context :]
        meters = self.tools.meters
        self.tools.settle()
        self.progress(None)
        if runner is None:
            made = load_trial(arm, pair, ids, meters)
            self.tools.collect()  # an engine's buffers lie in cycles, and two of them would be counted as one's peak
        elif phase.kind == "prefill":
            made = prefill_trial(arm.name, pair, runner, ids, meters)
        else:
            made = decode_trial(arm.name, pair, runner, context.ids, ids, context.cached.get(arm.name, 0), meters)
        self.add([made.ids_sha256], len(ids))
        return made

    def trials(self, arms: dict[str, Arm], phase: Phase, order: Iterable[tuple[str, int]]) -> list[Trial]:
        """Warm up each arm with ids of its own, then run in the order given. All trials of a decode phase share the
        context, which is not timed."""
        self.progress(f"{phase.kind} {phase.n_prompt or phase.n_context} ({', '.join(arms)})")
        load = phase.kind == "load"
        runners = {name: None if load else named(name, arm.open) for name, arm in arms.items()}
        context = Context(draw_ids(phase, self.subject.vocab_size, self.seed, CONTEXT)[: phase.n_context])
        for name, arm in arms.items():
            if (runner := runners[name]) is not None and phase.n_context:
                context.cached[name] = named(name, partial(fill, runner, context.ids))
                self.num_ids += phase.n_context
            named(name, partial(self.trial, arm, runner, phase, WARM_UP + self._warm_ups, context))
            self._warm_ups += 1
        made = [
            named(name, partial(self.trial, arms[name], runners[name], phase, pair, context)) for name, pair in order
        ]
        for runner in runners.values():
            if runner is not None:
                runner.close()
        return made

    def add(self, hashes: Sequence[str], num_ids: int) -> None:
        """Ids that were fed elsewhere."""
        self._fed += hashes
        self.num_ids += num_ids

    @property
    def ids_sha256(self) -> str:
        """Of the hashes of all trials in their order."""
        return hashlib.sha256("".join(self._fed).encode()).hexdigest()


def bench(
    subject: Subject, native: Arm, peers: Sequence[Arm], tools: Tools, *, seed: int, rounds: int, progress: Progress
) -> BenchReport:
    """Measure. Ratios only with a peer, with equal settings, and after parity passed on prompts of the same kind."""
    run = Bench(subject, tools, seed, rounds, progress)
    order = [(native.name, AA + i) for i in range(4 * rounds)]
    same = {phase: run.trials({native.name: native}, phase, order) for phase in subject.phases}
    peak, machine = tools.peak_rss_bytes(), tools.ceilings()
    floors = {phase: noise(phase, same[phase]) for phase in subject.phases if phase.is_timed}
    there, unavailable = _able(peers)
    apart, failed = _against(run, [native, *there]) if there else (same, [])
    machine = machine.best(tools.ceilings())
    progress("parity")
    parity = tools.parity() if there or tools.batch else "not run"
    withheld = _withheld(apart, native, there, parity) if there else None
    ratios = [] if withheld else [r for peer in there for r in _ratios(apart, native, peer, floors)]
    threads = next((trial.threads for trials in same.values() for trial in trials), subject.threads)
    report = BenchReport(
        str(subject.model), threads, subject.isa, run.ids_sha256, run.num_ids, seed, machine.read_gb_s,
        machine, _results(subject, apart, [native, *there], machine), ratios, withheld, list(floors.values()), parity,
        peak, tools.energy, unavailable + failed,
    )  # fmt: skip
    return report if tools.batch is None else _with_batch(report, run, tools.batch(parity))


def _with_batch(report: BenchReport, run: Bench, found: BatchFound) -> BenchReport:
    run.add(found.ids_sha256, found.num_ids)
    reasons = dict.fromkeys(reason for reason in (report.withheld, found.withheld) if reason)
    return replace(
        report, ids_sha256=run.ids_sha256, num_ids=run.num_ids, results=report.results + found.results,
        ratios=report.ratios + found.ratios, noise=report.noise + found.noise, withheld="; ".join(reasons) or None,
        unavailable=report.unavailable + found.unavailable,
    )  # fmt: skip


def _able(peers: Sequence[Arm]) -> tuple[list[Arm], list[Unavailable]]:
    """Those that can open the model and answer a token, and why the others cannot."""
    there, unavailable = [], []
    for peer in peers:
        try:
            runner = peer.open()
            runner.step(np.zeros(1, np.int64))
            runner.close()
            there.append(peer)
        except GenaiError as error:
            unavailable.append(Unavailable(peer.name, error.message))
    return there, unavailable


def _against(run: Bench, arms: Sequence[Arm]) -> tuple[dict[Phase, list[Trial]], list[Unavailable]]:
    """Every phase with native and the peers that can do it; a peer that fails is named, and the phase run without it."""
    apart: dict[Phase, list[Trial]] = {}
    failed = []
    for phase in run.subject.phases:
        there = {arm.name: arm for arm in arms}
        while phase not in apart:
            try:
                apart[phase] = run.trials(there, phase, in_turn(list(there), run.rounds))
            except ArmFailed as error:
                if error.arm == arms[0].name:
                    raise
                del there[error.arm]
                failed.append(Unavailable(error.arm, error.message, phase.kind))
    return apart, failed


def _of(trials: Sequence[Trial], arm: Arm) -> list[Trial]:
    return [trial for trial in trials if trial.arm == arm.name]


def _withheld(
    apart: dict[Phase, list[Trial]], native: Arm, peers: Sequence[Arm], parity: Parity
) -> str | None:  # fmt: skip
    if parity != "passed":
        return f"parity {parity}"
    pairs = ((_of(trials, native), _of(trials, peer)) for trials in apart.values() for peer in peers)
    reasons = (unequal(a, b) for a, b in pairs if b)
    return next((reason for reason in reasons if reason), None)


def _ratios(apart: dict[Phase, list[Trial]], native: Arm, peer: Arm, floors: dict[Phase, Noise]) -> list[Ratio]:
    return [
        ratio(phase, _of(apart[phase], native), _of(apart[phase], peer), found.floor)
        for phase, found in floors.items()
        if _of(apart[phase], peer)
    ]


def _results(
    subject: Subject, apart: dict[Phase, list[Trial]], arms: Sequence[Arm], machine: Ceilings
) -> list[Result]:  # fmt: skip
    return [
        result(
            phase, _of(trials, arm), machine, subject.bytes_per_token(phase.n_context + phase.n_new // 2),
            subject.operations.get(phase.n_prompt) if phase.kind == "prefill" else None,
        )
        for phase, trials in apart.items()
        for arm in arms
        if _of(trials, arm)
    ]  # fmt: skip
