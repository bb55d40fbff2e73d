"""Graph -> plan: what is run for all logits, for the last row, or for the KV alone; and what native cannot run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from genai_cli.engine.abstract import AbstractBackend, AbstractSlot
from genai_cli.engine.arena import Arena
from genai_cli.engine.decomposed import bind_decomposed
from genai_cli.engine.feeds import cached_inputs, dynamic, known_inputs, step_inputs
from genai_cli.engine.probe import settle
from genai_cli.engine.trace import LAST_ROW, Constants, HostStep, Tracer
from genai_cli.engine.values import Static, Value
from genai_cli.errors import GenaiError
from genai_cli.graph.attention import INTERNAL_DOMAIN, bind_attention
from genai_cli.graph.fuse import fold_transposes
from genai_cli.graph.io import DecoderIo
from genai_cli.graph.ir import Graph, Node
from genai_cli.graph.loader import node_inputs
from genai_cli.graph.prune import live_nodes, prune
from genai_cli.ops import lookup
from genai_cli.ops.registry import unknown_attributes

# Ops whose row t of the output depends only on row t of their first input: logits of the last row need only that row.
_ROWWISE = {
    ("", "MatMul"), ("com.microsoft", "FusedMatMul"), ("com.microsoft", "MatMulNBits"), ("", "Cast"), ("", "Tanh"),
    ("", "Sigmoid"), ("", "Identity"), ("", "SimplifiedLayerNormalization"), ("", "RMSNormalization"),
    ("", "LayerNormalization"),
}  # fmt: skip
_ROWWISE_WITH_SCALAR = {("", "Mul"), ("", "Div"), ("", "Add"), ("", "Sub")}


@dataclass(frozen=True)
class Unsupported:
    """A node native cannot run, and why."""

    node: str
    op: str
    reason: str


@dataclass
class Plan:
    """Nodes to trace per kind of step, after rewrites. `guards` are If conditions that depend on the past length."""

    graph: Graph
    io: DecoderIo
    nodes: dict[str, list[Node]]  # "all", "last", "none"
    guards: list[str]
    host_steps: list[HostStep]  # as traced for one new token
    past_dependent: bool  # every step is recorded anew
    embed_width: int

    def evaluate(self, names: Sequence[str], num_new: int, past_len: int, backend: str = "cpu") -> dict[str, Value]:
        """Values of `names` at (T, past_len), without running kernels."""
        nodes = live_nodes(self.graph.nodes, names)
        return trace_abstract(
            self.graph, self.io, nodes, num_new, past_len, backend, frozenset(names), self.embed_width
        ).env

    def guard(self, num_new: int, past_len: int) -> tuple[bool, ...]:
        """Which branches a step at (T, past_len) takes."""
        if not self.guards:
            return ()
        values = self.evaluate(self.guards, num_new, past_len)
        return tuple(bool(_static(values[name]).reshape(-1)[0]) for name in self.guards)


def unsupported(graph: Graph) -> list[Unsupported]:
    """Every node without a registered op or with an attribute the op does not know. Empty: native covers the graph."""
    found: list[Unsupported] = []
    for node in graph.nodes:
        for inner in [value for value in node.attrs.values() if isinstance(value, Graph)]:
            found += unsupported(inner)
        if node.op_type == "If" and node.domain == "":
            continue
        opdef = lookup(node.op_type, node.domain, node.opset)
        if opdef is None:
            found.append(Unsupported(node.name, node.key, f"no such op at opset {node.opset}"))
        elif unknown := [name for name in unknown_attributes(opdef, node.attrs) if name != "assumes"]:
            found.append(Unsupported(node.name, node.key, f"attribute {', '.join(unknown)}"))
    return found


def make_plan(graph: Graph, io: DecoderIo, context_len: int | None, backend: str = "cpu", embed_width: int = 0) -> Plan:
    """Rewrite, refuse what cannot run (all of it listed), prove the rewrites, and split off the tail for the last row."""
    presents = [binding.present for binding in io.kv] + [state.present for state in io.states]
    bound = bind_attention(fold_transposes(prune(graph, [io.logits, *presents])), io)
    refuse(unsupported(prune(bound, [io.logits, *presents])))
    plain = Plan(bound, io, {"all": bound.nodes}, [], [], False, embed_width)
    bound = bind_decomposed(bound, io, lambda names, new, past: plain.evaluate(names, new, past, backend))
    internal = [node for node in bound.nodes if node.domain == INTERNAL_DOMAIN]
    draft = Plan(bound, io, {"all": bound.nodes}, [], [], False, embed_width)
    settle(internal, lambda names, new, past: draft.evaluate(names, new, past, backend), context_len)
    live = prune(bound, [io.logits, *presents])
    plan = replace(draft, graph=live, nodes=_step_nodes(live, io.logits, presents))
    sample = trace_abstract(
        live, io, plan.nodes["all"], 1, min(6, (context_len or 8) - 1), backend, frozenset({io.logits}), embed_width
    )
    guards = [
        node.inputs[0] for node in live.nodes if node.op_type == "If" and _tainted(sample.env.get(node.inputs[0]))
    ]
    return replace(plan, guards=guards, host_steps=sample.host_steps, past_dependent=sample.one_shot)


def refuse(nodes: list[Unsupported]) -> None:
    """GenaiError listing every unsupported op once, with its count and reason."""
    if not nodes:
        return
    counts = Counter((node.op, node.reason) for node in nodes)
    listed = "; ".join(f"`{op}` x {count} ({reason})" for (op, reason), count in sorted(counts.items()))
    raise GenaiError(
        f"native cannot run {len(nodes)} nodes of this graph: {listed}",
        hint="run it with `--backend ort`, or see `genai inspect MODEL`",
    )


def trace_abstract(
    graph: Graph, io: DecoderIo, nodes: list[Node], num_new: int, past_len: int, backend: str, keep: frozenset[str],
    embed_width: int = 0,
) -> Tracer:  # fmt: skip
    """Trace shapes and known values at (T, past_len) without memory or kernels."""
    abstract = AbstractBackend(backend)
    slots = [
        AbstractSlot(index, binding.num_heads, binding.head_dim, binding.dtype) for index, binding in enumerate(io.kv)
    ]
    states = {state.past: abstract.empty(state.shape, state.dtype) for state in io.states}
    env: dict[str, Value] = dynamic(step_inputs(graph, io, abstract, num_new, embed_width) | states)
    env |= known_inputs(graph, io, num_new, past_len) | cached_inputs(io, num_new, past_len)
    constants = Constants(abstract)
    tracer = Tracer(
        abstract, abstract.record(), Arena(abstract), constants, graph.initializers, slots, env, keep
    )  # fmt: skip
    tracer.run(nodes)
    return tracer


def _static(value: Value) -> np.ndarray:
    if not isinstance(value, Static):
        raise GenaiError("an If condition depends on data and on the past length at once; this is not supported")
    return value.array


def _tainted(value: Value | None) -> bool:
    return isinstance(value, Static) and value.tainted


def _step_nodes(graph: Graph, logits: str, presents: list[str]) -> dict[str, list[Node]]:
    nodes = {"all": graph.nodes, "none": live_nodes(graph.nodes, presents)}
    nodes["last"] = _last_row_nodes(graph, logits)
    return nodes


def _last_row_nodes(graph: Graph, logits: str) -> list[Node]:
    """The rowwise ops that end in the logits read only the last row."""
    tail, cut = _tail(graph, logits)
    if not tail:
        return graph.nodes
    row = f"{cut}/last_row"
    nodes: list[Node] = []
    for node in graph.nodes:
        if id(node) == id(tail[0]):
            nodes.append(Node(LAST_ROW, INTERNAL_DOMAIN, [cut], [row], {}, "last_row", 1))
            node = replace(node, inputs=[row if name == cut else name for name in node.inputs])
        nodes.append(node)
    return nodes


def _tail(graph: Graph, logits: str) -> tuple[list[Node], str]:
    producers = {name: node for node in graph.nodes for name in node.outputs}
    readers = Counter(name for node in graph.nodes for name in node_inputs(node))
    tail: list[Node] = []
    value = logits
    while (node := producers.get(value)) is not None and _rowwise(node, graph):
        if len([name for name in node.outputs if name]) != 1 or (tail and readers[value] != 1):
            break
        tail.append(node)
        value = _row_input(node, graph)
    return tail[::-1], value


def _row_input(node: Node, graph: Graph) -> str:
    """The input whose rows the node maps; the other is a constant."""
    return next(name for name in node.inputs if name and not _is_constant(name, graph))


def _is_constant(name: str, graph: Graph) -> bool:
    return name in graph.initializers or any(name in n.outputs and n.op_type == "Constant" for n in graph.nodes)


def _rowwise(node: Node, graph: Graph) -> bool:
    key = (node.domain, node.op_type)
    moving = [name for name in node.inputs if name and not _is_constant(name, graph)]
    if key in _ROWWISE:
        return len(moving) == 1 and moving[0] == node.inputs[0] and node.attrs.get("axis", -1) == -1
    if key in _ROWWISE_WITH_SCALAR:
        return len(moving) == 1 and all(_is_row_or_scalar(name, graph) for name in node.inputs if name not in moving)
    return False


def _is_row_or_scalar(name: str, graph: Graph) -> bool:
    weight = graph.initializers.get(name)
    if weight is not None:
        return len(weight.shape) <= 1
    node = next(node for node in graph.nodes if name in node.outputs)
    return node.op_type == "Constant" and np.ndim(node.attrs.get("value", 0.0)) <= 1
