"""Rewrites of weight subgraphs that need no arithmetic: a transposed weight is read transposed."""

from __future__ import annotations

from dataclasses import replace

from genai_cli.graph.ir import Graph, Node


def fold_transposes(graph: Graph) -> Graph:
    """MatMul(x, Transpose(W)) with a rank-2 weight becomes FusedMatMul(x, W, transB=1): W is used where it lies."""
    transposed = {
        node.outputs[0]: node.inputs[0]
        for node in graph.nodes
        if node.op_type == "Transpose" and node.domain == "" and _swaps(node, graph)
    }
    nodes = [_fused(node, transposed) for node in graph.nodes]
    return replace(graph, nodes=nodes)


def _swaps(node: Node, graph: Graph) -> bool:
    weight = graph.initializers.get(node.inputs[0])
    return weight is not None and len(weight.shape) == 2 and list(node.attrs.get("perm", [1, 0])) == [1, 0]


def _fused(node: Node, transposed: dict[str, str]) -> Node:
    if node.op_type != "MatMul" or node.domain != "" or node.inputs[1] not in transposed:
        return node
    inputs = [node.inputs[0], transposed[node.inputs[1]]]
    return Node("FusedMatMul", "com.microsoft", inputs, node.outputs, {"transB": 1}, node.name, 1)
