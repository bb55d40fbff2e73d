"""Walk a graph once: compute what is known, run and record the rest.

The first run of a step *is* its recording: every kernel runs as it is recorded, so shapes that only data can tell are
simply there. Three kinds of values meet here (engine/values.py): static ones are computed now, in numpy, and vanish from
the recording; dynamic ones get memory and a kernel (or a host step where no kernel takes them); cached ones live in KV
slots. `tainted` follows everything that depends on the past length: a recording that baked such a value in is good for one
step only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from genai_cli.backends.base import Backend, KvSlot, Recording, Tensor
from genai_cli.engine.abstract import AbstractBackend
from genai_cli.engine.arena import Arena
from genai_cli.engine.values import Cached, Dynamic, Static, Storage, Value
from genai_cli.errors import GenaiError
from genai_cli.graph.attention import ASSUMES, INTERNAL_DOMAIN
from genai_cli.graph.ir import Graph, Initializer, Node
from genai_cli.graph.loader import node_inputs
from genai_cli.ops import OpDef, lookup, run_reference
from genai_cli.ops.registry import Known, Spec

VIEWS = {"Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity"}
LAST_ROW = "LastRow"  # genai::LastRow: the last token's row of [1, T, ...]


class StaleRecording(Exception):
    """A replayed host step made another shape than the one recorded: record again."""


@dataclass
class Constants:
    """Weights and folded constants on the backend, shared by all recordings."""

    backend: Backend
    tensors: dict[str, Tensor] = field(default_factory=dict)
    folded: dict[str, Static] = field(default_factory=dict)

    def tensor(self, name: str, array: np.ndarray) -> Tensor:
        if name not in self.tensors:
            tensor = self.backend.constant(array)
            tensor.host = array
            self.tensors[name] = tensor
        return self.tensors[name]


@dataclass
class HostStep:
    """A node that ran in numpy between kernels, and why: the fast path's price list."""

    node: Node
    reason: str


class Tracer:
    """One recording of one list of nodes. `env` holds every value by name afterwards."""

    def __init__(
        self,
        backend: Backend,
        recording: Recording,
        arena: Arena,
        constants: Constants,
        initializers: dict[str, Initializer],
        slots: Sequence[KvSlot],
        env: dict[str, Value],
        keep: frozenset[str],
    ) -> None:
        self.backend, self.recording, self.arena, self.constants = backend, recording, arena, constants
        self.initializers, self.slots, self.env = dict(initializers), slots, env
        self.keep = keep  # names whose memory must outlive the trace (outputs)
        self.one_shot = False
        self.host_steps: list[HostStep] = []
        self._last_use: dict[str, int] = {}

    def run(self, nodes: list[Node]) -> None:
        """Trace nodes in order; memory goes back to the arena after its last reader."""
        self._last_use = {name: index for index, node in enumerate(nodes) for name in node_inputs(node)}
        for index, node in enumerate(nodes):
            self.trace(node)
            for name in {*node_inputs(node), *node.outputs}:
                if self._last_use.get(name, -1) <= index and name not in self.keep:
                    self._forget(name)

    def trace(self, node: Node) -> None:
        """One node, by what its inputs are."""
        if node.op_type == "If" and node.domain == "":
            return self._branch(node)
        if all(name in self.constants.folded for name in node.outputs if name):
            self.env |= {name: self.constants.folded[name] for name in node.outputs if name}
            return None
        inputs = [self.value(name) if name else None for name in node.inputs]
        if node.op_type in ("Shape", "Size") and node.domain == "":
            return self._shape(node, inputs[0])
        if node.domain == INTERNAL_DOMAIN and node.op_type == LAST_ROW:
            return self._last_row(node, inputs[0])
        if all(value is None or isinstance(value, Static) for value in inputs):
            return self._fold(node, [value.array if isinstance(value, Static) else None for value in inputs])
        operands = [self._dense(value) for value in inputs]
        if node.op_type in VIEWS and node.domain == "" and isinstance(operands[0], Dynamic):
            return self._reshape(node, operands)
        self._compute(node, operands)
        if node.domain == INTERNAL_DOMAIN:
            self._present(node)
        return None

    def _present(self, node: Node) -> None:
        """An attention bound to slots leaves its present there."""
        for name in node.outputs[1:3]:
            value = self.env.get(name)
            if isinstance(value, Cached):
                self.env[name] = replace(value, written=True)

    def value(self, name: str) -> Value:
        """A name's value; weights become static when first seen."""
        if name not in self.env:
            if name not in self.initializers:
                raise GenaiError(f"value `{name}` is read before any node makes it")
            self.env[name] = Static(self.initializers[name].array(), constant=True)
        return self.env[name]

    # -- known now ---------------------------------------------------------------------------------------------------

    def _fold(self, node: Node, arrays: list[np.ndarray | None]) -> None:
        values = [self.env[name] for name in node.inputs if name]
        constant = all(isinstance(value, Static) and value.constant for value in values)
        tainted = any(isinstance(value, Static) and value.tainted for value in values)
        results = run_reference(definition(node), arrays, reference_attrs(node), len(node.outputs))
        for name, array in zip(node.outputs, results, strict=False):
            if name and array is not None:
                self.env[name] = Static(array, constant, tainted)
                if constant:
                    self.constants.folded[name] = Static(array, constant=True)

    def _shape(self, node: Node, value: Value | None) -> None:
        shape, tainted = _shape_of(value)
        attrs = dict(node.attrs)
        stand_in = np.broadcast_to(np.zeros((), np.int8), shape)
        results = run_reference(definition(node), [stand_in], attrs, 1)
        self.env[node.outputs[0]] = Static(np.asarray(results[0]), tainted=tainted)

    def _branch(self, node: Node) -> None:
        """If: the condition is known while recording; a tainted one is a guard the plan checks before each replay."""
        condition = self.value(node.inputs[0])
        if isinstance(condition, Static):
            taken = bool(condition.array.reshape(-1)[0])
        else:
            taken = bool(self.backend.view(self._dense_dynamic(condition).tensor).reshape(-1)[0])
            self.one_shot = True
        branch: Graph = node.attrs["then_branch" if taken else "else_branch"]
        self.initializers |= branch.initializers
        saved = self._last_use
        for inner in branch.nodes:
            self.trace(inner)
        self._last_use = saved
        for outer, result in zip(node.outputs, branch.outputs, strict=True):
            value = self.value(result.name)
            if isinstance(value, Static) and not (isinstance(condition, Static) and condition.constant):
                value = replace(value, constant=False)  # the other branch gives the same name another value
            self._bind(outer, value)

    # -- views -------------------------------------------------------------------------------------------------------

    def _reshape(self, node: Node, operands: list[Static | Dynamic | None]) -> None:
        source = operands[0]
        assert isinstance(source, Dynamic)
        shape, dtype = infer(node, [known(value) for value in operands])[0]
        tainted = source.tainted or any(isinstance(value, Static) and value.tainted for value in operands)
        self._alias(node.outputs[0], source, shape, dtype, 0, tainted)

    def _last_row(self, node: Node, value: Value | None) -> None:
        source = self._dense(value)
        assert isinstance(source, Dynamic)
        shape = source.tensor.shape
        row = int(np.prod(shape[2:], dtype=np.int64)) * source.tensor.dtype.itemsize
        offset = (shape[1] - 1) * row
        self._alias(node.outputs[0], source, (shape[0], 1, *shape[2:]), source.tensor.dtype, offset, source.tainted)

    def _alias(
        self, name: str, source: Dynamic, shape: tuple[int, ...], dtype: np.dtype, offset: int, tainted: bool
    ) -> None:
        tensor = self.backend.alias(source.tensor, shape, dtype, offset)
        self._bind(name, Dynamic(tensor, tainted, source.storage))

    # -- computed by every step --------------------------------------------------------------------------------------

    def _compute(self, node: Node, operands: list[Static | Dynamic | None]) -> None:
        baked = any(value is not None and value.tainted for value in operands)
        self.one_shot |= baked
        opdef = definition(node)
        attrs = reference_attrs(node)
        knowns = [known(value) for value in operands]
        rule = opdef.kernels.get(self.backend.name)
        refusal = f"no {self.backend.name} kernel" if rule is None else rule.accepts(knowns, attrs)
        if rule is not None and rule.num_outputs is not None and any(self._read(node.outputs[rule.num_outputs :])):
            refusal = f"the kernel makes only {rule.num_outputs} of the outputs that are read"
        if rule is not None and refusal is None and opdef.infer is not None:
            self._kernel(node, rule.name, opdef, operands, knowns, attrs, baked)
        else:
            self.host_steps.append(HostStep(node, refusal or "no shape rule"))
            self._host(node, opdef, operands, baked)

    def _kernel(
        self, node: Node, kernel: str, opdef: OpDef, operands: list[Static | Dynamic | None],
        knowns: list[Known | None], attrs: dict[str, Any], tainted: bool,
    ) -> None:  # fmt: skip
        specs = _infer(opdef, knowns, attrs, node)
        outputs = [self._new(name, spec, tainted) if name else None for name, spec in self._wanted(node, specs)]
        inputs = [self._tensor(name, value) for name, value in zip(node.inputs, operands, strict=True)]
        self.recording.call(kernel, inputs, outputs, attrs)

    def _read(self, names: list[str]) -> list[bool]:
        return [bool(name) and (name in self._last_use or name in self.keep) for name in names]

    def _wanted(self, node: Node, specs: list[Spec]) -> list[tuple[str, Spec]]:
        """Outputs with their specs; an output nobody reads gets no memory."""
        read = self._last_use
        return [
            (name if name and (name in read or name in self.keep or index == 0) else "", spec)
            for index, (name, spec) in enumerate(zip(node.outputs, specs, strict=False))
        ]

    def _host(self, node: Node, opdef: OpDef, operands: list[Static | Dynamic | None], tainted: bool) -> None:
        attrs, backend = reference_attrs(node), self.backend

        def compute() -> list[np.ndarray | None]:
            arrays = [
                backend.view(value.tensor) if isinstance(value, Dynamic) else value.array if value else None
                for value in operands
            ]
            return run_reference(opdef, arrays, attrs, len(node.outputs))

        first: list[list[np.ndarray | None]] = [compute()]
        outputs = [
            self._new(name, (array.shape, array.dtype), tainted) if name and array is not None else None
            for name, array in zip(node.outputs, first[0], strict=False)
        ]
        self.recording.host(_host_step(backend, outputs, compute, first))

    def _new(self, name: str, spec: Spec, tainted: bool) -> Tensor:
        tensor, storage = self.arena.take(tuple(int(dim) for dim in spec[0]), np.dtype(spec[1]))
        self._bind(name, Dynamic(tensor, tainted, storage))
        return tensor

    def _bind(self, name: str, value: Value) -> None:
        self.env[name] = value
        if isinstance(value, Dynamic) and value.storage is not None:
            value.storage.names += 1

    def _forget(self, name: str) -> None:
        value = self.env.get(name)
        if not isinstance(value, Dynamic) or value.storage is None:
            return
        del self.env[name]
        value.storage.names -= 1
        if value.storage.names == 0:
            self.arena.give_back(value.storage)

    # -- operands ----------------------------------------------------------------------------------------------------

    def _tensor(self, name: str, value: Static | Dynamic | None) -> Tensor | None:
        if value is None:
            return None
        if isinstance(value, Dynamic):
            return value.tensor
        if value.constant:
            return self.constants.tensor(name, value.array)
        tensor = self.backend.constant(value.array)
        tensor.host = value.array
        return tensor

    def _dense(self, value: Value | None) -> Static | Dynamic | None:
        return self._dense_dynamic(value) if isinstance(value, Dynamic | Cached) else value

    def _dense_dynamic(self, value: Dynamic | Cached) -> Dynamic:
        """KV read by something else than attention is copied out of its slot, as the graph's own tensor."""
        if isinstance(value, Dynamic):
            return value
        if not value.written and not isinstance(self.backend, AbstractBackend):
            raise GenaiError(f"the present of KV slot {value.slot} is read before its attention wrote it")
        tensor, storage = self.arena.take(value.shape, value.dtype)
        dense = Dynamic(tensor, True, Storage(storage.tensor, 1))
        slot, length, backend = self.slots[value.slot], value.length, self.backend

        def copy() -> None:
            rows = backend.kv_view(slot, 0, length)
            if len(value.shape) == 3:  # [1, capacity, H_kv * D]
                full = np.zeros((1, value.shape[1], rows.shape[0], rows.shape[2]), rows.dtype)
                full[0, :length] = rows.transpose(1, 0, 2)
                backend.upload(tensor, full.reshape(value.shape))
            else:
                backend.upload(tensor, np.ascontiguousarray(rows).reshape(value.shape))

        self.recording.host(copy)
        return dense


def _host_step(
    backend: Backend,
    outputs: list[Tensor | None],
    compute: Callable[[], list[np.ndarray | None]],
    first: list[list[np.ndarray | None]],
) -> Callable[[], None]:
    def step() -> None:
        results = first.pop() if first else compute()
        for tensor, array in zip(outputs, results, strict=False):
            if tensor is not None and array is not None:
                if array.shape != tensor.shape:
                    raise StaleRecording
                backend.upload(tensor, array)

    return step


def definition(node: Node) -> OpDef:
    """The registered op of a node. GenaiError when there is none (plans refuse such graphs before tracing)."""
    opdef = lookup(node.op_type, node.domain, node.opset)
    if opdef is None:
        raise GenaiError(f"op `{node.key}` (opset {node.opset}) is not supported by the native engine")
    return opdef


def known(value: Static | Dynamic | None) -> Known | None:
    """What `infer` and `accepts` are told: the array where it is known, else shape and dtype."""
    if isinstance(value, Static):
        return value.array
    return None if value is None else (value.tensor.shape, value.tensor.dtype)


def infer(node: Node, inputs: Sequence[Known | None]) -> list[Spec]:
    """Output shapes and dtypes of a node."""
    return _infer(definition(node), inputs, node.attrs, node)


def _infer(opdef: OpDef, inputs: Sequence[Known | None], attrs: dict[str, Any], node: Node) -> list[Spec]:
    if opdef.infer is None:
        raise GenaiError(f"op `{node.key}` has no shape rule")
    if "num_node_outputs" in opdef.attributes:
        attrs = {**attrs, "num_node_outputs": len(node.outputs)}
    return opdef.infer(inputs, attrs)


def reference_attrs(node: Node) -> dict[str, Any]:
    """A node's attributes as its reference takes them."""
    return {name: value for name, value in node.attrs.items() if name != ASSUMES}


def _shape_of(value: Value | None) -> tuple[tuple[int, ...], bool]:
    if isinstance(value, Static):
        return value.array.shape, value.tainted
    if isinstance(value, Dynamic):
        return value.tensor.shape, value.tainted
    if isinstance(value, Cached):
        return value.shape, True
    raise GenaiError("`Shape` of a missing input")
