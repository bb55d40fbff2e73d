"""The machine's ceiling, and what one token must read of it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from genai_cli.graph.io import DecoderIo
from genai_cli.graph.ir import Graph

STREAM_BYTES = 256 * 2**20  # larger than the last-level cache of the machines we know of
STREAM_PASSES = 8  # the best counts: a ceiling is what the machine can do, not what it did while disturbed
ROW_READERS = ("Gather", "GatherBlockQuantized")  # of their table they read one row a token
PARTIAL_READERS = ("MoE", "QMoE")  # which experts are read, only the router knows


def streaming_bandwidth_gb_s(threads: int) -> float:
    """Reading main memory with `threads` threads, GB/s (1e9): a dot product over each thread's part of one buffer."""
    buffer = np.ones(STREAM_BYTES // 4, np.float32)
    parts = np.array_split(buffer, threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(STREAM_PASSES):
            started = time.perf_counter()
            list(pool.map(lambda part: float(np.dot(part, part)), parts))
            best = min(best, time.perf_counter() - started)
    return buffer.nbytes / best / 1e9


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
