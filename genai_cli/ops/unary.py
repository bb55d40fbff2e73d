"""Functions of one element: mathematics and activations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from genai_cli.ops.infer import boolean, same
from genai_cli.ops.registry import op

Array = np.ndarray[Any, Any]


@op(since=6, infer=same)
def Abs(x: Array) -> Array:
    return np.abs(x)


@op(since=6, infer=same)
def Neg(x: Array) -> Array:
    return np.negative(x)


@op(since=9, infer=same)
def Sign(x: Array) -> Array:
    return np.sign(x)


@op(since=6, infer=same)
def Ceil(x: Array) -> Array:
    return np.ceil(x)


@op(since=6, infer=same)
def Floor(x: Array) -> Array:
    return np.floor(x)


@op(since=11, infer=same)
def Round(x: Array) -> Array:
    """Half to even."""
    return np.rint(x)


@op(since=6, infer=same)
def Reciprocal(x: Array) -> Array:
    return np.reciprocal(x)


@op(since=6, infer=same)
def Sqrt(x: Array) -> Array:
    return np.sqrt(x)


@op(since=6, infer=same)
def Exp(x: Array) -> Array:
    return np.exp(x)


@op(since=6, infer=same)
def Log(x: Array) -> Array:
    return np.log(x)


@op(since=7, infer=same)
def Sin(x: Array) -> Array:
    return np.sin(x)


@op(since=7, infer=same)
def Cos(x: Array) -> Array:
    return np.cos(x)


@op(since=7, infer=same)
def Tan(x: Array) -> Array:
    return np.tan(x)


@op(since=7, infer=same)
def Asin(x: Array) -> Array:
    return np.arcsin(x)


@op(since=7, infer=same)
def Acos(x: Array) -> Array:
    return np.arccos(x)


@op(since=7, infer=same)
def Atan(x: Array) -> Array:
    return np.arctan(x)


@op(since=9, infer=same)
def Sinh(x: Array) -> Array:
    return np.sinh(x)


@op(since=9, infer=same)
def Cosh(x: Array) -> Array:
    return np.cosh(x)


@op(since=6, infer=same)
def Tanh(x: Array) -> Array:
    return np.tanh(x)


@op(since=9, infer=same)
def Asinh(x: Array) -> Array:
    return np.arcsinh(x)


@op(since=9, infer=same)
def Acosh(x: Array) -> Array:
    return np.arccosh(x)


@op(since=9, infer=same)
def Atanh(x: Array) -> Array:
    return np.arctanh(x)


@op(since=9, infer=same)
def Erf(x: Array) -> Array:
    """The C library's erf in f64: numpy has none, and a polynomial would need its own error bound."""
    return np.fromiter(map(math.erf, x.ravel().tolist()), np.float64, x.size).reshape(x.shape)


@op(since=9, infer=boolean, like=None)
def IsNaN(x: Array) -> Array:
    return np.isnan(x)


@op(since=10, infer=boolean, like=None)
def IsInf(x: Array, *, detect_negative: int = 1, detect_positive: int = 1) -> Array:
    return np.isinf(x) & (((x < 0) & bool(detect_negative)) | ((x > 0) & bool(detect_positive)))


@op(since=6, infer=same)
def Sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


@op(infer=same)
def Softplus(x: Array) -> Array:
    return np.logaddexp(x, np.zeros((), x.dtype))


@op(infer=same)
def Softsign(x: Array) -> Array:
    return x / (1 + np.abs(x))


@op(since=6, infer=same)
def Relu(x: Array) -> Array:
    return np.maximum(x, x.dtype.type(0))


@op(since=6, infer=same)
def LeakyRelu(x: Array, *, alpha: float = 0.01) -> Array:
    return np.where(x < 0, x * alpha, x)


@op(since=6, infer=same)
def Elu(x: Array, *, alpha: float = 1.0) -> Array:
    return np.where(x < 0, alpha * np.expm1(x), x)


@op(since=6, infer=same)
def Selu(x: Array, *, alpha: float = 1.6732632423543772, gamma: float = 1.0507009873554805) -> Array:
    return gamma * np.where(x > 0, x, alpha * np.expm1(x))


@op(since=12, infer=same)
def Celu(x: Array, *, alpha: float = 1.0) -> Array:
    return np.maximum(x, 0) + np.minimum(0, alpha * np.expm1(x / alpha))


@op(since=10, infer=same)
def ThresholdedRelu(x: Array, *, alpha: float = 1.0) -> Array:
    return np.where(x > alpha, x, 0)


@op(since=6, infer=same)
def HardSigmoid(x: Array, *, alpha: float = 0.2, beta: float = 0.5) -> Array:
    return np.clip(alpha * x + beta, 0, 1)


@op(since=14, infer=same)
def HardSwish(x: Array) -> Array:
    return x * np.clip(x / 6 + 0.5, 0, 1)


@op(since=18, infer=same)
def Mish(x: Array) -> Array:
    return x * np.tanh(Softplus(x))


@op(since=9, infer=same)
def Shrink(x: Array, *, bias: float = 0.0, lambd: float = 0.5) -> Array:
    return np.where(x < -lambd, x + bias, np.where(x > lambd, x - bias, 0))


def erf_gelu(x: Array) -> Array:
    """0.5 x (1 + erf(x / sqrt 2)) in the dtype of x."""
    return (0.5 * x * (1 + Erf(x / math.sqrt(2)))).astype(x.dtype)


def tanh_gelu(x: Array) -> Array:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


@op(since=20, infer=same)
def Gelu(x: Array, *, approximate: str = "none") -> Array:
    return tanh_gelu(x) if approximate == "tanh" else erf_gelu(x)


@op(name="Gelu", domain="com.microsoft", infer=same)
def ms_Gelu(x: Array) -> Array:
    return erf_gelu(x)


@op(domain="com.microsoft", infer=same)
def BiasGelu(a: Array, b: Array) -> Array:
    return erf_gelu(a + b)


@op(domain="com.microsoft", infer=same)
def FastGelu(x: Array, bias: Array | None = None) -> Array:
    return tanh_gelu(x if bias is None else x + bias)


@op(domain="com.microsoft", infer=same)
def QuickGelu(x: Array, *, alpha: float = 1.702) -> Array:
    return x * Sigmoid(alpha * x)


@op(since=24, infer=same)
def Swish(x: Array, *, alpha: float = 1.0) -> Array:
    return x * Sigmoid(alpha * x)


@op(since=28, infer=same)
def SwiGLU(a: Array, b: Array, *, alpha: float = 1.0) -> Array:
    return Swish(a, alpha=alpha) * b


@op(name="Clip", since=6, infer=same)
def Clip_6(x: Array, *, min: float = float("-inf"), max: float = float("inf")) -> Array:
    return np.minimum(np.maximum(x, min), max)


@op(since=11, infer=same)
def Clip(x: Array, min: Array | None = None, max: Array | None = None) -> Array:
    """With min > max every element becomes max, as the specification says."""
    low = x if min is None else np.maximum(x, min)
    return low if max is None else np.minimum(low, max)
