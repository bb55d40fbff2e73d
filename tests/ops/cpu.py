"""Calling CPU kernels directly, with what lies around their memory under the test's control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from genai_cli import _native
from genai_cli.backends.base import Tensor
from genai_cli.backends.cpu import CpuBackend, CpuKvSlot

Array = np.ndarray[Any, Any]
ISAS = _native.isas()
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
GUARD, PATTERN = 64, 0xA5  # bytes on either side of an output, and what they hold


class Guarded:
    """An output with guard bytes right before and after it."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        raw = np.full(self.nbytes + 3 * GUARD, PATTERN, np.uint8)
        start = -raw.ctypes.data % GUARD + GUARD
        self.memory = raw[start - GUARD : start + self.nbytes + GUARD]
        self.tensor = Tensor(self.memory.ctypes.data + GUARD, self.shape, self.dtype, self.memory)

    @property
    def value(self) -> Array:
        return self.memory[GUARD : GUARD + self.nbytes].view(self.dtype).reshape(self.shape)

    @property
    def intact(self) -> bool:
        return bool((self.memory[:GUARD] == PATTERN).all() and (self.memory[GUARD + self.nbytes :] == PATTERN).all())


def misplaced(array: Array) -> Array:
    """The same values one byte off any alignment, as a weight in a mapped file may lie."""
    raw = np.empty(array.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + 1
    moved = raw[start : start + array.nbytes]
    moved[...] = np.frombuffer(array.tobytes(), np.uint8)
    return moved.view(array.dtype).reshape(array.shape)


def call(
    on: CpuBackend,
    kernel: str,
    inputs: Sequence[Array | None],
    outputs: Sequence[Guarded | None],
    attrs: dict[str, Any],
) -> None:
    """One kernel call; asserts that nothing around the outputs was touched."""
    tensors = [None if a is None else Tensor(a.ctypes.data, a.shape, a.dtype, a) for a in inputs]
    on.record().call(kernel, tensors, [None if o is None else o.tensor for o in outputs], attrs)
    assert all(o.intact for o in outputs if o is not None)


def compute(on: CpuBackend, kernel: str, inputs: Sequence[Array | None], spec: Any, **attrs: Any) -> Array:
    """The only output of a kernel; `spec` is its (shape, dtype)."""
    out = Guarded(*spec)
    call(on, kernel, inputs, [out], attrs)
    return out.value


@dataclass
class Decoder:
    """genai.Attention over slots whose unused rows are poisoned."""

    on: CpuBackend
    num_heads: int
    kv_num_heads: int
    head_dim: int
    dtype: Any
    capacity: int
    poison: float = float("nan")
    slots: list[CpuKvSlot] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = [self.on.kv_slot(self.kv_num_heads, self.head_dim, self.dtype) for _ in range(2)]
        self.on.reserve(self.capacity)
        for slot in self.slots:
            slot.buffer[...] = self.poison

    def feed(self, qkv: Array, **attrs: Any) -> Array:
        """Packed qkv [1, T, (H + 2 H_kv) D] -> output [1, T, H D]; the tokens are kept."""
        out = Guarded((1, qkv.shape[1], self.num_heads * self.head_dim), qkv.dtype)
        attrs |= {"num_heads": self.num_heads, "kv_num_heads": self.kv_num_heads}
        attrs |= {"key_slot": self.slots[0].index, "value_slot": self.slots[1].index}
        extra = [attrs.pop(name, None) for name in ("cos", "sin")]
        call(self.on, "genai.Attention", [qkv, None, None, *extra, None, None, None, None, None], [out], attrs)
        self.on.set_past_len(self.on.past_len + qkv.shape[1])
        return out.value


def same_bits(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
