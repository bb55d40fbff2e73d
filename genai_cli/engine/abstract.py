"""A backend without memory: traces shapes and host values only. Plans use it to prove what rewrites assume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from genai_cli.backends.base import KvSlot, Tensor


class AbstractRecording:
    """Forgets kernel calls; runs nothing."""

    def call(
        self, kernel: str, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None], attrs: dict[str, Any]
    ) -> None:
        """Nothing."""

    def host(self, function: Callable[[], None]) -> None:
        """Nothing."""

    def replay(self) -> None:
        """Nothing."""


@dataclass
class AbstractSlot:
    """Geometry of a KV slot."""

    index: int
    num_heads: int
    head_dim: int
    dtype: np.dtype
    capacity: int = 0


class AbstractBackend:
    """Implements `backends.base.Backend`; every tensor reads as zeros."""

    description = "abstract"

    def __init__(self, name: str) -> None:
        self.name = name

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Tensor:
        """Shape only."""
        return Tensor(0, shape, np.dtype(dtype))

    def constant(self, array: np.ndarray) -> Tensor:
        """Shape only."""
        return Tensor(0, array.shape, array.dtype)

    def alias(self, tensor: Tensor, shape: tuple[int, ...], dtype: np.dtype, offset: int = 0) -> Tensor:
        """Shape only."""
        return Tensor(0, shape, np.dtype(dtype))

    def upload(self, tensor: Tensor, array: np.ndarray) -> None:
        """Nothing."""

    def download(self, tensor: Tensor) -> np.ndarray:
        """Zeros."""
        return np.zeros(tensor.shape, tensor.dtype)

    def view(self, tensor: Tensor) -> np.ndarray:
        """Zeros, without memory."""
        return np.broadcast_to(np.zeros((), tensor.dtype), tensor.shape)

    def record(self) -> AbstractRecording:
        """A recording that forgets."""
        return AbstractRecording()

    def kv_slot(self, num_heads: int, head_dim: int, dtype: np.dtype) -> AbstractSlot:
        """Geometry only."""
        return AbstractSlot(0, num_heads, head_dim, np.dtype(dtype))

    def reserve(self, capacity: int) -> None:
        """Nothing."""

    def set_past_len(self, past_len: int) -> None:
        """Nothing."""

    def kv_view(self, slot: KvSlot, start: int, stop: int) -> np.ndarray:
        """Zeros."""
        return np.zeros((slot.num_heads, stop - start, slot.head_dim), slot.dtype)

    def kv_write(self, slot: KvSlot, rows: np.ndarray, start: int = 0) -> None:
        """Nothing."""

    def synchronize(self) -> None:
        """Nothing."""
