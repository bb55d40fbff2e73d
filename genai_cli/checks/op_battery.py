"""Every op x dtype x shape that an artifact really uses, one node at a time: native's kernel against ONNX Runtime's.

Inputs are identical on both sides: the artifact's own weights, and values the oracle computed on the way or, for
quantized products, drawn from `seed`. A node that native computes inside a larger kernel (attention over
slots) is said so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from genai_cli.backends.base import Backend
from genai_cli.checks import compare
from genai_cli.checks.limits import Limit, Precision, op_limit
from genai_cli.errors import GenaiError
from genai_cli.graph.ir import Graph, Node
from genai_cli.graph.twins import is_narrow, one_node_model
from genai_cli.ops import lookup
from genai_cli.ops.dtypes import is_float
from genai_cli.ops.registry import run_reference
from genai_cli.report.parity import Check

RunModel = Callable[[bytes, dict[str, np.ndarray]], list[np.ndarray]]  # ORT on a model in memory
ROWS = (1, 4, 64)  # M of quantized products: a decode step, a short and a long prompt
_SUMMING = {
    "MatMul", "Gemm", "MatMulNBits", "FusedMatMul", "Conv", "MoE", "QMoE", "LinearAttention", "Attention", "Softmax",
    "MultiHeadAttention", "CausalConvWithState", "LayerNormalization", "RMSNormalization",
    "SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "GatedRMSNorm",
    "ReduceSum", "ReduceMean",
}  # fmt: skip
_INSIDE = {"GroupQueryAttention": "attention over KV slots is one kernel with its cache; judged by layers and logits"}


@dataclass(frozen=True)
class OpResult:
    """One op on one set of shapes."""

    op: str
    node: str
    shapes: str
    dtype: str
    where: str  # "kernel" or "host", or why it was not compared
    nmse: float | None
    max_abs: float | None
    limit: float
    ok: bool | None  # None: not compared
    repro: str


def native_op(
    backend: Backend, node: Node, inputs: Sequence[np.ndarray | None], constants: frozenset[int] = frozenset()
) -> tuple[list[np.ndarray | None], str]:
    """Run one node the way the engine does: the backend's kernel where its rule accepts, else the host reference.
    `constants` are weights: their values are known beforehand."""
    opdef = lookup(node.op_type, node.domain, node.opset)
    if opdef is None:
        raise GenaiError(f"native has no op `{node.key}` at opset {node.opset}")
    rule = opdef.kernels.get(backend.name)
    given_values = constants | set(opdef.host_inputs)
    known = [None if a is None else (a if i in given_values else (a.shape, a.dtype)) for i, a in enumerate(inputs)]
    if rule is None or opdef.infer is None or rule.accepts(known, node.attrs) is not None:
        return run_reference(opdef, inputs, node.attrs, len(node.outputs)), "host"
    specs = opdef.infer(known, node.attrs)[: rule.num_outputs or None]
    wanted = [i < len(node.outputs) and bool(node.outputs[i]) for i in range(len(specs))]
    outputs = [backend.empty(*spec) if want else None for spec, want in zip(specs, wanted, strict=True)]
    given = [None if a is None else backend.constant(a) for a in inputs]
    backend.record().call(rule.name, given, outputs, node.attrs)
    backend.synchronize()
    return [None if tensor is None else backend.download(tensor) for tensor in outputs], "kernel"


def ort_op(
    run: RunModel, node: Node, inputs: Sequence[np.ndarray | None], constants: frozenset[int]
) -> list[np.ndarray]:
    """The same node alone on ONNX Runtime, 16-bit values widened (its CPU has no bf16 kernels)."""
    wide = [a.astype(np.float32) if a is not None and is_narrow(a.dtype) else a for a in inputs]
    model, feeds = one_node_model(
        node.op_type,
        node.domain,
        {node.domain: node.opset},
        wide,
        node.attrs,
        [bool(n) for n in node.outputs],
        constants,
    )
    return run(model, feeds)


def compare_op(
    backend: Backend,
    run: RunModel,
    node: Node,
    inputs: Sequence[np.ndarray | None],
    constants: frozenset[int],
    repro: str,
) -> OpResult:
    """One node on identical inputs."""
    shapes = " ".join("-" if a is None else f"{a.dtype.name}{list(a.shape)}" for a in inputs)
    dtype = next((a.dtype.name for a in inputs if a is not None and is_float(a.dtype)), "int")
    limit = limit_of(node, inputs)
    bare = OpResult(node.key, node.name, shapes, dtype, "", None, None, limit.nmse, None, repro)
    if node.op_type in _INSIDE:
        return replace(bare, where=_INSIDE[node.op_type])
    got, where = native_op(backend, node, inputs, constants)
    want = ort_op(run, node, inputs, constants)
    present = [a for a, name in zip(got, node.outputs, strict=False) if name and a is not None]
    worst = [_difference(node, a, b, limit) for a, b in zip(present, want, strict=False)]
    return replace(
        bare, where=where, nmse=max(w[0] for w in worst), max_abs=max(w[1] for w in worst), ok=all(w[2] for w in worst)
    )


def _difference(node: Node, got: np.ndarray, want: np.ndarray, limit: Limit) -> tuple[float, float, bool]:
    if got.shape != want.shape:
        return np.inf, np.inf, False
    if not is_float(got.dtype):
        same = bool(np.array_equal(got, want))
        return float(not same), float(not same), same
    a, b = got.astype(np.float64), want.astype(np.float64)
    both = np.isfinite(b)
    if not np.array_equal(np.isfinite(a), both) or not np.array_equal(a[np.isinf(b)], b[np.isinf(b)]):
        return np.inf, np.inf, False
    error = compare.nmse(a[both], b[both])
    if node.op_type in _SUMMING:
        return error, compare.max_abs(a[both], b[both]), error <= limit.nmse
    inside = bool((np.abs(a[both] - b[both]) <= limit.atol + limit.rtol * np.abs(b[both])).all())
    return error, compare.max_abs(a[both], b[both]), inside


def limit_of(node: Node, inputs: Sequence[np.ndarray | None]) -> Limit:
    """From the table, by the dtype computed on and the kind of weights."""
    precision: Precision = "f32"
    if any(a is not None and a.dtype.name == "bfloat16" for a in inputs):
        precision = "bf16"
    elif any(a is not None and a.dtype == np.float16 for a in inputs):
        precision = "f16"
    elif node.op_type in ("MatMulNBits", "QMoE"):
        precision = "q_int8" if node.attrs.get("accuracy_level") == 4 else "q_f32"
    return op_limit(precision)


def quantized_products(graph: Graph, backend: Backend, run: RunModel, seed: int) -> list[OpResult]:
    """Every distinct MatMulNBits shape with its own weights on random rows, M = 1, 4, 64."""
    made = []
    for node in _distinct(graph, {"MatMulNBits"}):
        for rows in ROWS:
            rng = np.random.default_rng([seed, rows])
            inputs = [_weight(graph, name) for name in node.inputs]
            scales = inputs[2]
            assert scales is not None
            inputs[0] = rng.standard_normal((1, rows, int(node.attrs["K"]))).astype(scales.dtype)
            constants = frozenset(i for i, a in enumerate(inputs) if i and a is not None)
            repro = f"--ops --seed {seed}  # {node.name} M={rows}"
            made.append(compare_op(backend, run, node, inputs, constants, repro))
    return made


def _weight(graph: Graph, name: str) -> np.ndarray | None:
    return graph.initializers[name].array() if name in graph.initializers else None


def _distinct(graph: Graph, op_types: set[str]) -> list[Node]:
    """One node for every op type, attributes and weight shapes."""
    seen: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op_type in op_types:
            seen.setdefault(_signature(graph, node), node)
    return list(seen.values())


def _signature(graph: Graph, node: Node) -> str:
    weights = [str(graph.initializers[n].shape) if n in graph.initializers else "" for n in node.inputs]
    return f"{node.key}{weights}{sorted((k, str(v)) for k, v in node.attrs.items())}"


def artifact_ops(
    graph: Graph, values: Sequence[Mapping[str, np.ndarray]], backend: Backend, run: RunModel, model: str
) -> list[OpResult]:
    """Every distinct op x dtype x shape in the graph, on values seen while the oracle ran (one map a step)."""
    made: dict[str, OpResult] = {}
    for seen in values:
        for node in graph.nodes:
            inputs = _inputs(graph, node, seen)
            if (
                inputs is None
                or any(isinstance(value, Graph) for value in node.attrs.values())
                or node.op_type == "Constant"
            ):
                continue
            key = _key(node, inputs)
            if key not in made:
                constants = frozenset(i for i, name in enumerate(node.inputs) if name in graph.initializers)
                made[key] = _judged(backend, run, node, inputs, constants, f"genai parity --ops {model}  # {node.name}")
    return list(made.values())


def _judged(
    backend: Backend, run: RunModel, node: Node, inputs: list[np.ndarray | None], constants: frozenset[int], repro: str
) -> OpResult:
    """A node ONNX Runtime refuses alone is named, never counted as compared."""
    try:
        return compare_op(backend, run, node, inputs, constants, repro)
    except GenaiError as error:
        return OpResult(node.key, node.name, "", "", f"not compared: {error.message}", None, None, 0.0, None, repro)


def _inputs(graph: Graph, node: Node, seen: Mapping[str, np.ndarray]) -> list[np.ndarray | None] | None:
    inputs: list[np.ndarray | None] = []
    for name in node.inputs:
        value = _weight(graph, name) if name in graph.initializers else seen.get(name)
        if name and value is None:
            return None
        inputs.append(value)
    return inputs


def _key(node: Node, inputs: Sequence[np.ndarray | None]) -> str:
    shapes = [None if a is None else (a.dtype.name, a.shape) for a in inputs]
    text = f"{node.key}{shapes}{sorted((k, str(v)) for k, v in node.attrs.items())}"
    return hashlib.sha256(text.encode()).hexdigest()


def ops_check(results: Sequence[OpResult], name: str = "ops") -> Check:
    """The worst op relative to its limit; nodes that were not compared are counted and named."""
    compared = [r for r in results if r.ok is not None]
    bad = [r for r in compared if not r.ok]
    skipped = sorted({r.op for r in results if r.ok is None} - {r.op for r in compared})
    if not compared:
        return Check(
            name, "ops", "not applicable", reason="no op of this kind in the graph", extra={"not_compared": skipped}
        )
    worst = max(compared, key=lambda r: (not r.ok, (r.nmse or 0.0) / max(r.limit, compare.TINY)))
    reason = f"{worst.op} `{worst.node}` {worst.shapes}: NMSE {worst.nmse:.2g}, limit {worst.limit:.0e}" if bad else ""
    return Check(
        name, "ops", "fail" if bad else "pass", len(compared), value=worst.nmse, limit=worst.limit,
        limit_source="design table by op and dtype", worst={"op": worst.op, "node": worst.node, "shapes": worst.shapes},
        reason=reason,
        extra={"repro": worst.repro, "not_compared": skipped, "host": sum(r.where == "host" for r in compared)},
    )  # fmt: skip
