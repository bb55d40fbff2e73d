"""Where the time of a step goes: time per op, and a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from genai_cli.backends.base import KvSlot
from genai_cli.backends.cpu import CpuBackend, Span
from genai_cli.bench.machine import Operations
from genai_cli.bench.trials import Phase, draw_ids
from genai_cli.bench.work import Work, shape_of, work
from genai_cli.engine.engine import Engine
from genai_cli.errors import GenaiError
from genai_cli.model import OpenOptions, open_model
from genai_cli.runners.base import Runner
from genai_cli.runners.native import NativeRunner
from genai_cli.runners.pipeline import PipelineRunner
from genai_cli.sampling import SamplingOptions, sample

SCHEMA = "genai.profile/1"
PREFILLS = 4  # untimed and timed in turn: off, on, on, off
OUTSIDE = "(outside kernels)"  # Python between and around kernels, inputs, logits to the host
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One op at one shape in one phase, a mean step of it. `share` is of the whole step's time."""

    op: str
    shape: str
    calls: float
    ms: float
    share: float
    gb_s: float | None
    gflop_s: float | None


@dataclass(frozen=True)
class Section:
    """One phase: `step_ms` with its rows; `cost` is the median step while timed over the median while not, less 1."""

    phase: str
    n_prompt: int
    n_context: int
    num_rows: int
    num_steps: int
    step_ms: float
    cost: float
    rows: list[Row]


@dataclass(frozen=True)
class ProfileReport:
    """The document of `--profile --json`."""

    model: str
    threads: int
    isa: str
    sections: list[Section]
    schema: str = field(default=SCHEMA)


@dataclass(frozen=True)
class TimedStep:
    """One timed step: what the caller waited for, and the spans inside."""

    name: str
    held: int  # tokens in the KV behind it
    start_ns: int
    end_ns: int
    spans: list[Span]
    num_rows: int = 1

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass
class Profiled:
    """A native runner whose steps are timed or not."""

    runner: NativeRunner | PipelineRunner
    engine: Engine
    backend: CpuBackend

    def step(self, name: str, ids: np.ndarray, *, timed: bool) -> tuple[int, TimedStep | None]:
        """Feed ids and sample: nanoseconds, and what happened in them."""
        self.backend.profile(timed)
        started = time.perf_counter_ns()
        sample(self.runner.step(ids)[-1], SamplingOptions(), [], 0)
        ended = time.perf_counter_ns()
        spans = self.backend.take_spans()
        self.backend.profile(False)
        held = self.runner.length
        return ended - started, TimedStep(name, held, started, ended, spans) if timed else None

    def step_rows(
        self, name: str, ids: np.ndarray, seats: list[Runner], *, timed: bool
    ) -> tuple[int, TimedStep | None]:
        """The same for one token each of several sequences."""
        assert isinstance(self.runner, NativeRunner)
        self.backend.profile(timed)
        started = time.perf_counter_ns()
        for row in self.runner.step_rows(ids, seats):
            sample(row, SamplingOptions(), [], 0)
        ended = time.perf_counter_ns()
        spans = self.backend.take_spans()
        self.backend.profile(False)
        held = sum(seat.length for seat in seats)
        return ended - started, TimedStep(name, held, started, ended, spans, len(seats)) if timed else None


def profile(
    model: Path, phases: list[Phase], num_rows: int, options: OpenOptions, seed: int, trace: Path | None,
    progress: Progress,
) -> ProfileReport:  # fmt: skip
    """Profile prefill, decode, and steps shared by `num_rows` sequences (where the model can), of a package on native;
    `trace` gets every span. GenaiError off the CPU."""
    runner = open_model(model, options).runner
    subject = profiled(runner)
    sections, steps = [], []
    for phase in phases:
        if phase.kind in ("prefill", "decode") and phase.is_timed:
            progress(f"{phase.kind} {phase.n_prompt or phase.n_context}")
            untimed, timed = (_decode if phase.kind == "decode" else _prefill)(subject, phase, seed)
            sections.append(_section(subject, phase, untimed, timed))
            steps += timed
    decodes = [phase for phase in phases if phase.kind == "decode" and phase.is_timed]
    if num_rows > 1 and decodes and isinstance(runner, NativeRunner) and runner.supports_rows().supported:
        progress(f"{num_rows} sequences a step")
        untimed, timed = _rows(runner, subject, decodes[0], num_rows, seed)
        sections.append(_section(subject, decodes[0], untimed, timed))
        steps += timed
    if trace is not None:
        _write(trace, steps, subject)
    return ProfileReport(str(model), runner.info.threads, subject.backend.description, sections)


def profiled(runner: object) -> Profiled:
    """Native's engine and backend behind a runner. GenaiError for other engines and devices."""
    if not isinstance(runner, NativeRunner | PipelineRunner):
        raise GenaiError("--profile shows the native engine's steps")
    decoder = runner.decoder if isinstance(runner, PipelineRunner) else runner
    if not isinstance(decoder, NativeRunner) or not isinstance(decoder.engine.backend, CpuBackend):
        raise GenaiError("--profile shows the native engine's steps on the CPU")
    return Profiled(runner, decoder.engine, decoder.engine.backend)


def operations(model: Path, options: OpenOptions, lengths: Sequence[int], seed: int) -> dict[int, Operations]:
    """Of a prefill of each length, as native runs it: products with int8 activations, and all others."""
    runner = open_model(model, options).runner
    subject = profiled(runner)
    made = {}
    for length in lengths:
        runner.reset()
        ids = draw_ids(Phase("prefill", length), runner.vocab_size, seed, 0)
        _, step = subject.step("", ids, timed=True)
        done = [(span.step, work(span.step, subject.engine.slots, length)) for span in (step.spans if step else [])]
        of_bytes = sum(d.num_ops for s, d in done if s.kernel == "MatMulNBits" and s.attrs.get("accuracy_level") == 4)
        made[length] = Operations(sum(d.num_ops for _, d in done) - of_bytes, of_bytes)
    runner.close()
    return made


def _prefill(subject: Profiled, phase: Phase, seed: int) -> tuple[list[int], list[TimedStep]]:
    untimed, timed = [], []
    for number in range(PREFILLS + 1):
        subject.runner.reset()
        ids = draw_ids(phase, subject.runner.vocab_size, seed, number)
        ns, found = subject.step(f"prefill {phase.n_prompt}", ids, timed=number % 4 in (2, 3))
        if found:
            timed.append(found)
        elif number:  # the first one is recorded, not replayed
            untimed.append(ns)
    return untimed, timed


def _decode(subject: Profiled, phase: Phase, seed: int) -> tuple[list[int], list[TimedStep]]:
    ids = draw_ids(phase, subject.runner.vocab_size, seed, 0)
    subject.runner.reset()
    subject.runner.step(ids[: phase.n_context])
    untimed, timed = [], []
    for number, token in enumerate(ids[phase.n_context :]):
        name = f"decode behind {phase.n_context + number}"
        ns, found = subject.step(name, np.array([token], np.int64), timed=number % 4 in (2, 3))
        if found:
            timed.append(found)
        elif number:
            untimed.append(ns)
    return untimed, timed


def _rows(
    runner: NativeRunner, subject: Profiled, phase: Phase, num_rows: int, seed: int
) -> tuple[list[int], list[TimedStep]]:  # fmt: skip
    seats: list[Runner] = [runner.seat() for _ in range(num_rows)]
    ids = np.stack([draw_ids(phase, runner.vocab_size, seed, number) for number in range(num_rows)])
    for seat, row in zip(seats, ids, strict=True):
        seat.step(row[: phase.n_context])
    untimed, timed = [], []
    for number in range(phase.n_new):
        name = f"{num_rows} sequences behind {phase.n_context + number}"
        ns, found = subject.step_rows(name, ids[:, phase.n_context + number], seats, timed=number % 4 in (2, 3))
        if found:
            timed.append(found)
        elif number:
            untimed.append(ns)
    return untimed, timed


def _section(subject: Profiled, phase: Phase, untimed: list[int], timed: list[TimedStep]) -> Section:
    if not timed or not untimed:
        raise GenaiError(f"{phase.kind}: too few steps to profile", hint="--new-tokens 32")
    step_ns = sum(step.ns for step in timed) / len(timed)
    cost = median(step.ns for step in timed) / median(untimed) - 1
    num_rows = timed[0].num_rows
    return Section(
        "batch" if num_rows > 1 else phase.kind, phase.n_prompt, phase.n_context, num_rows, len(timed), step_ns / 1e6,
        cost, rows_of(subject.engine.slots, timed),
    )  # fmt: skip


def rows_of(slots: Sequence[KvSlot], timed: list[TimedStep]) -> list[Row]:
    """Time by op and shape, the longest first, and what lies outside all kernels."""
    step_ns = sum(step.ns for step in timed) / len(timed)
    calls: dict[tuple[str, str], list[tuple[int, Work]]] = defaultdict(list)
    for step in timed:
        for span in step.spans:
            done = work(span.step, slots, step.held, step.num_rows)
            calls[span.step.kernel, shape_of(span.step)].append((span.end_ns - span.start_ns, done))
    rows = [_row(*key, found, len(timed), step_ns) for key, found in calls.items()]
    outside = step_ns - sum(row.ms for row in rows) * 1e6
    rows.append(Row(OUTSIDE, "", 1, outside / 1e6, outside / step_ns, None, None))
    return sorted(rows, key=lambda row: -row.ms)


def _row(op: str, shape: str, calls: list[tuple[int, Work]], num_steps: int, step_ns: float) -> Row:
    ns = sum(call[0] for call in calls)
    num_bytes, num_ops = sum(call[1].num_bytes for call in calls), sum(call[1].num_ops for call in calls)
    return Row(
        op, shape, len(calls) / num_steps, ns / num_steps / 1e6, ns / num_steps / step_ns,
        num_bytes / ns if num_bytes and ns else None, num_ops / ns if num_ops and ns else None,
    )  # fmt: skip


def _write(path: Path, steps: list[TimedStep], subject: Profiled) -> None:
    origin = min((step.start_ns for step in steps), default=0)
    try:
        path.write_text(json.dumps(trace_document(steps, subject.engine.slots, origin)), encoding="utf-8")
    except OSError as error:
        raise GenaiError(f"cannot write the trace `{path}`: {error.strerror}", hint="--trace FILE") from None


def trace_document(steps: list[TimedStep], slots: Sequence[KvSlot], origin: int) -> dict[str, Any]:
    """Complete events (`ph` X, microseconds) of the Trace Event Format: one track of steps, one of kernels."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}}
        for tid, name in ((1, "steps"), (2, "kernels"))
    ]
    for step in steps:
        events.append(_event(step.name, 1, step.start_ns - origin, step.ns, {}))
        for span in step.spans:
            ns, done = span.end_ns - span.start_ns, work(span.step, slots, step.held, step.num_rows)
            args = {"shape": shape_of(span.step), "bytes": done.num_bytes, "operations": done.num_ops}
            events.append(_event(span.step.kernel, 2, span.start_ns - origin, ns, args))
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _event(name: str, tid: int, start_ns: int, ns: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": 1, "tid": tid, "ts": start_ns / 1e3, "dur": ns / 1e3, "args": args}
