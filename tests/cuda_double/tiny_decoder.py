"""A decoder of two unequal layers as an exporter writes it: real attention, random weights, small for the double."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from genai_cli.graph.ir import Graph
from genai_cli.graph.loader import load_graph

VOCAB, HIDDEN, INNER = 67, 32, 48
LAYERS = ((4, 2, 8), (6, 3, 16))  # heads, key/value heads, head size
ROTARY_POSITIONS = 4096
CODES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


@dataclass
class Builder:
    """Nodes and weights, in order of making."""

    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(5)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def weight(self, name: str, *shape: int, scale: float = 1.0) -> str:
        array = (self.random.standard_normal(shape) * scale).astype(self.dtype)
        return self.constant(name, array)

    def constant(self, name: str, array: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(self, op: str, inputs: list[str], name: str, domain: str = "", outputs: int = 1, **attrs: Any) -> str:
        outs = [name] + [f"{name}_{i}" for i in range(1, outputs)]
        self.nodes.append(helper.make_node(op, inputs, outs, name=f"/{name}", domain=domain, **attrs))
        return name


def lengths(b: Builder) -> tuple[str, str]:
    """seqlens_k and total_sequence_length from the mask."""
    total = b.node("ReduceSum", ["attention_mask", b.constant("one", np.array([1]))], "mask_sum", keepdims=0)
    less = b.node("Sub", [total, "one"], "mask_less")
    seqlens = b.node("Cast", [less], "seqlens_k", to=TensorProto.INT32)
    width = b.node("Shape", ["attention_mask"], "mask_shape", start=1, end=2)
    return seqlens, b.node("Cast", [width], "total_len", to=TensorProto.INT32)


def attention(b: Builder, i: int, x: str, shared: tuple[str, str, str, str]) -> str:
    heads, kv_heads, dim = LAYERS[i]
    width = (heads + 2 * kv_heads) * dim
    qkv = b.node("MatMul", [x, b.weight(f"qkv{i}", HIDDEN, width, scale=HIDDEN**-0.5)], f"packed{i}")
    cos, sin = (
        b.constant(f"{name}{i}", table) for name, table in zip(("cos", "sin"), rotary(dim, b.dtype), strict=True)
    )
    past = [f"past_key_values.{i}.{kind}" for kind in ("key", "value")]
    inputs = [qkv, "", "", *past, shared[0], shared[1], cos, sin]
    outs = [f"attended{i}", f"present.{i}.key", f"present.{i}.value"]
    b.nodes.append(
        helper.make_node(
            "GroupQueryAttention", inputs, outs, domain="com.microsoft", num_heads=heads, kv_num_heads=kv_heads,
            do_rotary=1, **({"local_window_size": 40} if i else {}),
        )
    )  # fmt: skip
    return b.node("MatMul", [outs[0], b.weight(f"o{i}", heads * dim, HIDDEN, scale=0.2)], f"o_out{i}")


def rotary(dim: int, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(ROTARY_POSITIONS)[:, None] * 1e4 ** (-np.arange(dim // 2) / (dim // 2))
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def feed_forward(b: Builder, i: int, x: str) -> str:
    gate, up = (
        b.node("MatMul", [x, b.weight(f"{n}{i}", HIDDEN, INNER, scale=0.2)], f"{n}_out{i}") for n in ("gate", "up")
    )
    opened = b.node("Mul", [gate, b.node("Sigmoid", [gate], f"sigmoid{i}")], f"silu{i}")
    inner = b.node("Mul", [opened, up], f"inner{i}")
    return b.node("MatMul", [inner, b.weight(f"down{i}", INNER, HIDDEN, scale=0.2)], f"down_out{i}")


def skip_norm(b: Builder, residual: str, x: str, name: str) -> tuple[str, str]:
    """The normed sum, and the sum."""
    gamma = b.constant(f"{name}_gamma", np.ones(HIDDEN, b.dtype))
    outs = [name, "", "", f"{name}_sum"]
    made = helper.make_node(
        "SkipSimplifiedLayerNormalization", [residual, x, gamma], outs, domain="com.microsoft", epsilon=1e-5
    )
    b.nodes.append(made)
    return name, outs[3]


def body(b: Builder) -> None:
    seqlens, total = lengths(b)
    shared = (seqlens, total, "", "")
    residual = b.node("Gather", [b.weight("embed", VOCAB, HIDDEN), "input_ids"], "embedded")
    gamma = b.constant("first_gamma", np.ones(HIDDEN, b.dtype))
    x = b.node("SimplifiedLayerNormalization", [residual, gamma], "normed", epsilon=1e-5)
    for i in range(len(LAYERS)):
        x, residual = skip_norm(b, residual, attention(b, i, x, shared), f"mid{i}")
        x, residual = skip_norm(b, residual, feed_forward(b, i, x), f"end{i}")
    b.node("MatMul", [x, b.weight("head", HIDDEN, VOCAB, scale=0.3)], "logits")


def make(folder: Path, dtype: str = "float32") -> Graph:
    """Write the model and load it as the product does."""
    b = Builder(np.dtype(dtype))
    body(b)
    code = CODES[dtype]
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"]),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"]),
    ]
    outputs = [helper.make_tensor_value_info("logits", code, ["batch", "sequence", VOCAB])]
    for i, (_, kv_heads, dim) in enumerate(LAYERS):
        for kind in ("key", "value"):
            past, present = f"past_key_values.{i}.{kind}", f"present.{i}.{kind}"
            inputs.append(helper.make_tensor_value_info(past, code, ["batch", kv_heads, "past", dim]))
            outputs.append(helper.make_tensor_value_info(present, code, ["batch", kv_heads, "total", dim]))
    graph = helper.make_graph(b.nodes, "tiny", inputs, outputs, b.weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    file = folder / f"{dtype}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), file)
    return load_graph(file)
