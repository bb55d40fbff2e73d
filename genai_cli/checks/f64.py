"""The graph in f64 on the host: the arbiter where two f32 engines disagree, for models small enough to wait for.

Everything is computed from the first token on, without a cache, by the registry's references: slow, and free of any state.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from genai_cli.checks.paths import Path, Run
from genai_cli.errors import GenaiError
from genai_cli.graph.exact import exact
from genai_cli.graph.io import DecoderIo, decoder_io
from genai_cli.graph.ir import Graph, Node
from genai_cli.ops import lookup

MAX_WEIGHTS = 1 << 25  # elements; 32 Mi in f64 are 256 MiB
_F64 = np.dtype(np.float64)
_FLOAT, _DOUBLE = 1, 11  # TensorProto.FLOAT, DOUBLE
Values = dict[str, np.ndarray]


def f64_run(graph: Graph, path: Path) -> Run:
    """Logits [T, V] of all ids at once, rounded to f32 at the very end. GenaiError when the model is too large, or an
    op has no reference."""
    size = sum(int(np.prod(weight.shape, dtype=np.int64)) for weight in graph.initializers.values())
    if size > MAX_WEIGHTS:
        raise GenaiError(
            f"the f64 oracle holds at most {MAX_WEIGHTS} weights, this model has {size}", hint="--oracle ort-sharp"
        )
    if not decoder_io(graph).input_ids:
        raise GenaiError("the f64 oracle feeds token ids; this decoder reads embeddings", hint="--oracle ort")
    wide = exact(graph)
    io = decoder_io(wide)
    values = {name: _wide(weight.array()) for name, weight in wide.initializers.items()}
    values |= _inputs(wide, io, path.ids)
    _evaluate(wide.nodes, values)
    logits = values[io.logits]
    return Run(logits.reshape(-1, logits.shape[-1]).astype(np.float32), [])


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(_F64) if array.dtype.kind == "f" or array.dtype.name == "bfloat16" else array


def _inputs(graph: Graph, io: DecoderIo, ids: np.ndarray) -> Values:
    total = len(ids)
    made: Values = {
        io.input_ids or "": ids[None],
        io.attention_mask or "": np.ones((1, total), np.int64),
        io.position_ids or "": np.arange(total)[None],
        io.write_indices or "": np.array([0]),
        io.kv_seq_len or "": np.array([total]),
        io.cache_position or "": np.arange(total),
    }
    buffered = {name for node in graph.nodes if node.attrs.get("sliding_window_cache") for name in node.inputs[3:5]}
    for binding in io.kv:
        heads, dim = binding.num_heads, binding.head_dim
        room = binding.capacity or (max(total, binding.window or 0) if binding.past in buffered else 0)
        shape = (1, room, heads * dim) if binding.axes == "BSM" else (1, heads, room, dim)
        made[binding.past] = np.zeros(shape, _F64)
    made |= {state.past: np.zeros(state.shape, _F64) for state in io.states}
    dtypes = {value.name: value.dtype for value in graph.inputs}
    return {n: a if a.dtype == _F64 else a.astype(dtypes[n] or a.dtype) for n, a in made.items() if n in dtypes}


def _evaluate(nodes: list[Node], values: Values) -> None:
    for node in nodes:
        if node.op_type == "If" and node.domain == "":
            branch = "then_branch" if bool(values[node.inputs[0]].reshape(-1)[0]) else "else_branch"
            inner: Graph = node.attrs[branch]
            scope = values | {name: _wide(weight.array()) for name, weight in inner.initializers.items()}
            _evaluate(inner.nodes, scope)
            made = [scope[value.name] for value in inner.outputs]
        else:
            made = _outputs(node, [values[name] if name else None for name in node.inputs])
        values |= {name: array for name, array in zip(node.outputs, made, strict=False) if name}


def _outputs(node: Node, inputs: list[np.ndarray | None]) -> list[np.ndarray]:
    opdef = lookup(node.op_type, node.domain, node.opset)
    if opdef is None:
        raise GenaiError(f"the f64 oracle has no reference for `{node.key}` at opset {node.opset}")
    if node.op_type in ("SkipSimplifiedLayerNormalization", "SkipLayerNormalization"):
        return _skip_norm(node, inputs)
    attrs = {name: _double(name, value) for name, value in node.attrs.items()}
    if "num_node_outputs" in opdef.attributes:
        attrs["num_node_outputs"] = len(node.outputs)
    with np.errstate(all="ignore"):
        made: Any = opdef.reference(*inputs, **attrs)
    return [np.asarray(a) for a in (made if isinstance(made, tuple | list) else (made,))]


def _skip_norm(node: Node, inputs: list[np.ndarray | None]) -> list[np.ndarray]:
    """The reference keeps the sum in the dtype of 16- and 32-bit engines; here it stays f64. Outputs: y, -, -, sum."""
    simple = node.op_type == "SkipSimplifiedLayerNormalization"
    padded: list[np.ndarray | None] = [*inputs, None, None]
    x, skip, gamma, *rest = padded
    beta, bias = (None, rest[0]) if simple else (rest[0], rest[1])
    assert x is not None
    assert skip is not None
    assert gamma is not None
    total = x + skip if bias is None else x + skip + bias
    centred = total if simple else total - total.mean(-1, keepdims=True)
    scaled = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + float(node.attrs.get("epsilon", 1e-5)))
    normed = scaled * gamma if beta is None else scaled * gamma + beta
    return [normed, np.empty(0), np.empty(0), total]


def _double(name: str, value: Any) -> Any:
    if name in ("to", "dtype") and value == _FLOAT:
        return _DOUBLE
    return _wide(value) if isinstance(value, np.ndarray) else value
