"""Causal attribution by splicing: what of the observed difference each block, and each part of a block's KV, makes.

Hybrid H_k runs native up to the cut after block k and ONNX Runtime from there on. The contribution of block k is the
change from H_(k-1) to H_k of the gap between the two tokens in question; the contributions telescope to the whole. The
other direction (ONNX Runtime up to the cut, native after it) brackets what depends on the order. KV is exchanged by
seeding: the oracle's own past with one part of it replaced by native's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from genai_cli.checks import compare
from genai_cli.checks.mutants import weight_of
from genai_cli.checks.oracles import Change
from genai_cli.checks.taps import Progress, Scene, Tapped, logits_of, rows_of
from genai_cli.graph.cuts import Block
from genai_cli.graph.ir import Graph, Node
from genai_cli.graph.twins import NORM_INPUTS
from genai_cli.kv.layout import KvRows
from genai_cli.report.parity import Layer, Splice
from genai_cli.runners.base import Runner

GAIN_STEP = 1e-4  # relative noise injected at a cut: well above rounding, well below saturation
ALL_BLOCKS = 8  # up to so many blocks every one is spliced; beyond, only the source, unless asked
POSITION_GROUPS = 8  # ranges of positions whose KV is exchanged together


@dataclass(frozen=True)
class Gap:
    """The difference looked at: one position, and the two tokens whose logits decide it."""

    pos: int
    ours: int
    theirs: int

    def of(self, row: np.ndarray) -> float:
        """How far native's token is ahead in one row [V]."""
        return float(row[self.ours]) - float(row[self.theirs])


def splice(
    scene: Scene, tapped: Tapped, layers: list[Layer], source: int | None, explain: bool, progress: Progress
) -> tuple[list[Layer], list[Splice]]:
    """Layers with their shares, isolated errors and gains; and every attribution, each with its sum checked."""
    wanted = scene.reference.logits[tapped.start :]
    metrics = compare.row_metrics(tapped.logits, wanted)
    if not metrics.finite.all():
        return layers, []
    worst = int(metrics.pair.argmax())
    ours, theirs = int(metrics.top_got[worst]), int(metrics.top_want[worst])
    if ours == theirs:
        ours = int(compare.second_of(wanted[worst : worst + 1])[0])
    gap = Gap(worst + tapped.start, ours, theirs)
    made: list[Splice] = []
    if tapped.start == 0:
        chosen = _chosen(scene, source, explain)
        layers, forward = _native_first(scene, tapped, layers, gap, chosen, explain, progress)
        made = [forward, _oracle_first(scene, tapped, gap, chosen, progress)]
    return layers, [*made, *kv_splices(scene, tapped, gap, source, progress)]


def telescoped(name: str, scene: Scene, gap: Gap, labels: Sequence[str], gaps: Sequence[float]) -> Splice:
    """Contributions between consecutive hybrids; they sum to last minus first, which is checked."""
    parts = np.diff(gaps)
    observed = gaps[-1] - gaps[0]
    check = float(abs(parts.sum() - observed))
    return Splice(name, scene.path.id, gap.pos, float(observed), check, parts.tolist(), list(labels))


def _chosen(scene: Scene, source: int | None, explain: bool) -> list[int]:
    every = list(range(len(scene.blocks)))
    index = next((k for k in every if scene.blocks[k].layer == source), None)
    if explain or len(every) <= ALL_BLOCKS or index is None:
        return every
    return [k for k in (index - 1, index) if k >= 0]


def _labels(scene: Scene, chosen: Sequence[int]) -> list[str]:
    """What lies up to each cut, and the rest."""
    names, start = [], 0
    for k in chosen:
        names.append(f"blocks {start}-{k}" if k > start else f"block {k}")
        start = k + 1
    return [*names, "head" if start == len(scene.blocks) else f"blocks {start}- and head"]


def _native_first(
    scene: Scene, tapped: Tapped, layers: list[Layer], gap: Gap, chosen: list[int], explain: bool, progress: Progress
) -> tuple[list[Layer], Splice]:
    """Native up to the cut, then the oracle; on the way every following block's error on native's input."""
    gaps = [gap.of(scene.reference.logits[gap.pos])]
    made = list(layers)
    for k in chosen:
        progress(f"layers: native up to block {k}, then the oracle")
        logits, following = _hybrid(scene, tapped, k)
        gaps.append(gap.of(logits[gap.pos]))
        if following and k + 1 < len(made):
            name, rows = following
            made[k + 1] = replace(made[k + 1], isolated=float(compare.nmse_rows(tapped.native[name], rows).max()))
        if explain:
            made[k] = replace(made[k], gain=_gain(scene, tapped, k))
    gaps.append(gap.of(tapped.logits[gap.pos]))
    found = telescoped("native then oracle", scene, gap, _labels(scene, chosen), gaps)
    for k, part in zip(chosen, found.contributions, strict=False):
        alone = k == 0 or k - 1 in chosen  # else the part is that of all blocks before it too
        if alone and found.observed:
            made[k] = replace(made[k], share=part / found.observed)
    return made, found


def _hybrid(scene: Scene, tapped: Tapped, k: int) -> tuple[np.ndarray, tuple[str, np.ndarray] | None]:
    """The oracle from the cut after block k on, fed with native's values there; its logits, and its own next cut."""
    values = _values(scene.blocks[k], tapped.native, tapped.oracle)
    after = (scene.blocks[k + 1].residual,) if k + 1 < len(scene.blocks) else ()
    runner = scene.oracle.open(_change(scene.blocks[k], values), outputs=after)
    try:
        logits = runner.step(scene.path.ids, logits="all")
        return logits, (after[0], rows_of(runner.taps[after[0]]).copy()) if after else None
    finally:
        runner.close()


def _change(block: Block, values: dict[str, np.ndarray]) -> Change:
    """The oracle's graph with these values [1, T, width] at a cut."""
    if block.skip_norm:
        return lambda twin: twin.splice_sum(block.residual, values[block.residual])
    return lambda twin: twin.splice(values)


def _values(block: Block, given: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One side's rows at a cut as the other side's arrays [1, T, width]."""
    return {name: given[name].reshape(1, *given[name].shape).astype(like[name].dtype) for name in block.outputs}


def _gain(scene: Scene, tapped: Tapped, k: int) -> float:
    """Finite difference: relative change of the logits for a relative change of the cut after block k. Far above 1, what
    follows amplifies; near or below 1, a large error was created where it shows."""
    rng = np.random.default_rng(k)
    moved = {
        name: (rows * (1 + GAIN_STEP * rng.standard_normal(rows.shape))).astype(rows.dtype)
        for name, rows in ((name, tapped.oracle[name]) for name in scene.blocks[k].outputs)
    }
    values = {name: rows.reshape(1, *rows.shape) for name, rows in moved.items()}
    runner = scene.oracle.open(_change(scene.blocks[k], values))
    try:
        logits = runner.step(scene.path.ids, logits="all")
    finally:
        runner.close()
    return float(np.sqrt(compare.nmse(logits, scene.reference.logits)) / GAIN_STEP)


# -- the other direction ---------------------------------------------------------------------------------------------------


def _oracle_first(scene: Scene, tapped: Tapped, gap: Gap, chosen: list[int], progress: Progress) -> Splice:
    """The oracle up to the cut, then native: the gap falls from native's to the oracle's, block by block."""
    gaps = [gap.of(tapped.logits[gap.pos])]
    for k in chosen:
        progress(f"layers: the oracle up to block {k}, then native")
        values = _values(scene.blocks[k], tapped.oracle, tapped.native)
        native = scene.open_native(spliced(scene.blocks[k], values))
        try:
            logits = logits_of(native.tap((), scene.path.ids), scene.io)
        finally:
            native.close()
        gaps.append(gap.of(logits[gap.pos]))
    gaps.append(gap.of(scene.reference.logits[gap.pos]))
    found = telescoped("oracle then native", scene, gap, _labels(scene, chosen), gaps)
    return replace(found, observed=-found.observed, contributions=[-part for part in found.contributions])


def spliced(block: Block, values: Mapping[str, np.ndarray]) -> Callable[[Graph], Graph]:
    """Everyone who reads a value of the cut gets the first T rows of the given array instead; a skip-and-norm that ends
    the block gets them as its sum."""

    def change(graph: Graph) -> Graph:
        if block.skip_norm:
            return _with_sum(graph, block, values[block.residual])
        added = {name: _chosen_rows(name, name, rows, graph) for name, rows in values.items()}
        nodes: list[Node] = []
        for node in graph.nodes:
            nodes.append(replace(node, inputs=[_spliced(name) if name in values else name for name in node.inputs]))
            nodes += [more for name in node.outputs if name in added for more in added[name][0]]
        return _with(graph, nodes, [constants for _, constants in added.values()])

    return change


def _with_sum(graph: Graph, block: Block, rows: np.ndarray) -> Graph:
    maker = next(node for node in graph.nodes if block.residual in node.outputs)
    first, skip = maker.inputs[:2]
    given, constants = _chosen_rows(block.residual, first, rows, graph)
    nothing, zeros = _chosen_rows(f"{block.residual}/skip", skip, np.zeros_like(rows), graph)
    sums = [_spliced(block.residual), _spliced(f"{block.residual}/skip")]
    fed = replace(maker, inputs=[*sums, *maker.inputs[2 : NORM_INPUTS[maker.op_type]]])
    index = next(i for i, node in enumerate(graph.nodes) if node is maker)
    nodes = [*graph.nodes[:index], *given, *nothing, fed, *graph.nodes[index + 1 :]]
    return _with(graph, nodes, [constants, zeros])


def _with(graph: Graph, nodes: list[Node], constants: Sequence[Mapping[str, np.ndarray]]) -> Graph:
    weights = {name: weight_of(name, array) for part in constants for name, array in part.items()}
    return replace(graph, nodes=nodes, initializers={**graph.initializers, **weights})


def _chosen_rows(name: str, original: str, rows: np.ndarray, graph: Graph) -> tuple[list[Node], dict[str, np.ndarray]]:
    """Nodes that give rows[:, :T] for the value `original` [1, T, width]. A Where chooses them, because what depends on
    constants alone would be computed once, by another kernel."""
    opset = graph.opsets.get("", 16)
    shape, count, first = f"{name}/shape", f"{name}/count", f"{name}/rows"
    constants = {
        f"{name}/yes": np.ones((1, 1, 1), np.bool_), f"{name}/given": rows, f"{name}/zero": np.array([0]),
        f"{name}/one": np.array([1]),
    }  # fmt: skip
    yes, given, zero, one = constants
    made = [
        ("Shape", [original], shape), ("Gather", [shape, one], count), ("Slice", [given, zero, count, one], first),
        ("Where", [yes, first, original], _spliced(name)),
    ]  # fmt: skip
    return [Node(op, "", inputs, [output], {}, output, opset) for op, inputs, output in made], constants


def _spliced(name: str) -> str:
    return f"{name}/spliced"


# -- parts of the KV -------------------------------------------------------------------------------------------------------


def kv_splices(scene: Scene, tapped: Tapped, gap: Gap, source: int | None, progress: Progress) -> list[Splice]:
    """What of the difference passes through the cached past: K and V of all layers, then of the source alone, by head
    and by position."""
    layout = scene.native.kv_layout
    if gap.pos == 0 or not scene.native.supports_paged_kv().supported or not layout.components:
        return []
    progress("layers: KV exchanged part by part")
    runner = scene.oracle.open()
    try:
        exchange = Exchange.of(scene, tapped, gap, runner)
        kinds = [c.kind for c in layout.components]
        here = [i for i, c in enumerate(layout.components) if c.layer == source]
        keys, values = ([i for i, kind in enumerate(kinds) if kind == name] for name in ("key", "value"))
        made = [exchange.splice("KV of all layers", ("K", "V"), [exchange.whole(keys), exchange.whole(values)])]
        if here:
            name = f"layer {source}"
            parts = [exchange.whole([i]) for i in here]
            made.append(exchange.splice(f"KV of {name}", [kinds[i] for i in here], parts))
            heads = layout.components[here[0]].num_heads
            made.append(
                exchange.splice(
                    f"KV of {name} by head", [f"head {h}" for h in range(heads)],
                    [exchange.part(here, head=h) for h in range(heads)],
                )
            )  # fmt: skip
            spans = exchange.spans()
            made.append(
                exchange.splice(
                    f"KV of {name} by position", [f"{a}..{b - 1}" if b - a > 1 else str(a) for a, b in spans],
                    [exchange.part(here, span=span) for span in spans],
                )
            )  # fmt: skip
        return made
    finally:
        runner.close()


Part = Callable[[KvRows], None]


@dataclass(frozen=True)
class Exchange:
    """The oracle at one position, on its own past with parts of native's."""

    scene: Scene
    gap: Gap
    runner: Runner
    own: KvRows
    native: KvRows
    state: list[np.ndarray]

    @classmethod
    def of(cls, scene: Scene, tapped: Tapped, gap: Gap, runner: Runner) -> Exchange:
        """Both pasts up to the position; native's in the way (prefill or steps) that showed the failure."""
        past = scene.path.ids[: gap.pos]
        runner.reset()
        runner.step(past, logits="none")
        own = [np.array(rows) for rows in runner.kv_rows(0, gap.pos)]
        native = scene.native
        native.reset()
        native.step(past[: tapped.start or None], logits="none")
        for t in range(tapped.start or gap.pos, gap.pos):
            native.step(past[t : t + 1], logits="none")
        theirs = [rows.astype(mine.dtype) for rows, mine in zip(native.kv_rows(0, gap.pos), own, strict=True)]
        return cls(scene, gap, runner, own, theirs, runner.snapshot_state())

    def splice(self, name: str, labels: Sequence[str], parts: Sequence[Part]) -> Splice:
        """Parts exchanged one after the other."""
        rows = [array.copy() for array in self.own]
        gaps = [self._gap(rows)]
        for part in parts:
            part(rows)
            gaps.append(self._gap(rows))
        return telescoped(name, self.scene, self.gap, labels, gaps)

    def _gap(self, rows: KvRows) -> float:
        self.runner.seed([array.copy() for array in rows], self.state or None)
        at = self.gap.pos
        return self.gap.of(self.runner.step(self.scene.path.ids[at : at + 1])[0])

    def whole(self, components: Sequence[int]) -> Part:
        """These components."""
        return self.part(components)

    def part(self, components: Sequence[int], head: int | None = None, span: tuple[int, int] | None = None) -> Part:
        """One head or one span of positions of these components."""
        heads = slice(None) if head is None else slice(head, head + 1)
        positions = slice(None) if span is None else slice(*span)

        def exchange(rows: KvRows) -> None:
            for i in components:
                rows[i][heads, positions] = self.native[i][heads, positions]

        return exchange

    def spans(self) -> list[tuple[int, int]]:
        """Ranges of about equal length that cover the past."""
        edges = np.unique(np.linspace(0, self.gap.pos, POSITION_GROUPS + 1).astype(int)).tolist()
        return list(pairwise(edges))
