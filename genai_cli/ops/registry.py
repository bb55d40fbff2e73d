"""The one table that says what runs where.

An op is registered once: its *reference* (numpy, the slow truth, also the host fallback), its *infer* (shapes and
dtypes, needed only where a kernel exists) and its *kernels* (backend -> dtypes). Nothing else in the project lists ops.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from genai_cli.errors import GenaiError
from genai_cli.ops.dtypes import is_16_bit

Spec = tuple[tuple[int, ...], np.dtype[Any]]  # (shape, dtype) of one tensor
Known = Spec | np.ndarray  # an input whose value is known is given as the array itself
Reference = Callable[..., Any]
Infer = Callable[[Sequence[Known | None], dict[str, Any]], list[Spec]]
Like = int | None | tuple[int | None, ...]


@dataclass(frozen=True)
class KernelRule:
    """A compiled kernel for an op on one backend.

    `accepts(inputs, attrs)` is None when it can run these specs, else the reason it cannot (then the reference runs on
    the host).
    The kernel is called with the op's own inputs, outputs and attributes, in ONNX order and spelling.
    """

    name: str
    accepts: Callable[[Sequence[Known | None], dict[str, Any]], str | None]
    dtypes: frozenset[np.dtype[Any]] = frozenset()  # of the data it computes on; `accepts` knows the details
    num_outputs: int | None = None  # how many of the op's outputs the kernel makes, where not all


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
    like: Like = 0  # the input whose dtype an output takes (or one each; input 0 if missing); None: as made
    host_inputs: tuple[int, ...] = ()  # axes, shape, repeats: their values decide shapes, `infer` wants the arrays

    @property
    def key(self) -> str:
        """`domain::OpType`, or just the type for ai.onnx."""
        return f"{self.domain}::{self.op_type}" if self.domain else self.op_type

    @cached_property
    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.reference).parameters.values())

    @cached_property
    def attributes(self) -> frozenset[str]:
        """The attributes the reference knows."""
        return frozenset(p.name for p in self._parameters if p.kind is p.KEYWORD_ONLY)

    @cached_property
    def required_attributes(self) -> frozenset[str]:
        """The attributes without a default."""
        return frozenset(p.name for p in self._parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty)

    @cached_property
    def num_inputs(self) -> tuple[int, int]:
        """The fewest and the most inputs."""
        inputs = [p for p in self._parameters if p.kind is not p.KEYWORD_ONLY]
        if any(p.kind is p.VAR_POSITIONAL for p in inputs):
            return 1, 1 << 30
        return sum(p.default is p.empty for p in inputs), len(inputs)

    def dtype_source(self, output: int) -> int | None:
        """The input whose dtype this output takes, or None."""
        if isinstance(self.like, tuple):
            return self.like[output] if output < len(self.like) else None
        return self.like


_TABLE: dict[tuple[str, str], list[OpDef]] = {}


def register(op: OpDef) -> OpDef:
    """Add an op. Two entries with the same (domain, op_type, since) are a programming error."""
    versions = _TABLE.setdefault((op.domain, op.op_type), [])
    if any(other.since == op.since for other in versions):
        raise ValueError(f"{op.domain}::{op.op_type} since {op.since} is registered twice")
    versions.append(op)
    versions.sort(key=lambda entry: entry.since)
    return op


def op(
    *,
    name: str = "",
    domain: str = "",
    since: int = 1,
    infer: Infer | None = None,
    raw: bool = False,
    like: Like = 0,
    host_inputs: tuple[int, ...] = (),
) -> Callable[[Reference], Reference]:
    """Register the decorated reference under its own (ONNX) name, or `name` where one spelling has several versions."""

    def decorate(function: Reference) -> Reference:
        op_type = name or function.__name__
        register(OpDef(op_type, domain, since, function, infer, {}, raw, like, host_inputs))
        return function

    return decorate


def lookup(op_type: str, domain: str, opset: int) -> OpDef | None:
    """The newest definition with since <= opset, or None."""
    found = None
    for entry in _TABLE.get((domain, op_type), []):
        if entry.since <= opset:
            found = entry
    return found


def versions(op_type: str, domain: str = "") -> list[OpDef]:
    """Every definition of one op, oldest first."""
    return _TABLE.get((domain, op_type), [])


def table() -> list[OpDef]:
    """Every registered op, sorted by domain, type and version."""
    return [entry for key in sorted(_TABLE) for entry in _TABLE[key]]


def unknown_attributes(opdef: OpDef, attrs: dict[str, Any]) -> list[str]:
    """Attributes of a node that the op does not know: a reason to refuse it at load, never to ignore them."""
    return sorted(set(attrs) - opdef.attributes)


def misuse(opdef: OpDef, num_inputs: int, attrs: dict[str, Any]) -> str | None:
    """Why a node with this many inputs and these attributes is not a call of the op, or None."""
    fewest, most = opdef.num_inputs
    if not fewest <= num_inputs <= most:
        return f"`{num_inputs}` inputs, wanted {fewest}" + (f" to {most}" if most > fewest else "")
    if not opdef.attributes.issuperset(attrs):
        return f"attribute {_listed(unknown_attributes(opdef, attrs))} is not supported"
    if not opdef.required_attributes <= attrs.keys():
        return f"attribute {_listed(sorted(opdef.required_attributes - attrs.keys()))} is missing"
    return None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def run_reference(
    opdef: OpDef, inputs: Sequence[np.ndarray | None], attrs: dict[str, Any], num_outputs: int | None = None
) -> list[np.ndarray | None]:
    """Run an op in numpy on the host: 16-bit inputs widened to f32, every output rounded once to its declared dtype.

    `num_outputs` is the node's own count, for the ops that derive something from it (Split). GenaiError says what is
    wrong with the call.
    """
    if reason := misuse(opdef, len(inputs), attrs):
        raise GenaiError(f"`{opdef.key}` (opset {opdef.since}): {reason}")
    if num_outputs is not None and "num_node_outputs" in opdef.attributes:
        attrs = {**attrs, "num_node_outputs": num_outputs}
    wide = inputs if opdef.raw else [_widen(array) for array in inputs]
    with np.errstate(all="ignore"):
        made = opdef.reference(*wide, **attrs)
        outputs = made if isinstance(made, tuple | list) else (made,)
        return [_round(opdef, i, array, inputs) for i, array in enumerate(outputs)]


def _widen(array: np.ndarray | None) -> np.ndarray | None:
    return array.astype(np.float32) if array is not None and is_16_bit(array.dtype) else array


def _round(
    opdef: OpDef, index: int, array: np.ndarray | None, inputs: Sequence[np.ndarray | None]
) -> np.ndarray | None:
    if array is None:
        return None
    source = opdef.dtype_source(index)
    if source is None:
        return np.asarray(array, order="C")
    wanted = inputs[source] if source < len(inputs) else None
    dtype = inputs[0].dtype if wanted is None else wanted.dtype  # type: ignore[union-attr]  # input 0 is never optional then
    return np.asarray(array, dtype=dtype, order="C")
