"""One spelling of attention: every op that reads past KV becomes `genai::Attention`, bound to KV slots.

The internal op's inputs: 0 q (or packed qkv), 1 k, 2 v, 3 cos_cache, 4 sin_cache, 5 position_ids, 6 additive or bool mask,
7 head_sink, 8 q_norm_weight, 9 k_norm_weight. It appends k and v to its slots at `past_len` and attends to everything up
to each query. `assumes` on the node says what the replaced inputs must be for that to be the same computation; the plan
proves it by evaluating them (engine/probe.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from genai_cli.errors import GenaiError
from genai_cli.graph.io import DecoderIo, KvBinding
from genai_cli.graph.ir import Graph, Node

INTERNAL_DOMAIN = "genai"
ASSUMES = "assumes"  # {"past_len_plus_new_minus_1": name, "total_len": name, "past_len": name, "mask": name}
MASK_INPUT = 6

Rewrite = Callable[[Node, "KvMap"], Node | None]


class KvMap:
    """Slot numbers by past and present names; slot order is KV layout order."""

    def __init__(self, kv: tuple[KvBinding, ...]) -> None:
        self.by_past = {binding.past: index for index, binding in enumerate(kv)}
        self.by_present = {binding.present: index for index, binding in enumerate(kv)}
        self.bindings = kv

    def pair(self, node: Node, past_key: int, past_value: int, present_key: int, present_value: int) -> dict[str, int]:
        """Slots of a node whose past inputs and present outputs are the graph's own, else {}."""
        key, value = self.by_past.get(_in(node, past_key)), self.by_past.get(_in(node, past_value))
        if key is None or value is None:
            return {}
        if (
            self.by_present.get(_out(node, present_key)) != key
            or self.by_present.get(_out(node, present_value)) != value
        ):
            return {}
        return {"key_slot": key, "value_slot": value}


def bind_attention(graph: Graph, io: DecoderIo) -> Graph:
    """Rewrite every attention op over graph KV. Ops it does not know stay, and run over a materialised past."""
    kv = KvMap(io.kv)
    nodes = [_rewritten(node, kv) for node in _join_static(graph.nodes, kv)]
    return replace(graph, nodes=nodes)


def _rewritten(node: Node, kv: KvMap) -> Node:
    rewrite = _REWRITES.get((node.domain, node.op_type))
    return (rewrite(node, kv) if rewrite else None) or node


def _group_query(node: Node, kv: KvMap) -> Node | None:
    """com.microsoft::GroupQueryAttention. Its window, softcap, sinks and rotary are the internal op's own."""
    slots = kv.pair(node, 3, 4, 1, 2)
    if not slots:
        return None
    attrs = dict(node.attrs)
    for name in ("k_quant_type", "v_quant_type"):
        if attrs.pop(name, "NONE") not in ("NONE", ""):
            raise GenaiError(f"node `{node.name}`: quantized KV (`{name}`) is not supported by the native engine")
    for name in ("sliding_window_cache", "kv_cache_bit_width"):
        attrs.pop(name, None)  # how ORT lays out its buffer; the slots hold every position
    if attrs.pop("qk_output", 0):
        raise GenaiError(f"node `{node.name}`: GroupQueryAttention with a qk output is not supported")
    rotary = attrs.pop("do_rotary", 0)
    inputs = [_in(node, 0), _in(node, 1), _in(node, 2)]
    inputs += [_in(node, 7), _in(node, 8), _in(node, 9)] if rotary else ["", "", ""]
    inputs += [_in(node, 10), _in(node, 11), _in(node, 14), _in(node, 15)]
    attrs |= slots | {"is_causal": 1}
    assumes = {"last_position": _in(node, 5), "total_len": _in(node, 6)}
    return _internal(node, inputs, attrs, assumes)


def _onnx_attention(node: Node, kv: KvMap) -> Node | None:
    """ai.onnx::Attention (23, 24) with past and present; rank-3 inputs [B, T, heads * D]."""
    slots = kv.pair(node, 4, 5, 1, 2)
    if not slots or "q_num_heads" not in node.attrs:
        return None
    return _from_onnx(node, _in(node, 1), _in(node, 2), slots, {"mask": _in(node, 3)})


def _from_onnx(node: Node, k: str, v: str, slots: dict[str, int], assumes: dict[str, str]) -> Node | None:
    source = node.attrs
    if source.get("qk_matmul_output_mode", 0) or (len(node.outputs) > 3 and node.outputs[3]):
        return None
    attrs: dict[str, Any] = slots | {
        "num_heads": source["q_num_heads"],
        "kv_num_heads": source["kv_num_heads"],
        "scale": source.get("scale", 0.0),
        "softcap": source.get("softcap", 0.0),
        "is_causal": source.get("is_causal", 0),
    }
    return _internal(node, [_in(node, 0), k, v, "", "", ""], attrs, assumes)


def _multi_head(node: Node, kv: KvMap) -> Node | None:
    """com.microsoft::MultiHeadAttention with past_key/past_value (6, 7) and present (1, 2), no packed inputs or bias."""
    slots = kv.pair(node, 6, 7, 1, 2)
    if not slots or not _in(node, 1) or not _in(node, 2) or _in(node, 3) or _in(node, 4):
        return None
    heads = node.attrs["num_heads"]
    attrs: dict[str, Any] = slots | {
        "num_heads": heads,
        "kv_num_heads": heads,
        "scale": node.attrs.get("scale", 0.0),
        "is_causal": node.attrs.get("unidirectional", 0),
    }
    return _internal(node, [_in(node, 0), _in(node, 1), _in(node, 2), "", "", ""], attrs, {"mask": _in(node, 5)})


def _join_static(nodes: list[Node], kv: KvMap) -> list[Node]:
    """TensorScatter into a static cache, then Attention over the whole cache: one internal op on the new rows."""
    scatters = {
        node.outputs[0]: node for node in nodes if node.op_type == "TensorScatter" and _in(node, 0) in kv.by_past
    }
    joined: list[Node] = []
    done: set[int] = set()
    for node in nodes:
        key, value = scatters.get(_in(node, 1)), scatters.get(_in(node, 2))
        if node.op_type == "Attention" and node.domain == "" and key is not None and value is not None:
            new = _from_static(node, key, value, kv)
            if new is not None:
                done |= {id(key), id(value)}
                node = new
        joined.append(node)
    return [node for node in joined if id(node) not in done]


def _from_static(node: Node, key: Node, value: Node, kv: KvMap) -> Node | None:
    axes_ok = all(scatter.attrs.get("axis", -2) in (1, -2) for scatter in (key, value))
    linear = all(scatter.attrs.get("mode", "linear") == "linear" for scatter in (key, value))
    if not axes_ok or not linear or "q_num_heads" not in node.attrs:
        return None
    slots = {"key_slot": kv.by_past[key.inputs[0]], "value_slot": kv.by_past[value.inputs[0]]}
    assumes = {
        "past_len": _in(key, 2),
        "past_len_of_value": _in(value, 2),
        "total_len": _in(node, 6),
        "mask": _in(node, 3),
    }
    if not assumes["past_len"] or not assumes["total_len"]:
        return None
    new = _from_onnx(node, key.inputs[1], value.inputs[1], slots, assumes)
    if new is not None:
        new.outputs = [node.outputs[0], key.outputs[0], value.outputs[0]]
    return new


def _internal(node: Node, inputs: list[str], attrs: dict[str, Any], assumes: dict[str, str]) -> Node:
    attrs[ASSUMES] = {what: name for what, name in assumes.items() if name}
    return Node("Attention", INTERNAL_DOMAIN, inputs, node.outputs[:3], attrs, node.name, 1)


def _in(node: Node, index: int) -> str:
    return node.inputs[index] if len(node.inputs) > index else ""


def _out(node: Node, index: int) -> str:
    return node.outputs[index] if len(node.outputs) > index else ""


_REWRITES: dict[tuple[str, str], Rewrite] = {
    ("com.microsoft", "GroupQueryAttention"): _group_query,
    ("", "Attention"): _onnx_attention,
    ("com.microsoft", "MultiHeadAttention"): _multi_head,
}
