"""The one table that says what runs where.

An op is registered once: its *reference* (numpy, the slow truth, also the host fallback), its *infer* (shapes and dtypes,
needed only where a kernel exists) and its *kernels* (backend -> dtypes). Nothing else in the project lists ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Spec = tuple[tuple[int, ...], np.dtype]  # (shape, dtype) of one tensor
Reference = Callable[..., Any]
Infer = Callable[[Sequence[Spec | None], dict[str, Any]], list[Spec]]


@dataclass(frozen=True)
class KernelRule:
    """A compiled kernel for an op on one backend.

    `accepts(inputs, attrs)` is None when it can run these specs, else the reason it cannot (then the reference runs on the host).
    The kernel is called with the op's own inputs, outputs and attributes, in ONNX order and spelling.
    """

    name: str
    accepts: Callable[[Sequence[Spec | None], dict[str, Any]], str | None]


@dataclass
class OpDef:
    """One op_type of one domain, from opset `since` on (newest since <= the model's opset wins)."""

    op_type: str
    domain: str
    since: int
    reference: Reference  # reference(*inputs, **attrs) -> array or tuple; missing inputs are None; f32 inside
    infer: Infer | None = None
    kernels: dict[str, KernelRule] = field(default_factory=dict)  # "cpu", "cuda"
    raw: bool = False  # True: the reference wants 16-bit inputs as they are (copies, casts, bit ops)


_TABLE: dict[tuple[str, str], list[OpDef]] = {}


def register(op: OpDef) -> OpDef:
    """Add an op. Two entries with the same (domain, op_type, since) are a programming error."""
    versions = _TABLE.setdefault((op.domain, op.op_type), [])
    if any(other.since == op.since for other in versions):
        raise ValueError(f"{op.domain}::{op.op_type} since {op.since} is registered twice")
    versions.append(op)
    versions.sort(key=lambda entry: entry.since)
    return op


def lookup(op_type: str, domain: str, opset: int) -> OpDef | None:
    """The newest definition with since <= opset, or None."""
    found = None
    for entry in _TABLE.get((domain, op_type), []):
        if entry.since <= opset:
            found = entry
    return found


def table() -> list[OpDef]:
    """Every registered op, sorted by domain, type and version."""
    return [entry for key in sorted(_TABLE) for entry in _TABLE[key]]
