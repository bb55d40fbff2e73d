"""Row arithmetic between a decoder's present/past buffers and pages: where each (head, position) row lies.

Mirror is present → pages, seed is pages → past. Both are the same copy: n rows of D scalars per head, between two
buffers whose head strides differ (a capacity buffer strides by capacity * D, a page by page_size * D).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from genai_cli.errors import ExitCode, GenaiError
from genai_cli.kv.layout import KvLayout, KvRows

PhysicalLayout = Literal["bhsd", "bshd", "bhds"]
"""How a KV tensor is declared: [B, H, S, D]; [B, S, H*D] (or [B, S, H, D]); transposed key [B, H, D, S].
Always declared, never guessed from sizes: a guess is wrong exactly when S == H or S == D."""

CopyRows = Callable[[np.ndarray], None]
"""Copies every line of an int64 [k, 9] table of COPY_COLUMNS; strides in bytes, rows of `row_bytes` bytes:
for i < n0, for j < n1: dst + i*dst_stride0 + j*dst_stride1 <- src + i*src_stride0 + j*src_stride1."""

COPY_COLUMNS = ("dst", "src", "n0", "dst_stride0", "src_stride0", "n1", "dst_stride1", "src_stride1", "row_bytes")


def copy_rows(table: np.ndarray) -> None:
    """The truth that the native `CopyRows` is compared with: one memmove per row."""
    for dst, src, n0, dst0, src0, n1, dst1, src1, row_bytes in table.tolist():
        for i in range(n0):
            for j in range(n1):
                ctypes.memmove(dst + i * dst0 + j * dst1, src + i * src0 + j * src1, row_bytes)


def address(array: np.ndarray) -> int:
    """Address of the first element."""
    return int(array.__array_interface__["data"][0])


def copy_lines(
    slots: np.ndarray, outside: np.ndarray, num_rows: np.ndarray, heads: np.ndarray, row_strides: np.ndarray,
    head_strides: tuple[np.ndarray, np.ndarray], row_bytes: np.ndarray, *, into_pages: bool,
) -> np.ndarray:  # fmt: skip
    """Table lines [C * P, 9] between page slots (addresses [C, P]) and rows of C arrays [H, n, D] (addresses [C, P]).

    num_rows [P]; heads, row_strides of the arrays, head_strides (pages, arrays) and row_bytes: [C]."""
    dense = (row_strides == row_bytes)[:, None]  # then a head's rows are one run on both sides
    to, source = (0, 1) if into_pages else (1, 0)
    table = np.empty((*slots.shape, 9), np.int64)
    table[..., to], table[..., source] = slots, outside
    table[..., 2] = heads[:, None]
    table[..., 3 + to], table[..., 3 + source] = (strides[:, None] for strides in head_strides)
    table[..., 5] = np.where(dense, 1, num_rows)
    table[..., 6 + to], table[..., 6 + source] = row_bytes[:, None], row_strides[:, None]
    table[..., 8] = row_bytes[:, None] * np.where(dense, num_rows, 1)
    return table.reshape(-1, 9)


def row_error(wanted: str, found: str) -> GenaiError:
    return GenaiError(f"KV rows are `{found}`, wanted `{wanted}`", exit_code=ExitCode.INTERNAL)


def check_rows(layout: KvLayout, rows: KvRows) -> int:
    """The one door for rows: one array [H_kv, n, D] per component in its dtype, one n for all. Returns n."""
    if len(rows) != len(layout.components):
        raise row_error(f"{len(layout.components)} components", f"{len(rows)} components")
    num_rows = rows[0].shape[1] if rows and rows[0].ndim == 3 else 0
    for component, array in zip(layout.components, rows, strict=True):
        wanted = (component.num_heads, num_rows, component.head_dim)
        if array.shape != wanted or array.dtype != component.dtype:
            where = f"layer {component.layer} {component.kind}"
            raise row_error(f"{component.dtype}{list(wanted)} for {where}", f"{array.dtype}{list(array.shape)}")
    return num_rows


def packed(rows: KvRows) -> KvRows:
    """The same rows with a contiguous last axis, which row copies need (a transposed key has none)."""
    return [row if row.strides[2] == row.itemsize or not row.size else np.ascontiguousarray(row) for row in rows]


def rows_view(tensor: np.ndarray, physical: PhysicalLayout, num_heads: int, start: int, stop: int, batch: int = 0
              ) -> np.ndarray:  # fmt: skip
    """View [H_kv, stop-start, D] of positions [start, stop) of one batch row of a present/past tensor.

    `tensor` may be longer than the valid length (capacity): positions past its end are an error, padding is not read.
    """
    row = tensor[batch]
    if physical == "bshd":
        row = row.reshape(row.shape[0], num_heads, -1).transpose(1, 0, 2)  # [H, S, D]
    elif physical == "bhds":
        row = row.transpose(0, 2, 1)  # [H, D, S] -> [H, S, D]
    if row.shape[0] != num_heads or not 0 <= start <= stop <= row.shape[1]:
        raise row_error(f"{num_heads} heads, positions {start}..{stop}", f"{list(tensor.shape)} as {physical}")
    return np.asarray(row[:, start:stop])


def seed_tensor(
    tensor: np.ndarray, physical: PhysicalLayout, rows: np.ndarray, *, start: int = 0, batch: int = 0
) -> None:
    """Write rows [H_kv, n, D] at positions [start, start+n) of a past tensor in its declared layout, in place.

    Refuses n = 0, a wrong head count or head size, a dtype that is not the tensor's, and a start other than 0.
    """
    num_heads, num_rows, _ = rows.shape
    if num_rows == 0 or start != 0:
        raise row_error("at least one row, from position 0", f"{num_rows} rows from position {start}")
    view = rows_view(tensor, physical, num_heads, 0, num_rows, batch)
    if view.shape != rows.shape or view.dtype != rows.dtype:
        raise row_error(f"{view.dtype}{[num_heads, num_rows, view.shape[2]]}", f"{rows.dtype}{list(rows.shape)}")
    view[...] = rows


def grow(tensors: Sequence[np.ndarray], length: int, capacity: int) -> list[np.ndarray]:
    """Larger capacity buffers [B, H_kv, capacity, D] with the first `length` rows of every head kept.

    Every head but the first moves. All are allocated before any is returned, so a failure leaves the old ones valid.
    """
    if any(tensor.shape[2] < length or capacity < length for tensor in tensors):
        raise row_error(f"capacity >= {length}", f"capacity {capacity}")
    grown = [np.zeros((*t.shape[:2], capacity, t.shape[3]), t.dtype) for t in tensors]
    for new, old in zip(grown, tensors, strict=True):
        new[:, :, :length] = old[:, :, :length]
    return grown


def convert(rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Rows in another float dtype: widening is exact, narrowing rounds to nearest even, NaN stays NaN (the sign and
    payload of a NaN may change). Anything but a float pair is refused: bits are never read as numbers."""
    if rows.dtype == dtype:
        return rows
    if not (is_float(rows.dtype) and is_float(dtype)):
        raise row_error(str(dtype), str(rows.dtype))
    return np.asarray(rows.astype(dtype))


def is_float(dtype: np.dtype) -> bool:
    """IEEE floats, and the extension floats (bfloat16, float8) that numpy files under kind "V" or "f"."""
    return dtype.kind == "f" or "float" in dtype.name
