"""The rules of the CUDA kernels (native/cuda), beside those of the CPU in kernels.py and by the same contract.

Where a kernel takes less than the CPU's (floats only, one run of axes, six dimensions) the rule says so, and the
reference runs on the host.
"""

from __future__ import annotations

import numpy as np

from genai_cli.ops.dtypes import ONNX_DTYPES
from genai_cli.ops.infer import Attrs, Inputs, axis_of, dtype, optional, shape
from genai_cli.ops.kernels import (
    ALIKE,
    ALL,
    ANY,
    BOOL,
    DENSE,
    FLOAT,
    FLOATS,
    INDICES,
    MS,
    NUMBER,
    NUMBERS,
    OURS,
    alike,
    count,
    kinds,
    known,
    last_axis,
    one_length,
    only,
    rule,
)

MOST_DIMS = 6  # the kernels take dimensions and strides as scalars
BYTES = frozenset((np.dtype(np.uint8),))
FEW = 64  # TopK runs one round for each value it finds
STATE_BYTES = 96 << 10  # shared memory a block may ask for from sm_80 on: one head's state
STATE_COLUMNS = 256  # a thread each, __launch_bounds__ in recurrent.cu


def dims(inputs: Inputs, attrs: Attrs) -> str | None:
    """No input has more dimensions than the kernels walk."""
    most = max((len(shape(value)) for value in inputs if value is not None), default=0)
    return None if most <= MOST_DIMS else f"{most} dimensions, the kernel has {MOST_DIMS}"


def few_dims(inputs: Inputs, attrs: Attrs) -> str | None:
    """Tile walks two dimensions for each."""
    rank = len(shape(inputs[0]))
    return None if 2 * rank <= MOST_DIMS else f"{rank} dimensions, the kernel has {MOST_DIMS // 2}"


def one_run(inputs: Inputs, attrs: Attrs) -> str | None:
    """The reduced axes lie side by side."""
    rank, given = len(shape(inputs[0])), optional(inputs, 1)
    axes = attrs.get("axes") or (given.reshape(-1).tolist() if isinstance(given, np.ndarray) else [])
    if not axes:
        return "no axes to reduce" if attrs.get("noop_with_empty_axes", 0) else None
    chosen = sorted({axis_of(int(axis), rank) for axis in axes})
    side_by_side = chosen[-1] - chosen[0] == len(chosen) - 1
    return None if side_by_side else f"axes {chosen} do not lie side by side"


def same_but_axis(inputs: Inputs, attrs: Attrs) -> str | None:
    """GatherElements whose indices cover the data everywhere but along the axis."""
    data, indices = shape(inputs[0]), shape(inputs[1])
    axis = axis_of(attrs.get("axis", 0), len(data))
    same = all(a == b for i, (a, b) in enumerate(zip(data, indices, strict=True)) if i != axis)
    return None if same else "indices smaller than the data beside the axis"


def sections(inputs: Inputs, attrs: Attrs) -> str | None:
    """MRotaryEmbedding whose three sections are the width of the caches."""
    section, width = list(attrs["mrope_section"]), shape(inputs[2])[-1]
    return None if len(section) == 3 and sum(section) == width else f"sections {section} of a width of {width}"


def few(inputs: Inputs, attrs: Attrs) -> str | None:
    """TopK of a number that is known and small."""
    k = optional(inputs, 1)
    if isinstance(k, np.ndarray) and int(k.reshape(-1)[0]) <= FEW:
        return None
    return f"more than {FEW} values, or a number only a step knows"


def blocks(inputs: Inputs, attrs: Attrs) -> str | None:
    """MatMulNBits in 4 or 8 bits; a block fills whole loads; no reordered groups."""
    if optional(inputs, 4) is not None:
        return "g_idx has no kernel"
    zeros = optional(inputs, 3)
    if zeros is not None and dtype(zeros) not in FLOATS | {np.dtype(np.uint8)}:
        return f"zero points of {dtype(zeros).name}"
    if zeros is not None and dtype(zeros) != np.uint8 and attrs.get("accuracy_level", 0) == 4:
        return "float zero points at accuracy_level 4"
    block = attrs["block_size"]
    if block < 16 or block & (block - 1):
        return f"blocks of {block}, the kernel has powers of two from 16 on"
    return only("bits", 4, 8)(inputs, attrs) or only("weight_prepacked", 0)(inputs, attrs)


def rows_of_table(inputs: Inputs, attrs: Attrs) -> str | None:
    """GatherBlockQuantized of the rows of a 2-D table quantized along its width."""
    rank = len(shape(inputs[0]))
    rows = rank == 2 and attrs.get("gather_axis", 0) in (0, -2) and attrs.get("quantize_axis", 1) in (1, -1)
    if not rows:
        return "not the rows of a 2-D table"
    data, zeros = dtype(inputs[0]), optional(inputs, 3)
    if data not in (np.dtype(np.uint8), np.dtype(np.int8)):  # an int4 byte has 4 bits; the kernel reads 8
        return f"data of {data.name}"
    if zeros is not None and dtype(zeros) != data:
        return f"zero points of {dtype(zeros).name}"
    return None


def small_state(inputs: Inputs, attrs: Attrs) -> str | None:
    """One head's state fits a block's shared memory, a value column a thread."""
    d_k = shape(inputs[0])[2] // attrs["q_num_heads"]
    d_v = shape(inputs[2])[2] // attrs["kv_num_heads"]
    fits = (d_k * d_v + 3 * d_k) * 4 <= STATE_BYTES and d_v <= STATE_COLUMNS
    return None if fits and not attrs.get("state_window", 0) else f"a state of {d_k} x {d_v}"


# elementwise
rule("cuda", "Add Sub Mul Div Min Max Mod", count(2), NUMBER, ALIKE, dims)
rule("cuda", "Pow", kinds(FLOATS, 0), kinds(NUMBERS, 1), dims)
rule("cuda", "Equal Less LessOrEqual Greater GreaterOrEqual", kinds(NUMBERS | BOOL), ALIKE, dims)
rule("cuda", "And Or Xor Not", kinds(BOOL), dims)
rule("cuda", "Neg Abs Relu Sign", NUMBER)
rule("cuda", "Clip", NUMBER, ALIKE)
rule("cuda", "Sigmoid Tanh Exp Sqrt Reciprocal Log Erf Sin Cos Softplus Gelu Swish Floor Ceil Round", FLOAT)
rule("cuda", "FastGelu BiasGelu QuickGelu", FLOAT, ALIKE, domain=MS)
rule("cuda", "Gelu", FLOAT, domain=MS)
rule("cuda", "SiluMul", FLOAT, ALIKE, domain=OURS, kernel="genai.SiluMul")
rule("cuda", "Cast", ANY, only("to", *(code for code, kind in ONNX_DTYPES.items() if kind in ALL)))
rule("cuda", "Where", kinds(BOOL, 0), kinds(ALL, 1, 2), alike(1, 2), dims)
rule("cuda", "GatedAdd", FLOAT, ALIKE, dims, domain=MS)

# layout and indexing
rule("cuda", "Identity Flatten", ANY)
rule("cuda", "Transpose Concat", ANY, dims)
rule("cuda", "Reshape Squeeze Unsqueeze Expand Split Trilu", kinds(ALL, 0), known(1), dims)
rule("cuda", "Tile", kinds(ALL, 0), known(1), few_dims)
rule("cuda", "Slice", kinds(ALL, 0), known(1, 2, 3, 4), dims)
rule("cuda", "Trilu", kinds(ALL, 0), known(1), domain=MS)
rule("cuda", "Gather", kinds(ALL, 0), kinds(INDICES, 1))
rule("cuda", "GatherElements", kinds(ALL, 0), kinds(INDICES, 1), same_but_axis)
REDUCTION = only("reduction", "none", "add", "mul", "max", "min")
rule("cuda", "ScatterElements", kinds(NUMBERS, 0, 2), alike(0, 2), kinds(INDICES, 1), same_but_axis, REDUCTION)
rule("cuda", "CumSum", kinds(NUMBERS, 0), known(1))

# rows: reductions, softmax, norms
REDUCE = "ReduceSum ReduceMean ReduceMax ReduceMin ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSum"
rule("cuda", REDUCE, kinds(FLOATS, 0), known(1), one_run)
rule("cuda", "ArgMax ArgMin", kinds(FLOATS | INDICES))
rule("cuda", "TopK", kinds(FLOATS, 0), few)
rule("cuda", "Softmax LogSoftmax", FLOAT, last_axis)
rule("cuda", "Softmax LogSoftmax", FLOAT, since=13)
rule("cuda", "SimplifiedLayerNormalization RMSNormalization LayerNormalization", FLOAT)
rule("cuda", "SimplifiedLayerNormalization", FLOAT, domain=MS)
rule("cuda", "SkipSimplifiedLayerNormalization SkipLayerNormalization", FLOAT, ALIKE, domain=MS)
rule("cuda", "LpNormalization", FLOAT, only("p", 1, 2))
rule("cuda", "GatedRMSNorm", FLOAT, ALIKE, domain=MS)

# attention and recurrent layers
rule("cuda", "RotaryEmbedding", kinds(FLOATS, 0, 1, 2), alike(0, 1, 2), kinds(INDICES, 3))
rule(
    "cuda", "RotaryEmbedding", kinds(FLOATS, 0, 2, 3), alike(0, 2, 3), kinds(INDICES, 1), only("scale", 1.0),
    only("is_packed_batching", 0), domain=MS, kernel="com.microsoft.RotaryEmbedding",
)  # fmt: skip
rule(
    "cuda", "MRotaryEmbedding", kinds(FLOATS, 0, 2, 3), alike(0, 2, 3), kinds(INDICES, 1), only("scale", 1.0),
    only("is_packed_batching", 0), sections, domain=MS,
)  # fmt: skip
rule(
    "cuda", "Attention", kinds(FLOATS, 0, 1, 2, 3, 4, 7, 8, 9), alike(0, 1, 2, 7, 8, 9), kinds(INDICES, 5),
    kinds(FLOATS | BOOL, 6), one_length, domain=OURS, kernel="genai.Attention",
)  # fmt: skip
rule("cuda", "Attention", *DENSE, num_outputs=1)
rule("cuda", "AttentionDense", *DENSE, num_outputs=1, domain=OURS, kernel="genai.AttentionDense")
CONV = only("activation", "none", "silu", "swish")
rule("cuda", "CausalConvWithState", FLOAT, ALIKE, CONV)
rule(
    "cuda", "CausalConvWithState", FLOAT, ALIKE, CONV, only("channels_last", 0), only("dilation", 1), only("ndim", 1),
    only("state_window", 0), domain=MS,
)  # fmt: skip
rule("cuda", "LinearAttention", FLOAT, alike(0, 1, 2, 4, 5), small_state)
rule("cuda", "LinearAttention", FLOAT, alike(0, 1, 2, 4, 5), small_state, domain=MS)
rule("cuda", "LinearAttentionGate", FLOAT, ALIKE, domain=MS)

# products
rule("cuda", "MatMul Gemm", FLOAT, ALIKE)
rule("cuda", "FusedMatMul", FLOAT, ALIKE, only("transBatchA", 0), only("transBatchB", 0), domain=MS)
rule("cuda", "MatMulNBits", kinds(FLOATS, 0, 2, 5), alike(0, 5), blocks, domain=MS)
rule("cuda", "GatherBlockQuantized", kinds(FLOATS, 2), kinds(INDICES, 1), rows_of_table, domain=MS)

# mixtures of experts
ACTIVATION = only("activation_type", "relu", "gelu", "silu", "identity", "swiglu")
rule("cuda", "MoE", FLOAT, ALIKE, ACTIVATION, only("use_sparse_mixer", 0), domain=MS)
rule(
    "cuda", "QMoE", kinds(FLOATS, 0, 1, 3, 4, 6, 7, 9, 10, 14), alike(0, 1, 14), alike(3, 6, 9), alike(4, 7, 10),
    kinds(BYTES, 2, 5, 8, 11, 12, 13), ACTIVATION, only("quant_type", "int"), only("use_sparse_mixer", 0),
    only("expert_weight_bits", 2, 4, 8), only("weights_prepacked", -1, 0), domain=MS,
)  # fmt: skip
