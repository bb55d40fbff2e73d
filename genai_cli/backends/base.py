"""What the engine asks of a device: memory, kernels, and a recording that can be replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np


@dataclass
class Tensor:
    """A dense C-contiguous tensor in a backend's memory. `owner` keeps the memory alive."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype
    owner: object = None
    host: np.ndarray | None = None  # the value, where it is known while recording (axes, shapes, small constants)

    @property
    def nbytes(self) -> int:
        size = self.dtype.itemsize
        for dim in self.shape:
            size *= dim
        return size


class KvSlot(Protocol):
    """Capacity buffer of one component: [H_kv, capacity, D] of `dtype`; `index` is what attention kernels are given."""

    index: int
    num_heads: int
    head_dim: int
    dtype: np.dtype

    @property
    def capacity(self) -> int: ...


class Recording(Protocol):
    """Kernel calls in order, run eagerly while being recorded; `replay` runs them again with the same addresses."""

    def call(
        self, kernel: str, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None], attrs: dict[str, Any]
    ) -> None:
        """Run the kernel now and record it. Checks shapes and dtypes at the door (GenaiError)."""
        ...

    def host(self, function: Callable[[], None]) -> None:
        """Run a host step now and record it; device work before it is finished first."""
        ...

    def replay(self) -> None: ...


class Backend(Protocol):
    """One device. `past_len` and KV buffer addresses live in a state block that kernels read, so that recordings
    depend neither on the position nor on the buffers' growth."""

    name: str  # "cpu" | "cuda"; the key into OpDef.kernels
    description: str  # "cpu:avx512vnni", "cuda:0 NVIDIA H200"

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Tensor: ...
    def constant(self, array: np.ndarray) -> Tensor:
        """A tensor for a weight: on the CPU a view of the mapped file, on a device one upload."""
        ...

    def alias(self, tensor: Tensor, shape: tuple[int, ...], dtype: np.dtype, offset: int = 0) -> Tensor:
        """The same memory from byte `offset` on, seen with another shape and dtype; never larger than `tensor`."""
        ...

    def upload(self, tensor: Tensor, array: np.ndarray) -> None: ...
    def download(self, tensor: Tensor) -> np.ndarray: ...
    def view(self, tensor: Tensor) -> np.ndarray:
        """Read-only values until the next step: on the CPU in place, on a device a download."""
        ...

    def record(self) -> Recording: ...
    def kv_slot(self, num_heads: int, head_dim: int, dtype: np.dtype) -> KvSlot: ...
    def reserve(self, capacity: int) -> None:
        """Grow every slot to hold `capacity` tokens, keeping the first past_len rows of every head; all or nothing."""
        ...

    def set_past_len(self, past_len: int) -> None: ...
    def kv_view(self, slot: KvSlot, start: int, stop: int) -> np.ndarray:
        """Rows [H_kv, stop-start, D]; on the CPU a strided view, on a device a packed copy through pinned memory."""
        ...

    def kv_write(self, slot: KvSlot, rows: np.ndarray, start: int = 0) -> None:
        """Write positions [start, start + n) of a slot from rows [H_kv, n, D]."""
        ...

    def synchronize(self) -> None: ...


@runtime_checkable
class DeviceBackend(Backend, Protocol):
    """A backend whose memory the host does not see: what the next step needs stays there, and of the logits only the
    largest are fetched."""

    def carry(self, recording: Recording, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Record the end of a step: every (to, source) is copied, unless a kernel of the step found fault."""
        ...

    def top(self, recording: Recording, logits: Tensor, count: int) -> Tensor:
        """Record the choice of the largest values of logits [V]: bytes of their ids (int64 [count], -1 where there are
        fewer) and of the values (f32 [count]). Best first, equal ones by id, NaN before all."""
        ...

    def advance(self, recording: Recording, top: Tensor, ids: Tensor | None, positions: Sequence[Tensor]) -> None:
        """Record the preparation of the next step of one token, if it is the best of `top`: into `ids`, positions and
        past_len one further. The backend knows its past_len afterwards, however often this is replayed."""
        ...

    def forget(self) -> None:
        """A step broke off: whether it advanced is not known."""
        ...


@runtime_checkable
class PatientBackend(Backend, Protocol):
    """A backend that does more for who runs long."""

    def runs_long(self) -> bool:
        """This process makes many steps. True when recordings must be made again."""
        ...


class KvSequence(Protocol):
    """What a backend holds of one sequence: its own memory for every slot."""

    @property
    def capacity(self) -> int: ...


@runtime_checkable
class RowsBackend(Backend, Protocol):
    """A backend that can hold several sequences, and take one token of each in one step."""

    @property
    def sequence(self) -> KvSequence:
        """The sequence that steps, `kv_view` and `kv_write` work on."""
        ...

    def new_sequence(self) -> KvSequence:
        """A sequence of its own over the slots made so far; empty, and without memory until it is reserved."""
        ...

    def select(self, sequence: KvSequence) -> None:
        """Work on this sequence from now on."""
        ...

    def rows(self, sequences: Sequence[KvSequence], lengths: Sequence[int]) -> AbstractContextManager[None]:
        """Within, token r of a step is the next one of sequences[r], which holds lengths[r] tokens and has room."""
        ...
