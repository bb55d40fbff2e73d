"""Micro-benchmarks of kernels: every kernel by shape and dtype that a step of the artifact runs, each beside ONNX Runtime's
model of the same node. Copies with weights of their own run one after another, so that none lies in a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from genai_cli.backends.base import KvSlot, Tensor
from genai_cli.backends.cpu import CpuBackend, Step
from genai_cli.bench.micro import Case
from genai_cli.bench.work import shape_of, work
from genai_cli.engine.engine import Engine
from genai_cli.errors import GenaiError
from genai_cli.graph.ir import Graph, Node
from genai_cli.graph.twins import one_node_model
from genai_cli.ops.registry import lookup
from genai_cli.runners.ort import OrtComponent

CACHE_BYTES = 96 * 2**20  # more than a core's share of the last-level cache, so that copies are read from memory
MOST_COPIES = 400
AGREE_NMSE = 1e-3  # only to see that both computed the same thing; `genai parity --ops` judges


@dataclass(frozen=True)
class Seen:
    """One kernel call of a step, and which of its inputs are weights."""

    step: Step
    constants: frozenset[int]
    held: int  # tokens in the KV behind the step

    @property
    def name(self) -> str:
        return self.step.kernel

    @property
    def shape(self) -> str:
        dtypes = dict.fromkeys(t.dtype.name for t in self.step.inputs[:2] if t is not None)
        behind = f" behind {self.held}" if "key_slot" in self.step.attrs else ""
        return f"{shape_of(self.step)}{behind} {'·'.join(dtypes)}"


def distinct(steps: Sequence[Step], weights: AbstractSet[int], held: int) -> list[Seen]:
    """One call for every kernel, shape, dtype and attributes. `weights`: addresses that no step writes."""
    seen: dict[str, Seen] = {}
    for step in steps:
        constants = frozenset(i for i, t in enumerate(step.inputs) if t is not None and t.address in weights)
        attrs = {key: value for key, value in step.attrs.items() if key not in ("key_slot", "value_slot")}
        shapes = [None if t is None else (t.dtype.name, t.shape) for t in (*step.inputs, *step.outputs)]
        if step.kernel != "host":
            seen.setdefault(f"{step.kernel}{shapes}{attrs}", Seen(step, constants, held))
    return list(seen.values())


def kernel_case(seen: Seen, engine: Engine, graph: Graph, open_backend: Callable[[], CpuBackend]) -> Case:
    """The case of one call, on a backend of its own, since KV slots are made on it."""
    step, backend = seen.step, open_backend()
    done = work(step, engine.slots, seen.held)
    weights = sum(t.nbytes for i, t in enumerate(step.inputs) if t is not None and i in seen.constants)
    slots = _slots_of(step, engine)
    weights += sum(slot.num_heads * slot.head_dim * slot.dtype.itemsize * seen.held for slot in slots)
    copies = max(1, min(MOST_COPIES, ceil(CACHE_BYTES / max(1, weights)) if weights else 8))
    native, output = _native(seen, slots, backend, copies)
    case = Case(seen.name, seen.shape, native, copies, done.num_bytes, done.num_ops)
    try:
        peer, want = _peer(seen, slots, graph, copies, backend.threads)
    except GenaiError as error:
        return replace(case, peer_reason=error.message)
    native()
    if _nmse(output(), want) > AGREE_NMSE:
        return replace(case, peer_reason="outputs differ")
    return replace(case, peer=peer)


def _slots_of(step: Step, engine: Engine) -> list[KvSlot]:
    if "key_slot" not in step.attrs:
        return []
    return [engine.slots[step.attrs["key_slot"]], engine.slots[step.attrs["value_slot"]]]


def _native(
    seen: Seen, slots: Sequence[KvSlot], backend: CpuBackend, copies: int
) -> tuple[Callable[[], None], Callable[[], np.ndarray]]:
    step, recording = seen.step, backend.record()
    first: list[Tensor] = []
    num_new = _num_new(step)
    for _ in range(copies):
        inputs = [None if t is None else backend.constant(backend.download(t)) for t in step.inputs]
        outputs = [None if t is None else backend.empty(t.shape, t.dtype) for t in step.outputs]
        own = [backend.kv_slot(slot.num_heads, slot.head_dim, slot.dtype) for slot in slots]
        if own:
            backend.reserve(seen.held)
            for slot, rows in zip(own, _past(slots, seen.held - num_new), strict=True):
                backend.kv_write(slot, rows)
            backend.set_past_len(seen.held - num_new)
        attrs = step.attrs | ({"key_slot": own[0].index, "value_slot": own[1].index} if own else {})
        recording.call(step.kernel, inputs, outputs, attrs)
        first = first or [t for t in outputs if t is not None]

    def replay() -> None:
        assert backend.threads  # holds the backend, whose KV the steps point to
        recording.replay()

    return replay, lambda: backend.download(first[0])


def _num_new(step: Step) -> int:
    query = step.inputs[0]
    return 0 if query is None or len(query.shape) < 3 else query.shape[-2]


def _past(slots: Sequence[KvSlot], length: int) -> list[np.ndarray]:
    """Rows [H_kv, length, D] that both engines get."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((s.num_heads, length, s.head_dim), np.float32).astype(s.dtype) for s in slots]


def _peer(
    seen: Seen, slots: Sequence[KvSlot], graph: Graph, copies: int, threads: int
) -> tuple[Callable[[], object], np.ndarray]:
    """ORT with all optimisations on the node that the artifact holds for this kernel. GenaiError when the artifact spells
    it in several nodes, or with inputs that are not rebuilt here."""
    arrays = [None if t is None else _view(t) for t in seen.step.inputs]
    if slots:
        node = _attention_node(graph)
        arrays = _attention_inputs(node, arrays, slots, seen.held, _num_new(seen.step))
        constants = frozenset({7, 8})
    else:
        node = _node(graph, seen.step)
        constants = seen.constants
    wanted = [bool(name) for name in node.outputs]
    model, feeds = one_node_model(
        node.op_type, node.domain, {node.domain: node.opset}, arrays, node.attrs, wanted, constants, copies
    )
    component = OrtComponent(model, threads=threads)
    return component.prepared(feeds), component.run(feeds)["y0"]


def _view(tensor: Tensor) -> np.ndarray:
    owner = tensor.owner
    assert isinstance(owner, np.ndarray)  # this is the CPU
    return owner.reshape(-1).view(np.uint8)[: tensor.nbytes].view(tensor.dtype).reshape(tensor.shape).copy()


def _node(graph: Graph, step: Step) -> Node:
    for node in graph.nodes:
        opdef = lookup(node.op_type, node.domain, node.opset)
        rule = opdef.kernels.get("cpu") if opdef else None
        if rule is not None and rule.name == step.kernel and _same(node, step):
            return node
    raise GenaiError("several nodes")


def _same(node: Node, step: Step) -> bool:
    inputs = [bool(name) for name in node.inputs]
    given = [t is not None for t in step.inputs]
    return inputs == given and all(step.attrs.get(key, value) == value for key, value in node.attrs.items())


def _attention_node(graph: Graph) -> Node:
    node = next((node for node in graph.nodes if node.op_type == "GroupQueryAttention"), None)
    if node is None:
        raise GenaiError("several nodes")
    if len(node.inputs) > 9 and any(node.inputs[9:]):
        raise GenaiError("bias or sinks")
    return node


def _attention_inputs(
    node: Node, arrays: list[np.ndarray | None], slots: Sequence[KvSlot], held: int, num_new: int
) -> list[np.ndarray | None]:
    past: list[np.ndarray | None] = [rows[None] for rows in _past(slots, held - num_new)]
    lengths: list[np.ndarray | None] = [np.array([[held - 1]], np.int32), np.array(held, np.int32)]
    made = [*(arrays + [None] * 3)[:3], *past, *lengths, *(arrays + [None] * 5)[3:5]]
    return made[: len(node.inputs)]


def _nmse(got: np.ndarray, want: np.ndarray) -> float:
    a, b = got.astype(np.float64).reshape(-1), want.astype(np.float64).reshape(-1)
    return float(((a - b) ** 2).sum() / max(float((b**2).sum()), 1e-30)) if a.shape == b.shape else float("inf")
