"""Is the fixture able to show a difference at all? Three things that must move the oracle's logits, or it is blind."""

from __future__ import annotations

import numpy as np

from genai_cli.checks import compare
from genai_cli.checks.oracles import Oracle
from genai_cli.checks.paths import Path
from genai_cli.graph.twins import Twin
from genai_cli.report.parity import Check, Probe
from genai_cli.runners.base import Runner

MIN_FLOORS = 10.0  # a probe that moves logits by less could hide behind kappa x floor


def probes(oracle: Oracle, runner: Runner, path: Path, reference: np.ndarray, pair_floor: float) -> list[Probe]:
    """Zeroed KV, another order of the prompt, and one changed weight; how far each moves the logits, in floors."""
    made = [
        _probe("prompt reversed", _reversed(runner, path), reference[path.prompt_len - 1], pair_floor),
        _weight_probe(oracle, path, reference, pair_floor),
    ]
    gate = runner.supports_paged_kv()
    if not gate.supported:
        return [Probe("KV zeroed", 0.0, True, f"not applicable: {gate.reason}"), *made]
    if len(path.ids) < 2:
        return [Probe("KV zeroed", 0.0, False), *made]  # one token has no past
    return [_probe("KV zeroed", _zeroed(runner, path), reference[-1], pair_floor), *made]


def _probe(name: str, moved: np.ndarray, reference: np.ndarray, pair_floor: float) -> Probe:
    floors = compare.max_abs(moved, reference) / pair_floor
    return Probe(name, floors, floors >= MIN_FLOORS)


def _zeroed(runner: Runner, path: Path) -> np.ndarray:
    """The last row after everything before it was forgotten."""
    runner.reset()
    runner.step(path.ids[:-1], logits="none")
    rows = [np.zeros_like(array) for array in runner.kv_rows(0, runner.length)]
    runner.seed(rows, [np.zeros_like(array) for array in runner.snapshot_state()] or None)
    return np.asarray(runner.step(path.ids[-1:])[0])


def _reversed(runner: Runner, path: Path) -> np.ndarray:
    """The prompt's last row with everything before the last token in reverse order."""
    prompt = path.ids[: path.prompt_len]
    runner.reset()
    return np.asarray(runner.step(np.concatenate([prompt[:-1][::-1], prompt[-1:]]))[0])


def _weight_probe(oracle: Oracle, path: Path, reference: np.ndarray, pair_floor: float) -> Probe:
    """The largest element of the first norm's weight (of the first product's, where there is no norm), doubled."""
    twin = oracle.twin()
    name = _telling_weight(twin)
    if name is None:
        return Probe("one weight changed", 0.0, True, "not applicable: no float weight is small enough to copy")
    values = twin.weight(name).copy()
    flat = values.reshape(-1)
    flat[int(np.abs(flat).argmax())] *= 2
    runner = oracle.open(lambda other: other.replace(name, values))
    try:
        moved = runner.step(path.ids, logits="all")
    finally:
        runner.close()
    return _probe("one weight changed", moved, reference, pair_floor)


def _telling_weight(twin: Twin) -> str | None:
    """A weight that every token meets."""
    usable = set(twin.nudgeable())
    for kind in ("Normalization", "MatMul", "Gemm", "MatMulNBits"):
        for node in twin.graph.node:
            name = next((n for n in node.input if n in usable), None)
            if node.op_type.endswith(kind) and name is not None:
                return name
    return None


def liveness_check(found: list[Probe]) -> Check:
    """Blind fixtures are refused."""
    blind = [probe for probe in found if not probe.ok]
    return Check(
        "liveness", "liveness", "unproven" if blind else "pass", compared=len(found),
        value=min((p.moved_in_floors for p in found if not p.reason), default=0.0), limit=MIN_FLOORS,
        limit_source="10 floors, else the fixture is blind",
        reason="; ".join(f"{p.probe} moves the logits by only {p.moved_in_floors:.1f} floors" for p in blind),
    )  # fmt: skip
