"""Whether the tokens of a step meet only in attention: then a step of R tokens serves R sequences with one token each.

Proved on the plan, not by names: the graph is traced abstractly with two different T; the axes of a value whose size
differs are its token axes. No value may have two of them (pairs of tokens), operands of an op must carry them at the same
place, and no op may sum, sort, cut or join along one. Attention is told by the backend whose token is whose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from genai_cli.engine.plan import Plan, trace_abstract
from genai_cli.engine.values import Dynamic, Static, Value
from genai_cli.graph.attention import INTERNAL_DOMAIN
from genai_cli.graph.ir import Node

_TRACED = (13, 17)  # two lengths; which ones does not matter
_ATTENTION_BIAS = 6  # input of genai::Attention

_ELEMENTWISE = frozenset({
    "Abs", "Add", "And", "Cast", "Clip", "Cos", "Div", "Elu", "Equal", "Erf", "Exp", "Expand", "FastGelu", "Gelu",
    "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less",
    "LessOrEqual", "Log", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "QuickGelu", "Reciprocal", "Relu",
    "Sigmoid", "Sign", "Sin", "Softplus", "Sqrt", "Sub", "Swish", "Tanh", "Where", "BiasGelu",
})  # fmt: skip
_MOVES = frozenset({
    "Constant", "ConstantOfShape", "Flatten", "Range", "Reshape", "Shape", "Size", "Squeeze", "Transpose",
    "Unsqueeze",
})  # fmt: skip
_LAST_AXIS = frozenset({
    "LayerNormalization", "LpNormalization", "RMSNormalization", "SimplifiedLayerNormalization",
    "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "MoE", "QMoE", "MatMulNBits", "Concat", "Split",
    "Softmax", "LogSoftmax", "TopK",
})  # fmt: skip
_REDUCE = frozenset({
    "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ReduceSumSquare", "ReduceL2",
})  # fmt: skip
_PRODUCTS = frozenset({"MatMul", "FusedMatMul", "Gemm"})
_TABLES = frozenset({"Gather", "GatherBlockQuantized"})


@dataclass
class _Traced:
    """One value at both lengths."""

    first: Value | None
    second: Value | None

    @property
    def axes(self) -> frozenset[int]:
        """Token axes, counted from the end (-1: the last)."""
        a, b = _shape(self.first), _shape(self.second)
        if len(a) != len(b):
            return frozenset({-1, -2})  # the rank depends on T: as bad as pairs
        return frozenset(i - len(a) for i in range(len(a)) if a[i] != b[i])

    @property
    def rank(self) -> int:
        return len(_shape(self.first))

    @property
    def moves(self) -> bool:
        """Computed anew by every step."""
        return isinstance(self.first, Dynamic)


def _shape(value: Value | None) -> tuple[int, ...]:
    if isinstance(value, Dynamic):
        return tuple(value.tensor.shape)
    return tuple(value.array.shape) if isinstance(value, Static) else ()


def mixing(plan: Plan) -> str:
    """Why a step cannot serve one token each of several sequences; "" when it can."""
    if plan.io.states:
        return "the decoder carries recurrent state"
    if plan.guards:
        return "branches depend on the length of the sequence"
    if plan.past_dependent:
        return "every step is recorded anew for its length"
    if not plan.io.kv:
        return "the graph has no KV"
    first, second = (_values(plan, num_new) for num_new in _TRACED)
    traced = {name: _Traced(first.get(name), second.get(name)) for name in first}
    for node in plan.nodes["all"]:
        if reason := _mixes(node, traced):
            return f"`{node.key}` {reason}"
    return ""


def _values(plan: Plan, num_new: int) -> dict[str, Value]:
    nodes, past = plan.nodes["all"], 7
    names = frozenset(name for node in nodes for name in node.outputs if name)
    return trace_abstract(plan.graph, plan.io, nodes, num_new, past, "cpu", names, plan.embed_width).env


def _mixes(node: Node, traced: dict[str, _Traced]) -> str:
    outputs = [traced[name] for name in node.outputs if name in traced]
    if not any(output.moves for output in outputs):
        return ""  # known before any token is
    inputs = [traced.get(name, _Traced(None, None)) for name in node.inputs]
    if node.domain == INTERNAL_DOMAIN:
        bias = node.inputs[_ATTENTION_BIAS] if len(node.inputs) > _ATTENTION_BIAS else ""
        return "adds a bias to the scores" if bias else ""
    if any(len(value.axes) > 1 for value in [*inputs, *outputs] if value.moves):
        return "makes pairs of tokens"
    if any(value.axes and not value.moves for value in inputs) and node.op_type not in _MOVES:
        return "meets a constant that counts the tokens of a step"
    check = _CHECKS.get(node.op_type)
    return check(node, inputs) if check else "is not known to treat every token by itself"


def _together(node: Node, inputs: list[_Traced]) -> str:
    """Elementwise: token axes must lie at the same place."""
    return "combines tokens at different places" if len({v.axes for v in inputs if v.axes}) > 1 else ""


def _nothing(node: Node, inputs: list[_Traced]) -> str:
    return ""


def _along(node: Node, inputs: list[_Traced]) -> str:
    """Norms, joins and the like: the axis (from it to the end for norms) must be none of tokens."""
    old = node.op_type.endswith("Softmax") and node.opset < 13  # flattens to [before axis, the rest]
    axis = node.attrs.get("axis", 0 if node.op_type == "Split" else 1 if old else -1)
    rank = max(value.rank for value in inputs)
    axis = axis - rank if axis >= 0 else axis
    norm = old or "Normalization" in node.op_type
    touched = range(axis, 0) if norm else [axis]
    if any(index in value.axes for value in inputs for index in touched):
        return "works along the tokens"
    return _together(node, inputs)


def _reduced(node: Node, inputs: list[_Traced]) -> str:
    axes = node.attrs.get("axes")
    if axes is None and len(inputs) > 1 and isinstance(inputs[1].first, Static):
        axes = inputs[1].first.array.reshape(-1).tolist()
    data = inputs[0]
    touched = [axis - data.rank if axis >= 0 else axis for axis in axes or range(-data.rank, 0)]
    return "sums over tokens" if data.axes & set(touched) else ""


def _product(node: Node, inputs: list[_Traced]) -> str:
    """The summed axis must not be that of tokens, and at most one operand may have tokens."""
    turned = [bool(node.attrs.get(name, 0)) for name in ("transA", "transB")]
    summed = [-2 if turned[0] else -1, -1 if turned[1] else -2]
    if any(axis in value.axes for axis, value in zip(summed, inputs[:2], strict=True)):
        return "sums over tokens"
    if len(inputs) > 2 and inputs[2].axes:
        return "adds a matrix of tokens"
    return "multiplies tokens by tokens" if inputs[0].axes and inputs[1].axes else ""


def _looked_up(node: Node, inputs: list[_Traced]) -> str:
    return "picks among tokens" if inputs[0].axes else ""


def _sliced(node: Node, inputs: list[_Traced]) -> str:
    axes = inputs[3].first if len(inputs) > 3 else None
    data = inputs[0]
    listed = axes.array.reshape(-1).tolist() if isinstance(axes, Static) else range(data.rank)
    touched = {axis - data.rank if axis >= 0 else axis for axis in listed}
    return "cuts along the tokens" if data.axes & touched else ""


def _rotary(node: Node, inputs: list[_Traced]) -> str:
    """Angles must come with the token: ids of positions, or cosines and sines, one row each."""
    return "" if any(value.axes for value in inputs[1:]) else "counts positions from one start"


_Check = Callable[[Node, list[_Traced]], str]
_CHECKS: dict[str, _Check] = {
    **dict.fromkeys(_ELEMENTWISE, _together),
    **dict.fromkeys(_MOVES, _nothing),
    **dict.fromkeys(_LAST_AXIS, _along),
    **dict.fromkeys(_REDUCE, _reduced),
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys(_TABLES, _looked_up),
    "Slice": _sliced,
    "RotaryEmbedding": _rotary,
}
