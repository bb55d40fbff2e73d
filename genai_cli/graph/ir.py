"""The typed graph the engine plans from. Plain data: no onnx object survives loading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Dim = int | str | None  # fixed, symbolic name, unknown


@dataclass(frozen=True)
class ValueInfo:
    """Declared type of a graph input, output or intermediate."""

    name: str
    dtype: np.dtype | None
    shape: tuple[Dim, ...] | None


@dataclass(frozen=True)
class Initializer:
    """A weight. `array()` is a view on the memory-mapped file; 4-bit types come unpacked as ml_dtypes arrays."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    nbytes: int
    array: Callable[[], np.ndarray] = field(repr=False, compare=False)


@dataclass
class Node:
    """One op. Missing optional inputs are ""; attributes are plain Python values, numpy arrays, or Graphs."""

    op_type: str
    domain: str  # "" is ai.onnx
    inputs: list[str]
    outputs: list[str]
    attrs: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    opset: int = 0  # the model's opset for `domain`

    @property
    def key(self) -> str:
        """`domain::OpType`, or just the type for ai.onnx."""
        return f"{self.domain}::{self.op_type}" if self.domain else self.op_type


@dataclass
class Graph:
    """Topologically ordered nodes over named values."""

    name: str
    inputs: list[ValueInfo]
    outputs: list[ValueInfo]
    nodes: list[Node]
    initializers: dict[str, Initializer]
    values: dict[str, ValueInfo]  # every value with a known type
    opsets: dict[str, int]
    ir_version: int = 0
    producer: str = ""
