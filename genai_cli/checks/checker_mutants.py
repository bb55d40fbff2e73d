"""Defects planted in the checker itself: if one of these goes unnoticed, the tool is worthless.

The checker as it is must fail on a planted difference; a crippled one is caught by not failing, or by comparing less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from genai_cli.checks import evidence
from genai_cli.checks.limits import Bound
from genai_cli.checks.paths import Path, Run
from genai_cli.kv.layout import KvComponent, KvLayout
from genai_cli.report.parity import Check, Mutant

LIMIT = Bound(1e-12, 4.0, 1e-6)
Inputs = tuple[list[Run], list[Run]]


@dataclass(frozen=True)
class CheckerMutant:
    """`cripple` changes what the checker is given or compares with; the audit must notice."""

    id: str
    expected_check: str
    cripple: Callable[[Inputs, Bound], tuple[Inputs, Bound]]


def _fixture() -> tuple[Inputs, list[Path], KvLayout]:
    """Two runs that differ: one deciding logit in the last row, and one element of the last layer's values."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((12, 50)).astype(np.float32)
    kv = [rng.standard_normal((2, 12, 4)).astype(np.float32) for _ in range(6)]
    changed = logits.copy()
    changed[-1, int(logits[-1].argmax())] -= 0.01
    other = [array.copy() for array in kv]
    other[-1][1, -1, 3] += 0.01
    parts = [KvComponent(layer, kind, 2, 4, np.dtype(np.float32)) for layer in range(3) for kind in ("key", "value")]
    path = Path("0", np.arange(12, dtype=np.int64), 6)
    return ([Run(changed, other)], [Run(logits, kv)]), [path], KvLayout(tuple(parts))


def verdicts(inputs: Inputs, paths: list[Path], layout: KvLayout, limit: Bound) -> dict[str, Check]:
    """The gating checks on prepared runs."""
    logits = evidence.Logits.of(*inputs, paths)
    rows = evidence.kv_rows(*inputs, layout, limit)
    checks = [evidence.finite_check(logits), evidence.nmse_check(logits, limit), evidence.kv_check(rows, limit, True)]
    return {check.id: check for check in checks}


def _itself(inputs: Inputs, limit: Bound) -> tuple[Inputs, Bound]:
    return (inputs[1], inputs[1]), limit


def _wide(inputs: Inputs, limit: Bound) -> tuple[Inputs, Bound]:
    return inputs, replace(limit, floor=limit.floor * 1e12, ceiling=None)


def _truncated(inputs: Inputs, limit: Bound) -> tuple[Inputs, Bound]:
    return tuple([replace(run, logits=run.logits[:-1]) for run in side] for side in inputs), limit  # type: ignore[return-value]


def _dropped_layer(inputs: Inputs, limit: Bound) -> tuple[Inputs, Bound]:
    return tuple([replace(run, kv=run.kv[:-1]) for run in side] for side in inputs), limit  # type: ignore[return-value]


CHECKER_MUTANTS = (
    CheckerMutant("compare-with-itself", "logits.nmse", _itself),
    CheckerMutant("limit-x-1e12", "logits.nmse", _wide),
    CheckerMutant("last-row-dropped", "logits.nmse", _truncated),
    CheckerMutant("last-layer-dropped", "kv.value", _dropped_layer),
)


def prove() -> list[Mutant]:
    """Killed: the audit tells the crippled checker from the real one, by verdict and denominators."""
    inputs, paths, layout = _fixture()
    clean = verdicts(inputs, paths, layout, LIMIT)
    made = []
    for mutant in CHECKER_MUTANTS:
        crippled = verdicts(*_applied(mutant, inputs, paths, layout))
        state = "killed" if audit(clean, crippled, mutant.expected_check) else "survived"
        made.append(
            Mutant(
                mutant.id, "checker", state, mutant.expected_check, mutant.expected_check if state == "killed" else ""
            )
        )
    return [*made, *_non_finite(inputs, paths, layout)]


def _applied(
    mutant: CheckerMutant, inputs: Inputs, paths: list[Path], layout: KvLayout
) -> tuple[Inputs, list[Path], KvLayout, Bound]:
    changed, limit = mutant.cripple(inputs, LIMIT)
    rows = len(changed[0][0].logits)
    return changed, [replace(path, ids=path.ids[:rows]) for path in paths], layout, limit


def audit(clean: dict[str, Check], crippled: dict[str, Check], check_id: str) -> bool:
    """The real checker fails on the planted difference, and the crippled one does not, or compares less."""
    return clean[check_id].verdict == "fail" and (
        crippled[check_id].verdict != "fail" or crippled[check_id].compared < clean[check_id].compared
    )


def _non_finite(inputs: Inputs, paths: list[Path], layout: KvLayout) -> list[Mutant]:
    """Two sides that are NaN in the same places must never pass."""
    broken = [replace(run, logits=np.full_like(run.logits, np.nan)) for run in inputs[1]]
    found = verdicts((broken, broken), paths, layout, LIMIT)
    ok = all(found[name].verdict == "fail" for name in ("logits.finite", "logits.nmse"))
    return [
        Mutant(
            "two-nan-sides", "checker", "killed" if ok else "survived", "logits.finite", "logits.finite" if ok else ""
        )
    ]
