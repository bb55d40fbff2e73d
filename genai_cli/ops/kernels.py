"""Which compiled kernel runs which op on which specs. A rule promises no more than its contract in native/kernels.md.

Nothing here is a fallback order: a rule that does not accept gives its reason, and the reference runs on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from genai_cli.ops.dtypes import BFLOAT16, FLOAT16, ONNX_DTYPES, SMALL_FLOAT, SMALL_INT, DType
from genai_cli.ops.infer import Attrs, Inputs, dtype, optional, shape
from genai_cli.ops.registry import KernelRule, versions

Check = Callable[[Inputs, Attrs], str | None]

F32 = np.dtype(np.float32)
Kinds = frozenset[DType]
FLOATS: Kinds = frozenset((F32, FLOAT16, BFLOAT16))
BOOL: Kinds = frozenset((np.dtype(np.bool_),))
INT64 = np.dtype(np.int64)
ALL: Kinds = frozenset(ONNX_DTYPES.values()) - SMALL_FLOAT - SMALL_INT
INDICES: Kinds = frozenset((np.dtype(np.int32), INT64))
NUMBERS: Kinds = ALL - BOOL - {np.dtype(np.uint64)}


def _names(kinds: Iterable[DType]) -> str:
    return ", ".join(sorted(kind.name for kind in kinds))


def kinds(allowed: Kinds, *indices: int) -> Check:
    """The inputs (all of them without indices), where present, have one of the dtypes."""

    def check(inputs: Inputs, attrs: Attrs) -> str | None:
        for i in indices or range(len(inputs)):
            value = inputs[i] if i < len(inputs) else None
            if value is not None and dtype(value) not in allowed:
                return f"input {i} is {dtype(value).name}, the kernel has {_names(allowed)}"
        return None

    return check


def alike(*indices: int) -> Check:
    """The inputs (all of them without indices), where present, share one dtype."""

    def check(inputs: Inputs, attrs: Attrs) -> str | None:
        there = [inputs[i] for i in indices or range(len(inputs)) if i < len(inputs)]
        found = {dtype(value) for value in there if value is not None}
        return f"inputs of different dtypes ({_names(found)})" if len(found) > 1 else None

    return check


def count(number: int) -> Check:
    """Exactly `number` inputs."""
    return lambda inputs, attrs: None if len(inputs) == number else f"{len(inputs)} inputs, the kernel takes {number}"


def only(name: str, *allowed: Any) -> Check:
    """An attribute, where given, has one of the values."""

    def check(inputs: Inputs, attrs: Attrs) -> str | None:
        if name in attrs and attrs[name] not in allowed:
            return f"{name} is `{attrs[name]}`, the kernel has {', '.join(map(repr, allowed))}"
        return None

    return check


def both(*checks: Check) -> Check:
    """All checks, the first reason."""

    def check(inputs: Inputs, attrs: Attrs) -> str | None:
        return next((reason for one in checks if (reason := one(inputs, attrs))), None)

    return check


def rule(backend: str, op_types: str, *checks: Check, domain: str = "", since: int = 0, kernel: str = "") -> None:
    """Every version (from `since` on) of the ops has a kernel, under the op's name, for inputs that pass all checks."""

    accepts = both(*checks)
    for op_type in op_types.split():
        found = [entry for entry in versions(op_type, domain) if entry.since >= since]
        if not found:
            raise ValueError(f"a kernel rule for `{domain}::{op_type}`, which is not registered")
        for entry in found:
            entry.kernels[backend] = KernelRule(kernel or op_type, accepts)


MS = "com.microsoft"
FLOAT = kinds(FLOATS)
ALIKE = alike()
FLOAT_OR_MASK = both(kinds(FLOATS, 0, 1, 2, 3, 4, 7, 8, 9), kinds(INDICES, 5), kinds(FLOATS | BOOL, 6))

rule("cpu", "Add Sub Mul Div Min Max Mod", count(2), kinds(NUMBERS), alike())
rule(
    "cpu",
    "Pow",
    kinds(NUMBERS),
    lambda inputs, attrs: None if FLOAT(inputs[:1], attrs) is None else ALIKE(inputs, attrs),
)
rule("cpu", "Equal Less LessOrEqual Greater GreaterOrEqual", kinds(NUMBERS | BOOL), alike())
rule("cpu", "And Or Xor Not", kinds(BOOL))
rule("cpu", "Neg Abs Relu Sign", kinds(NUMBERS))
rule("cpu", "Clip", kinds(NUMBERS), alike())
rule("cpu", "Sigmoid Tanh Exp Sqrt Reciprocal Log Erf Sin Cos Softplus Gelu Swish", FLOAT)
rule("cpu", "FastGelu BiasGelu QuickGelu", FLOAT, alike(), domain=MS)
rule("cpu", "Gelu", FLOAT, domain=MS)
rule("cpu", "Cast", kinds(ALL), only("to", *(code for code, kind in ONNX_DTYPES.items() if kind in ALL)))
rule("cpu", "Gather", kinds(ALL, 0), kinds(INDICES, 1))
rule("cpu", "SimplifiedLayerNormalization RMSNormalization LayerNormalization", FLOAT)
rule("cpu", "SimplifiedLayerNormalization", FLOAT, domain=MS)
rule("cpu", "SkipSimplifiedLayerNormalization SkipLayerNormalization", FLOAT, alike(), domain=MS)


def _one_length(inputs: Inputs, attrs: Attrs) -> str | None:
    """Slots hold the past, so there are as many new keys as queries."""
    q, k = (optional(inputs, i) for i in range(2))
    if q is None or k is None or shape(q)[-2] == shape(k)[-2]:
        return None
    return f"{shape(q)[-2]} queries and {shape(k)[-2]} new keys, the kernel wants as many"


rule("cpu", "Attention", FLOAT_OR_MASK, _one_length, domain="genai", kernel="genai.Attention")
rule("cpu", "LpNormalization", FLOAT, only("p", 1, 2))
