"""Weights between the mapped file and the kernels: what is copied, and which of the file's pages stay in memory."""

from __future__ import annotations

import mmap
import os

import numpy as np

from genai_cli.backends.base import Tensor

ALIGNMENT = 64  # bytes: one cache line, one AVX-512 register
REPACKS = frozenset({"MatMulNBits"})  # kernels that read a copy of their weights, made once in an order of their own
STREAMS = frozenset({"MatMul", "Gemm"})  # kernels that read their weights from end to end, where they lie
_BLOCK = 64 << 20  # bytes; numpy asks for huge pages from 4 MiB on
_CHUNK = 4 << 20  # bytes copied before the file's pages are left
_WORTH = 64 << 10  # bytes of a weight that is worth moving


def aligned(nbytes: int) -> np.ndarray:
    """Uninitialised bytes [nbytes], aligned for vector loads; never at address 0, even when empty."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def mapping_of(array: object) -> mmap.mmap | None:
    """The mapped file an array's memory belongs to, if it does."""
    base = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base if isinstance(base, mmap.mmap) else None


def leave_pages(tensor: Tensor | None) -> None:
    """Give back the memory of weights that lie in a mapped file and were copied; whoever reads them again gets them from
    the file. (Only a mapping of a file may be told so: other memory would lose its values.)"""
    if tensor is not None and isinstance(tensor.owner, np.ndarray):
        _leave(tensor.owner)


def _leave(array: np.ndarray) -> None:
    mapped = mapping_of(array)
    if mapped is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    begin = array.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, (begin + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        mapped.madvise(mmap.MADV_DONTNEED, first, last - first)


class HugeWeights:
    """Streamed weights in huge pages. A file's small pages cost a tenth of the bandwidth and more; the copy takes time and
    is private to the process, so it is made only for who runs long (`wanted`), and only while all of them stay below a
    quarter of the memory that was free."""

    def __init__(self, budget: int | None = None) -> None:
        """`budget` in bytes; default: a quarter of the physical memory that is free now."""
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if budget is None else 4 * budget
        self.budget = free // 4
        self.wanted = False
        self._block = aligned(0)

    def move(self, tensor: Tensor) -> None:
        """Let the tensor live in huge pages from now on, if it lies in a mapped file and the budget allows."""
        array = tensor.owner
        if (
            not self.wanted
            or not isinstance(array, np.ndarray)
            or not _WORTH <= array.nbytes <= self.budget
            or mapping_of(array) is None
        ):
            return
        self.budget -= array.nbytes
        copy = self._take(array.nbytes)
        source = array.reshape(-1).view(np.uint8)
        for start in range(0, source.nbytes, _CHUNK):  # never much of a weight twice in memory
            part = slice(start, start + _CHUNK)
            copy[part] = source[part]
            _leave(source[part])
        tensor.owner, tensor.address = copy.view(array.dtype).reshape(array.shape), copy.ctypes.data

    def _take(self, nbytes: int) -> np.ndarray:
        if nbytes > self._block.nbytes:
            self._block = aligned(max(nbytes, _BLOCK))
        piece, rest = self._block[:nbytes], -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._block = self._block[rest:]
        return piece
