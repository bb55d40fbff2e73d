"""Arithmetic, comparison and logic with numpy broadcasting."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

from genai_cli.ops.dtypes import is_float
from genai_cli.ops.infer import broadcast, broadcast_shape, compare, dtype
from genai_cli.ops.registry import op

Array = np.ndarray[Any, Any]


@op(since=7, infer=broadcast)
def Add(a: Array, b: Array) -> Array:
    return a + b


@op(since=7, infer=broadcast)
def Sub(a: Array, b: Array) -> Array:
    return a - b


@op(since=7, infer=broadcast)
def Mul(a: Array, b: Array) -> Array:
    return a * b


@op(since=7, infer=broadcast)
def Div(a: Array, b: Array) -> Array:
    """Integers are divided towards zero, as C does."""
    if is_float(a.dtype):
        return a / b
    quotient = np.floor_divide(a, b)
    return quotient + ((quotient < 0) & (quotient * b != a)).astype(a.dtype)


@op(since=7, infer=broadcast)
def Pow(x: Array, y: Array) -> Array:
    """The result has the base's dtype; an integer base with a float exponent is computed in f64."""
    if is_float(x.dtype):
        return np.power(x, y.astype(x.dtype))
    if is_float(y.dtype) or np.any(y < 0):
        return np.power(x.astype(np.float64), y.astype(np.float64)).astype(x.dtype)
    return np.power(x, y)


@op(since=10, infer=broadcast)
def Mod(a: Array, b: Array, *, fmod: int = 0) -> Array:
    return np.fmod(a, b) if fmod else np.mod(a, b)


@op(since=8, infer=broadcast)
def Max(*data_0: Array) -> Array:
    return reduce(np.maximum, data_0)


@op(since=8, infer=broadcast)
def Min(*data_0: Array) -> Array:
    return reduce(np.minimum, data_0)


@op(since=8, infer=broadcast)
def Sum(*data_0: Array) -> Array:
    return reduce(np.add, data_0)


@op(since=8, infer=broadcast)
def Mean(*data_0: Array) -> Array:
    return reduce(np.add, data_0) / len(data_0)


@op(since=9, infer=broadcast)
def PRelu(x: Array, slope: Array) -> Array:
    return np.where(x < 0, x * slope, x)


@op(since=7, infer=compare, like=None)
def Equal(a: Array, b: Array) -> Array:
    return np.equal(a, b)


@op(since=7, infer=compare, like=None)
def Less(a: Array, b: Array) -> Array:
    return np.less(a, b)


@op(since=7, infer=compare, like=None)
def Greater(a: Array, b: Array) -> Array:
    return np.greater(a, b)


@op(since=12, infer=compare, like=None)
def LessOrEqual(a: Array, b: Array) -> Array:
    return np.less_equal(a, b)


@op(since=12, infer=compare, like=None)
def GreaterOrEqual(a: Array, b: Array) -> Array:
    return np.greater_equal(a, b)


@op(since=7, infer=compare)
def And(a: Array, b: Array) -> Array:
    return np.logical_and(a, b)


@op(since=7, infer=compare)
def Or(a: Array, b: Array) -> Array:
    return np.logical_or(a, b)


@op(since=7, infer=compare)
def Xor(a: Array, b: Array) -> Array:
    return np.logical_xor(a, b)


@op(infer=compare)
def Not(x: Array) -> Array:
    return np.logical_not(x)


@op(since=18, infer=broadcast)
def BitwiseAnd(a: Array, b: Array) -> Array:
    return np.bitwise_and(a, b)


@op(since=18, infer=broadcast)
def BitwiseOr(a: Array, b: Array) -> Array:
    return np.bitwise_or(a, b)


@op(since=18, infer=broadcast)
def BitwiseXor(a: Array, b: Array) -> Array:
    return np.bitwise_xor(a, b)


@op(since=18, infer=broadcast)
def BitwiseNot(x: Array) -> Array:
    return np.bitwise_not(x)


@op(since=11, infer=broadcast)
def BitShift(x: Array, y: Array, *, direction: str) -> Array:
    return np.left_shift(x, y) if direction == "LEFT" else np.right_shift(x, y)


@op(since=9, infer=lambda inputs, attrs: [(broadcast_shape(inputs), dtype(inputs[1]))], raw=True, like=1)
def Where(condition: Array, x: Array, y: Array) -> Array:
    return np.where(condition, x, y)
