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
    """The largest element of one weight, doubled: the first norm's; where that moves nothing, the first and the last
    product's (the queries of a layer that sees one key decide nothing)."""
    names = _telling_weights(oracle.twin())
    if not names:
        return Probe("one weight changed", 0.0, True, "not applicable: no float weight is small enough to copy")
    found = [Probe("one weight changed", 0.0, False)]
    for name in names:
        found.append(_probe("one weight changed", _doubled(oracle, name, path), reference, pair_floor))
        if found[-1].ok:
            break
    return max(found, key=lambda probe: probe.moved_in_floors)


def _doubled(oracle: Oracle, name: str, path: Path) -> np.ndarray:
    values = oracle.twin().weight(name).copy()
    flat = values.reshape(-1)
    flat[int(np.abs(flat).argmax())] *= 2
    runner = oracle.open(lambda twin: twin.replace(name, values))
    try:
        return runner.step(path.ids, logits="all")
    finally:
        runner.close()


def _telling_weights(twin: Twin) -> list[str]:
    """The first norm's weight, the first and the last product's."""
    usable = set(twin.nudgeable())
    norms, products = (
        [n for node in twin.graph.node if node.op_type.endswith(kinds) for n in node.input if n in usable]
        for kinds in (("Normalization",), ("MatMul", "Gemm", "MatMulNBits"))
    )
    return list(dict.fromkeys([*norms[:1], *products[:1], *products[-1:]]))


def liveness_check(found: list[Probe]) -> Check:
    """Blind fixtures are refused."""
    blind = [probe for probe in found if not probe.ok]
    return Check(
        "liveness", "liveness", "unproven" if blind else "pass", compared=len(found),
        value=min((p.moved_in_floors for p in found if not p.reason), default=0.0), limit=MIN_FLOORS,
        limit_source="10 floors, else the fixture is blind",
        reason="; ".join(f"{p.probe} moves the logits by only {p.moved_in_floors:.1f} floors" for p in blind),
    )  # fmt: skip
