"""Where a decoder can be cut in two: the values that everything downstream depends on, found by structure.

A node is a cut when every way from the token embedding to the logits passes through it. With KV of all layers before
it, its outputs carry the whole state of the computation: the residual stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from genai_cli.graph.io import DecoderIo
from genai_cli.graph.ir import Graph, Node
from genai_cli.graph.twins import NORM_INPUTS, Twin


@dataclass(frozen=True)
class EmbeddingOutput:
    """The value that carries the looked-up embeddings [B, T, width]."""

    name: str
    width: int
    dtype: np.dtype


_SAME_IDS = {"Reshape", "Cast", "Identity", "Squeeze", "Unsqueeze", "Flatten"}


def embedding_output(twin: Twin) -> EmbeddingOutput | None:
    """The output of the first lookup by token ids; None where the decoder is fed embeddings."""
    ids = {value.name for value in twin.graph.input if value.name == "input_ids"}
    weights = twin.weights()
    for node in twin.graph.node:
        if node.op_type in _SAME_IDS and node.input[0] in ids:
            ids.add(node.output[0])
        if node.op_type == "Gather" and node.input[0] in weights and node.input[1] in ids:
            table = twin.weight(node.input[0])
            return EmbeddingOutput(node.output[0], table.shape[-1], table.dtype)
        if node.op_type == "GatherBlockQuantized" and node.input[1] in ids:
            return _quantized_embedding(twin, node.output[0], node.input[2], node.attribute)
    return None


def _quantized_embedding(twin: Twin, output: str, scales: str, attributes: Sequence[Any]) -> EmbeddingOutput:
    block = next((int(a.i) for a in attributes if a.name == "block_size"), 128)
    values = twin.weight(scales)
    return EmbeddingOutput(output, values.shape[-1] * block, values.dtype)


@dataclass(frozen=True)
class Block:
    """One layer: `outputs` is its cut, `nodes` everything between the previous cut and it."""

    k: int
    layer: int  # the number in the graph's KV names; -1 where the block has no KV (recurrent)
    outputs: tuple[str, ...]
    nodes: tuple[str, ...]  # names of outputs, in order

    skip_norm: str = ""  # op_type of a skip-and-norm that ends the block: its sum is the cut, its norm the next block's

    with_layers: tuple[int, ...] = ()  # layers before it that have no cut of their own: one block with this one

    @property
    def label(self) -> str:
        """For reports."""
        return f"layers {self.with_layers[0]}-{self.layer}" if self.with_layers else f"layer {self.layer}"

    @property
    def residual(self) -> str:
        """The residual stream after the block. A skip-and-norm op gives (normed, sum): normed is the next block's."""
        return self.outputs[-1]


def cut_nodes(graph: Graph, io: DecoderIo) -> list[Node]:
    """Nodes on every path from the token input to the logits, in order."""
    source = io.input_ids or io.inputs_embeds or ""
    readers = _data_readers(graph, source)
    order = [node for node in graph.nodes if id(node) in readers["reached"]]
    needed = _ancestors(graph, io.logits)
    live = [node for node in order if id(node) in needed]
    return _dominators(live, io.logits)


def _data_readers(graph: Graph, source: str) -> dict[str, set[int]]:
    """Ids of the nodes that depend on the token input by data (not on its shape alone)."""
    reached, values = set(), {source}
    for node in graph.nodes:
        if node.op_type not in ("Shape", "Size") and values.intersection(node.inputs):
            reached.add(id(node))
            values.update(name for name in node.outputs if name)
    return {"reached": reached}


def _ancestors(graph: Graph, value: str) -> set[int]:
    wanted, found = {value}, set()
    for node in reversed(graph.nodes):
        if wanted.intersection(node.outputs):
            found.add(id(node))
            wanted.update(name for name in node.inputs if name)
    return found


def _dominators(nodes: list[Node], logits: str) -> list[Node]:
    """A node is a cut when no value made before it is still read after it (values other than its own)."""
    last_use: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in node.inputs:
            last_use[name] = index
    last_use[logits] = len(nodes)
    made_by = {name: index for index, node in enumerate(nodes) for name in node.outputs if name}
    open_until, cuts = -1, []
    for index, node in enumerate(nodes):
        if open_until <= index:
            cuts.append(node)
        own = [last_use.get(name, -1) for name in node.outputs if name in made_by]
        open_until = max([open_until, *own])
    return cuts


def blocks(graph: Graph, io: DecoderIo) -> list[Block]:
    """The decoder's blocks in order. A block ends at the last cut before the next layer's KV or state is written."""
    cuts = cut_nodes(graph, io)
    position = {id(node): index for index, node in enumerate(graph.nodes)}
    carriers = _carriers(graph, io)
    made: list[Block] = []
    start, uncut = -1, []
    for k, (layer, first) in enumerate(carriers):
        following = carriers[k + 1][1] if k + 1 < len(carriers) else len(graph.nodes)
        inside = [node for node in cuts if first < position[id(node)] < following and _carries_rows(node, io)]
        if not inside:
            uncut.append(layer)
            continue
        end = inside[-1] if k + 1 < len(carriers) else _before_head(inside)
        outputs = _used_outputs(graph, end)
        inner = [node.outputs[0] for node in graph.nodes[start + 1 : position[id(end)]]]
        before = list(made[-1].outputs[:-1]) if made else []
        skip_norm = end.op_type if end.op_type in NORM_INPUTS and len(outputs) > 1 else ""
        made.append(Block(k, layer, outputs, (*before, *inner, outputs[-1]), skip_norm, tuple(uncut)))
        uncut = []
        start = position[id(end)]
    return made


def _carries_rows(node: Node, io: DecoderIo) -> bool:
    return io.logits not in node.outputs


def _before_head(cuts: list[Node]) -> Node:
    """After the last layer the head's chain (norm, projection) is all cuts: the block ends at the last skip."""
    adders = [node for node in cuts if node.op_type == "Add" or node.op_type.startswith("Skip")]
    return adders[-1] if adders else cuts[0]


def _used_outputs(graph: Graph, node: Node) -> tuple[str, ...]:
    read = {name for other in graph.nodes for name in other.inputs} | {value.name for value in graph.outputs}
    return tuple(name for name in node.outputs if name and name in read)


def _carriers(graph: Graph, io: DecoderIo) -> list[tuple[int, int]]:
    """(layer number, index of the node) of everything that makes a present KV or state, one a layer, in order."""
    layers = {binding.present: binding.layer for binding in io.kv}
    numbers: dict[int, int] = {}
    for index, node in enumerate(graph.nodes):
        for name in node.outputs:
            if name in layers:
                numbers[layers[name]] = index
    for state in io.states:
        digits = [int(part) for part in state.present.replace("_", ".").split(".") if part.isdigit()]
        made = next((i for i, node in enumerate(graph.nodes) if state.present in node.outputs), None)
        if digits and made is not None:
            numbers.setdefault(digits[-1], made)
    return sorted(numbers.items(), key=lambda item: item[1])
