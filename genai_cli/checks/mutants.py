"""Defects planted in the engine, as functions Graph -> Graph, and what must become of each.

A mutant is killed when the check it is meant for fails and the report names the layer it was planted in; noticed
elsewhere it was killed for another reason; unnoticed it survived. Where a graph has nothing to change it is not
applicable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from genai_cli.graph.cuts import blocks
from genai_cli.graph.io import decoder_io
from genai_cli.graph.ir import Graph, Initializer, Node, ValueInfo
from genai_cli.ops.dtypes import is_float
from genai_cli.report.parity import Mutant, ParityReport

Transform = Callable[[Graph], Graph]
ATTENTION = ("GroupQueryAttention", "Attention", "MultiHeadAttention")
_NORMS = (
    "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization", "LayerNormalization", "SkipLayerNormalization",
    "RMSNormalization",
)  # fmt: skip


@dataclass(frozen=True)
class EngineMutant:
    """`plant(graph, layer)` gives the changed graph, or None where the graph has nothing to change."""

    id: str
    plant: Callable[[Graph, int], Graph | None]
    expected: tuple[str, ...] = ("logits.nmse", "kv.value")  # checks of values, any of which may see it
    per_layer: bool = True  # planted at one layer, which the report must name; else everywhere or in the sampler
    pick: Callable[[np.ndarray], int] | None = None  # a defect of the sampler


def num_layers(graph: Graph) -> int:
    """Blocks of the decoder, attention or not."""
    return len(blocks(graph, decoder_io(graph)))


def _layer_nodes(graph: Graph, layer: int) -> list[Node]:
    """The nodes of one block, in order."""
    found = blocks(graph, decoder_io(graph))
    names = set(found[layer].nodes) if layer < len(found) else set()
    return [node for node in graph.nodes if names.intersection(node.outputs)]


def _with_node(graph: Graph, old: Node, new: Node) -> Graph:
    return replace(graph, nodes=[new if node is old else node for node in graph.nodes])


def _with_attrs(graph: Graph, node: Node, **attrs: object) -> Graph:
    return _with_node(graph, node, replace(node, attrs={**node.attrs, **attrs}))


def _with_weight(graph: Graph, name: str, values: np.ndarray) -> Graph:
    return replace(graph, initializers={**graph.initializers, name: weight_of(name, values)})


def weight_of(name: str, values: np.ndarray) -> Initializer:
    """An initializer that holds `values`."""
    values = np.ascontiguousarray(values)
    return Initializer(name, values.dtype, values.shape, values.nbytes, lambda: values)


def _attention(graph: Graph, layer: int) -> Node | None:
    return next((node for node in _layer_nodes(graph, layer) if node.op_type in ATTENTION), None)


def scaled_attention(layer: int, size: float) -> Transform:
    """1/sqrt(D) times 1 + size; the graph itself where there is no such layer."""

    def plant(graph: Graph) -> Graph:
        return attention_scale(graph, layer, size) or graph

    return plant


def attention_scale(graph: Graph, layer: int, size: float = 0.02) -> Graph | None:
    """1/sqrt(D) off by 2 %."""
    node = _attention(graph, layer)
    dim = head_dim(graph, layer)
    if node is None or dim is None:
        return None
    scale = float(node.attrs.get("scale", 0.0)) or dim**-0.5
    return _with_attrs(graph, node, scale=scale * (1 + size))


def layer_number(graph: Graph, layer: int) -> int:
    """The number that the graph's KV or state names give to a block; sparse numbering is legal."""
    found = blocks(graph, decoder_io(graph))
    return found[layer].layer if layer < len(found) else layer


def head_dim(graph: Graph, layer: int) -> int | None:
    """D of a block's KV, as it is bound."""
    number = layer_number(graph, layer)
    return next((b.head_dim for b in decoder_io(graph).kv if b.layer == number), None)


def rotary_base(graph: Graph, layer: int) -> Graph | None:
    """cos/sin read one position further for this layer alone: what another base does at small angles."""
    node = _rotary(graph, layer)
    if node is None:
        return None
    graph = replace(graph, initializers=dict(graph.initializers))
    inputs = list(node.inputs)
    for index in _tables(node):
        table = graph.initializers[inputs[index]].array()
        angles = np.arange(table.shape[1]) / table.shape[1]
        stretched = table.astype(np.float32).copy()
        stretched[1:, 1:] = np.clip(stretched[1:, 1:] * (1 + 0.01 * angles[1:]), -1, 1)
        name = f"{inputs[index]}/mutant{layer}"
        graph.initializers[name] = weight_of(name, stretched.astype(table.dtype))
        inputs[index] = name
    return _with_node(graph, node, replace(node, inputs=inputs))


def _tables(node: Node) -> tuple[int, int]:
    return (7, 8) if node.op_type == "GroupQueryAttention" else (1, 2) if node.domain == "" else (2, 3)


def _rotary(graph: Graph, layer: int) -> Node | None:
    """The node of this layer that applies rotary from weight tables."""
    node = _attention(graph, layer)
    if node is not None and node.op_type == "GroupQueryAttention" and node.attrs.get("do_rotary"):
        return node if all(node.inputs[i] in graph.initializers for i in _tables(node)) else None
    chosen = next((n for n in _layer_nodes(graph, layer) if n.op_type == "RotaryEmbedding"), None)
    return chosen if chosen and all(chosen.inputs[i] in graph.initializers for i in _tables(chosen)) else None


def rotary_interleave(graph: Graph, layer: int) -> Graph | None:
    """Pairs (2i, 2i+1) for (i, i + D/2)."""
    node = _attention(graph, layer)
    if node is not None and node.op_type == "GroupQueryAttention" and node.attrs.get("do_rotary"):
        return _with_attrs(graph, node, rotary_interleaved=1 - int(node.attrs.get("rotary_interleaved", 0)))
    rotary = next((n for n in _layer_nodes(graph, layer) if n.op_type == "RotaryEmbedding"), None)
    return (
        None if rotary is None else _with_attrs(graph, rotary, interleaved=1 - int(rotary.attrs.get("interleaved", 0)))
    )


def causal_off_by_one(graph: Graph, layer: int) -> Graph | None:
    """The oldest key a query sees is lost (GroupQueryAttention), or the mask that hides the future (Attention).

    Where an Attention is given a mask, the attribute may say nothing the mask does not: not applicable.
    """
    node = _attention(graph, layer)
    if node is None:
        return None
    if node.op_type != "GroupQueryAttention":
        masked = len(node.inputs) > 3 and bool(node.inputs[3])
        return _with_attrs(graph, node, is_causal=0) if node.attrs.get("is_causal") and not masked else None
    window = int(node.attrs.get("local_window_size", -1))
    return _with_attrs(graph, node, local_window_size=window - 1 if 1 < window <= 16 else 8)


def epsilon(graph: Graph, layer: int) -> Graph | None:
    """1e-3; less hides below the floor where the residual stream is large."""
    node = next((node for node in _layer_nodes(graph, layer) if node.op_type in _NORMS), None)
    if node is None:
        return None
    return _with_attrs(graph, node, epsilon=max(1e-3, float(node.attrs.get("epsilon", 1e-5)) * 100))


def missing_bias(graph: Graph, layer: int) -> Graph | None:
    """A bias that is added to a projection is forgotten. Zero biases cannot be missed: not applicable."""
    for node in _layer_nodes(graph, layer):
        bias = _bias(graph, node)
        if bias and np.any(graph.initializers[bias].array()):
            name = f"{bias}/mutant"
            zeros = weight_of(name, np.zeros_like(graph.initializers[bias].array()))
            graph = replace(graph, initializers={**graph.initializers, name: zeros})
            return _with_node(graph, node, replace(node, inputs=[name if n == bias else n for n in node.inputs]))
    return None


def _bias(graph: Graph, node: Node) -> str | None:
    """The vector that an Add or a Gemm adds to every row."""
    given = {"Add": node.inputs, "Gemm": node.inputs[2:]}.get(node.op_type, [])
    return next((n for n in given if n in graph.initializers and len(graph.initializers[n].shape) == 1), None)


def kv_head_mapping(graph: Graph, layer: int) -> Graph | None:
    """Query head h reads KV head h mod H_kv for h // group: queries are permuted before the op and back after it."""
    node = _attention(graph, layer)
    if node is None or node.op_type != "GroupQueryAttention" or not node.inputs[0]:
        return None
    heads, kv_heads = int(node.attrs["num_heads"]), int(node.attrs["kv_num_heads"])
    if kv_heads == 1 or heads == kv_heads:
        return None
    dim = head_dim(graph, layer)
    if dim is None:
        return None
    group = heads // kv_heads
    order = [g * kv_heads + k for k in range(kv_heads) for g in range(group)]
    packed = not node.inputs[1]
    columns = np.concatenate([np.arange(h * dim, (h + 1) * dim) for h in order])
    width = (heads + 2 * kv_heads) * dim if packed else heads * dim
    forward = np.concatenate([columns, np.arange(heads * dim, width)])
    back = np.argsort(columns)
    return _permuted(graph, node, forward, back)


def _permuted(graph: Graph, node: Node, forward: np.ndarray, back: np.ndarray) -> Graph:
    index = graph.nodes.index(node)
    opset = graph.opsets.get("", 13)
    before, after = f"{node.inputs[0]}/permuted", f"{node.outputs[0]}/permuted"
    orders = {f"{before}/order": forward, f"{after}/order": back}
    weights = {name: weight_of(name, order.astype(np.int64)) for name, order in orders.items()}
    gather_in = Node("Gather", "", [node.inputs[0], f"{before}/order"], [before], {"axis": 2}, before, opset)
    moved = replace(node, inputs=[before, *node.inputs[1:]], outputs=[after, *node.outputs[1:]])
    gather_out = Node("Gather", "", [after, f"{after}/order"], [node.outputs[0]], {"axis": 2}, after, opset)
    nodes = [*graph.nodes[:index], gather_in, moved, gather_out, *graph.nodes[index + 1 :]]
    values = {**graph.values, before: ValueInfo(before, None, (None, None, len(forward)))}
    return replace(graph, nodes=nodes, values=values, initializers={**graph.initializers, **weights})


def zero_point(graph: Graph, layer: int) -> Graph | None:
    """7 for 8 (or the given points lowered by one in the low nibble) in one quantized product."""
    node = next(
        (n for n in _layer_nodes(graph, layer) if n.op_type == "MatMulNBits" and n.attrs.get("bits", 4) == 4), None
    )
    if node is None:
        return None
    size, block = int(node.attrs["N"]), int(node.attrs["block_size"])
    blocks = -(-int(node.attrs["K"]) // block)
    given = node.inputs[3] if len(node.inputs) > 3 else ""
    points = graph.initializers[given].array() if given else np.full(size * ((blocks + 1) // 2), 0x88, np.uint8)
    if points.dtype != np.uint8:
        return None
    name = f"{node.outputs[0]}/mutant_points"
    changed = ((points & 0xF0) | (np.maximum(points & 0x0F, 1) - 1)).astype(np.uint8)
    graph = replace(graph, initializers={**graph.initializers, name: weight_of(name, changed)})
    inputs = [*node.inputs[:3], name, *node.inputs[4:]]
    return _with_node(graph, node, replace(node, inputs=inputs))


def exponent_bit(graph: Graph, layer: int) -> Graph | None:
    """One exponent bit of the largest element of one weight of the layer: that element doubles or halves."""
    name = _float_weight(graph, layer)
    return None if name is None else _with_weight(graph, name, _flipped(graph.initializers[name].array()))


def _flipped(array: np.ndarray) -> np.ndarray:
    """The lowest exponent bit of the largest element, inverted."""
    values = array.copy()
    flat = values.reshape(-1)
    mantissa = {2: 10 if values.dtype == np.float16 else 7, 4: 23}[values.itemsize]
    bits = flat.view(np.dtype(f"u{values.itemsize}"))
    bits[int(np.abs(flat.astype(np.float32)).argmax())] ^= 1 << mantissa
    return values


_PRODUCTS = ("MatMul", "Gemm", "MatMulNBits")


def _float_weight(graph: Graph, layer: int, last: bool = False) -> str | None:
    """A matrix, or the scales of one, that a product of this layer alone reads; the first or the last of the layer."""
    readers = [name for node in graph.nodes for name in node.inputs]
    nodes = _layer_nodes(graph, layer)
    for node in reversed(nodes) if last else nodes:
        for name in node.inputs[1:] if node.op_type in _PRODUCTS else ():
            weight = graph.initializers.get(name)
            if weight and is_float(weight.dtype) and len(weight.shape) >= 1 and readers.count(name) == 1:
                return name
    return None


def nan_in_layer(graph: Graph, layer: int) -> Graph | None:
    """One NaN in the last product of the layer. (Some exports replace NaN inside attention by 0 themselves.)"""
    name = _float_weight(graph, layer, last=True)
    if name is None:
        return None
    values = graph.initializers[name].array().copy()
    values.reshape(-1)[0] = np.nan
    return _with_weight(graph, name, values)


def last_maximum(row: np.ndarray) -> int:
    """The highest id among equal maxima: the wrong rule."""
    return int(len(row) - 1 - np.argmax(row[::-1]))


def tied_head(graph: Graph, layer: int) -> Graph | None:
    """No change of the graph: the defect is in the sampler."""
    return graph


ENGINE_MUTANTS = (
    EngineMutant("attention-scale", attention_scale),
    EngineMutant("rotary-base", rotary_base),
    EngineMutant("rotary-interleave", rotary_interleave),
    EngineMutant("causal-off-by-one", causal_off_by_one),
    EngineMutant("epsilon", epsilon),
    EngineMutant("missing-bias", missing_bias),
    EngineMutant("kv-head-mapping", kv_head_mapping),
    EngineMutant("zero-point", zero_point),
    EngineMutant("exponent-bit", exponent_bit),
    EngineMutant("nan-in-layer", nan_in_layer, ("logits.finite",)),
    EngineMutant("tie-break", tied_head, ("free_run",), per_layer=False, pick=last_maximum),
)


def nudged(graph: Graph, seed: int) -> Graph:
    """A clean engine: one element of one float weight (read by a node) changed by one ulp of f32.

    A 16-bit weight is widened first: one ulp of f16 would be another model, not another order of summation.
    """
    read = {name for node in graph.nodes for name in node.inputs}
    names = sorted(
        name
        for name, w in graph.initializers.items()
        if name in read and is_float(w.dtype) and 8 <= w.nbytes <= 1 << 24
    )
    rng = np.random.default_rng(seed)
    name = names[int(rng.integers(len(names)))]
    values = graph.initializers[name].array().astype(np.float32)
    flat = values.reshape(-1)
    index = int(np.abs(flat.astype(np.float32)).argmax()) if seed % 2 else int(rng.integers(flat.size))
    flat.view(np.uint32)[index] += 1
    return _with_weight(graph, name, values)


def judged(mutant: EngineMutant, report: ParityReport, layer: int | None) -> Mutant:
    """State of one mutant from the report of its run."""
    failed = [check.id for check in report.checks if check.verdict == "fail"]
    target = "engine" if layer is None else f"engine, layer {layer}"
    if not failed:
        return Mutant(mutant.id, target, "survived", " or ".join(mutant.expected), "")
    right_place = layer is None or f"layer {layer}" in report.place
    right = bool(set(mutant.expected) & set(failed)) and right_place
    state = "killed" if right else "killed-for-another-reason"
    return Mutant(mutant.id, target, state, " or ".join(mutant.expected), failed[0], report.place)


def prove(
    graph: Graph, run: Callable[[EngineMutant, Transform, int | None], ParityReport], layers: Sequence[int]
) -> list[Mutant]:
    """Every mutant at every given block. `run` runs parity with the defect planted."""
    made: list[Mutant] = []
    for mutant in ENGINE_MUTANTS:
        for layer in layers if mutant.per_layer else [0]:
            changed = mutant.plant(graph, layer)
            where = layer_number(graph, layer) if mutant.per_layer else None
            if changed is None:
                target = f"engine, layer {layer_number(graph, layer)}"
                made.append(
                    Mutant(
                        mutant.id,
                        target,
                        "not-applicable",
                        " or ".join(mutant.expected),
                        "",
                        "the graph has no such thing",
                    )
                )
                continue
            made.append(judged(mutant, run(mutant, _planter(mutant, layer), where), where))
    return made


def _planter(mutant: EngineMutant, layer: int) -> Transform:
    def plant(graph: Graph) -> Graph:
        changed = mutant.plant(graph, layer)
        assert changed is not None
        return changed

    return plant
