"""Which compiled kernel runs which op on which specs. A rule promises no more than its contract in native/kernels.md.

Nothing here is a fallback order: a rule that does not accept gives its reason, and the reference runs on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from genai_cli.ops import (  # noqa: F401  (imported to register what the rules name)
    attention,
    cast,
    conv,
    elementwise,
    gather,
    group_query_attention,
    internal,
    layout,
    matmul,
    moe,
    norms,
    quant,
    recurrent,
    reduce,
    rotary,
    unary,
)
from genai_cli.ops.dtypes import BFLOAT16, FLOAT16, ONNX_DTYPES, SMALL_FLOAT, SMALL_INT, DType
from genai_cli.ops.infer import Attrs, Inputs, axis_of, dtype, optional, shape
from genai_cli.ops.registry import KernelRule, versions

Check = Callable[[Inputs, Attrs], str | None]

F32 = np.dtype(np.float32)
Kinds = frozenset[DType]
FLOATS: Kinds = frozenset((F32, FLOAT16, BFLOAT16))
BOOL: Kinds = frozenset((np.dtype(np.bool_),))
INT64 = np.dtype(np.int64)
ALL: Kinds = frozenset(ONNX_DTYPES.values()) - SMALL_FLOAT - SMALL_INT
INDICES: Kinds = frozenset((np.dtype(np.int32), INT64))
BYTES: Kinds = frozenset((np.dtype(np.uint8),))
NUMBERS: Kinds = ALL - BOOL - {np.dtype(np.uint64)}


def _names(kinds: Iterable[DType]) -> str:
    return ", ".join(sorted(kind.name for kind in kinds))


@dataclass(frozen=True)
class OfKind:
    """A check: the inputs (all of them without indices), where present, have one of the dtypes."""

    allowed: Kinds
    indices: tuple[int, ...] = ()

    def __call__(self, inputs: Inputs, attrs: Attrs) -> str | None:
        for i in self.indices or range(len(inputs)):
            value = inputs[i] if i < len(inputs) else None
            if value is not None and dtype(value) not in self.allowed:
                return f"input {i} is {dtype(value).name}, the kernel has {_names(self.allowed)}"
        return None


def kinds(allowed: Kinds, *indices: int) -> OfKind:
    """The check that inputs have one of the dtypes."""
    return OfKind(allowed, indices)


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


def rule(
    backend: str,
    op_types: str,
    *checks: Check,
    domain: str = "",
    since: int = 0,
    kernel: str = "",
    num_outputs: int | None = None,
) -> None:
    """Every version (from `since` on) of the ops has a kernel, under the op's name, for inputs that pass all checks.

    The first check of dtypes says which data the kernel is for (the coverage table); without one, any.
    """
    accepts = both(*checks)
    dtypes = next((check.allowed for check in checks if isinstance(check, OfKind)), ALL)
    for op_type in op_types.split():
        found = [entry for entry in versions(op_type, domain) if entry.since >= since]
        if not found:
            raise ValueError(f"a kernel rule for `{domain}::{op_type}`, which is not registered")
        for entry in found:
            entry.kernels[backend] = KernelRule(kernel or op_type, accepts, dtypes, num_outputs)


def known(*indices: int) -> Check:
    """The inputs, where present, are read while recording: their values must be known then."""

    def check(inputs: Inputs, attrs: Attrs) -> str | None:
        for i in indices:
            if (value := optional(inputs, i)) is not None and not isinstance(value, np.ndarray):
                return f"the value of input {i} is not known while recording"
        return None

    return check


def missing(*indices: int) -> Check:
    """The inputs are not given."""

    def check(inputs: Inputs, attrs: Attrs) -> str | None:
        return next((f"input {i} has no kernel" for i in indices if optional(inputs, i) is not None), None)

    return check


def pow_kinds(inputs: Inputs, attrs: Attrs) -> str | None:
    """A float base takes any exponent; other bases one of their own dtype."""
    return NUMBER(inputs, attrs) or (ALIKE(inputs, attrs) if FLOAT(inputs[:1], attrs) else None)


def last_axis(inputs: Inputs, attrs: Attrs) -> str | None:
    """Before opset 13 softmax flattens its input from `axis` (default 1) on: one axis only where that is the last."""
    rank = len(shape(inputs[0]))
    same = rank > 0 and axis_of(attrs.get("axis", 1), rank) == rank - 1
    return None if same else "softmax over several axes at once (before opset 13)"


def one_length(inputs: Inputs, attrs: Attrs) -> str | None:
    """Slots hold the past, so there are as many new keys as queries."""
    q, k = (optional(inputs, i) for i in range(2))
    if q is None or k is None or shape(q)[-2] == shape(k)[-2]:
        return None
    return f"{shape(q)[-2]} queries and {shape(k)[-2]} new keys, the kernel wants as many"


def whole_mask(inputs: Inputs, attrs: Attrs) -> str | None:
    """A mask has a column for every key."""
    mask, keys = optional(inputs, 3), shape(inputs[1])[-2]
    if mask is None or shape(mask)[-1:] in ((keys,), (1,)):
        return None
    return f"a mask of {shape(mask)[-1:]} columns for {keys} keys"


def packed_blocks(inputs: Inputs, attrs: Attrs) -> str | None:
    """MatMulNBits weights are repacked while recording; int8 activations want whole zero points."""
    zeros = optional(inputs, 3)
    if zeros is not None and dtype(zeros) != np.uint8 and attrs.get("accuracy_level", 0) == 4:
        return "float zero points at accuracy_level 4"
    block = attrs["block_size"]
    return None if block >= 16 and block % 16 == 0 else f"blocks of {block}"


def rows_of_bytes(inputs: Inputs, attrs: Attrs) -> str | None:
    """GatherBlockQuantized of rows of a matrix of bytes, quantized along them."""
    data = inputs[0]
    plain = len(shape(data)) == 2 and attrs.get("gather_axis", 0) == 0 and attrs.get("quantize_axis", 1) == 1
    return None if plain and dtype(data) == np.uint8 else "not the rows of a matrix of bytes"


def turned_matrix(inputs: Inputs, attrs: Attrs) -> str | None:
    """transA turns a matrix, not a batch of them."""
    rank = len(shape(inputs[0]))
    return f"transA of {rank} dimensions, the kernel has 2" if attrs.get("transA", 0) and rank > 2 else None


MS, OURS = "com.microsoft", "genai"
ANY, FLOAT, NUMBER, ALIKE = kinds(ALL), kinds(FLOATS), kinds(NUMBERS), alike()

# elementwise
rule("cpu", "Add Sub Mul Div Min Max Mod", count(2), NUMBER, ALIKE)
rule("cpu", "Pow", NUMBER, pow_kinds)
rule("cpu", "Equal Less LessOrEqual Greater GreaterOrEqual", kinds(NUMBERS | BOOL), ALIKE)
rule("cpu", "And Or Xor Not", kinds(BOOL))
rule("cpu", "Neg Abs Relu Sign", NUMBER)
rule("cpu", "Clip", NUMBER, ALIKE)
rule("cpu", "Sigmoid Tanh Exp Sqrt Reciprocal Log Erf Sin Cos Softplus Gelu Swish", FLOAT)
rule("cpu", "FastGelu BiasGelu QuickGelu", FLOAT, ALIKE, domain=MS)
rule("cpu", "Gelu", FLOAT, domain=MS)
rule("cpu", "SiluMul", FLOAT, ALIKE, domain=OURS, kernel="genai.SiluMul")
rule("cpu", "Cast", ANY, only("to", *(code for code, kind in ONNX_DTYPES.items() if kind in ALL)))

# layout and indexing
rule("cpu", "Identity Flatten Transpose Concat", ANY)
rule("cpu", "Reshape Squeeze Unsqueeze Expand Tile Split Trilu", kinds(ALL, 0), known(1))
rule("cpu", "Slice", kinds(ALL, 0), known(1, 2, 3, 4))
rule("cpu", "Trilu", kinds(ALL, 0), known(1), domain=MS)
rule("cpu", "Where", kinds(ALL, 1, 2), kinds(BOOL, 0), alike(1, 2))
rule("cpu", "Gather", kinds(ALL, 0), kinds(INDICES, 1))

# rows: reductions, softmax, norms
rule("cpu", "ReduceSum ReduceMean ReduceMax ReduceMin ReduceL2 ReduceSumSquare", kinds(NUMBERS, 0), known(1))
rule("cpu", "ArgMax ArgMin", NUMBER)
rule("cpu", "Softmax LogSoftmax", FLOAT, last_axis)
rule("cpu", "Softmax LogSoftmax", FLOAT, since=13)
rule("cpu", "SimplifiedLayerNormalization RMSNormalization LayerNormalization", FLOAT)
rule("cpu", "SimplifiedLayerNormalization", FLOAT, domain=MS)
rule("cpu", "SkipSimplifiedLayerNormalization SkipLayerNormalization", FLOAT, ALIKE, domain=MS)
rule("cpu", "LpNormalization", FLOAT, only("p", 1, 2))

# products
rule("cpu", "MatMul Gemm", FLOAT)
rule(
    "cpu",
    "FusedMatMul",
    FLOAT,
    turned_matrix,
    only("transBatchA", 0),
    only("transBatchB", 0),
    domain=MS,
    kernel="MatMul",
)

rule(
    "cpu", "MatMulNBits", kinds(FLOATS, 0, 2, 5), kinds(BYTES, 1), kinds(FLOATS | BYTES, 3), known(1, 2, 3), missing(4),
    only("bits", 4, 8), only("weight_prepacked", 0), packed_blocks, domain=MS,
)  # fmt: skip
rule(
    "cpu", "GatherBlockQuantized", kinds(FLOATS, 2), kinds(INDICES, 1), kinds(BYTES, 3), only("bits", 4, 8),
    rows_of_bytes, domain=MS,
)  # fmt: skip

# attention
rule("cpu", "RotaryEmbedding", kinds(FLOATS, 0, 1, 2), kinds(INDICES, 3))
rule(
    "cpu", "RotaryEmbedding", kinds(FLOATS, 0, 2, 3), kinds(INDICES, 1), only("scale", 1.0),
    only("is_packed_batching", 0), domain=MS, kernel="com.microsoft.RotaryEmbedding",
)  # fmt: skip
DENSE = (
    kinds(FLOATS, 0, 1, 2), kinds(FLOATS | BOOL, 3), alike(1, 2), missing(4, 5), kinds(INDICES, 6), whole_mask,
    only("softmax_precision", 1, 10, 16),
)  # fmt: skip
rule("cpu", "Attention", *DENSE, num_outputs=1)
rule("cpu", "AttentionDense", *DENSE, num_outputs=1, domain=OURS, kernel="genai.AttentionDense")
rule(
    "cpu", "Attention", kinds(FLOATS, 0, 1, 2, 3, 4, 7, 8, 9), kinds(INDICES, 5), kinds(FLOATS | BOOL, 6), one_length,
    only("bias_before_softcap", 0), domain=OURS, kernel="genai.Attention",
)  # fmt: skip

# recurrent state
for home in ("", MS):
    rule(
        "cpu", "CausalConvWithState", FLOAT, only("activation", "none", "silu", "swish"), only("channels_last", 0),
        only("dilation", 1), only("ndim", 1), only("state_window", 0), domain=home,
    )  # fmt: skip
    rule("cpu", "LinearAttention", FLOAT, only("state_window", 0), domain=home)


# mixtures of experts
def expert_blocks(inputs: Inputs, attrs: Attrs) -> str | None:
    """QMoE weights are repacked while recording, in whole blocks (a row is one where no size is given)."""
    default = attrs.get("expert_weight_bits", 4)
    for name, weights in zip(("fc1", "fc2", "fc3"), (optional(inputs, i) for i in (2, 5, 8)), strict=True):
        bits = attrs.get(f"{name}_expert_weight_bits", 0) or default
        if weights is None:
            continue
        if bits not in (4, 8):
            return f"{name} of {bits} bits, the kernel has 4 and 8"
        columns = shape(weights)[-1] * 8 // bits
        block = attrs.get("block_size", 0) or columns
        if block < 16 or block % 16 or columns % block:
            return f"{name} in blocks of {block} of {columns} columns"
    return None


ACTIVATION = only("activation_type", "relu", "gelu", "silu", "identity", "swiglu")
rule("cpu", "MoE", FLOAT, ACTIVATION, only("use_sparse_mixer", 0), domain=MS)
rule(
    "cpu", "QMoE", kinds(FLOATS, 0, 1, 3, 4, 6, 7, 9, 10, 14), kinds(BYTES, 2, 5, 8, 11, 12, 13), ACTIVATION,
    known(2, 3, 5, 6, 8, 9, 11, 12, 13), only("quant_type", "int"), only("use_sparse_mixer", 0),
    only("weights_prepacked", -1, 0), expert_blocks, domain=MS,
)  # fmt: skip
