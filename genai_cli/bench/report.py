"""What a benchmark found, schema genai.bench/1: medians, paired ratios, and what they must exceed to mean anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from genai_cli.bench.machine import Ceilings, Operations
from genai_cli.bench.process import ProcessTrial
from genai_cli.bench.trials import Phase, Trial

SCHEMA = "genai.bench/1"
Difference = Literal["none", "faster", "slower"]
Parity = Literal["passed", "failed", "not run"]


@dataclass(frozen=True)
class Spread:
    """Median and 5th to 95th percentile of n trials."""

    median: float
    p5: float
    p95: float
    n: int


@dataclass(frozen=True)
class Result:
    """One engine in one phase. `tok_s` is None (n/a) for load, for 0 tokens and after a prefix hit."""

    engine: str
    phase: str
    n_prompt: int
    n_context: int
    n_new: int
    batch: int
    num_cached_tokens: int
    tok_s: Spread | None
    seconds: Spread
    ttft_s: float | None = None  # prefill: of this prompt
    tpot_s: float | None = None  # decode: seconds a token
    bytes_per_token: int | None = None  # decode: weights and KV that one token reads
    gb_s: float | None = None
    bandwidth_fraction: float | None = None
    peak_fraction: float | None = None  # prefill: least time at the arithmetic peaks, over the time it took
    joules_per_token: float | None = None  # of prefill and decode, where the machine has a counter


@dataclass(frozen=True)
class Unavailable:
    """An engine that was asked for and could not be measured (in `phase`, or at all)."""

    engine: str
    reason: str
    phase: str | None = None


@dataclass(frozen=True)
class Ratio:
    """How many times as fast a is as b: pairs of neighbouring trials. `difference` is none inside the noise."""

    phase: str
    n_prompt: int
    n_context: int
    a: str
    b: str
    median: float
    p5: float
    p95: float
    difference: Difference


@dataclass(frozen=True)
class Noise:
    """native against itself in the same phase: the largest |ratio - 1| of neighbouring trials."""

    phase: str
    n_prompt: int
    n_context: int
    floor: float


@dataclass(frozen=True)
class ProcessFigures:
    """An engine in fresh processes. `mapped_bytes` are shared with others that map the same files, `private_bytes` (since
    before the model was opened: repacked weights, KV, activations) are not. None where the system does not tell."""

    engine: str
    first_token_s: Spread  # from before the process existed
    peak_rss_bytes: int | None
    mapped_bytes: int | None
    private_bytes: int | None


@dataclass(frozen=True)
class BenchReport:
    """The whole document."""

    model: str
    threads: int
    isa: str
    ids_sha256: str
    num_ids: int
    seed: int
    bandwidth_gb_s: float
    ceilings: Ceilings
    results: list[Result]
    ratios: list[Ratio]
    withheld: str | None
    noise: list[Noise]
    parity: Parity
    peak_rss_bytes: int  # of the process while only native had run
    energy: str  # what counts it, or that and why nothing does
    unavailable: list[Unavailable] = field(default_factory=list)
    processes: list[ProcessFigures] = field(default_factory=list)
    others_cpu: float | None = None  # share of all cores' time that other processes used meanwhile
    artifact_bytes: int = 0  # files of the decoder: what all engines have to hold, with the KV
    schema: str = field(default=SCHEMA)


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    p5, median, p95 = np.percentile(values, [5, 50, 95])
    return Spread(float(median), float(p5), float(p95), len(values))


def result(
    phase: Phase, trials: Sequence[Trial], machine: Ceilings, bytes_per_token: int | None, done: Operations | None
) -> Result:
    """Trials of one engine in one phase."""
    rates = [trial.tok_s for trial in trials if trial.tok_s is not None]
    tok_s = spread(rates) if len(rates) == len(trials) else None
    decode = phase.kind == "decode" and tok_s is not None
    gb_s = tok_s.median * bytes_per_token / 1e9 if decode and tok_s and bytes_per_token else None
    seconds = spread([trial.seconds for trial in trials])
    return Result(
        trials[0].arm, phase.kind, phase.n_prompt, phase.n_context, phase.n_new, 1,
        max(trial.num_cached for trial in trials), tok_s, seconds,
        ttft_s=seconds.median if phase.kind == "prefill" and tok_s else None,
        tpot_s=1 / tok_s.median if decode and tok_s else None,
        bytes_per_token=bytes_per_token if phase.kind == "decode" else None,
        gb_s=gb_s, bandwidth_fraction=gb_s / machine.read_gb_s if gb_s else None,
        peak_fraction=done.least_s(machine) / seconds.median if done and tok_s else None,
        joules_per_token=_joules(trials) if tok_s else None,
    )  # fmt: skip


def _joules(trials: Sequence[Trial]) -> float | None:
    """A token's, over all trials: counters tick too rarely for one."""
    total = [trial.joules for trial in trials if trial.joules is not None]
    return sum(total) / sum(trial.num_tokens for trial in trials) if len(total) == len(trials) else None


def paired(a: Sequence[Trial], b: Sequence[Trial]) -> list[float]:
    """b's seconds over a's, pair by pair: above 1, a is faster."""
    others = {trial.pair: trial for trial in b}
    return [others[trial.pair].seconds / trial.seconds for trial in a if trial.pair in others]


def noise(phase: Phase, trials: Sequence[Trial]) -> Noise:
    """From an A/A run: trials 0 and 1 are a pair, 2 and 3, and so on."""
    ratios = paired_neighbours(trials)
    return Noise(phase.kind, phase.n_prompt, phase.n_context, max(abs(ratio - 1) for ratio in ratios))


def paired_neighbours(trials: Sequence[Trial]) -> list[float]:
    """Larger over smaller, so that the floor is symmetric."""
    pairs = zip(trials[::2], trials[1::2], strict=True)
    return [max(x.seconds, y.seconds) / min(x.seconds, y.seconds) for x, y in pairs]


def process_figures(trials: Sequence[ProcessTrial]) -> ProcessFigures:
    """All starts of one engine; of memory, the last."""
    memory = trials[-1].memory
    parts = (memory.peak_rss, memory.mapped, memory.private) if memory else (None, None, None)
    return ProcessFigures(trials[0].engine, spread([trial.first_token_s for trial in trials]), *parts)


def ratio(phase: Phase, a: Sequence[Trial], b: Sequence[Trial], floor: float) -> Ratio:
    """The paired ratio; a difference inside the noise floor, or an interval with 1 in it, is none."""
    found = spread(paired(a, b))
    return Ratio(
        phase.kind, phase.n_prompt, phase.n_context, a[0].arm, b[0].arm, found.median, found.p5, found.p95,
        difference_of(found, floor),
    )  # fmt: skip


def difference_of(found: Spread, floor: float) -> Difference:
    """What a ratio of this spread says beyond the noise."""
    if max(found.median, 1 / found.median) - 1 <= floor or found.p5 <= 1 <= found.p95:
        return "none"
    return "faster" if found.median > 1 else "slower"


def unequal(a: Sequence[Trial], b: Sequence[Trial]) -> str | None:
    """Why two arms must not be compared: threads, ids, tokens processed, or a prefix hit."""
    for x, y in zip(sorted(a, key=lambda t: t.pair), sorted(b, key=lambda t: t.pair), strict=True):
        if x.threads != y.threads:
            return f"settings differ: {x.arm} ran on {x.threads} threads, {y.arm} on {y.threads}"
        if x.ids_sha256 != y.ids_sha256 or x.num_tokens != y.num_tokens:
            return f"settings differ: {x.arm} and {y.arm} were not fed the same ids"
        if x.num_cached or y.num_cached:
            return f"a prefix hit: {max(x.num_cached, y.num_cached)} tokens were not computed"
    return None
