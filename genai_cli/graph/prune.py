"""Dead code: what no output needs is never run."""

from __future__ import annotations

from collections.abc import Iterable

from genai_cli.graph.ir import Graph, Node
from genai_cli.graph.loader import node_inputs


def live_nodes(nodes: list[Node], wanted: Iterable[str]) -> list[Node]:
    """The nodes that `wanted` values need, in order."""
    needed = set(wanted)
    live: list[Node] = []
    for node in reversed(nodes):
        if needed.intersection(node.outputs):
            needed.update(node_inputs(node))
            live.append(node)
    return live[::-1]


def prune(graph: Graph, wanted: Iterable[str]) -> Graph:
    """A graph with only the nodes and initializers that `wanted` values need. Shares nodes with the old one."""
    nodes = live_nodes(graph.nodes, wanted)
    used = {name for node in nodes for name in node_inputs(node)} | set(wanted)
    weights = {name: weight for name, weight in graph.initializers.items() if name in used}
    return Graph(
        graph.name, graph.inputs, graph.outputs, nodes, weights, graph.values, graph.opsets, graph.ir_version,
        graph.producer,
    )  # fmt: skip
