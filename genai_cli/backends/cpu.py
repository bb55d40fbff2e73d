"""The CPU: memory is numpy's, kernels are the compiled module's, a recording is a native program and host steps."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import genai_cli._native as _native
from genai_cli.backends.base import KvSequence, KvSlot, Tensor
from genai_cli.backends.cpu_weights import ALIGNMENT, REPACKS, STREAMS, HugeWeights, aligned, leave_pages
from genai_cli.errors import GenaiError

MAX_THREADS = 1024  # of a pool (native/threads.cpp)
FIRST_CAPACITY = 256  # tokens; buffers double from here

Native = tuple[int, str, tuple[int, ...]]


@contextmanager
def _told() -> Iterator[None]:
    """Kernels refuse with C++ exceptions; users get a GenaiError."""
    try:
        yield
    except (ValueError, IndexError, RuntimeError) as error:
        raise GenaiError(f"native kernel: {error}") from error


def _native_of(tensor: Tensor | None) -> Native | None:
    return None if tensor is None else (tensor.address, tensor.dtype.name, tuple(tensor.shape))


def _view(tensor: Tensor) -> np.ndarray:
    owner = tensor.owner
    if not isinstance(owner, np.ndarray):
        raise GenaiError(f"tensor `{tensor.dtype.name}{list(tensor.shape)}` is not this backend's")
    return owner.reshape(-1).view(np.uint8)[: tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)


@dataclass
class CpuKvSlot:
    """Capacity buffer [H_kv, capacity, D] of one component, of the sequence that is selected."""

    index: int
    num_heads: int
    head_dim: int
    dtype: np.dtype
    buffer: np.ndarray  # [H_kv, capacity, D]

    @property
    def capacity(self) -> int:
        return int(self.buffer.shape[1])


@dataclass
class CpuSequence:
    """What one sequence holds: the native record of it and the memory of its slots."""

    native: _native.Sequence
    buffers: list[np.ndarray]  # [H_kv, capacity, D] per slot

    @property
    def capacity(self) -> int:
        """Tokens every slot holds without growing."""
        return min((int(buffer.shape[1]) for buffer in self.buffers), default=0)


def _words(array: np.ndarray | Tensor) -> str:
    return f"{array.dtype.name}{list(array.shape)}"


def copy_rows(to: np.ndarray, source: np.ndarray) -> None:
    """Copy [H, n, D] rows between strided views of one dtype, outside the interpreter lock; rows must be contiguous."""
    if to.shape != source.shape or to.dtype != source.dtype or to.ndim != 3:
        raise GenaiError(f"copying KV rows: found `{_words(source)}`, wanted `{_words(to)}`")
    if to.size == 0:
        return
    itemsize = to.dtype.itemsize
    if not to.flags.writeable or any(a.shape[2] > 1 and a.strides[2] != itemsize for a in (to, source)):
        raise GenaiError("copying KV rows: the rows of both sides must be contiguous, and the target writable")
    _native.copy_rows(
        to.ctypes.data, to.strides[0], to.strides[1],
        source.ctypes.data, source.strides[0], source.strides[1],
        to.shape[0], to.shape[1], to.shape[2] * itemsize,
    )  # fmt: skip


@dataclass(frozen=True)
class Step:
    """What a recorded kernel call works on; a host step has the kernel `host` and nothing else."""

    kernel: str
    inputs: tuple[Tensor | None, ...] = ()
    outputs: tuple[Tensor | None, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)


HOST_STEP = Step("host")


@dataclass(frozen=True)
class Span:
    """One run of one step, in ns of the monotonic clock (`time.perf_counter_ns`)."""

    step: Step
    start_ns: int
    end_ns: int


class CpuRecording:
    """Native steps in order, with host steps between them: (first, last) ranges of the program, or callables."""

    def __init__(self, program: _native.Program, weights: HugeWeights) -> None:
        self._program, self._weights = program, weights
        self._steps: list[Step] = []
        self._host_spans: list[Span] = []
        self._profiling = False
        self._segments: list[Callable[[], None] | tuple[int, int]] = []

    def call(
        self, kernel: str, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None], attrs: dict[str, Any]
    ) -> None:
        """Check, run and record one kernel call."""
        if kernel in STREAMS and len(inputs) > 1 and inputs[1] is not None:
            self._weights.move(inputs[1])
        with _told():
            native_in, native_out = [_native_of(t) for t in inputs], [_native_of(t) for t in outputs]
            step = self._program.add(kernel, native_in, native_out, attrs)
            # buffers live as long as the steps that hold their addresses
            self._steps.append(Step(kernel, tuple(inputs), tuple(outputs), attrs))
            self._program.run(step, step + 1)
        if kernel in REPACKS:
            for tensor in inputs[1:]:
                leave_pages(tensor)
        last = self._segments[-1] if self._segments else None
        if isinstance(last, tuple):
            self._segments[-1] = (last[0], step + 1)
        else:
            self._segments.append((step, step + 1))

    def host(self, function: Callable[[], None]) -> None:
        """Run and record a host step."""
        function()
        self._segments.append(function)

    def replay(self) -> None:
        """Run everything again."""
        with _told():
            for segment in self._segments:
                if isinstance(segment, tuple):
                    self._program.run(*segment)
                elif self._profiling:
                    self._timed(segment)
                else:
                    segment()

    def _timed(self, function: Callable[[], None]) -> None:
        started = time.perf_counter_ns()
        function()
        self._host_spans.append(Span(HOST_STEP, started, time.perf_counter_ns()))

    def profile(self, on: bool = True) -> None:
        """Time every step of a replay from now on: one clock read (about 30 ns) a step."""
        self._profiling = on
        self._program.profile(on)

    def take_spans(self) -> list[Span]:
        """Every run of every step since the last call, in the order of time."""
        native = [Span(self._steps[step], start, end) for step, start, end in self._program.take_spans()]
        host, self._host_spans = self._host_spans, []
        return sorted([*native, *host], key=lambda span: span.start_ns)


def num_cores() -> int:
    """Physical cores this process may use, as far as the kernel tells; hyperthreads only slow decoding down."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_core_of(cpu) for cpu in allowed}
    return max(1, len(cores))


def _core_of(cpu: int) -> str:
    try:
        with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
            return file.read().strip()
    except OSError:
        return str(cpu)


class CpuBackend:
    """Implements `backends.base.Backend`. One sequence; not thread-safe."""

    name = "cpu"

    def __init__(self, *, threads: int | None = None, isa: str | None = None) -> None:
        supported = _native.isas()
        if isa is not None and isa not in supported:
            raise GenaiError(
                f"instruction set `{isa}` was asked for, found " + ", ".join(f"`{i}`" for i in supported),
                hint="unset GENAI_ISA",
            )
        if threads is not None and not 1 <= threads <= MAX_THREADS:
            raise GenaiError(f"`{threads}` threads were asked for, wanted 1 to {MAX_THREADS}")
        self.isa: str = isa or supported[-1]
        self.threads = threads or num_cores()
        self.description = f"cpu:{self.isa}"
        self._pool = _native.ThreadPool(self.threads)
        self._state = _native.State()
        self._weights = HugeWeights()
        self._slots: list[CpuKvSlot] = []
        self._sequence = CpuSequence(self._state.now, [])
        self._recordings: weakref.WeakSet[CpuRecording] = weakref.WeakSet()
        self._profiled: list[CpuRecording] | None = None  # while profiling: one-shot recordings live until read

    def kernels(self) -> list[str]:
        """Names of the kernels compiled for this instruction set."""
        return list(_native.kernels(self.isa))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Tensor:
        """Uninitialised, 64-byte aligned."""
        tensor = Tensor(0, tuple(shape), np.dtype(dtype))
        tensor.owner = memory = aligned(tensor.nbytes)
        tensor.address = memory.ctypes.data
        return tensor

    def constant(self, array: np.ndarray) -> Tensor:
        """The array's own memory when it is C-contiguous, wherever it lies (mapped files align nothing)."""
        array = np.ascontiguousarray(array).reshape(array.shape)
        return Tensor(array.ctypes.data, array.shape, array.dtype, array)

    def alias(self, tensor: Tensor, shape: tuple[int, ...], dtype: np.dtype, offset: int = 0) -> Tensor:
        """The same memory from byte `offset` on, seen with another shape and dtype."""
        seen = Tensor(tensor.address + offset, tuple(shape), np.dtype(dtype))
        if offset + seen.nbytes > tensor.nbytes:
            raise GenaiError(f"a view of {seen.nbytes} bytes at {offset} was asked for, the tensor has {tensor.nbytes}")
        owner = tensor.owner
        if not isinstance(owner, np.ndarray):
            raise GenaiError(f"tensor `{tensor.dtype.name}{list(tensor.shape)}` is not this backend's")
        seen.owner = owner.reshape(-1).view(np.uint8)[offset : offset + seen.nbytes]
        return seen

    def upload(self, tensor: Tensor, array: np.ndarray) -> None:
        """Overwrite the tensor's values; shapes and dtypes must be the same."""
        if array.shape != tensor.shape or array.dtype != tensor.dtype:
            raise GenaiError(f"upload: found `{_words(array)}`, wanted `{_words(tensor)}`")
        _view(tensor)[...] = array

    def download(self, tensor: Tensor) -> np.ndarray:
        """A copy of the values."""
        return _view(tensor).copy()

    def view(self, tensor: Tensor) -> np.ndarray:
        """The values in place, until the next step overwrites them."""
        return _view(tensor)

    def record(self) -> CpuRecording:
        """A new recording, on this backend's threads and state."""
        made = CpuRecording(_native.Program(self.isa, self._pool, self._state), self._weights)
        self._recordings.add(made)
        if self._profiled is not None:
            made.profile(True)
            self._profiled.append(made)
        return made

    def runs_long(self) -> bool:
        """This process makes many steps: weights may be moved for it. True when recordings must be made again."""
        fresh, self._weights.wanted = not self._weights.wanted, True
        return fresh

    def profile(self, on: bool) -> None:
        """Time every step of every recording from now on, those to come included; older spans are dropped."""
        self._profiled = [*self._recordings] if on else None
        for recording in self._recordings:
            recording.profile(on)
            recording.take_spans()

    def take_spans(self) -> list[Span]:
        """Every run of every step since `profile` or the last call, in the order of time."""
        made, self._profiled = self._profiled or [], None if self._profiled is None else [*self._recordings]
        return sorted((span for recording in made for span in recording.take_spans()), key=lambda span: span.start_ns)

    def kv_slot(self, num_heads: int, head_dim: int, dtype: np.dtype) -> CpuKvSlot:
        """A capacity buffer for one component; all slots share one capacity."""
        dtype = np.dtype(dtype)
        with _told():
            index = self._sequence.native.add_slot(num_heads, head_dim, dtype.name)
        slot = CpuKvSlot(index, num_heads, head_dim, dtype, _kv_buffer(num_heads, 0, head_dim, dtype))
        self._slots.append(slot)
        self._sequence.buffers.append(slot.buffer)
        if self.capacity:
            self._commit([slot], [_kv_buffer(num_heads, self.capacity, head_dim, dtype)])
        return slot

    @property
    def capacity(self) -> int:
        """Tokens the slots hold without growing."""
        return max((slot.capacity for slot in self._slots), default=0)

    def reserve(self, capacity: int) -> None:
        """Grow every slot to hold `capacity` tokens, keeping the first past_len rows of every head; all or nothing."""
        grown = max((slot for slot in self._slots), key=lambda slot: slot.capacity, default=None)
        if grown is None or capacity <= min(slot.capacity for slot in self._slots):
            return
        bucket = FIRST_CAPACITY
        while bucket < capacity:
            bucket *= 2
        try:
            buffers = _kv_buffers(self._slots, bucket)
        except MemoryError as error:
            raise GenaiError(f"no memory for the KV of `{bucket}` tokens", hint="ask for fewer tokens") from error
        kept = self.past_len
        for slot, buffer in zip(self._slots, buffers, strict=True):
            copy_rows(buffer[:, :kept], slot.buffer[:, :kept])
        self._commit(self._slots, buffers)

    def _commit(self, slots: Sequence[CpuKvSlot], buffers: Sequence[np.ndarray]) -> None:
        for slot, buffer in zip(slots, buffers, strict=True):
            slot.buffer = self._sequence.buffers[slot.index] = buffer
            self._sequence.native.set_slot(slot.index, buffer.ctypes.data, buffer.shape[1])

    @property
    def sequence(self) -> CpuSequence:
        """The sequence that steps, `kv_view` and `kv_write` work on."""
        return self._sequence

    def new_sequence(self) -> CpuSequence:
        """A sequence of its own over the slots made so far; empty, and without memory until it is reserved."""
        made = CpuSequence(_native.Sequence(), [])
        for slot in self._slots:
            made.native.add_slot(slot.num_heads, slot.head_dim, slot.dtype.name)
            made.buffers.append(_kv_buffer(slot.num_heads, 0, slot.head_dim, slot.dtype))
        return made

    def select(self, sequence: KvSequence) -> None:
        """Work on this sequence from now on."""
        assert isinstance(sequence, CpuSequence)
        self._sequence, self._state.now = sequence, sequence.native
        for slot, buffer in zip(self._slots, sequence.buffers, strict=True):
            slot.buffer = buffer

    @contextmanager
    def rows(self, sequences: Sequence[KvSequence], lengths: Sequence[int]) -> Iterator[None]:
        """Within, token r of a step is the next one of sequences[r], which holds lengths[r] tokens and has room."""
        held = [sequence.native for sequence in sequences if isinstance(sequence, CpuSequence)]
        for native, length in zip(held, lengths, strict=True):
            native.past_len = length
        self._state.rows = held
        try:
            yield
        finally:
            self._state.rows = []

    @property
    def past_len(self) -> int:
        """Tokens whose KV is valid."""
        return int(self._sequence.native.past_len)

    def set_past_len(self, past_len: int) -> None:
        """Where the next step's tokens go."""
        if past_len < 0 or (self._slots and past_len > self.capacity):
            raise GenaiError(f"past length `{past_len}` was asked for, the KV buffers hold `{self.capacity}`")
        self._sequence.native.past_len = past_len

    def kv_view(self, slot: KvSlot, start: int, stop: int) -> np.ndarray:
        """Rows [H_kv, stop-start, D], a strided view valid until the slots grow."""
        own = self._slots[slot.index]
        if not 0 <= start <= stop <= own.capacity:
            raise GenaiError(f"KV rows `{start}:{stop}` were asked for, the buffer holds `{own.capacity}`")
        return own.buffer[:, start:stop]

    def kv_write(self, slot: KvSlot, rows: np.ndarray, start: int = 0) -> None:
        """Write positions [start, start + n) of a slot from rows [H_kv, n, D]."""
        own = self._slots[slot.index]
        if rows.ndim == 3 and start + rows.shape[1] > own.capacity:
            raise GenaiError(f"KV rows up to `{start + rows.shape[1]}` were given, the buffer holds `{own.capacity}`")
        copy_rows(own.buffer[:, start : start + rows.shape[1]], rows)

    def synchronize(self) -> None:
        """Native calls return when they are done."""


def _kv_buffer(num_heads: int, capacity: int, head_dim: int, dtype: np.dtype) -> np.ndarray:
    nbytes = num_heads * capacity * head_dim * dtype.itemsize
    return aligned(nbytes).view(dtype).reshape(num_heads, capacity, head_dim)


def _kv_buffers(slots: Sequence[CpuKvSlot], capacity: int) -> list[np.ndarray]:
    """Buffers of all slots in one block: numpy asks for huge pages from 4 MiB on, and a step reads every slot."""
    sizes = [slot.num_heads * capacity * slot.head_dim * slot.dtype.itemsize for slot in slots]
    ends = np.cumsum([-(-size // ALIGNMENT) * ALIGNMENT for size in sizes])
    block = aligned(int(ends[-1]))
    starts = [0, *ends[:-1].tolist()]
    return [
        block[start : start + size].view(slot.dtype).reshape(slot.num_heads, capacity, slot.head_dim)
        for slot, start, size in zip(slots, starts, sizes, strict=True)
    ]


def copy_table(table: np.ndarray) -> None:
    """The native twin of `kv.mirror.copy_rows`: every line of an int64 [k, 9] table (columns as named there)."""
    lines = np.ascontiguousarray(table, np.int64)
    if lines.ndim != 2 or lines.shape[1] != 9:
        raise GenaiError(f"a copy table of shape {list(lines.shape)} was given, wanted [k, 9]")
    _native.copy_table(lines.ctypes.data, len(lines))
