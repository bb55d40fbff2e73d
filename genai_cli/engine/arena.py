"""Scratch memory for activations, shared by all recordings of an engine (they never run at the same time)."""

from __future__ import annotations

import numpy as np

from genai_cli.backends.base import Backend, Tensor
from genai_cli.engine.values import Storage

_GRANULE = 4096  # bytes; sizes are rounded up, at least to this
_BYTE = np.dtype(np.uint8)


def _rounded(nbytes: int) -> int:
    """Up to three leading binary digits: steps of many lengths share blocks, whose pages are then already there."""
    step = max(_GRANULE, 1 << max(0, nbytes.bit_length() - 3))
    return -(-nbytes // step) * step


class Arena:
    """Best-fit reuse of blocks. `restart` begins a new recording over the same blocks."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._blocks: list[Tensor] = []
        self._free: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def restart(self) -> None:
        """Everything is free again; memory that older recordings point to stays alive in them."""
        self._free = list(self._blocks)

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Tensor, Storage]:
        """A tensor of this shape on a block of its own."""
        nbytes = max(1, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        wanted = _rounded(nbytes)
        fitting = [block for block in self._free if wanted <= block.nbytes <= 4 * wanted]
        if fitting:
            block = min(fitting, key=lambda free: free.nbytes)
            self._free.remove(block)
        else:
            block = self._backend.empty((wanted,), _BYTE)
            self._blocks.append(block)
        return self._backend.alias(block, tuple(shape), dtype), Storage(block)

    def give_back(self, storage: Storage) -> None:
        self._free.append(storage.tensor)
