"""`genai bench MODEL --micro`: which cases a package has."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from genai_cli.backends.cpu import CpuBackend, Step
from genai_cli.bench.crowd import Crowd
from genai_cli.bench.machine import ceilings
from genai_cli.bench.micro import MicroReport, chosen, measure
from genai_cli.bench.micro_host import Makers, page_cases, sampling_cases, text_cases
from genai_cli.bench.micro_kernels import distinct, kernel_case
from genai_cli.bench.profile import Profiled, Progress, profiled
from genai_cli.bench.trials import Phase, draw_ids
from genai_cli.model import Model, OpenOptions, open_model


def run_micro(
    model: Path, options: OpenOptions, lengths: tuple[int, int], only: str, seed: int, progress: Progress
) -> MicroReport:
    """Everything that `only` (a pattern) names. `lengths`: tokens of a prefill, and the context of a decode step."""
    opened, crowd = open_model(model, options), Crowd()
    subject = profiled(opened.runner)
    made = _makers(opened, subject, lengths, seed)
    results = []
    for case in chosen(made.values(), made, only):
        progress(f"{case.name} {case.shape}")
        results.append(measure(case))
    backend = subject.backend
    return MicroReport(str(model), backend.threads, backend.description, ceilings(backend), results, crowd.share())


def _makers(opened: Model, subject: Profiled, lengths: tuple[int, int], seed: int) -> Makers:
    made = _kernels(opened, subject, lengths, seed)
    made |= sampling_cases(opened.runner.vocab_size) | page_cases(opened.runner.kv_layout)
    return made | (text_cases(opened.tokenizer) if opened.package.tokenizer is not None else {})


def _kernels(opened: Model, subject: Profiled, lengths: tuple[int, int], seed: int) -> Makers:
    """Of a decode step and of a prefill."""
    num_prompt, num_context = lengths
    room = opened.runner.context_len or num_prompt + num_context + 1
    prompt, context = min(num_prompt, room), min(num_context, room - 1)
    steps = {
        context + 1: _steps(subject, Phase("decode", n_context=context, n_new=1), seed),
        prompt: _steps(subject, Phase("prefill", prompt), seed),
    }
    # what both recordings read at one address is a weight; ids and activations lie elsewhere in each
    read = [{t.address for step in made for t in step.inputs if t is not None} for made in steps.values()]
    weights = read[0] & read[-1] if len(read) > 1 else set()
    made: Makers = {}
    for held, recorded in steps.items():
        for seen in distinct(recorded, weights, held):
            backend = partial(CpuBackend, threads=subject.backend.threads, isa=subject.backend.isa)
            make = partial(kernel_case, seen, subject.engine, opened.decoder.graph, backend)
            made[f"{seen.name} {seen.shape}"] = make
    return made


def _steps(subject: Profiled, phase: Phase, seed: int) -> list[Step]:
    subject.runner.reset()
    ids = draw_ids(phase, subject.runner.vocab_size, seed, 0)
    if phase.n_context:
        subject.runner.step(ids[: phase.n_context])
    _, timed = subject.step("", np.asarray(ids[phase.n_context :]), timed=True)
    return [span.step for span in (timed.spans if timed else [])]
