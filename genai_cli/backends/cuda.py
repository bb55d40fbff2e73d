"""CUDA through cuda-python: KV stays on the device, kernels are compiled at first use, steps become graphs.

The state block is an int64 array on the device: past_len, then (address, capacity) of each KV slot. Kernels read it, so
a captured step depends neither on the position nor on buffer addresses; only grids that follow the capacity do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from genai_cli.backends import (  # noqa: F401
    cuda_attention,
    cuda_elementwise,
    cuda_lines,
    cuda_matmul,
    cuda_moe,
    cuda_norm,
    cuda_reduce,
    cuda_shape,
    cuda_step,
)
from genai_cli.backends.base import KvSlot, Recording, Tensor
from genai_cli.backends.cuda_device import CudaDevice, CudaOptions, Memory, as_bytes
from genai_cli.backends.cuda_launch import (
    flat,
    integers,
    pointer,
)
from genai_cli.backends.cuda_recording import CaptureCounters, CudaRecording
from genai_cli.errors import GenaiError

FIRST_CAPACITY = 256  # tokens; buffers double from here
MAX_SLOTS = 2047
PACKING = 16  # bytes: slots in a packed read-out start where wide copies may
INT64 = np.dtype(np.int64)


@dataclass
class CudaKvSlot:
    """Capacity buffer [H_kv, capacity, D] of one component, on the device."""

    index: int
    num_heads: int
    head_dim: int
    dtype: np.dtype
    capacity: int = 0
    memory: Memory | None = None

    @property
    def row_bytes(self) -> int:
        return self.head_dim * self.dtype.itemsize

    @property
    def address(self) -> int:
        return 0 if self.memory is None else self.memory.address

    def nbytes(self, capacity: int) -> int:
        return self.num_heads * capacity * self.row_bytes


@dataclass
class _ReadOut:
    """Rows of all slots, fetched by one copy, as long as no step has run since."""

    start: int
    stop: int
    rows: list[np.ndarray]


class CudaBackend:
    """Implements `backends.base.Backend` on device `index`. One sequence; not thread-safe."""

    name = "cuda"

    def __init__(self, index: int = 0, options: CudaOptions | None = None) -> None:
        self.options = options or CudaOptions()
        self.device = CudaDevice(index, self.options)
        self.tensor_cores = self.device.tensor_cores
        products = "mma.sync" if self.tensor_cores else "fma"
        self.description = f"cuda:{index} {self.device.name} ({self.device.arch}, 16-bit products by {products})"
        self.captures = CaptureCounters()
        self.generation = 0  # grows with every growth of the KV: what was planned before is stale
        self.num_sms = self.device.num_sms
        self._past_len = 0
        self._past_len_there: int | None = None  # what the state block holds; None: not known
        self._slots: list[CudaKvSlot] = []
        self._state = Memory(self.device, 8 * (1 + 2 * MAX_SLOTS))
        self.state_address = self._state.address
        self._read_out: _ReadOut | None = None
        self._scratch: list[Memory] = []
        self._upload_state()

    # -- tensors -----------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Tensor:
        """Uninitialised."""
        tensor = Tensor(0, tuple(shape), np.dtype(dtype))
        tensor.owner = memory = Memory(self.device, tensor.nbytes)
        tensor.address = memory.address
        return tensor

    def constant(self, array: np.ndarray) -> Tensor:
        """One upload."""
        tensor = self.empty(array.shape, array.dtype)
        self.upload(tensor, array)
        return tensor

    def alias(self, tensor: Tensor, shape: tuple[int, ...], dtype: np.dtype, offset: int = 0) -> Tensor:
        """The same memory from byte `offset` on, seen with another shape and dtype."""
        seen = Tensor(tensor.address + offset, tuple(shape), np.dtype(dtype), tensor.owner)
        if offset < 0 or offset + seen.nbytes > tensor.nbytes:
            raise GenaiError(f"alias of `{offset + seen.nbytes}` bytes in a tensor of `{tensor.nbytes}`")
        return seen

    def upload(self, tensor: Tensor, array: np.ndarray) -> None:
        """Overwrite the tensor's values; shapes and dtypes must be the same."""
        if array.shape != tensor.shape or array.dtype != tensor.dtype:
            found, wanted = f"{array.dtype.name}{list(array.shape)}", f"{tensor.dtype.name}{list(tensor.shape)}"
            raise GenaiError(f"upload: found `{found}`, wanted `{wanted}`")
        self.device.upload(tensor.address, as_bytes(array))

    def download(self, tensor: Tensor) -> np.ndarray:
        """A copy of the values, after all queued work."""
        return self.device.download(tensor.address, tensor.nbytes).view(tensor.dtype).reshape(tensor.shape)

    def view(self, tensor: Tensor) -> np.ndarray:
        """Read-only values."""
        array = self.download(tensor)
        array.flags.writeable = False
        return array

    def record(self) -> CudaRecording:
        """A new recording."""
        return CudaRecording(self)

    def scratch(self, index: int, nbytes: int) -> Memory:
        """Working memory shared by all kernel calls, which run one after another; a larger request replaces a piece."""
        while len(self._scratch) <= index:
            self._scratch.append(Memory(self.device, 0))
        if self._scratch[index].nbytes < nbytes:
            self._scratch[index] = Memory(self.device, nbytes)
        return self._scratch[index]

    def touch(self) -> None:
        """Something ran: rows read out before are no longer the present."""
        self._read_out = None

    def synchronize(self) -> None:
        """Wait for everything queued."""
        self.device.wait()

    # -- KV ----------------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Tokens the slots hold without growing."""
        return max((slot.capacity for slot in self._slots), default=0)

    @property
    def past_len(self) -> int:
        """Tokens whose KV is valid."""
        return self._past_len

    def capacity_of(self, slot: int) -> int:
        return self._slots[slot].capacity

    def dtype_of(self, slot: int) -> np.dtype:
        return self._slots[slot].dtype

    def kv_slot(self, num_heads: int, head_dim: int, dtype: np.dtype) -> CudaKvSlot:
        """A capacity buffer for one component; all slots share one capacity."""
        if len(self._slots) == MAX_SLOTS:
            raise GenaiError(f"a KV slot beyond `{MAX_SLOTS}` was asked for")
        slot = CudaKvSlot(len(self._slots), num_heads, head_dim, np.dtype(dtype))
        if self.capacity:
            slot.memory, slot.capacity = Memory(self.device, slot.nbytes(self.capacity)), self.capacity
        self._slots.append(slot)
        self._upload_state()
        return slot

    def reserve(self, capacity: int) -> None:
        """Grow every slot to hold `capacity` tokens, keeping the first past_len rows of every head; all or nothing."""
        if not self._slots or capacity <= min(slot.capacity for slot in self._slots):
            return
        bucket = FIRST_CAPACITY
        while bucket < capacity:
            bucket *= 2
        grown = [Memory(self.device, slot.nbytes(bucket)) for slot in self._slots]
        for slot, memory in zip(self._slots, grown, strict=True):
            self._move_rows(slot, memory.address, bucket, slot.address, slot.capacity, self._past_len)
        self._commit(grown, bucket)

    def _commit(self, grown: list[Memory], capacity: int) -> None:
        """Nothing has changed before this; the old buffers are freed behind the copies out of them."""
        for slot, memory in zip(self._slots, grown, strict=True):
            slot.memory, slot.capacity = memory, capacity
        self.generation += 1
        self._upload_state()

    def set_past_len(self, past_len: int) -> None:
        """Where the next step's tokens go."""
        if past_len < 0 or (self._slots and past_len > self.capacity):
            raise GenaiError(f"past length `{past_len}` was asked for, the KV buffers hold `{self.capacity}`")
        self._past_len = past_len
        if past_len != self._past_len_there:
            self.device.upload(self.state_address, as_bytes(np.array([past_len], INT64)))
            self._past_len_there = past_len

    def kv_view(self, slot: KvSlot, start: int, stop: int) -> np.ndarray:
        """Rows [H_kv, stop-start, D]. The first slot asked for brings those of all: one packed copy."""
        if not 0 <= start <= stop <= self.capacity:
            raise GenaiError(f"KV rows `{start}:{stop}` were asked for, the buffer holds `{self.capacity}`")
        found = self._read_out
        if found is None or (found.start, found.stop) != (start, stop) or len(found.rows) != len(self._slots):
            found = self._read_out = _ReadOut(start, stop, self._fetch(start, stop))
        return found.rows[slot.index]

    def _fetch(self, start: int, stop: int) -> list[np.ndarray]:
        """Every slot's rows, gathered into one packed buffer and fetched by one copy."""
        count = stop - start
        sizes = [slot.nbytes(count) for slot in self._slots]
        offsets = np.cumsum([0, *(-(-nbytes // PACKING) * PACKING for nbytes in sizes)]).tolist()
        packed = Memory(self.device, offsets[-1])
        for slot, offset in zip(self._slots, offsets, strict=False):
            source = slot.address + start * slot.row_bytes
            self._move_rows(slot, packed.address + offset, count, source, slot.capacity, count)
        data = self.device.download(packed.address, offsets[-1])
        return [
            data[offset : offset + nbytes].view(slot.dtype).reshape(slot.num_heads, count, slot.head_dim)
            for slot, nbytes, offset in zip(self._slots, sizes, offsets, strict=False)
        ]

    def kv_write(self, slot: KvSlot, rows: np.ndarray, start: int = 0) -> None:
        """Write positions [start, start + n) of a slot from rows [H_kv, n, D]: one upload, one scatter."""
        own = self._slots[slot.index]
        wanted = (own.num_heads, rows.shape[1] if rows.ndim == 3 else -1, own.head_dim)
        if rows.shape != wanted or rows.dtype != own.dtype:
            raise GenaiError(
                f"KV rows: found `{rows.dtype.name}{list(rows.shape)}`, wanted `{own.dtype.name}{list(wanted)}`"
            )
        count = rows.shape[1]
        if start < 0 or start + count > own.capacity:
            raise GenaiError(f"KV rows `{start}:{start + count}` were given, the buffer holds `{own.capacity}`")
        packed = Memory(self.device, rows.nbytes)
        self.device.upload(packed.address, as_bytes(rows))
        self._move_rows(own, own.address + start * own.row_bytes, own.capacity, packed.address, count, count)
        self.touch()

    def _move_rows(
        self, slot: CudaKvSlot, to: int, to_stride: int, source: int, source_stride: int, count: int
    ) -> None:
        """`count` rows of every head between buffers whose heads are `stride` rows apart."""
        unit = next(n for n in (16, 8, 4, 2, 1) if slot.row_bytes % n == 0)
        units = slot.row_bytes // unit
        total = slot.num_heads * count * units
        if total == 0:
            return
        pointers = (pointer(to), pointer(source))
        args = (*pointers, *integers(slot.num_heads, count, units, to_stride, source_stride))
        for launch in flat("kv", f"move_rows<{unit}>", total, args):
            self.device.launch(launch)

    def _upload_state(self) -> None:
        words = [self._past_len]
        for slot in self._slots:
            words += [slot.address, slot.capacity]
        self.device.upload(self.state_address, as_bytes(np.array(words, INT64)))
        self._past_len_there = self._past_len

    # -- what stays on the device between steps ----------------------------------------------------------------------

    def carry(self, recording: Recording, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Record the copies (to, source) that end a step; none of them happens when a kernel of it found fault."""
        if pairs:
            recording.call("genai.Carry", [source for _, source in pairs], [to for to, _ in pairs], {})

    def top(self, recording: Recording, logits: Tensor, count: int) -> Tensor:
        """Record the choice of the largest of logits [V]: ids (int64 [count]) and values (f32 [count]) as bytes."""
        found = self.empty((12 * count,), np.dtype(np.uint8))
        recording.call("genai.Top", [logits], [found], {"count": count})
        return found

    def advance(self, recording: Recording, top: Tensor, ids: Tensor | None, positions: Sequence[Tensor]) -> None:
        """Record that the best of `top` is fed next, one position further."""
        assert isinstance(recording, CudaRecording)
        recording.call("genai.Advance", [top], [ids, *positions], {})
        recording.advances = True
        self.moved_on()

    def moved_on(self) -> None:
        """A step has advanced the state block's past_len."""
        if self._past_len_there is not None:
            self._past_len_there += 1

    def forget(self) -> None:
        """A step broke off: what the state block holds is written anew before the next."""
        self._past_len_there = None

    def close(self) -> None:
        """Finish queued work and give the KV back; the rest goes with the last reference."""
        self.device.wait()
        self._slots.clear()
        self._read_out = None
