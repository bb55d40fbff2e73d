"""Shapes that no artifact has: random calls over the registry, native's kernel against ONNX Runtime's node.

Families come from the registry (an op whose shapes broadcast is fed two tensors that broadcast); what takes axes, tables
or packed weights has a maker of its own. An op without either is named as not compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from genai_cli.backends.base import Backend
from genai_cli.checks.op_battery import OpResult, RunModel, compare_op
from genai_cli.errors import GenaiError
from genai_cli.graph.ir import Node
from genai_cli.ops import infer
from genai_cli.ops.registry import OpDef, table

Rng = np.random.Generator
SIZES = (1, 2, 3, 5, 8, 17, 33, 64, 100)  # below, at and beyond the width of a vector, and no multiple of it
MAX_ELEMENTS = 1 << 14
DRAWS = 8  # a dtype of an op
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
OPSET = 21  # the newest that every op here knows in ONNX Runtime; later ops name their own
NO_COUNTERPART = "an op of native's own: ONNX Runtime has none to compare with; judged by layers and logits"
NO_MAKER = "no random calls are known for it; judged where an artifact uses it"


@dataclass(frozen=True)
class Call:
    """Inputs and attributes of one node; `weights` are inputs that are initializers."""

    inputs: tuple[np.ndarray | None, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    weights: frozenset[int] = frozenset()


Maker = Callable[[Rng, np.dtype], Call]


def random_ops(backend: Backend, run: RunModel, seed: int, progress: Callable[[str], None]) -> list[OpResult]:
    """Every op of the registry in its newest version; those without calls are named."""
    newest = {opdef.key: opdef for opdef in table()}
    made: list[OpResult] = []
    for key, opdef in newest.items():
        maker = maker_of(opdef)
        if opdef.domain == "genai" or maker is None:
            why = NO_COUNTERPART if opdef.domain == "genai" else NO_MAKER
            made.append(OpResult(key, "", "", "", why, None, None, 0.0, None, ""))
            continue
        progress(f"ops: random shapes of {key}")
        made += list(_cases(opdef, maker, backend, run, seed))
    return made


def _cases(opdef: OpDef, maker: Maker, backend: Backend, run: RunModel, seed: int) -> Iterator[OpResult]:
    """A call ONNX Runtime refuses is named, never counted as compared."""
    dtypes = INTEGERS.get(opdef.key, FLOATS)
    for dtype in dtypes:
        for draw in range(DRAWS):
            rng = np.random.default_rng([seed, zlib.crc32(f"{opdef.key} {dtype.name}".encode()), draw])
            call = maker(rng, dtype)
            opset = max(OPSET, opdef.since) if not opdef.domain else 1
            outputs = [f"y{i}" for i in range(call.outputs)]
            name = f"random {dtype.name} {draw}"
            node = Node(opdef.op_type, opdef.domain, [], outputs, call.attrs, name, opset)
            repro = f"genai parity --ops MODEL --seed {seed}  # {opdef.key} {name}"
            try:
                yield compare_op(backend, run, node, call.inputs, call.weights, repro)
            except GenaiError as error:
                why = f"not compared: {error.message}"
                yield OpResult(opdef.key, name, "", dtype.name, why, None, None, 0.0, None, repro)


def maker_of(opdef: OpDef) -> Maker | None:
    """The op's own, or its family's."""
    if opdef.key in _MAKERS:
        return _MAKERS[opdef.key]
    fewest, _ = opdef.num_inputs
    if opdef.required_attributes:
        return None
    families: dict[object, Maker] = {infer.same: _unary, infer.broadcast: _binary, infer.compare: _compared}
    maker = families.get(opdef.infer)
    if maker is None and getattr(opdef.infer, "__name__", "") == "_reduce_infer":
        return _reduce
    wanted = 1 if opdef.infer in (infer.same, infer.boolean) else 2
    return maker if fewest == wanted or (fewest == 1 and opdef.num_inputs[1] > 2) else None


# -- values and shapes ----------------------------------------------------------------------------------------------------


def _shape(rng: Rng, low: int = 1, high: int = 4) -> tuple[int, ...]:
    while True:
        shape = tuple(int(n) for n in rng.choice(SIZES, rng.integers(low, high + 1)))
        if np.prod(shape) <= MAX_ELEMENTS:
            return shape


def _values(rng: Rng, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Of either sign, away from 0 and from overflow: an op's edges have tests of their own."""
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    if dtype.kind in "iu":
        return rng.integers(1, 9, shape).astype(dtype)
    signs = rng.choice([-1.0, 1.0], shape)
    return np.asarray(signs * rng.uniform(0.1, 2.0, shape), np.float32).astype(dtype)


def _size(rng: Rng) -> int:
    return int(rng.choice(SIZES))


def _axis(rng: Rng, rank: int) -> int:
    return int(rng.integers(-rank, rank))


# -- families -------------------------------------------------------------------------------------------------------------


def _unary(rng: Rng, dtype: np.dtype) -> Call:
    return Call((_values(rng, _shape(rng), dtype),))


def _binary(rng: Rng, dtype: np.dtype) -> Call:
    shape = _shape(rng)
    thin = tuple(n if keep else 1 for n, keep in zip(shape, rng.random(len(shape)) < 0.7, strict=True))
    pair = [_values(rng, shape, dtype), _values(rng, thin[int(rng.integers(0, len(thin))) :], dtype)]
    return Call(tuple(pair))


def _ordered(rng: Rng, dtype: np.dtype) -> Call:
    """For ops that do not commute with a sign: both positive."""
    call = _binary(rng, dtype)
    return Call(tuple(np.abs(a) for a in call.inputs if a is not None))


def _compared(rng: Rng, dtype: np.dtype) -> Call:
    call = _binary(rng, dtype)
    return Call(tuple(np.rint(a.astype(np.float32)).astype(dtype) for a in call.inputs if a is not None))


def _reduce(rng: Rng, dtype: np.dtype) -> Call:
    x = _values(rng, _shape(rng, 2, 3), dtype)
    axes = rng.permutation(x.ndim)[: rng.integers(1, x.ndim + 1)]
    return Call((x, axes.astype(np.int64)), {"keepdims": int(rng.integers(0, 2))}, weights=frozenset({1}))


# -- ops with rules of their own ------------------------------------------------------------------------------------------


def _matmul(rng: Rng, dtype: np.dtype) -> Call:
    m, k, n, batch = (_size(rng) for _ in range(4))
    weights = frozenset({1}) if rng.random() < 0.5 else frozenset[int]()
    lead = () if rng.random() < 0.5 else (min(batch, 5),)
    return Call((_values(rng, (*lead, m, k), dtype), _values(rng, (k, n), dtype)), weights=weights)


def _fused_matmul(rng: Rng, dtype: np.dtype) -> Call:
    m, k, n = (_size(rng) for _ in range(3))
    turned = int(rng.integers(0, 2))
    b = _values(rng, (n, k) if turned else (k, n), dtype)
    return Call((_values(rng, (m, k), dtype), b), {"transB": turned, "alpha": 0.5})


def _gemm(rng: Rng, dtype: np.dtype) -> Call:
    m, k, n = (_size(rng) for _ in range(3))
    first, second = (int(v) for v in rng.integers(0, 2, 2))
    a = _values(rng, (k, m) if first else (m, k), dtype)
    b = _values(rng, (n, k) if second else (k, n), dtype)
    return Call((a, b, _values(rng, (n,), dtype)), {"transA": first, "transB": second, "alpha": 0.5, "beta": 2.0})


def _packed(levels: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned levels [..., n] as bytes, low bits first."""
    per = 8 // bits
    padded = np.pad(levels, [(0, 0)] * (levels.ndim - 1) + [(0, -levels.shape[-1] % per)])
    lanes = padded.reshape(*padded.shape[:-1], -1, per).astype(np.uint8)
    return np.asarray(np.bitwise_or.reduce(lanes << (np.arange(per, dtype=np.uint8) * bits), -1))


def _nbits(rng: Rng, dtype: np.dtype) -> Call:
    bits, block = int(rng.choice([4, 8])), int(rng.choice([16, 32, 64, 128]))
    rows, n, k = _size(rng), _size(rng), int(rng.choice([block, 2 * block, 3 * block, 2 * block + 24]))
    blocks = -(-k // block)
    weights = _packed(rng.integers(0, 1 << bits, (n, blocks, block)), bits)
    scales = _values(rng, (n, blocks), dtype)
    zeros = _packed(rng.integers(0, 1 << bits, (n, blocks)), bits) if rng.random() < 0.5 else None
    attrs = {"K": k, "N": n, "bits": bits, "block_size": block, "accuracy_level": int(rng.choice([0, 4]))}
    return Call((_values(rng, (1, rows, k), dtype), weights, scales, zeros), attrs, weights=frozenset({1, 2, 3}))


def _gather_nbits(rng: Rng, dtype: np.dtype) -> Call:
    block, rows, blocks = int(rng.choice([16, 32, 64])), _size(rng), int(rng.integers(1, 4))
    data = _packed(rng.integers(0, 16, (rows, blocks * block)), 4)
    ids = rng.integers(0, rows, _shape(rng, 1, 2))
    attrs = {"block_size": block, "bits": 4, "gather_axis": 0, "quantize_axis": 1}
    return Call((data, ids, _values(rng, (rows, blocks), dtype)), attrs, weights=frozenset({0, 2}))


def _softmax(rng: Rng, dtype: np.dtype) -> Call:
    x = _values(rng, _shape(rng), dtype)
    return Call((x,), {"axis": _axis(rng, x.ndim)})


def _norm(num_weights: int) -> Maker:
    def make(rng: Rng, dtype: np.dtype) -> Call:
        x = _values(rng, _shape(rng, 2, 3), dtype)
        rows = [_values(rng, x.shape[-1:], dtype) for _ in range(num_weights)]
        return Call((x, *rows), {"axis": -1, "epsilon": 1e-5}, weights=frozenset(range(1, 1 + num_weights)))

    return make


def _skip_norm(num_weights: int) -> Maker:
    def make(rng: Rng, dtype: np.dtype) -> Call:
        x = _values(rng, _shape(rng, 3, 3), dtype)
        rows = [_values(rng, x.shape[-1:], dtype) for _ in range(num_weights)]
        return Call((x, _values(rng, x.shape, dtype), *rows), {"epsilon": 1e-5})

    return make


def _rotary(domain: str) -> Maker:
    def make(rng: Rng, dtype: np.dtype) -> Call:
        batch, heads, length = int(rng.integers(1, 3)), int(rng.integers(1, 4)), int(rng.integers(1, 9))
        half, room = int(rng.choice([4, 16, 32])), 16
        angles = rng.uniform(0, 6, (room, half))
        tables = np.cos(angles).astype(np.float32).astype(dtype), np.sin(angles).astype(np.float32).astype(dtype)
        x = _values(rng, (batch, heads, length, 2 * half), dtype)
        ids = rng.integers(0, room, (batch, length))
        interleaved = {"interleaved": int(rng.integers(0, 2))}
        return Call((x, ids, *tables) if domain else (x, *tables, ids), interleaved)

    return make


def _attention(rng: Rng, dtype: np.dtype) -> Call:
    batch, kv_heads, group = (int(v) for v in rng.integers(1, 4, 3))
    queries, keys, dim = int(rng.integers(1, 9)), int(rng.integers(9, 20)), int(rng.choice([8, 16, 32]))
    q = _values(rng, (batch, kv_heads * group, queries, dim), dtype)
    k, v = (_values(rng, (batch, kv_heads, keys, dim), dtype) for _ in range(2))
    return Call((q, k, v), {"is_causal": int(rng.integers(0, 2))})


def _gather(rng: Rng, dtype: np.dtype) -> Call:
    x = _values(rng, _shape(rng), dtype)
    axis = _axis(rng, x.ndim)
    size = x.shape[axis]
    return Call((x, rng.integers(-size, size, _shape(rng, 1, 2)[:1])), {"axis": axis})


def _transpose(rng: Rng, dtype: np.dtype) -> Call:
    x = _values(rng, _shape(rng), dtype)
    return Call((x,), {"perm": rng.permutation(x.ndim).tolist()})


def _slice(rng: Rng, dtype: np.dtype) -> Call:
    x = _values(rng, _shape(rng), dtype)
    axis = _axis(rng, x.ndim)
    start, stop = sorted(rng.integers(0, x.shape[axis] + 1, 2).tolist())
    bounds = [np.array([v], np.int64) for v in (start, stop, axis, int(rng.choice([1, 2])))]
    return Call((x, *bounds), weights=frozenset({1, 2, 3, 4}))


def _concat(rng: Rng, dtype: np.dtype) -> Call:
    x = _values(rng, _shape(rng), dtype)
    return Call((x, x, x), {"axis": _axis(rng, x.ndim)})


def _split(rng: Rng, dtype: np.dtype) -> Call:
    x = _values(rng, _shape(rng), dtype)
    axis = _axis(rng, x.ndim)
    cut = int(rng.integers(0, x.shape[axis] + 1))
    return Call((x, np.array([cut, x.shape[axis] - cut])), {"axis": axis}, 2, frozenset({1}))


def _reshape(rng: Rng, dtype: np.dtype) -> Call:
    x = _values(rng, _shape(rng, 2, 4), dtype)
    return Call((x, np.array([-1, x.shape[-1]])), weights=frozenset({1}))


def _expand(rng: Rng, dtype: np.dtype) -> Call:
    shape = _shape(rng)
    thin = tuple(n if keep else 1 for n, keep in zip(shape, rng.random(len(shape)) < 0.5, strict=True))
    return Call((_values(rng, thin, dtype), np.array(shape)), weights=frozenset({1}))


def _tile(rng: Rng, dtype: np.dtype) -> Call:
    x = _values(rng, _shape(rng, 1, 3), dtype)
    return Call((x, rng.integers(1, 4, x.ndim)), weights=frozenset({1}))


def _unsqueeze(rng: Rng, dtype: np.dtype) -> Call:
    x = _values(rng, _shape(rng, 1, 3), dtype)
    return Call((x, np.array([int(rng.integers(0, x.ndim + 1))])), weights=frozenset({1}))


def _squeeze(rng: Rng, dtype: np.dtype) -> Call:
    call = _unsqueeze(rng, dtype)
    x, axes = call.inputs
    assert x is not None
    assert axes is not None
    return Call((np.expand_dims(x, int(axes[0])), axes), weights=frozenset({1}))


def _where(rng: Rng, dtype: np.dtype) -> Call:
    call = _binary(rng, dtype)
    first = call.inputs[0]
    assert first is not None
    return Call((rng.random(first.shape) < 0.5, *call.inputs))


def _cast(rng: Rng, dtype: np.dtype) -> Call:
    return Call((_values(rng, _shape(rng), dtype),), {"to": int(rng.choice([1, 7]))})  # FLOAT, INT64


def _clip(rng: Rng, dtype: np.dtype) -> Call:
    low, high = (np.array(v, np.float32).astype(dtype) for v in (-0.5, 1.0))
    return Call((_values(rng, _shape(rng), dtype), low, high), weights=frozenset({1, 2}))


def _trilu(rng: Rng, dtype: np.dtype) -> Call:
    x = _values(rng, _shape(rng, 2, 3), dtype)
    return Call((x, np.array(int(rng.integers(-3, 4)))), {"upper": int(rng.integers(0, 2))}, weights=frozenset({1}))


def _flatten(rng: Rng, dtype: np.dtype) -> Call:
    x = _values(rng, _shape(rng), dtype)
    return Call((x,), {"axis": _axis(rng, x.ndim)})


def _arg(rng: Rng, dtype: np.dtype) -> Call:
    x = _values(rng, _shape(rng), dtype)
    return Call((x,), {"axis": _axis(rng, x.ndim), "keepdims": int(rng.integers(0, 2))})


def _bias_gelu(rng: Rng, dtype: np.dtype) -> Call:
    x = _values(rng, _shape(rng, 2, 3), dtype)
    return Call((x, _values(rng, x.shape[-1:], dtype)))


def _cumsum(rng: Rng, dtype: np.dtype) -> Call:
    x = _values(rng, _shape(rng), dtype)
    flags = {"exclusive": int(rng.integers(0, 2)), "reverse": int(rng.integers(0, 2))}
    return Call((x, np.array(_axis(rng, x.ndim))), flags, weights=frozenset({1}))


_I64, _BOOL = np.dtype(np.int64), np.dtype(np.bool_)
INTEGERS: dict[str, tuple[np.dtype, ...]] = {  # ops whose dtypes are not the floats alone
    **{
        name: (*FLOATS, _I64)
        for name in ("Add", "Sub", "Mul", "Gather", "Transpose", "Concat", "Slice", "Where", "Cast")
    },
    **{
        name: (*FLOATS, _I64)
        for name in ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "Reshape", "Expand")
    },
    **{name: (_BOOL,) for name in ("And", "Or", "Xor", "Not")},
    **{name: (_I64,) for name in ("BitwiseAnd", "BitwiseOr", "BitwiseXor", "Mod")},
}
_MS = "com.microsoft::"
_MAKERS: dict[str, Maker] = {
    "MatMul": _matmul, "Gemm": _gemm, f"{_MS}FusedMatMul": _fused_matmul, f"{_MS}MatMulNBits": _nbits,
    f"{_MS}GatherBlockQuantized": _gather_nbits, "Attention": _attention, "RotaryEmbedding": _rotary(""),
    f"{_MS}RotaryEmbedding": _rotary(_MS), "Softmax": _softmax, "LogSoftmax": _softmax, "LayerNormalization": _norm(2),
    "RMSNormalization": _norm(1), "SimplifiedLayerNormalization": _norm(1),
    f"{_MS}SkipSimplifiedLayerNormalization": _skip_norm(1), f"{_MS}SkipLayerNormalization": _skip_norm(2),
    "Gather": _gather, "Transpose": _transpose, "Slice": _slice, "Concat": _concat, "Split": _split,
    "Reshape": _reshape, "Expand": _expand, "Tile": _tile, "Unsqueeze": _unsqueeze, "Squeeze": _squeeze,
    "Where": _where, "Cast": _cast, "Clip": _clip, "Trilu": _trilu, f"{_MS}Trilu": _trilu, "ArgMax": _arg,
    "ArgMin": _arg, f"{_MS}BiasGelu": _bias_gelu, "CumSum": _cumsum, "Pow": _ordered, "Log": _unary, "Not": _unary,
    "Flatten": _flatten, "IsNaN": _unary, "IsInf": _unary, "Shape": _unary, "Size": _unary,
}  # fmt: skip
