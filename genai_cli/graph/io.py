"""Which graph inputs and outputs of a decoder mean what. The graph is the truth; names only pair past with present."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from genai_cli.errors import GenaiError
from genai_cli.graph.ir import Graph, Node, ValueInfo
from genai_cli.kv.layout import KvKind

KvAxes = Literal["BHSD", "BSM"]
"""[B, H_kv, S, D], or rank 3 [B, S, H_kv * D] (static caches)."""

# (past, present) spellings; the group is what both share. Layer numbers may be sparse.
_PAIRS = (
    (r"past_key_values\.(.+)", "present.{}"),
    (r"past_key_values\.(.+)", "present_key_values.{}"),
    (r"past\.(.+)", "present.{}"),
    (r"past_(.+)", "present_{}"),
    (r"key_cache\.(.+)", "updated_key_cache.{}"),
    (r"value_cache\.(.+)", "updated_value_cache.{}"),
)


@dataclass(frozen=True)
class KvBinding:
    """One K or V: a graph input (past) and output (present). `capacity` is fixed for static caches, else None."""

    layer: int
    kind: KvKind
    past: str
    present: str
    num_heads: int
    head_dim: int
    dtype: np.dtype
    axes: KvAxes
    capacity: int | None = None
    window: int | None = None


@dataclass(frozen=True)
class StateBinding:
    """A recurrent or convolution state [1, ...]: zeros at position 0, carried over step by step."""

    past: str
    present: str
    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(frozen=True)
class DecoderIo:
    """Everything a runner feeds and reads. `kv` is sorted by layer number, K before V."""

    logits: str
    input_ids: str | None
    inputs_embeds: str | None
    attention_mask: str | None
    position_ids: str | None
    kv: tuple[KvBinding, ...]
    states: tuple[StateBinding, ...]
    write_indices: str | None = None  # static caches: where this step's tokens go, [B] = past length
    kv_seq_len: str | None = None  # static caches: past length + T, [B]
    past_seq_len: str | None = None  # scalar or [1]: past length
    cache_position: str | None = None  # [T]: positions


_NAMES: dict[str, tuple[str, ...]] = {
    "input_ids": ("input_ids",),
    "inputs_embeds": ("inputs_embeds",),
    "attention_mask": ("attention_mask",),
    "position_ids": ("position_ids",),
    "write_indices": ("write_indices",),
    "kv_seq_len": ("nonpad_kv_seqlen",),
    "past_seq_len": ("past_seq_len", "past_sequence_length"),
    "cache_position": ("cache_position",),
}


def decoder_io(
    graph: Graph,
    names: dict[str, str] | None = None,
    head_size: int | None = None,
    declared_pairs: dict[str, str] | None = None,
) -> DecoderIo:
    """Bind a decoder graph. `names` overrides roles (`{"input_ids": "tokens", "logits": "scores"}`), as configs declare
    them; `head_size` is used only where neither shapes nor ops tell D; `declared_pairs` (past -> present) adds pairs
    whose names follow no known spelling. GenaiError lists every input that has no role."""
    names = names or {}
    inputs = {value.name: value for value in graph.inputs}
    roles = {role: _find(role, names, options, inputs) for role, options in _NAMES.items()}
    pairs = {**dict(_pairs(graph)), **(declared_pairs or {})}
    known = {name for name in roles.values() if name} | set(pairs)
    strangers = [name for name in inputs if name not in known]
    if strangers:
        raise GenaiError(
            "inputs with no known role: " + ", ".join(f"`{name}`" for name in strangers),
            hint="this graph is not a plain decoder; name its inputs in genai_config.json",
        )
    if not roles["input_ids"] and not roles["inputs_embeds"]:
        raise GenaiError(f"no `input_ids` or `inputs_embeds` among the inputs {sorted(inputs)}")
    kv, states = _caches(graph, inputs, pairs, head_size)
    return DecoderIo(logits=_logits(graph, names, pairs), kv=kv, states=states, **roles)


def _find(role: str, names: dict[str, str], options: tuple[str, ...], inputs: dict[str, ValueInfo]) -> str | None:
    return next((name for name in (names.get(role, ""), *options) if name in inputs), None)


def _logits(graph: Graph, names: dict[str, str], pairs: dict[str, str]) -> str:
    free = [value.name for value in graph.outputs if value.name not in pairs.values()]
    wanted = names.get("logits", "logits")
    if wanted in free:
        return wanted
    if len(free) != 1:
        raise GenaiError(f"cannot tell the logits among the outputs {free}", hint="name them in genai_config.json")
    return free[0]


def _pairs(graph: Graph) -> Iterator[tuple[str, str]]:
    outputs = {value.name for value in graph.outputs}
    for value in graph.inputs:
        for past, present in _PAIRS:
            match = re.fullmatch(past, value.name)
            if match and present.format(match[1]) in outputs:
                yield value.name, present.format(match[1])
                break


def _caches(
    graph: Graph, inputs: dict[str, ValueInfo], pairs: dict[str, str], head_size: int | None
) -> tuple[tuple[KvBinding, ...], tuple[StateBinding, ...]]:
    readers = _readers(graph)
    kv: list[KvBinding] = []
    states: list[StateBinding] = []
    for past, present in pairs.items():
        kind = _kind(past)
        if kind is None:
            states.append(_state(inputs[past], present))
        else:
            kv.append(_kv(graph, inputs[past], present, kind, readers, head_size))
    kv.sort(key=lambda binding: (binding.layer, binding.kind == "value"))
    return tuple(kv), tuple(states)


def _kind(name: str) -> KvKind | None:
    words = re.split(r"[._]", name.removeprefix("past_key_values"))
    return "key" if "key" in words else "value" if "value" in words else None


def _state(value: ValueInfo, present: str) -> StateBinding:
    if value.shape is None or value.dtype is None or any(not isinstance(dim, int) for dim in value.shape[1:]):
        raise GenaiError(f"state `{value.name}` has the shape {value.shape}; wanted fixed dims after the batch")
    return StateBinding(value.name, present, (1, *(int(dim) for dim in value.shape[1:] if dim)), value.dtype)


def _kv(
    graph: Graph, value: ValueInfo, present: str, kind: KvKind, readers: dict[str, list[Node]], head_size: int | None
) -> KvBinding:
    if value.shape is None or len(value.shape) not in (3, 4) or value.dtype is None:
        raise GenaiError(f"KV input `{value.name}` has the shape {value.shape}; wanted rank 3 or 4")
    node = _attention_of(value.name, readers)
    heads, dim = _geometry(graph, value, node, kind, head_size)
    static = len(value.shape) == 3
    capacity = value.shape[1] if static and isinstance(value.shape[1], int) else None
    numbers = re.findall(r"\d+", value.name)
    if not numbers:
        raise GenaiError(f"KV input `{value.name}` carries no layer number")
    window = node.attrs.get("local_window_size", -1) if node else -1
    return KvBinding(
        int(numbers[-1]), kind, value.name, present, heads, dim, value.dtype,
        "BSM" if static else "BHSD", capacity, window if window > 0 else None,
    )  # fmt: skip


def _readers(graph: Graph) -> dict[str, list[Node]]:
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    return readers


def _attention_of(past: str, readers: dict[str, list[Node]]) -> Node | None:
    """The attention op that reads this KV, directly or through one TensorScatter or Concat."""
    for node in readers.get(past, []):
        if num_kv_heads(node):
            return node
        if node.op_type in ("TensorScatter", "Concat"):
            return next((n for n in readers.get(node.outputs[0], []) if num_kv_heads(n)), None)
    return None


def num_kv_heads(node: Node) -> int:
    """H_kv as an attention op's attributes tell it; 0 when the node is no attention op."""
    if node.op_type not in ("GroupQueryAttention", "Attention", "MultiHeadAttention"):
        return 0
    return int(node.attrs.get("kv_num_heads", 0) or node.attrs.get("q_num_heads", 0) or node.attrs.get("num_heads", 0))


def _geometry(
    graph: Graph, value: ValueInfo, node: Node | None, kind: KvKind, head_size: int | None
) -> tuple[int, int]:
    shape = value.shape or ()
    heads: int | None = None
    dim: int | None = None
    if len(shape) == 4:
        heads = shape[1] if isinstance(shape[1], int) else None
        dim = shape[3] if isinstance(shape[3], int) else None
    heads = heads or (num_kv_heads(node) if node else None)
    if len(shape) == 3 and heads and isinstance(shape[2], int):
        dim = shape[2] // heads
    dim = dim or (_dim_from_op(graph, node, kind) if node else None) or head_size
    if not heads or not dim:
        raise GenaiError(f"cannot tell the heads and head size of `{value.name}` {list(shape)} from the graph")
    return heads, dim


def _dim_from_op(graph: Graph, node: Node, kind: KvKind) -> int | None:
    """D from the width of the op's projected inputs: packed qkv is (H + 2 H_kv) * D wide, k and v are H_kv * D."""
    kv_heads = num_kv_heads(node)
    index = 1 if kind == "key" else 2
    separate = node.inputs[index] if len(node.inputs) > index else ""
    width = value_width(graph, separate or node.inputs[0])
    if width is None:
        return None
    heads = kv_heads if separate else int(node.attrs.get("num_heads", 0)) + 2 * kv_heads
    return width // heads if heads and width % heads == 0 else None


def value_width(graph: Graph, name: str) -> int | None:
    """Last dim of a value: declared, or the columns of the weight its producer multiplies by."""
    info = graph.values.get(name)
    if info is not None and info.shape and isinstance(info.shape[-1], int):
        return info.shape[-1]
    producer = next((node for node in graph.nodes if name in node.outputs), None)
    if producer is None:
        return None
    if producer.op_type == "MatMulNBits":
        return int(producer.attrs["N"])
    if producer.op_type == "MatMul" and producer.inputs[1] in graph.initializers:
        return graph.initializers[producer.inputs[1]].shape[-1]
    if producer.op_type in ("Add", "Cast", "Identity", "RotaryEmbedding"):
        return value_width(graph, producer.inputs[0])
    return None
