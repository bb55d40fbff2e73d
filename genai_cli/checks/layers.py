"""Where a difference comes from: the first block that fails while its input passes, the op in it, and its share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from genai_cli.checks import compare, splices
from genai_cli.checks.limits import ROUNDOFF_NMSE
from genai_cli.checks.oracles import Oracle
from genai_cli.checks.paths import Path, Run
from genai_cli.checks.taps import (
    OpenPlanted,
    Progress,
    Scene,
    Tapped,
    TappedRunner,
    fails,
    logits_of,
    rows_of,
    tap,
)  # fmt: skip
from genai_cli.graph.cuts import Block, blocks, embedding_output
from genai_cli.graph.io import DecoderIo, decoder_io
from genai_cli.graph.ir import Graph
from genai_cli.ops.dtypes import is_float
from genai_cli.report.parity import Floor, Layer, Splice


@dataclass(frozen=True)
class Located:
    """The first source, in words and numbers."""

    place: str
    layers: list[Layer] = field(default_factory=list)
    splice: list[Splice] = field(default_factory=list)
    source: int | None = None  # index of the block


def localise(
    native: TappedRunner, open_native: OpenPlanted, oracle: Oracle, graph: Graph, path: Path, run: Run,
    reference: Run, floor: Floor, progress: Progress, explain: bool = False,
) -> Located:  # fmt: skip
    """The first block that fails while its input passes, its op, and every block's share."""
    io = decoder_io(graph)
    embedding = embedding_output(oracle.twin())
    name = embedding.name if embedding else None
    scene = Scene(native, open_native, oracle, graph, io, blocks(graph, io), name, path, reference)
    limit = max(floor.kappa**2 * floor.used["nmse"], ROUNDOFF_NMSE)
    tapped = tap(scene, run, limit, progress)
    if tapped is None:
        return Located("not localised: the tapped runs do not show the failure")
    layers = [_accumulated(scene, tapped, k) for k in range(len(scene.blocks))]
    source = next((layer.k for layer in layers if not layer.accumulated <= (layer.limit or 0.0)), None)
    place = _place(scene, tapped, source, progress)
    if explain or source is not None:
        layers, made = splices.splice(scene, tapped, layers, source, explain, progress)
        return Located(place, layers, made, source)
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
        if not fails(logits_of(ours, self._io), wanted, self._limit):
            return None
        for block in self._blocks:
            name = block.residual
            error = compare.nmse_rows(rows_of(ours[name]), rows_of(self._oracle.taps[name])).max()
            if not error <= self._limits[name]:
                return block.layer
        return -1

    def close(self) -> None:
        """Drop the oracle's session."""
        self._oracle.close()


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
    label = scene.blocks[index].label
    progress(f"layers: which op of {label}")
    return f"{label}{_op_inside(scene, tapped, index)}"


def _cut_agrees(tapped: Tapped, name: str) -> bool:
    return float(compare.nmse_rows(tapped.native[name], tapped.oracle[name]).max()) <= tapped.limits[name]


def _op_inside(scene: Scene, tapped: Tapped, index: int) -> str:
    """The first op of the block whose result differs, where both sides can show their values."""
    names = _visible(scene.native, scene.graph, scene.io, scene.blocks[index])
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
    bad = compare.non_finite(rows_of(values))
    what = f"first {bad.kind} at position {bad.position}" if bad else "its result is wrong"
    return f": {node.op_type} `{node.name or name}`, {what}"


def _first_row(scene: Scene, tapped: Tapped, index: int) -> str:
    name = scene.blocks[index].residual
    errors = compare.nmse_rows(tapped.native[name], tapped.oracle[name])
    bad = np.flatnonzero(~(errors <= tapped.limits[name]))
    return f": from position {int(bad[0]) + tapped.start} on" if len(bad) else ""


def non_finite_place(native: TappedRunner, graph: Graph, path: Path) -> str:
    """The first layer, and in it the first op, whose values stop being finite in a prefill; no oracle is asked."""
    io = decoder_io(graph)
    found = blocks(graph, io)
    native.reset()
    rows = native.tap([block.residual for block in found], path.ids)
    block = next((b for b in found if compare.non_finite(rows_of(rows[b.residual])) is not None), None)
    if block is None:
        bad = compare.non_finite(logits_of(rows, io))
        return f"after the last layer: first {bad.kind} at position {bad.position}" if bad else ""
    names = _visible(native, graph, io, block)
    native.reset()
    values = native.tap(names, path.ids)
    name = next((n for n in names if compare.non_finite(rows_of(values[n])) is not None), None)
    what = _described(graph, name, values[name]) if name else ""
    return f"{block.label}{what}"


def _visible(native: TappedRunner, graph: Graph, io: DecoderIo, block: Block) -> list[str]:
    """Float values of the block that exist in native's plan too (rewrites may have absorbed some), in order."""
    plan = native.engine.plan
    kept = {name for node in plan.nodes["all"] for name in node.outputs if name}
    hidden = {binding.present for binding in io.kv} | {state.present for state in io.states}
    produced = {name: node for node in graph.nodes for name in node.outputs}
    names = [n for n in block.nodes if n in kept and n not in hidden]
    return [n for n in names if _is_float_value(graph, n, produced[n].op_type)]


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
