"""What `genai inspect` found: frozen data, schema genai.inspect/1. Renderers read it; nothing here computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SCHEMA = "genai.inspect/1"


@dataclass(frozen=True)
class TensorInfo:
    """A graph input or output. Dims are numbers, symbolic names, or null."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True)
class OpCount:
    """How often an op is used, and whether native has it."""

    op: str  # `domain::OpType`, or the type alone for ai.onnx
    count: int
    supported: bool
    reason: str = ""  # why not


@dataclass(frozen=True)
class ComponentInfo:
    """One ONNX file. `num_parameters` counts logical weights: two in a byte for int4, tied ones once, no scales and no
    rotary tables."""

    role: str
    file: str
    producer: str
    opsets: dict[str, int]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    num_nodes: int
    num_parameters: int
    weight_bytes: int
    ops: tuple[OpCount, ...]


@dataclass(frozen=True)
class KvGroup:
    """Layers whose K and V are alike."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype: str
    axes: str  # BHSD: [B, H_kv, S, D]; BSM: [B, S, H_kv * D]
    capacity: int | None  # of static caches
    window: int | None
    bytes_per_token: int  # K and V of all these layers


@dataclass(frozen=True)
class StateInfo:
    """A recurrent or convolution state."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class DecoderInfo:
    """Geometry of the decoder, from the graph."""

    takes: tuple[str, ...]  # roles of its inputs beside the past: input_ids, attention_mask, ...
    num_layers: int
    num_heads: tuple[int, ...]  # query heads, as the attention ops say; empty for decomposed attention
    vocab_size: int | None
    kv: tuple[KvGroup, ...]
    kv_bytes_per_token: int
    states: tuple[StateInfo, ...]


@dataclass(frozen=True)
class HostOp:
    """Nodes that leave the fast path: they run in numpy between kernels."""

    op: str
    count: int
    reason: str


@dataclass(frozen=True)
class NativeCoverage:
    """What native makes of the decoder on one backend. `replays`: a decode step is recorded once, not every time."""

    backend: str
    supported: bool
    reason: str
    replays: bool
    host_ops: tuple[HostOp, ...]


@dataclass(frozen=True)
class GateInfo:
    """Whether an engine can do something with this package, and why."""

    feature: str
    engine: str
    supported: bool
    reason: str


@dataclass(frozen=True)
class Inspection:
    """Everything `genai inspect` says."""

    path: str
    kind: str
    model_type: str
    components: tuple[ComponentInfo, ...]
    decoder: DecoderInfo | None
    context_len: int | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    tokenizer: bool
    chat_template: bool
    search: dict[str, Any]
    native: tuple[NativeCoverage, ...]
    gates: tuple[GateInfo, ...]
    warnings: tuple[str, ...]
    schema: str = field(default=SCHEMA)
