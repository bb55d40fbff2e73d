"""What a recorded kernel call reads, writes and computes: bytes and operations from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from genai_cli.backends.base import KvSlot, Tensor
from genai_cli.backends.cpu import Step

ROW_READERS = ("Gather", "GatherBlockQuantized")  # of their table they read the rows that indices name


@dataclass(frozen=True)
class Work:
    """Bytes moved to or from memory if no cache held any, and multiplications and additions (of products only)."""

    num_bytes: int
    num_ops: int


def work(step: Step, slots: Sequence[KvSlot], held: int, num_rows: int = 1) -> Work:
    """Of one call. `held` is the number of tokens in the KV when it ran, the new ones included; of `num_rows` sequences
    that share the step, of all together."""
    outputs = sum(tensor.nbytes for tensor in step.outputs if tensor is not None)
    inputs = {tensor.address: tensor.nbytes for tensor in step.inputs if tensor is not None}  # one memory is read once
    if step.kernel in ROW_READERS:
        return Work(_rows_read(step.inputs) + outputs, 0)
    if "key_slot" in step.attrs:
        new = sum(tensor.nbytes for tensor in step.inputs[:3] if tensor is not None)  # of cos and sin one row a token
        return _attention(step, slots, held, num_rows, new + outputs)
    return Work(sum(inputs.values()) + outputs, 2 * prod(_matrix(step) or (0,)))


def shape_of(step: Step) -> str:
    """`K→N` of a product with a weight, else the first output's shape."""
    sizes = _matrix(step)
    if sizes:
        num_rows, inner, width = sizes
        return f"{num_rows}×{inner} → {width}"
    first = next((tensor for tensor in step.outputs if tensor is not None), None)
    return "" if first is None else "×".join(map(str, first.shape))


def _rows_read(inputs: Sequence[Tensor | None]) -> int:
    table, indices = inputs[0], inputs[1]
    assert table is not None and indices is not None  # noqa: PT018  (the ops require both)
    others = [tensor for tensor in inputs[2:] if tensor is not None]
    rows, read = max(1, table.shape[0] if table.shape else 1), prod(indices.shape)
    return indices.nbytes + sum(tensor.nbytes * read // rows for tensor in (table, *others))


def _attention(step: Step, slots: Sequence[KvSlot], held: int, num_rows: int, moved: int) -> Work:
    key, value = slots[step.attrs["key_slot"]], slots[step.attrs["value_slot"]]
    window = step.attrs.get("local_window_size", -1)
    seen = held if window is None or window < 0 else min(held, window * num_rows)
    kv = seen * sum(slot.num_heads * slot.head_dim * slot.dtype.itemsize for slot in (key, value))
    num_heads = step.attrs.get("num_heads") or key.num_heads
    query = step.inputs[0]
    num_new = 1 if query is None else query.shape[-2] if len(query.shape) == 4 else query.shape[1]
    num_new //= num_rows
    pairs = num_new * seen - num_new * (num_new - 1) // 2  # of query and key; those of later keys are masked
    return Work(kv + moved, 2 * num_heads * max(0, pairs) * (key.head_dim + value.head_dim))


def _matrix(step: Step) -> tuple[int, int, int] | None:
    """(rows, inner, columns) of a matrix product; the rows of a batch together."""
    if step.kernel not in ("MatMul", "Gemm", "MatMulNBits"):
        return None
    left, out = step.inputs[0], step.outputs[0]
    if left is None or out is None or not left.shape or not out.shape:
        return None
    inner = left.shape[0] if step.kernel == "Gemm" and step.attrs.get("transA") else left.shape[-1]
    return prod(out.shape[:-1]), inner, out.shape[-1]
