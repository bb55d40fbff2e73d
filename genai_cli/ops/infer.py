"""Shapes and dtypes of outputs from those of inputs. A host input comes as an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from genai_cli.errors import GenaiError
from genai_cli.ops.dtypes import DType
from genai_cli.ops.registry import Infer, Known, Spec

Inputs = Sequence[Known | None]
Attrs = dict[str, Any]


def spec(value: Known | None) -> Spec:
    """(shape, dtype) of a required input."""
    if value is None:
        raise GenaiError("a required input is missing")
    return (value.shape, value.dtype) if isinstance(value, np.ndarray) else value


def shape(value: Known | None) -> tuple[int, ...]:
    """Shape of a required input."""
    return spec(value)[0]


def dtype(value: Known | None) -> DType:
    """Dtype of a required input."""
    return spec(value)[1]


def optional(inputs: Inputs, index: int) -> Known | None:
    """An optional input, None when missing or left off the end."""
    return inputs[index] if index < len(inputs) else None


def values(inputs: Inputs, index: int) -> list[int] | None:
    """The integers of a host input; None when the input is missing; an error when only its shape is known."""
    value = optional(inputs, index)
    if value is None:
        return None
    if not isinstance(value, np.ndarray):
        raise GenaiError(f"the output shape depends on the value of input {index}, which is not known yet")
    return [int(v) for v in value.reshape(-1)]


def axis_of(axis: int, rank: int) -> int:
    """A non-negative axis."""
    if not -rank <= axis < max(rank, 1):
        raise GenaiError(f"axis `{axis}` is outside a tensor of rank {rank}")
    return axis % rank if rank else 0


def same(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    """One output like input 0."""
    return [spec(inputs[0])]


def same_as(index: int) -> Infer:
    """One output like input `index`."""
    return lambda inputs, attrs: [spec(inputs[index])]


def boolean(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    """One bool output with the shape of input 0."""
    return [(shape(inputs[0]), np.dtype(np.bool_))]


def broadcast_shape(inputs: Inputs) -> tuple[int, ...]:
    """Numpy's broadcast of all inputs that are present."""
    return np.broadcast_shapes(*(shape(value) for value in inputs if value is not None))


def broadcast(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    """Broadcast of all inputs, dtype of input 0."""
    return [(broadcast_shape(inputs), dtype(inputs[0]))]


def compare(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    """Broadcast of all inputs, bool."""
    return [(broadcast_shape(inputs), np.dtype(np.bool_))]
