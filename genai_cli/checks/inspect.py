"""`genai inspect`: what a package is, and what each engine makes of it. Reads weights' places, never their values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from math import prod
from pathlib import Path

import numpy as np

from genai_cli.engine.plan import make_plan, unsupported
from genai_cli.errors import GenaiError
from genai_cli.graph.io import DecoderIo, KvBinding
from genai_cli.graph.ir import Graph, Initializer, Node, ValueInfo
from genai_cli.graph.loader import load_graph
from genai_cli.package.decoder import LoadedDecoder, load_decoder
from genai_cli.package.model import Component
from genai_cli.package.open import open_package
from genai_cli.report.inspect import (
    ComponentInfo,
    DecoderInfo,
    GateInfo,
    HostOp,
    Inspection,
    KvGroup,
    NativeCoverage,
    OpCount,
    StateInfo,
    TensorInfo,
)
from genai_cli.runners.native import paged_kv_gate as native_gate
from genai_cli.runners.native import rows_gate
from genai_cli.runners.ort import paged_kv_gate as ort_gate

_BACKENDS = ("cpu", "cuda")
# op: (inputs that are packed weights, inputs that are weights of no parameter: scales, zero points, rotary tables)
_WEIGHTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "MatMulNBits": ((1,), (2, 3, 4)),
    "GatherBlockQuantized": ((0,), (2, 3)),
    "QMoE": ((2, 5, 8), (3, 6, 9, 11, 12, 13)),
    "GroupQueryAttention": ((), (7, 8, 12, 13)),
    "RotaryEmbedding": ((), (1, 2, 3)),
}


def inspect_model(path: Path | str) -> Inspection:
    """Look at a package. GenaiError when it cannot be read; a decoder that native cannot run is a finding."""
    package = open_package(path)
    part = package.component("decoder")
    loaded = load_decoder(package) if part else None
    graphs = {other.role: load_graph(other.path) for other in package.components if other is not part}
    if part and loaded:
        graphs[part.role] = loaded.graph
    return Inspection(
        path=str(path),
        kind=package.kind,
        model_type=package.model_type,
        components=tuple(_component(part, graphs[part.role], package.path) for part in package.components),
        decoder=_decoder(loaded) if loaded else None,
        context_len=loaded.context_len if loaded else package.context_len,
        bos_token_id=package.bos_token_id,
        eos_token_ids=package.eos_token_ids,
        pad_token_id=package.pad_token_id,
        tokenizer=package.tokenizer is not None,
        chat_template=package.chat_template is not None,
        search={name: value for name, value in asdict(package.search).items() if value is not None},
        native=tuple(_coverage(loaded, backend) for backend in _BACKENDS) if loaded else (),
        gates=tuple(_gates(loaded)) if loaded else (),
        warnings=(*package.warnings, *(loaded.warnings if loaded else ())),
    )


def _component(part: Component, graph: Graph, folder: Path) -> ComponentInfo:
    parameters, weight_bytes = _weights(graph)
    missing = {item.op: item.reason for item in unsupported(graph)}
    counts = Counter(node.key for node in _all_nodes(graph))
    file = part.path.relative_to(folder) if part.path != folder else Path(part.path.name)
    return ComponentInfo(
        role=part.role,
        file=str(file),
        producer=graph.producer,
        opsets={domain or "ai.onnx": version for domain, version in sorted(graph.opsets.items())},
        inputs=tuple(map(_tensor, graph.inputs)),
        outputs=tuple(map(_tensor, graph.outputs)),
        num_nodes=sum(counts.values()),
        num_parameters=parameters,
        weight_bytes=weight_bytes,
        ops=tuple(
            OpCount(op, count, op not in missing, missing.get(op, ""))
            for op, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        ),
    )


def _tensor(value: ValueInfo) -> TensorInfo:
    return TensorInfo(value.name, value.dtype.name if value.dtype else "unknown", value.shape)


def _all_nodes(graph: Graph) -> Iterator[Node]:
    """Nodes of the graph and of its If branches."""
    for node in graph.nodes:
        yield node
        for value in node.attrs.values():
            if isinstance(value, Graph):
                yield from _all_nodes(value)


def _weights(graph: Graph) -> tuple[int, int]:
    """Logical parameters and bytes. Weights that lie at the same place count once."""
    per_byte: dict[str, int] = {}
    extras: set[str] = set()
    for node in _all_nodes(graph):
        packed, beside = _WEIGHTS.get(node.op_type, ((), ()))
        per_byte |= dict.fromkeys(_names(node, packed), 8 // int(node.attrs.get("bits", 4)))
        extras |= set(_names(node, beside))
    parameters = num_bytes = 0
    for weight in _distinct(graph.initializers.values()):
        num_bytes += weight.nbytes
        factor = per_byte.get(weight.name, 1) if weight.dtype == np.uint8 else 1
        parameters += 0 if weight.name in extras else prod(weight.shape) * factor
    return parameters, num_bytes


def _names(node: Node, indices: Sequence[int]) -> list[str]:
    return [node.inputs[index] for index in indices if index < len(node.inputs) and node.inputs[index]]


def _distinct(weights: Iterable[Initializer]) -> Iterator[Initializer]:
    seen: set[tuple[int, int]] = set()
    for weight in weights:
        place = (weight.array().ctypes.data, weight.nbytes)
        if place not in seen:
            seen.add(place)
            yield weight


def _decoder(loaded: LoadedDecoder) -> DecoderInfo:
    io, graph = loaded.io, loaded.graph
    roles = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "write_indices", "kv_seq_len",
             "past_seq_len", "cache_position")  # fmt: skip
    groups = tuple(_kv_groups(io))
    logits = next(value for value in graph.outputs if value.name == io.logits)
    vocab = logits.shape[-1] if logits.shape else None
    return DecoderInfo(
        takes=tuple(role for role in roles if getattr(io, role)),
        num_layers=len({binding.layer for binding in io.kv} | _state_layers(io)),
        num_heads=_query_heads(graph),
        vocab_size=vocab if isinstance(vocab, int) else None,
        kv=groups,
        kv_bytes_per_token=sum(group.bytes_per_token for group in groups),
        states=tuple(
            StateInfo(s.past, s.dtype.name, s.shape, prod(s.shape) * s.dtype.itemsize) for s in io.states
        ),
    )  # fmt: skip


def _state_layers(io: DecoderIo) -> set[int]:
    """Layer numbers in the names of states, where they carry one."""
    words = (word for state in io.states for word in state.past.replace("_", ".").split("."))
    return {int(word) for word in words if word.isdecimal()}


def _query_heads(graph: Graph) -> tuple[int, ...]:
    """H of the attention ops, each value once; only ops with KV heads of their own count as a decoder's."""
    heads = {
        int(node.attrs.get("q_num_heads") or node.attrs.get("num_heads") or 0)
        for node in graph.nodes
        if node.op_type in ("GroupQueryAttention", "Attention", "MultiHeadAttention")
    }
    return tuple(sorted(heads - {0}))


def _kv_groups(io: DecoderIo) -> Iterator[KvGroup]:
    alike: dict[tuple[object, ...], list[KvBinding]] = {}
    for binding in io.kv:
        key = (binding.num_heads, binding.head_dim, binding.dtype, binding.axes, binding.capacity, binding.window)
        alike.setdefault(key, []).append(binding)
    for group in alike.values():
        one = group[0]
        yield KvGroup(
            layers=tuple(sorted({binding.layer for binding in group})),
            num_kv_heads=one.num_heads,
            head_dim=one.head_dim,
            dtype=one.dtype.name,
            axes=one.axes,
            capacity=one.capacity,
            window=one.window,
            bytes_per_token=len(group) * one.num_heads * one.head_dim * one.dtype.itemsize,
        )


def _coverage(loaded: LoadedDecoder, backend: str) -> NativeCoverage:
    """Plan the decoder for a backend without its device: unsupported nodes, host steps, replay."""
    try:
        plan = make_plan(loaded.graph, loaded.io, loaded.context_len, backend, _embed_width(loaded))
    except GenaiError as error:
        return NativeCoverage(backend, False, error.message, False, ())
    counts = Counter((step.node.key, step.reason) for step in plan.host_steps)
    host = tuple(HostOp(op, count, reason) for (op, reason), count in sorted(counts.items()))
    replays = not plan.past_dependent
    reason = "" if replays else "shapes depend on the past: every step is recorded anew"
    return NativeCoverage(backend, True, reason, replays, host)


def _embed_width(loaded: LoadedDecoder) -> int:
    info = next((value for value in loaded.graph.inputs if value.name == loaded.io.inputs_embeds), None)
    width = info.shape[-1] if info and info.shape else 0
    return width if isinstance(width, int) else 0


def _gates(loaded: LoadedDecoder) -> Iterator[GateInfo]:
    for engine, gate in (("native", native_gate(loaded.io)), ("ort", ort_gate(loaded.io, loaded.graph))):
        yield GateInfo("paged KV", engine, gate.supported, gate.reason)
        if loaded.io.inputs_embeds:
            yield GateInfo(
                "prefix reuse", engine, gate.supported,
                "by token ids and the content of the pictures: equal ids may stand for different ones",
            )  # fmt: skip
    with suppress(GenaiError):  # what native cannot run is told elsewhere
        gate = rows_gate(make_plan(loaded.graph, loaded.io, loaded.context_len, "cpu", _embed_width(loaded)))
        yield GateInfo("shared steps", "native", gate.supported, gate.reason)
    if reason := _ort_cpu_cannot(loaded.graph):
        yield GateInfo("run as it is on the CPU", "ort", False, reason)


def _ort_cpu_cannot(graph: Graph) -> str:
    """What ONNX Runtime's CPU provider lacks; parity then compares with a twin in f32."""
    bf16 = next((n for n in graph.nodes if n.op_type == "MatMul" and _weight_dtype(graph, n) == "bfloat16"), None)
    if bf16:
        return "its CPU provider has no bf16 MatMul; parity compares with the same artifact in f32"
    normed = (n for n in graph.nodes if n.op_type == "GroupQueryAttention" and any(n.inputs[14:16]))
    if next(normed, None):
        return "its CPU provider has no q/k norm inside GroupQueryAttention"
    return ""


def _weight_dtype(graph: Graph, node: Node) -> str:
    weight = graph.initializers.get(node.inputs[1])
    return weight.dtype.name if weight else ""
