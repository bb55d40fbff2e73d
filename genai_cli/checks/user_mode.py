"""The mode the user runs, where it is not the exact one: rounded 16-bit values, int8 activations.

Its largest deviation is printed and never gated: it differs from ONNX Runtime's elided casts by policy, not by fault.
What vouches for it: every quantized product in isolation on identical inputs, and the mean of the log likelihood.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from genai_cli.checks import compare, layers, likelihood, statistics
from genai_cli.checks.flips import flips_of
from genai_cli.checks.op_battery import ops_check, quantized_products
from genai_cli.checks.paths import Run, forced
from genai_cli.checks.preflight import Artifact
from genai_cli.graph.ir import Graph
from genai_cli.report.parity import Check
from genai_cli.runners.base import Runner

if TYPE_CHECKING:
    from genai_cli.checks.parity import Oracles, Target


def checks(
    target: Target, oracles: Oracles, artifact: Artifact, transform: Callable[[Graph], Graph] | None,
    seed: int, progress: Callable[[str], None],
) -> list[Check]:  # fmt: skip
    """Op by op, then statistically, on the oracle's path."""
    progress("native: the mode you run")
    native = target.open_native(exact=False, transform=transform)
    try:
        runs = [forced(native, path) for path in oracles.paths]
        nll = _long_nll(native, oracles, progress) if oracles.likelihood is not None else _nll(runs, oracles)
        finite = _non_finite(runs)
        if finite.verdict == "fail":
            worst = oracles.paths[finite.worst["input"]]
            finite = replace(finite, extra={"place": layers.non_finite_place(native, target.graph, worst)})
    finally:
        native.close()
    made = [_deviation(runs, oracles), finite, nll]
    if artifact.precision == "q_int8" and oracles.kind == "ort-sharp":
        progress("oracle: the artifact as it is")
        made.append(_beside_plain(runs, target, oracles))
    if artifact.precision == "q_int8" and oracles.oracle is not None:
        progress("ops: quantized products on identical inputs")
        results = quantized_products(target.graph, target.open_backend(), target.run_ort, seed)
        made.append(ops_check(results, "ops.quantized"))
    return made


def _rows(runs: list[Run], oracles: Oracles) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([r.logits for r in runs]), np.concatenate([r.logits for r in oracles.references])


def _deviation(runs: list[Run], oracles: Oracles) -> Check:
    rows = compare.row_metrics(*_rows(runs, oracles))
    flips = len(rows.flips)
    return Check(
        "user_mode.deviation", "logits", "info", len(rows.nmse), value=float(rows.nmse.max()),
        limit_source="printed, not gated: rounding policy, not fault",
        extra={"max_abs": float(rows.max_abs.max()), "flips": flips, "oracle": oracles.kind},
    )  # fmt: skip


def _beside_plain(runs: list[Run], target: Target, oracles: Oracles) -> Check:
    """The artifact on ORT as it is, which rounds activations too; the sharp oracle is the arbiter of every flip."""
    runner = target.open_ort(None)
    try:
        plain = [oracles.ask(runner, path) for path in oracles.paths]
    finally:
        runner.close()
    wins = {"native": 0, "oracle": 0, "neither": 0}
    found = [compare.row_metrics(run.logits, other.logits) for run, other in zip(runs, plain, strict=True)]
    sides = zip(runs, plain, oracles.references, found, strict=True)
    for run, other, sharp, rows in sides:
        for flip in flips_of(run.logits, other.logits, 0.0, 0.0, arbiter=sharp.logits, metrics=rows):
            wins[flip.arbiter] += 1
    own = [_num_flips(other.logits, sharp.logits) for other, sharp in zip(plain, oracles.references, strict=True)]
    extra = {
        "oracle": "ort", "flips": sum(len(rows.flips) for rows in found), "ort_flips_itself": sum(own), "arbiter": wins,
        "sign_test_p": statistics.sign_test(wins["native"], wins["oracle"]),
        "max_abs": max(float(rows.max_abs.max()) for rows in found),
    }  # fmt: skip
    return Check(
        "user_mode.plain", "logits", "info", sum(len(rows.nmse) for rows in found),
        value=max(float(rows.nmse.max()) for rows in found),
        limit_source="printed, not gated: ORT flips its own tokens with int8 activations", extra=extra,
    )  # fmt: skip


def _num_flips(a: np.ndarray, b: np.ndarray) -> int:
    return int((compare.first_max(a) != compare.first_max(b)).sum())


def _non_finite(runs: list[Run]) -> Check:
    found = [(i, bad) for i, run in enumerate(runs) if (bad := compare.non_finite(run.logits))]
    reason = f"native gives {found[0][1].kind} logits at position {found[0][1].position}" if found else ""
    return Check(
        "user_mode.finite", "logits", "fail" if found else "pass", sum(len(run.logits) for run in runs),
        value=float(len(found)), limit=0.0, limit_source="non-finite values are never equal", reason=reason,
        worst={"input": found[0][0], "pos": found[0][1].position} if found else {},
    )  # fmt: skip


def _long_nll(native: Runner, oracles: Oracles, progress: Callable[[str], None]) -> Check:
    """On the text of `likelihood`."""
    assert oracles.likelihood is not None
    progress("native: likelihood of a long text")
    found = likelihood.score(native, oracles.likelihood.windows)
    what = f"the mode you run against {oracles.kind}"
    return statistics.nll_check(found - oracles.likelihood.nll, what, oracles.likelihood.natural)


def _nll(runs: list[Run], oracles: Oracles) -> Check:
    differences = [
        compare.nll(run.logits[:-1], path.ids[1:]) - compare.nll(reference.logits[:-1], path.ids[1:])
        for run, reference, path in zip(runs, oracles.references, oracles.paths, strict=True)
    ]
    return statistics.nll_check(np.concatenate(differences), f"the mode you run against {oracles.kind}")
