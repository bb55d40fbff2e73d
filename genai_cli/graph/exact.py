"""Exact mode: the same graph with f32 wherever it said f16 or bf16. Weights that a matmul or a lookup reads stay as they
are in the file (widening on the way in is exact); everything else is widened once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from genai_cli.graph.ir import Graph, Initializer, Node, ValueInfo

_F32 = np.dtype(np.float32)
_NARROW = {np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)}
_ONNX_FLOAT, _ONNX_NARROW = 1, {10, 16}  # TensorProto.FLOAT; FLOAT16, BFLOAT16
_MATMULS = {"MatMul": (1,), "Gemm": (1,)}


def exact(graph: Graph) -> Graph:
    """A graph whose values are all f32 where they were 16-bit, and whose quantized matmuls take f32 activations."""
    kept = _kept_narrow(graph)
    nodes = [new for node in graph.nodes for new in _exact_node(node, graph, kept)]
    return replace(
        graph,
        inputs=[_wide(value) for value in graph.inputs],
        outputs=[_wide(value) for value in graph.outputs],
        values={name: _wide(value) for name, value in graph.values.items()},
        initializers={name: _weight(weight, name in kept) for name, weight in graph.initializers.items()},
        nodes=nodes,
    )


def _kept_narrow(graph: Graph) -> set[str]:
    """16-bit weights read only as a matmul's B or a Gather's table."""
    kept: set[str] = set()
    dropped: set[str] = set()
    for node in graph.nodes:
        for index, name in enumerate(node.inputs):
            weight = graph.initializers.get(name)
            if weight is None or weight.dtype not in _NARROW:
                continue
            fits = node.domain == "" and (
                index in _MATMULS.get(node.op_type, ()) or (node.op_type, index) == ("Gather", 0)
            )
            (kept if fits else dropped).add(name)
    return kept - dropped


def _exact_node(node: Node, graph: Graph, kept: set[str]) -> list[Node]:
    attrs = {name: _exact_attr(node, name, value) for name, value in node.attrs.items()}
    new = replace(node, attrs=attrs)
    if node.op_type == "MatMulNBits":
        new.attrs["accuracy_level"] = 1  # f32 activations
    if node.op_type == "Gather" and node.domain == "" and node.inputs[0] in kept:
        narrow = f"{node.outputs[0]}/narrow"
        cast = Node("Cast", "", [narrow], [node.outputs[0]], {"to": _ONNX_FLOAT}, f"{node.name}/widen", node.opset)
        return [replace(new, outputs=[narrow]), cast]
    return [new]


def _exact_attr(node: Node, name: str, value: Any) -> Any:
    if name in ("to", "dtype", "output_dtype", "stash_type") and value in _ONNX_NARROW:
        return _ONNX_FLOAT
    if isinstance(value, np.ndarray) and value.dtype in _NARROW:
        return value.astype(_F32)
    return exact(value) if isinstance(value, Graph) else value


def _wide(value: ValueInfo) -> ValueInfo:
    return replace(value, dtype=_F32) if value.dtype in _NARROW else value


def _weight(weight: Initializer, keep: bool) -> Initializer:
    if keep or weight.dtype not in _NARROW:
        return weight
    return replace(weight, dtype=_F32, nbytes=weight.nbytes * 2, array=_once(weight.array))


def _once(array: Callable[[], np.ndarray]) -> Callable[[], np.ndarray]:
    made: list[np.ndarray] = []

    def wide() -> np.ndarray:
        if not made:
            made.append(array().astype(_F32))
        return made[0]

    return wide
