"""Attention spelled out as MatMul, scale, mask, Softmax, MatMul over concatenated KV becomes the one internal op.

Matched backwards from every Softmax, by structure alone. Scales are whatever known values multiply or divide q, k or the
scores; the mask's meaning is proved later by probing, as for every other spelling (engine/probe.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from genai_cli.engine.values import Dynamic, Static, Value
from genai_cli.graph.attention import ASSUMES, INTERNAL_DOMAIN, KvMap
from genai_cli.graph.io import DecoderIo
from genai_cli.graph.ir import Graph, Node

Evaluate = Callable[[list[str], int, int], dict[str, Value]]  # names, T, past length
_PROBES = ((1, 1), (2, 6), (5, 9))  # (T, past length): a scale that is the same at all of them depends on neither
OPSET = 18  # of the plain ops written here: Reshape and Transpose have not changed since 14 and 1


@dataclass
class _Match:
    """What was found around one Softmax."""

    q: str
    q_scales: list[tuple[str, bool]]  # (factor, divides)
    key: Node  # Concat(past, new)
    value: Node
    mask: str
    output: Node  # the last MatMul


class _Graph:
    """Producer and reader look-ups for matching."""

    def __init__(self, graph: Graph) -> None:
        self.producer = {name: node for node in graph.nodes for name in node.outputs if name}
        self.readers: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for name in node.inputs:
                self.readers.setdefault(name, []).append(node)
        self.initializers = graph.initializers

    def made_by(self, name: str, *op_types: str) -> Node | None:
        """The producer of a value when it is one of these standard ops."""
        node = self.producer.get(name)
        return node if node is not None and node.domain == "" and node.op_type in op_types else None


def bind_decomposed(graph: Graph, io: DecoderIo, evaluate: Evaluate) -> Graph:
    """Rewrite every spelled-out attention over graph KV; anything that does not fit stays as it is."""
    look, kv = _Graph(graph), KvMap(io.kv)
    matches = [m for n in graph.nodes if n.op_type == "Softmax" and (m := _match(n, look, kv)) is not None]
    if not matches:
        return graph
    names = {m.q for m in matches} | {name for m in matches for name, _ in m.q_scales}
    probes = [evaluate(sorted(names), num_new, past_len) for num_new, past_len in _PROBES]
    nodes = list(graph.nodes)
    for number, match in enumerate(matches):
        new = _replacement(match, kv, probes, number)
        if new is not None:
            nodes = _spliced(nodes, match, new)
    return replace(graph, nodes=nodes)


def _match(softmax: Node, look: _Graph, kv: KvMap) -> _Match | None:
    if softmax.attrs.get("axis", -1) not in (-1, 3):
        return None
    output = _weighted_sum(softmax.outputs[0], look)
    scores, mask = _without_mask(_uncast(softmax.inputs[0], look), look)
    factors: list[tuple[str, bool]] = []
    product = look.made_by(_unscaled(scores, look, factors), "MatMul")
    if output is None or product is None:
        return None
    q = _unscaled(product.inputs[0], look, factors)
    turned = look.made_by(_unscaled(product.inputs[1], look, factors), "Transpose")
    if turned is None or list(turned.attrs.get("perm", [])) != [0, 1, 3, 2]:
        return None
    key = _cached(_unscaled(turned.inputs[0], look, factors), look, kv)
    value = _cached(output.inputs[1], look, kv)
    if key is None or value is None:
        return None
    return _Match(q, factors, key, value, mask, output)


def _uncast(name: str, look: _Graph) -> str:
    node = look.made_by(name, "Cast")
    return node.inputs[0] if node else name


def _without_mask(name: str, look: _Graph) -> tuple[str, str]:
    """(scores, additive mask): the scores are the side that a MatMul made."""
    add = look.made_by(name, "Add")
    if add is None:
        return name, ""
    for scores, mask in (add.inputs, add.inputs[::-1]):
        if look.made_by(_unscaled(scores, look, []), "MatMul"):
            return scores, mask
    return name, ""


def _unscaled(name: str, look: _Graph, factors: list[tuple[str, bool]]) -> str:
    """Strip multiplications and divisions by scalars that no activation feeds; they are added to `factors`."""
    while (node := look.made_by(name, "Mul", "Div")) is not None:
        left, right = node.inputs
        if _is_scalar(right, look):
            factors.append((right, node.op_type == "Div"))
            name = left
        elif node.op_type == "Mul" and _is_scalar(left, look):
            factors.append((left, False))
            name = right
        else:
            break
    return name


def _is_scalar(name: str, look: _Graph) -> bool:
    """A constant scalar, or a chain of shape arithmetic on scalars (Sqrt of a head size)."""
    if name in look.initializers:
        return int(np.prod(look.initializers[name].shape, dtype=np.int64)) == 1
    node = look.producer.get(name)
    if node is None or node.domain != "":
        return False
    if node.op_type == "Constant":
        return bool(np.size(node.attrs.get("value", node.attrs.get("value_float", 0.0))) == 1)
    if node.op_type in ("Sqrt", "Cast", "Div", "Mul", "Reciprocal", "Identity", "Pow"):
        return all(_is_scalar(inner, look) for inner in node.inputs)
    return node.op_type in ("Slice", "Gather", "Squeeze") and look.made_by(node.inputs[0], "Shape") is not None


def _weighted_sum(name: str, look: _Graph) -> Node | None:
    """The MatMul that takes the weights, through Cast and the NaN guard of fully masked rows."""
    for _ in range(4):
        readers = look.readers.get(name, [])
        matmul = next((n for n in readers if n.op_type == "MatMul" and n.domain == "" and n.inputs[0] == name), None)
        if matmul is not None:
            return matmul
        step = next((n for n in readers if n.op_type in ("Where", "Cast", "Dropout")), None)
        if step is None or not _guards_nan(step, name, look):
            return None
        name = step.outputs[0]
    return None


def _guards_nan(node: Node, name: str, look: _Graph) -> bool:
    if node.op_type != "Where":
        return True
    condition = look.made_by(node.inputs[0], "IsNaN")
    return condition is not None and condition.inputs[0] == name and node.inputs[2] == name


def _cached(name: str, look: _Graph, kv: KvMap) -> Node | None:
    """Concat(past, new) on the sequence axis, through the repetition of KV heads (Unsqueeze 2, Expand, Reshape)."""
    reshape = look.made_by(name, "Reshape")
    if reshape is not None:
        expand = look.made_by(reshape.inputs[0], "Expand")
        unsqueeze = look.made_by(expand.inputs[0], "Unsqueeze") if expand else None
        if unsqueeze is None or not _is_axis_two(unsqueeze, look):
            return None
        name = unsqueeze.inputs[0]
    concat = look.made_by(name, "Concat")
    fits = concat is not None and len(concat.inputs) == 2 and concat.attrs.get("axis") in (2, -2)
    return concat if concat is not None and fits and concat.inputs[0] in kv.by_past else None


def _is_axis_two(node: Node, look: _Graph) -> bool:
    name = node.inputs[1] if len(node.inputs) > 1 else ""
    if name in look.initializers:
        return look.initializers[name].array().reshape(-1).tolist() == [2]
    constant = look.made_by(name, "Constant")
    value = constant.attrs.get("value") if constant else node.attrs.get("axes")
    return value is not None and np.asarray(value).reshape(-1).tolist() == [2]


def _scale(match: _Match, values: dict[str, Value]) -> float | None:
    """The product of the scales, where all of them are known."""
    scale = 1.0
    for name, divides in match.q_scales:
        factor = values.get(name)
        if not isinstance(factor, Static):
            return None
        by = float(factor.array.reshape(-1)[0])
        scale = scale / by if divides else scale * by
    return scale


def _replacement(match: _Match, kv: KvMap, probes: list[dict[str, Value]], number: int) -> list[Node] | None:
    query = probes[0].get(match.q)
    if not isinstance(query, Dynamic) or len(query.tensor.shape) != 4 or not _presented(match, kv):
        return None
    scales = {_scale(match, values) for values in probes}
    scale = scales.pop()
    if scales or scale is None:
        return None
    heads, dim = query.tensor.shape[1], query.tensor.shape[3]
    slots = {"key_slot": kv.by_past[match.key.inputs[0]], "value_slot": kv.by_past[match.value.inputs[0]]}
    key, value = kv.bindings[slots["key_slot"]], kv.bindings[slots["value_slot"]]
    base = f"genai/attention.{number}"
    flat = [
        _flat(match.q, f"{base}/q", heads * dim),
        _flat(match.key.inputs[1], f"{base}/k", key.num_heads * key.head_dim),
        _flat(match.value.inputs[1], f"{base}/v", value.num_heads * value.head_dim),
    ]
    attrs = slots | {
        "num_heads": heads, "kv_num_heads": key.num_heads, "scale": scale, "is_causal": 0,
        ASSUMES: {"mask": match.mask} if match.mask else {},
    }  # fmt: skip
    inputs = [nodes[-1].outputs[0] for nodes in flat]
    outputs = [f"{base}/out", match.key.outputs[0], match.value.outputs[0]]
    attention = Node("Attention", INTERNAL_DOMAIN, [*inputs, "", "", ""], outputs, attrs, match.output.name, 1)
    back = _unflat(f"{base}/out", match.output.outputs[0], heads, value.head_dim)
    return [node for nodes in flat for node in nodes] + [attention, *back]


def _presented(match: _Match, kv: KvMap) -> bool:
    """The concatenations are the graph's own presents."""
    return all(node.outputs[0] in kv.by_present for node in (match.key, match.value))


def _flat(source: str, name: str, width: int) -> list[Node]:
    """[1, H, T, D] -> [1, T, H * D]."""
    turned = Node("Transpose", "", [source], [f"{name}/btHd"], {"perm": [0, 2, 1, 3]}, name, OPSET)
    shape = Node("Constant", "", [], [f"{name}/shape"], {"value": np.array([1, -1, width])}, name, OPSET)
    return [turned, shape, Node("Reshape", "", [f"{name}/btHd", f"{name}/shape"], [name], {}, name, OPSET)]


def _unflat(source: str, name: str, heads: int, dim: int) -> list[Node]:
    """[1, T, H * D] -> [1, H, T, D]."""
    shape = Node("Constant", "", [], [f"{source}/shape"], {"value": np.array([1, -1, heads, dim])}, name, OPSET)
    split = Node("Reshape", "", [source, f"{source}/shape"], [f"{source}/bthd"], {}, name, OPSET)
    return [shape, split, Node("Transpose", "", [f"{source}/bthd"], [name], {"perm": [0, 2, 1, 3]}, name, OPSET)]


def _spliced(nodes: list[Node], match: _Match, new: list[Node]) -> list[Node]:
    """The old output MatMul gives way to `new`; the concatenations go; dead weights are pruned later."""
    gone = {id(match.key), id(match.value)}
    made: list[Node] = []
    for node in nodes:
        if id(node) == id(match.output):
            made += new
        elif id(node) not in gone:
            made.append(node)
    return made
