"""Where a difference comes from: taps at every cut, one op inside the first bad block, and splices that sum exactly.

Hybrid H_k runs native up to the cut after block k and ONNX Runtime from there on. The contribution of block k is the
change from H_(k-1) to H_k of the gap between the two tokens in question; the contributions telescope to the whole.
Taps are believed only where the tapped run still shows the failure: adding outputs changes 16-bit results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from genai_cli.checks import compare
from genai_cli.checks.floor import nudges
from genai_cli.checks.limits import KAPPA, ROUNDOFF_NMSE, ceiling
from genai_cli.checks.oracles import Oracle, OracleRunner
from genai_cli.checks.paths import Path, Run
from genai_cli.engine.engine import Engine
from genai_cli.graph.cuts import Block, blocks, embedding_output
from genai_cli.graph.io import DecoderIo, decoder_io
from genai_cli.graph.ir import Graph
from genai_cli.ops.dtypes import is_float
from genai_cli.report.parity import Floor, Layer, Splice
from genai_cli.runners.base import Runner

GAIN_STEP = 1e-4  # relative noise injected at a cut: well above rounding, well below saturation
ALL_BLOCKS = 8  # up to so many blocks every one is spliced; beyond, only the source, unless asked
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


@dataclass(frozen=True)
class Located:
    """The first source, in words and numbers."""

    place: str
    layers: list[Layer] = field(default_factory=list)
    splice: list[Splice] = field(default_factory=list)
    source: int | None = None  # index of the block


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


def localise(
    native: TappedRunner, oracle: Oracle, graph: Graph, path: Path, run: Run, reference: Run, floor: Floor,
    progress: Progress, explain: bool = False,
) -> Located:  # fmt: skip
    """The first block that fails while its input passes, its op, and every block's share."""
    io = decoder_io(graph)
    embedding = embedding_output(oracle.twin())
    scene = Scene(native, oracle, graph, io, blocks(graph, io), embedding.name if embedding else None, path, reference)
    limit = max(floor.kappa**2 * floor.used["nmse"], ROUNDOFF_NMSE)
    tapped = _tap(scene, run, limit, progress)
    if tapped is None:
        return Located("not localised: the tapped runs do not show the failure")
    layers = [_accumulated(scene, tapped, k) for k in range(len(scene.blocks))]
    source = next((layer.k for layer in layers if not layer.accumulated <= (layer.limit or 0.0)), None)
    place = _place(scene, tapped, source, progress)
    if tapped.start == 0 and (explain or source is not None):
        layers, splice = _splice(scene, tapped, layers, source, explain, progress)
        return Located(place, layers, splice, source)
    return Located(place, layers, [], source)


class Locator:
    """Asks the same question of many inputs: does a prefill of these ids fail, and in which block first."""

    def __init__(
        self, native: TappedRunner, oracle: Oracle, graph: Graph, layers: Sequence[Layer], limit: float
    ) -> None:
        """`layers` are those of the failure as first seen, with their limits; `limit` is that of the logits' NMSE."""
        io = decoder_io(graph)
        self._native, self._io, self._limit = native, io, limit
        self._blocks = blocks(graph, io)
        self._limits = {block.residual: layer.limit or 0.0 for block, layer in zip(self._blocks, layers, strict=True)}
        self._oracle = oracle.open(outputs=tuple(self._limits))

    def source(self, ids: np.ndarray) -> int | None:
        """Layer number of the first failing block (-1: after the last one); None where nothing fails."""
        self._native.reset()
        ours = self._native.tap(tuple(self._limits), ids)
        self._oracle.reset()
        wanted = self._oracle.step(ids, logits="all")
        if not _fails(_logits(ours, self._io), wanted, self._limit):
            return None
        for block in self._blocks:
            name = block.residual
            error = compare.nmse_rows(_rows(ours[name]), _rows(self._oracle.taps[name])).max()
            if not error <= self._limits[name]:
                return block.layer
        return -1

    def close(self) -> None:
        """Drop the oracle's session."""
        self._oracle.close()


def _tap(scene: Scene, run: Run, limit: float, progress: Progress) -> Tapped | None:
    """Prefill first; where that does not show the failure, prompt at once and every later token tapped."""
    wanted = scene.reference.logits
    scene.native.reset()
    rows = scene.native.tap(scene.cuts, scene.path.ids)
    logits = _logits(rows, scene.io)
    start = 0
    if _fails(run.logits, wanted, limit) and not _fails(logits, wanted, limit):
        progress("layers: the failure needs decode steps")
        start = scene.path.prompt_len
        rows = _tap_steps(scene)
        logits = _logits(rows, scene.io)
        if not _fails(logits, wanted[start:], limit):
            return None
    oracle, limits = _oracle_taps(scene, start)
    return Tapped({n: _rows(rows[n]) for n in scene.cuts}, oracle, limits, logits, start)


def _tap_steps(scene: Scene) -> Taps:
    scene.native.reset()
    scene.native.step(scene.path.ids[: scene.path.prompt_len], logits="none")
    parts = [
        scene.native.tap(scene.cuts, scene.path.ids[t : t + 1])
        for t in range(scene.path.prompt_len, len(scene.path.ids))
    ]
    return {name: np.concatenate([_rows(part[name]) for part in parts]) for name in parts[0]}


def _fails(got: np.ndarray, want: np.ndarray, limit: float) -> bool:
    return not float(compare.row_metrics(got, want).nmse.max()) <= limit


def _logits(taps: Taps, io: DecoderIo) -> np.ndarray:
    return _rows(taps[io.logits]).astype(np.float32)


def _rows(array: np.ndarray) -> np.ndarray:
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
    return {name: _rows(runner.taps[name]).copy() for name in names}


def _step_taps(runner: OracleRunner, path: Path, names: Sequence[str]) -> Taps:
    runner.reset()
    parts: list[Taps] = []
    for t in range(len(path.ids)):
        runner.step(path.ids[t : t + 1], logits="all")
        parts.append({name: _rows(runner.taps[name]).copy() for name in names})
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def _accumulated(scene: Scene, tapped: Tapped, k: int) -> Layer:
    block = scene.blocks[k]
    name = block.residual
    errors = compare.nmse_rows(tapped.native[name], tapped.oracle[name])
    worst = int(errors.argmax())
    return Layer(
        k=block.layer if block.layer >= 0 else k, isolated=None, accumulated=float(errors.max()), gain=None, share=None,
        limit=tapped.limits[name], where=f"`{name}` position {worst + tapped.start}",
    )  # fmt: skip


def _place(scene: Scene, tapped: Tapped, source: int | None, progress: Progress) -> str:
    if scene.embedding and not _cut_agrees(tapped, scene.embedding):
        return f"the embedding lookup is wrong (`{scene.embedding}`)"
    index = next((k for k, block in enumerate(scene.blocks) if block.layer == source), None)
    if index is None:
        return "after the last layer: final norm or lm_head"
    progress(f"layers: which op of layer {source}")
    return f"layer {source}{_op_inside(scene, tapped, index)}"


def _cut_agrees(tapped: Tapped, name: str) -> bool:
    return float(compare.nmse_rows(tapped.native[name], tapped.oracle[name]).max()) <= tapped.limits[name]


def _op_inside(scene: Scene, tapped: Tapped, index: int) -> str:
    """The first op of the block whose result differs, where both sides can show their values."""
    names = _visible(scene, scene.blocks[index])
    if tapped.start or not names:
        return _first_row(scene, tapped, index)
    scene.native.reset()
    ours = scene.native.tap(names, scene.path.ids)
    runner = scene.oracle.open(outputs=tuple(names))
    try:
        runner.step(scene.path.ids, logits="all")
        theirs = {name: runner.taps[name] for name in names}
    finally:
        runner.close()
    limit = tapped.limits[scene.blocks[index].residual]
    for name in names:
        if ours[name].shape == theirs[name].shape and not compare.nmse(ours[name], theirs[name]) <= limit:
            return _described(scene.graph, name, ours[name])
    return _first_row(scene, tapped, index)


def _described(graph: Graph, name: str, values: np.ndarray) -> str:
    node = next(node for node in graph.nodes if name in node.outputs)
    bad = compare.non_finite(_rows(values))
    what = f"first {bad.kind} at position {bad.position}" if bad else "its result is wrong"
    return f": {node.op_type} `{node.name or name}`, {what}"


def _first_row(scene: Scene, tapped: Tapped, index: int) -> str:
    name = scene.blocks[index].residual
    errors = compare.nmse_rows(tapped.native[name], tapped.oracle[name])
    bad = np.flatnonzero(~(errors <= tapped.limits[name]))
    return f": from position {int(bad[0]) + tapped.start} on" if len(bad) else ""


def _visible(scene: Scene, block: Block) -> list[str]:
    """Float values of the block that exist in native's plan too (rewrites may have absorbed some), in order."""
    plan = scene.native.engine.plan
    kept = {name for node in plan.nodes["all"] for name in node.outputs if name}
    hidden = {binding.present for binding in scene.io.kv} | {state.present for state in scene.io.states}
    produced = {name: node for node in scene.graph.nodes for name in node.outputs}
    names = [n for n in block.nodes if n in kept and n not in hidden]
    return [n for n in names if _is_float_value(scene.graph, n, produced[n].op_type)]


# What computes on floats whatever the graph declares; most exporters declare no types of intermediate values.
_FLOAT_OPS = {
    "MatMul",
    "Gemm",
    "MatMulNBits",
    "GroupQueryAttention",
    "Attention",
    "MultiHeadAttention",
    "RotaryEmbedding",
}
_FLOAT_OPS |= {"Sigmoid", "Tanh", "Gelu", "FastGelu", "QuickGelu", "Relu", "Softmax", "LinearAttention", "MoE", "QMoE"}


def _is_float_value(graph: Graph, name: str, op_type: str) -> bool:
    info = graph.values.get(name)
    if op_type in ("Constant", "Shape", "Size"):
        return False
    if info is None or info.dtype is None:
        return op_type in _FLOAT_OPS or op_type.endswith("Normalization")
    return is_float(info.dtype)


# -- splicing ----------------------------------------------------------------------------------------------------


def _splice(
    scene: Scene, tapped: Tapped, layers: list[Layer], source: int | None, explain: bool, progress: Progress
) -> tuple[list[Layer], list[Splice]]:
    """Contributions of every block (or of the source alone) to the change of the gap at the worst position."""
    metrics = compare.row_metrics(tapped.logits, scene.reference.logits)
    if not metrics.finite.all():
        return layers, []
    pos = int(metrics.pair.argmax())
    tokens = _pair(metrics, scene.reference.logits, pos)
    gaps = [_gap(scene.reference.logits, pos, tokens)]
    chosen = _chosen(scene, source, explain)
    made = list(layers)
    for k in chosen:
        progress(f"layers: splice after block {k}")
        logits, following = _hybrid(scene, tapped, k)
        gaps.append(_gap(logits, pos, tokens))
        if following and k + 1 < len(made):
            name, rows = following
            made[k + 1] = replace(made[k + 1], isolated=float(compare.nmse_rows(tapped.native[name], rows).max()))
        if explain:
            made[k] = replace(made[k], gain=_gain(scene, tapped, k))
    gaps.append(_gap(tapped.logits, pos, tokens))
    parts = np.diff(gaps)
    observed = gaps[-1] - gaps[0]
    for k, part in zip(chosen, parts, strict=False):
        made[k] = replace(made[k], share=float(part / observed) if observed else None)
    check = float(abs(parts.sum() - observed))
    return made, [Splice("native then oracle", scene.path.id, pos, float(observed), check, parts.tolist())]


def _gain(scene: Scene, tapped: Tapped, k: int) -> float:
    """Finite difference: relative change of the logits for a relative change of the cut after block k. Far above 1, what
    follows amplifies; near or below 1, a large error was created where it shows."""
    rng = np.random.default_rng(k)
    moved = {
        name: (rows * (1 + GAIN_STEP * rng.standard_normal(rows.shape))).astype(rows.dtype)
        for name, rows in ((name, tapped.oracle[name]) for name in scene.blocks[k].outputs)
    }
    values = {name: rows.reshape(1, *rows.shape) for name, rows in moved.items()}
    runner = scene.oracle.open(lambda twin: twin.splice(values))
    try:
        logits = runner.step(scene.path.ids, logits="all")
    finally:
        runner.close()
    return float(np.sqrt(compare.nmse(logits, scene.reference.logits)) / GAIN_STEP)


def _pair(metrics: compare.RowMetrics, want: np.ndarray, pos: int) -> tuple[int, int]:
    ours, theirs = int(metrics.top_got[pos]), int(metrics.top_want[pos])
    return (ours, theirs) if ours != theirs else (int(compare.second_of(want[pos : pos + 1])[0]), theirs)


def _gap(logits: np.ndarray, pos: int, tokens: tuple[int, int]) -> float:
    return float(logits[pos, tokens[0]]) - float(logits[pos, tokens[1]])


def _chosen(scene: Scene, source: int | None, explain: bool) -> list[int]:
    every = list(range(len(scene.blocks)))
    index = next((k for k in every if scene.blocks[k].layer == source), None)
    if explain or len(every) <= ALL_BLOCKS or index is None:
        return every
    return [k for k in (index - 1, index) if k >= 0]


def _hybrid(scene: Scene, tapped: Tapped, k: int) -> tuple[np.ndarray, tuple[str, np.ndarray] | None]:
    """ORT from the cut after block k on, fed with native's values there; its logits, and its own next cut."""
    shapes = {name: (1, *tapped.native[name].shape) for name in scene.blocks[k].outputs}
    values = {
        name: tapped.native[name].reshape(shape).astype(tapped.oracle[name].dtype) for name, shape in shapes.items()
    }
    after = (scene.blocks[k + 1].residual,) if k + 1 < len(scene.blocks) else ()
    runner = scene.oracle.open(lambda twin: twin.splice(values), outputs=after)
    try:
        logits = runner.step(scene.path.ids, logits="all")
        return logits, (after[0], _rows(runner.taps[after[0]]).copy()) if after else None
    finally:
        runner.close()
