"""`--prove`: plant defects, see each one killed for the right reason, and say how small a defect still shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from genai_cli.checks import checker_mutants, mirror_mutants, mutants, preflight
from genai_cli.checks.parity import Oracles, Prompt, Settings, Target, Transform, consult, parity
from genai_cli.checks.verdict import judge
from genai_cli.report.parity import Check, Mutant, ParityReport, Proof

EXCUSED = ("not-applicable", "equivalent")
POWER_STEPS = tuple(10.0**-k for k in range(1, 8))  # relative size of a change of one weight matrix


def prove(
    target: Target, prompts: Sequence[Prompt], settings: Settings, clean: ParityReport, progress: Callable[[str], None]
) -> ParityReport:
    """The clean report with its proof: engine mutants at the first, middle and last layer, and the checker's own."""
    artifact = preflight.artifact(target.model_path, target.graph, target.tokenizer_path)
    quiet = replace(settings, explain=False, save_golden=None, user_mode=False)
    oracles = consult(target, artifact, prompts, quiet, progress)
    count = mutants.num_layers(target.graph)
    chosen = sorted({0, count // 2, count - 1}) if count else []

    def run(mutant: mutants.EngineMutant, plant: Transform, layer: int | None) -> ParityReport:
        progress(f"mutant: {mutant.id}" + ("" if layer is None else f", layer {layer}"))
        planted = replace(quiet, transform=plant, pick=mutant.pick or settings.pick)
        return parity(target, prompts, planted, lambda _: None, oracles)

    progress("mutants of pages and of the checker")
    found = [*mutants.prove(target.graph, run, chosen), *checker_mutants.prove(), *_page_mutants()]
    power = smallest_detectable(target, prompts, replace(quiet, locate=False), oracles, progress)
    return with_proof(clean, found, power)


def _page_mutants() -> list[Mutant]:
    """The battery of `genai mirror-check --prove`, on closed-form decoders."""
    return [
        Mutant(judged.id, "pages", judged.state, " or ".join(judged.expected), judged.failed, judged.detail)
        for judged in mirror_mutants.prove()
    ]


def with_proof(clean: ParityReport, found: Sequence[Mutant], power: dict[str, float]) -> ParityReport:
    """Survivors, and mutants killed for another reason, make the run unproven."""
    applicable = [mutant for mutant in found if mutant.state not in EXCUSED]
    killed = [mutant for mutant in applicable if mutant.state == "killed"]
    left = [f"{m.id} ({m.target}): {m.state}" for m in applicable if m.state != "killed"]
    check = Check(
        "proof", "proof", "unproven" if left or not killed else "pass", compared=len(applicable), value=float(len(killed)),
        limit=float(len(applicable)), limit_source="every applicable mutant, for the right reason", reason="; ".join(left),
    )  # fmt: skip
    checks = [*clean.checks, check]
    judgement = judge(checks, clean.flips)
    return replace(
        clean, checks=checks, verdict=judgement.verdict, exit_code=int(judgement.exit_code),
        reason=judgement.reason or clean.reason, proof=Proof(list(found), len(killed), len(applicable), power),
    )  # fmt: skip


def smallest_detectable(
    target: Target, prompts: Sequence[Prompt], settings: Settings, oracles: Oracles, progress: Callable[[str], None]
) -> dict[str, float]:
    """Power at the limit in use: the smallest relative change of one attention scale that still fails, in decades."""
    layers = [
        k for k in range(mutants.num_layers(target.graph)) if mutants.attention_scale(target.graph, k) is not None
    ]
    if not layers:
        return {}
    smallest = float("nan")
    for size in POWER_STEPS:
        progress(f"power: attention scale x (1 + {size:g})")
        plant = mutants.scaled_attention(layers[len(layers) // 2], size)
        report = parity(target, prompts, replace(settings, transform=plant), lambda _: None, oracles)
        if report.exit_code != 1:
            break
        smallest = size
    limit = next((c.limit for c in report.checks if c.id == "logits.nmse"), None)
    return {"smallest_detectable": smallest, "limit_nmse": limit if limit is not None else np.nan}
