"""Launches of elementwise kernels (native/cuda/elementwise.cu)."""

from __future__ import annotations

import numpy as np

from genai_cli.backends.base import Tensor
from genai_cli.backends.cuda_launch import (
    Call,
    Launch,
    Strided,
    address,
    broadcast_strides,
    ctype,
    double,
    flat,
    integer,
    integers,
    plans,
    real,
    size,
    walk_args,
)

SOURCE = "elementwise"
BINARY = ("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "And", "Or", "Xor")
COMPARISONS = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
NUMBERS = ("Neg", "Abs", "Relu", "Sign", "Not")
FUNCTIONS = (
    "Exp",
    "Log",
    "Sqrt",
    "Reciprocal",
    "Erf",
    "Sin",
    "Cos",
    "Tanh",
    "Floor",
    "Ceil",
    "Round",
    "Sigmoid",
    "Softplus",
)
QUICK_GELU_ALPHA = 1.702  # the op's default, com.microsoft::QuickGelu


def _count(tensor: Tensor) -> int:
    return size(tensor.shape)


@plans(*BINARY, *COMPARISONS)
def _binary(call: Call) -> list[Launch]:
    return _two_operands(call, call.kernel)


@plans("Mod")
def _mod(call: Call) -> list[Launch]:
    return _two_operands(call, "TruncMod" if call.attrs.get("fmod", 0) else "FloorMod")


def _two_operands(call: Call, op: str) -> list[Launch]:
    a, b, y = call.input(0), call.input(1), call.output()
    types = f"<{op}, {ctype(a)}, {ctype(b)}, {ctype(y)}>"
    args = (address(a), address(b), address(y), integer(_count(y)))
    if a.shape == b.shape:
        return flat(SOURCE, "binary" + types, _count(y), args)
    walk = Strided(list(y.shape), [broadcast_strides(x.shape, y.shape) for x in (a, b)]).merged()
    return flat(SOURCE, "binary_strided" + types, _count(y), (*args, *walk_args(walk, call.kernel)))


@plans("Where")
def _where(call: Call) -> list[Launch]:
    operands, y = [call.input(i) for i in range(3)], call.output()
    walk = Strided(list(y.shape), [broadcast_strides(x.shape, y.shape) for x in operands]).merged()
    args = (*map(address, operands), address(y), integer(_count(y)), *walk_args(walk, call.kernel))
    return flat(SOURCE, f"where<{ctype(y)}>", _count(y), args)


def _one_operand(call: Call, op: str, alpha: float = 0.0) -> list[Launch]:
    x, y = call.input(0), call.output()
    args = (address(x), address(y), integer(_count(x)), real(alpha))
    return flat(SOURCE, f"unary<{op}, {ctype(x)}>", _count(x), args)


@plans(*NUMBERS, *FUNCTIONS)
def _unary(call: Call) -> list[Launch]:
    return _one_operand(call, call.kernel)


@plans("Swish")
def _swish(call: Call) -> list[Launch]:
    return _one_operand(call, "Swish", float(call.attrs.get("alpha", 1.0)))


@plans("QuickGelu")
def _quick_gelu(call: Call) -> list[Launch]:
    return _one_operand(call, "Swish", float(call.attrs.get("alpha", QUICK_GELU_ALPHA)))


@plans("Gelu")
def _gelu(call: Call) -> list[Launch]:
    return _one_operand(call, "GeluTanh" if call.attrs.get("approximate", "none") == "tanh" else "GeluErf")


@plans("FastGelu", "BiasGelu")
def _biased_gelu(call: Call) -> list[Launch]:
    op = "GeluTanh" if call.kernel == "FastGelu" else "GeluErf"
    x, bias, y = call.input(0), call.optional(1), call.output()
    if bias is None:
        return _one_operand(call, op)
    args = (address(x), address(bias), address(y), *integers(_count(x), x.shape[-1]))
    return flat(SOURCE, f"biased<{op}, {ctype(x)}>", _count(x), args)


@plans("Clip")
def _clip(call: Call) -> list[Launch]:
    x, y = call.input(0), call.output()
    low, high = (float(call.attrs.get(name, end)) for name, end in (("min", -np.inf), ("max", np.inf)))
    pointers = (address(x), address(call.optional(1)), address(call.optional(2)), address(y))
    args = (*pointers, integer(_count(x)), double(low), double(high))
    return flat(SOURCE, f"clip<{ctype(x)}>", _count(x), args)


@plans("Cast")
def _cast(call: Call) -> list[Launch]:
    x, y = call.input(0), call.output()
    low, high = 0.0, 0.0
    if y.dtype.kind in "iu":
        limits = np.iinfo(y.dtype)
        low, high = float(limits.min), float(limits.max)
    args = (address(x), address(y), integer(_count(x)), double(low), double(high))
    return flat(SOURCE, f"cast<{ctype(x)}, {ctype(y)}>", _count(x), args)


@plans("genai.SiluMul")
def _silu_mul(call: Call) -> list[Launch]:
    return _two_operands(call, "SiluMul")


@plans("GatedAdd")
def _gated_add(call: Call) -> list[Launch]:
    operands, y = [call.input(i) for i in range(3)], call.output()
    walk = Strided(list(y.shape), [broadcast_strides(x.shape, y.shape) for x in operands]).merged()
    args = (*map(address, operands), address(y), integer(_count(y)), *walk_args(walk, call.kernel))
    return flat(SOURCE, f"gated_add<{ctype(y)}>", _count(y), args)
