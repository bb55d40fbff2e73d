"""Both sides' values at every cut of the residual stream, and how noisy the oracle is there itself.

Taps are believed only where the tapped run still shows the failure: adding outputs changes 16-bit results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from genai_cli.checks import compare
from genai_cli.checks.floor import nudges
from genai_cli.checks.limits import KAPPA, ROUNDOFF_NMSE, ceiling
from genai_cli.checks.oracles import Oracle, OracleRunner
from genai_cli.checks.paths import Path, Run
from genai_cli.engine.engine import Engine
from genai_cli.graph.cuts import Block
from genai_cli.graph.io import DecoderIo
from genai_cli.graph.ir import Graph
from genai_cli.runners.base import Runner

Taps = dict[str, np.ndarray]
Progress = Callable[[str], None]


class TappedRunner(Runner, Protocol):
    """The native side, with its intermediate values."""

    @property
    def engine(self) -> Engine:
        """Its plan says which values exist."""
        ...

    def tap(self, names: Sequence[str], ids: np.ndarray) -> dict[str, np.ndarray]:
        """Feed `ids` once with these values read out (all logits too)."""
        ...


class OpenPlanted(Protocol):
    """Another native runner like the one under test, its graph changed once more."""

    def __call__(self, change: Callable[[Graph], Graph], /) -> TappedRunner: ...


@dataclass(frozen=True)
class Tapped:
    """Rows [T', width] at every cut on both sides, from position `start` on, and the tapped native run's logits."""

    native: Taps
    oracle: Taps
    limits: dict[str, float]
    logits: np.ndarray
    start: int


@dataclass(frozen=True)
class Scene:
    """What localisation works on."""

    native: TappedRunner
    open_native: OpenPlanted
    oracle: Oracle
    graph: Graph
    io: DecoderIo
    blocks: list[Block]
    embedding: str | None
    path: Path
    reference: Run

    @property
    def cuts(self) -> list[str]:
        """All tapped names in order."""
        names = [self.embedding] if self.embedding else []
        return names + [name for block in self.blocks for name in block.outputs]


def tap(scene: Scene, run: Run, limit: float, progress: Progress) -> Tapped | None:
    """Prefill first; where that does not show the failure, prompt at once and every later token tapped."""
    wanted = scene.reference.logits
    scene.native.reset()
    rows = scene.native.tap(scene.cuts, scene.path.ids)
    logits = logits_of(rows, scene.io)
    start = 0
    if fails(run.logits, wanted, limit) and not fails(logits, wanted, limit):
        progress("layers: the failure needs decode steps")
        start = scene.path.prompt_len
        rows = _tap_steps(scene)
        logits = logits_of(rows, scene.io)
        if not fails(logits, wanted[start:], limit):
            return None
    oracle, limits = _oracle_taps(scene, start)
    return Tapped({n: rows_of(rows[n]) for n in scene.cuts}, oracle, limits, logits, start)


def _tap_steps(scene: Scene) -> Taps:
    scene.native.reset()
    scene.native.step(scene.path.ids[: scene.path.prompt_len], logits="none")
    parts = [
        scene.native.tap(scene.cuts, scene.path.ids[t : t + 1])
        for t in range(scene.path.prompt_len, len(scene.path.ids))
    ]
    return {name: np.concatenate([rows_of(part[name]) for part in parts]) for name in parts[0]}


def fails(got: np.ndarray, want: np.ndarray, limit: float) -> bool:
    return not float(compare.row_metrics(got, want).nmse.max()) <= limit


def logits_of(taps: Taps, io: DecoderIo) -> np.ndarray:
    return rows_of(taps[io.logits]).astype(np.float32)


def rows_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, array.shape[-1])


def _oracle_taps(scene: Scene, start: int) -> tuple[Taps, dict[str, float]]:
    """The oracle's rows at every cut, and how noisy it is there itself: token by token, and with one ulp changed."""
    names = tuple(scene.cuts)
    runner = scene.oracle.open(outputs=names)
    try:
        reference = _prefill_taps(runner, scene.path, names)
        stepped = _step_taps(runner, scene.path, names)
    finally:
        runner.close()
    others = [stepped]
    for _, change in nudges(scene.oracle, seed=0, count=2):
        nudged = scene.oracle.open(change, outputs=names)
        try:
            others.append(_prefill_taps(nudged, scene.path, names))
        finally:
            nudged.close()
    limits = {n: _cut_limit([compare.nmse_rows(o[n], reference[n]) for o in others]) for n in names}
    return {name: rows[start:] for name, rows in reference.items()}, limits


def _cut_limit(worst: Sequence[np.ndarray]) -> float:
    found = max(float(rows.max()) for rows in worst)
    top = ceiling("f32").nmse
    assert top is not None
    return min(top, KAPPA**2 * max(found, ROUNDOFF_NMSE))


def _prefill_taps(runner: OracleRunner, path: Path, names: Sequence[str]) -> Taps:
    runner.reset()
    runner.step(path.ids, logits="all")
    return {name: rows_of(runner.taps[name]).copy() for name in names}


def _step_taps(runner: OracleRunner, path: Path, names: Sequence[str]) -> Taps:
    runner.reset()
    parts: list[Taps] = []
    for t in range(len(path.ids)):
        runner.step(path.ids[t : t + 1], logits="all")
        parts.append({name: rows_of(runner.taps[name]).copy() for name in names})
    return {name: np.concatenate([part[name] for part in parts]) for name in names}
