"""The machine's ceilings, and what one token must read."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import nan
from statistics import median

import numpy as np

from genai_cli.backends.base import Backend, DeviceBackend, Tensor
from genai_cli.backends.cpu import CpuBackend
from genai_cli.errors import GenaiError
from genai_cli.graph.io import DecoderIo
from genai_cli.graph.ir import Graph

STREAM_BYTES = 256 * 2**20  # larger than the last-level cache of the machines we know of
STREAM_PASSES = 24
PEAK_PASSES = 8  # of arithmetic the best counts: it depends on nobody else's memory traffic
ROW_READERS = ("Gather", "GatherBlockQuantized")  # of their table they read one row a token
PARTIAL_READERS = ("MoE", "QMoE")  # which experts are read, only the router knows


def streaming_bandwidth_gb_s(threads: int) -> float:
    """Reading main memory with `threads` threads, GB/s (1e9): a dot product over each thread's part of one buffer. The
    median pass: on a shared machine the best one is luck that no median of trials can be measured by."""
    buffer = np.ones(STREAM_BYTES // 4, np.float32)
    parts = np.array_split(buffer, threads)
    spent = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(STREAM_PASSES):
            started = time.perf_counter()
            list(pool.map(lambda part: float(np.dot(part, part)), parts))
            spent.append(time.perf_counter() - started)
    return buffer.nbytes / median(spent) / 1e9


DEVICE_COPY_BYTES = 128 << 20  # twice that is more than the caches of the largest devices
PEAK_ROUNDS = 1_000_000  # some 10 ms


@dataclass(frozen=True)
class Ceilings:
    """What all threads together can do: GB/s read, 1e9 operations/s (a multiplication and an addition are two)."""

    read_gb_s: float
    float_gop_s: float  # f32 multiply-adds
    byte_gop_s: float  # int8 dot products, as the instruction set does them

    def best(self, other: Ceilings) -> Ceilings:
        """A ceiling is the most that was seen."""
        return Ceilings(
            max(self.read_gb_s, other.read_gb_s), max(self.float_gop_s, other.float_gop_s),
            max(self.byte_gop_s, other.byte_gop_s),
        )  # fmt: skip


@dataclass(frozen=True)
class Operations:
    """Multiplications and additions of one step, by the ceiling that bounds them."""

    floats: int
    bytes: int

    def least_s(self, machine: Ceilings) -> float:
        """Seconds at both peaks, one after the other."""
        return self.floats / machine.float_gop_s / 1e9 + self.bytes / machine.byte_gop_s / 1e9


def ceilings(backend: CpuBackend) -> Ceilings:
    """Measured here and now; the best of several passes."""
    floats = backend.constant(np.full(32, 1e-9, np.float32))
    byte = backend.constant(np.ones(64, np.int8))
    return Ceilings(
        streaming_bandwidth_gb_s(backend.threads),
        _peak(backend, "bench.FloatPeak", floats),
        _peak(backend, "bench.BytePeak", byte),
    )


def device_ceilings(backend: Backend) -> Ceilings:
    """A device's memory, as a copy inside it reads and writes it; what it computes at most is not known here."""
    if not isinstance(backend, DeviceBackend):
        raise GenaiError(f"the memory of the backend `{backend.name}` is the host's")
    source, to = (backend.empty((DEVICE_COPY_BYTES // 8,), np.dtype(np.int64)) for _ in range(2))
    recording = backend.record()
    backend.carry(recording, [(to, source)])
    spent = []
    for _ in range(PEAK_PASSES):
        backend.synchronize()
        started = time.perf_counter()
        recording.replay()
        backend.synchronize()
        spent.append(time.perf_counter() - started)
    return Ceilings(2 * source.nbytes / median(spent) / 1e9, nan, nan)


def _peak(backend: CpuBackend, kernel: str, operand: Tensor) -> float:
    out = backend.empty((2, backend.threads), np.dtype(np.float32))
    recording = backend.record()
    recording.call(kernel, [operand], [out], {"rounds": PEAK_ROUNDS})
    best = float("inf")
    for _ in range(PEAK_PASSES):
        started = time.perf_counter()
        recording.replay()
        best = min(best, time.perf_counter() - started)
    return float(backend.view(out)[1].sum()) / best / 1e9


def weight_bytes_per_token(graph: Graph) -> int | None:
    """Bytes of weights one decode step reads; of tables that are only gathered from, one row. None with experts."""
    if any(node.op_type in PARTIAL_READERS for node in graph.nodes):
        return None
    rows = {name for node in graph.nodes if node.op_type in ROW_READERS for name in node.inputs if name}
    whole = {name for node in graph.nodes if node.op_type not in ROW_READERS for name in node.inputs if name}
    total = 0
    for name, weight in graph.initializers.items():
        if name in whole:
            total += weight.nbytes
        elif name in rows:
            total += weight.nbytes // (weight.shape[0] if len(weight.shape) > 1 and weight.shape[0] else 1)
    return total


def kv_bytes_per_token(io: DecoderIo, length: int) -> int:
    """Bytes of KV that a step behind `length` tokens reads; a window bounds its layer."""
    return sum(
        min(length, b.window or length) * b.num_heads * b.head_dim * np.dtype(b.dtype).itemsize for b in io.kv
    )  # fmt: skip
