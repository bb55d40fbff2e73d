"""Launches of attention, rotary embedding and the recurrent layers (attention.cu, recurrent.cu)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from genai_cli.backends.base import Tensor
from genai_cli.backends.cuda_launch import (
    CTYPES,
    WARP,
    Call,
    Launch,
    Scalar,
    address,
    broadcast_strides,
    ctype,
    flag,
    flat,
    integer,
    integers,
    plans,
    pointer,
    real,
    size,
)

SOURCE = "attention"
TILE = 128  # keys of a tile, kTile in attention.cu
FEW_TOKENS = 8  # up to here tiles are blocks of their own, merged afterwards; beyond, one block takes them all
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Heads:
    """Rows of heads in a tensor [1, T, heads * D] or [1, heads, T, D], in elements."""

    address: int
    token_stride: int
    head_stride: int

    @property
    def args(self) -> tuple[Scalar, ...]:
        return (pointer(self.address), *integers(self.token_stride, self.head_stride))


def _heads(tensor: Tensor, dim: int, first: int = 0) -> Heads:
    if len(tensor.shape) == 4:
        return Heads(tensor.address, dim, tensor.shape[2] * dim)
    return Heads(tensor.address + first * tensor.dtype.itemsize, tensor.shape[2], dim)


def _head_dim(tensor: Tensor, heads: int) -> int:
    return tensor.shape[3] if len(tensor.shape) == 4 else tensor.shape[2] // heads


@dataclass(frozen=True)
class _Shape:
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    tokens: int
    appended: int  # tokens whose K and V this call stores


def _shape(call: Call) -> _Shape:
    q, k, v = call.input(0), call.optional(1), call.optional(2)
    heads = int(call.attrs["num_heads"])
    kv_heads = int(call.attrs.get("kv_num_heads", heads))
    tokens = q.shape[-2]
    if k is not None and v is not None:
        return _Shape(heads, kv_heads, _head_dim(q, heads), _head_dim(v, kv_heads), tokens, tokens)
    if call.attrs.get("reads_only", 0):
        dim = _head_dim(q, heads)
        return _Shape(heads, kv_heads, dim, int(call.attrs.get("value_head_size", dim)), tokens, 0)
    dim = q.shape[2] // (heads + 2 * kv_heads)
    return _Shape(heads, kv_heads, dim, dim, tokens, tokens)


def _rows(call: Call, shape: _Shape) -> tuple[Heads, Heads, Heads]:
    q, k, v = call.input(0), call.optional(1), call.optional(2)
    if k is not None and v is not None:
        return _heads(q, shape.dim), _heads(k, shape.dim), _heads(v, shape.value_dim)
    if not shape.appended:
        return _heads(q, shape.dim), Heads(0, 0, 0), Heads(0, 0, 0)
    width = shape.heads * shape.dim
    return _heads(q, shape.dim), _heads(q, shape.dim, width), _heads(q, shape.dim, width + shape.kv_heads * shape.dim)


@plans("genai.Attention")
def _attention(call: Call) -> list[Launch]:
    shape = _shape(call)
    if shape.tokens == 0:
        return []
    capacity = call.slots.capacity_of(int(call.attrs["key_slot"]))
    if shape.tokens > capacity:
        raise call.refuse(f"`{shape.tokens}` new tokens and a KV capacity of `{capacity}`", "room for them")
    queries = call.scratch(shape.tokens * shape.heads * shape.dim * FLOAT_BYTES)
    return [_prepare(call, shape, queries), *_attend(call, shape, queries, capacity)]


def _kv_type(call: Call) -> str:
    """What the slots hold; K and V are rounded to it when they are stored."""
    key, value = (call.slots.dtype_of(int(call.attrs[name])) for name in ("key_slot", "value_slot"))
    if key != value:
        raise call.refuse(f"slots of `{key.name}` and `{value.name}`", "one dtype for K and V")
    return CTYPES[key.name]


def _slot_args(call: Call) -> tuple[Scalar, ...]:
    return integers(int(call.attrs["key_slot"]), int(call.attrs["value_slot"]))


def _prepare(call: Call, shape: _Shape, queries: int) -> Launch:
    q, cos, ids = call.input(0), call.optional(3), call.optional(5)
    half = cos.shape[1] if cos is not None else 0
    pointers = (
        address(cos),
        address(call.optional(4)),
        address(ids),
        address(call.optional(8)),
        address(call.optional(9)),
    )
    args = (
        *(value for heads in _rows(call, shape) for value in heads.args),
        *pointers,
        pointer(queries),
        pointer(call.slots.state_address),
        *integers(shape.heads, shape.kv_heads, shape.dim, shape.value_dim, half),
        *_slot_args(call),
        real(call.attrs.get("qk_norm_epsilon", 1e-6)),
        flag(call.attrs.get("rotary_interleaved", 0)),
        integer(cos.shape[0] if cos is not None else 0),
        pointer(call.fault_address),
    )
    types = (ctype(q), _kv_type(call), ctype(cos) if cos else ctype(q), ctype(ids) if ids else "long long")
    num_rows = shape.heads + (2 * shape.kv_heads if shape.appended else 0)
    wide = max(shape.dim, shape.value_dim)
    block = min(256, -(-wide // WARP) * WARP)
    return Launch(SOURCE, f"prepare<{', '.join(types)}>", (num_rows, shape.tokens, 1), block, args, wide * FLOAT_BYTES)


def _attend(call: Call, shape: _Shape, queries: int, capacity: int) -> list[Launch]:
    y, mask, sink = call.output(), call.optional(6), call.optional(7)
    out = _heads(y, shape.value_dim)
    tiles = -(-capacity // TILE)
    split = shape.tokens <= FEW_TOKENS and tiles > 1
    partial = call.scratch(shape.tokens * shape.heads * tiles * (shape.value_dim + 2) * FLOAT_BYTES) if split else 0
    attrs = call.attrs
    args = (
        pointer(queries),
        *out.args,
        address(mask),
        *_mask_strides(mask, shape),
        address(sink),
        pointer(partial),
        pointer(call.slots.state_address),
        *integers(shape.heads, shape.heads // shape.kv_heads, shape.tokens, shape.appended, shape.dim, shape.value_dim),
        *_slot_args(call),
        integer(attrs.get("local_window_size", -1)),
        real(attrs.get("scale", 0.0) or 1 / math.sqrt(shape.dim)),
        real(attrs.get("softcap", 0.0)),
        flag(attrs.get("is_causal", 1)),
        flag(attrs.get("smooth_softmax", 0) == 1),
        flag(attrs.get("bias_before_softcap", 0)),
    )
    types = f"{'true' if split else 'false'}, {ctype(y)}, {_kv_type(call)}, {ctype(mask) if mask else 'float'}"
    grid = (tiles if split else 1, shape.heads, shape.tokens)
    shared = (shape.dim + TILE + shape.value_dim) * FLOAT_BYTES
    launches = [Launch(SOURCE, f"attend<{types}>", grid, TILE, args, shared)]
    if split:
        launches.append(_combine(call, shape, out, partial, tiles))
    return launches


def _combine(call: Call, shape: _Shape, out: Heads, partial: int, tiles: int) -> Launch:
    y, sink = call.output(), call.optional(7)
    args = (
        pointer(partial),
        *out.args,
        address(sink),
        *integers(shape.heads, tiles, shape.value_dim),
        flag(call.attrs.get("smooth_softmax", 0) == 1),
    )
    block = min(256, -(-shape.value_dim // WARP) * WARP)
    return Launch(SOURCE, f"combine<{ctype(y)}>", (shape.heads, shape.tokens, 1), block, args)


def _mask_strides(mask: Tensor | None, shape: _Shape) -> tuple[Scalar, ...]:
    """(token, head, key) strides of a bias that broadcasts to [1, H, T, S]."""
    if mask is None:
        return integers(0, 0, 0)
    strides = broadcast_strides(mask.shape, (1, shape.heads, shape.tokens, mask.shape[-1]))
    return integers(strides[2], strides[1], strides[3])


@dataclass(frozen=True)
class _Side:
    """[B, heads, T, D], or [B, T, heads * D] with the number of heads from an attribute."""

    address: int
    heads: int
    tokens: int
    dim: int
    strides: tuple[int, int, int]  # batch, token, head, in elements

    @property
    def args(self) -> tuple[Scalar, ...]:
        return (pointer(self.address), *integers(*self.strides))


def _side(tensor: Tensor, heads: int) -> _Side:
    if len(tensor.shape) == 4:
        _, own, tokens, dim = tensor.shape
        return _Side(tensor.address, own, tokens, dim, (own * tokens * dim, dim, tokens * dim))
    _, tokens, width = tensor.shape
    return _Side(tensor.address, heads, tokens, width // heads, (tokens * width, width, width // heads))


@plans("Attention", "genai.AttentionDense")
def _dense(call: Call) -> list[Launch]:
    attrs, mask, lengths, y = call.attrs, call.optional(3), call.optional(6), call.output()
    heads = int(attrs.get("q_num_heads") or attrs.get("num_heads") or 0)
    kv_heads = int(attrs.get("kv_num_heads") or heads)
    q, k, v = (_side(call.input(i), n) for i, n in ((0, heads), (1, kv_heads), (2, kv_heads)))
    out, batch = _side(y, heads), y.shape[0]
    if size(y.shape) == 0:
        return []
    strides = broadcast_strides(mask.shape, (batch, q.heads, q.tokens, mask.shape[-1])) if mask is not None else [0] * 4
    args = (
        *q.args, *k.args, *v.args, *out.args,
        address(mask), *integers(strides[0], strides[2], strides[1], strides[3]), address(lengths),
        *integers(k.tokens, q.heads // k.heads, q.dim, v.dim, attrs.get("left_window_size", -1)),
        integer(0 if attrs.get("is_causal", 0) else attrs.get("right_window_size", -1)),
        real(attrs.get("scale") or 1 / math.sqrt(q.dim)), real(attrs.get("softcap", 0.0)),
        flag(attrs.get("bias_before_softcap", 0)), pointer(call.fault_address),
    )  # fmt: skip
    types = (
        ctype(y),
        ctype(call.input(1)),
        ctype(mask) if mask else "float",
        ctype(lengths) if lengths else "long long",
    )
    shared = (q.dim + TILE + v.dim) * FLOAT_BYTES
    return [Launch(SOURCE, f"dense<{', '.join(types)}>", (q.heads, q.tokens, batch), TILE, args, shared)]


@plans("RotaryEmbedding")
def _rotary(call: Call) -> list[Launch]:
    """ai.onnx: x, cos, sin, ids?."""
    return _rotate(call, call.input(1), call.input(2), call.optional(3))


@plans("com.microsoft.RotaryEmbedding")
def _rotary_microsoft(call: Call) -> list[Launch]:
    """com.microsoft: x, ids, cos, sin."""
    return _rotate(call, call.input(2), call.input(3), call.input(1))


def _rotate(call: Call, cos: Tensor, sin: Tensor, ids: Tensor | None) -> list[Launch]:
    x, y, half = call.input(0), call.output(), cos.shape[-1]
    if len(x.shape) == 4:
        batch, heads, tokens, dim = x.shape
        strides = (heads * tokens * dim, dim, tokens * dim)
    else:
        batch, tokens, width = x.shape
        heads = int(call.attrs.get("num_heads", 0)) or width // (2 * half)
        dim = width // heads
        strides = (tokens * width, width, dim)
    if size(x.shape) == 0:
        return []
    args = (
        *map(address, (x, y)),
        *integers(*strides),
        *map(address, (cos, sin, ids)),
        *integers(0 if ids is not None and ids.shape == (1,) else 1, tokens, dim, half),
        flag(call.attrs.get("interleaved", 0)),
        integer(size(cos.shape[:-1])),
        pointer(call.fault_address),
    )
    block = min(256, -(-dim // WARP) * WARP)
    types = f"{ctype(x)}, {ctype(ids) if ids else 'long long'}"
    return [Launch(SOURCE, f"rotary<{types}>", (heads, tokens, batch), block, args, dim * FLOAT_BYTES)]


@plans("CausalConvWithState")
def _causal_conv(call: Call) -> list[Launch]:
    x, weight, y, present = call.input(0), call.input(1), call.output(0), call.output(1)
    batch, channels, tokens = x.shape
    silu = "true" if call.attrs.get("activation", "none") in ("silu", "swish") else "false"
    pointers = tuple(map(address, (x, weight, call.optional(2), call.optional(3), y, present)))
    args = (*pointers, *integers(batch * channels, channels, tokens, weight.shape[-1]))
    return flat("recurrent", f"causal_conv<{silu}, {ctype(x)}>", batch * channels, args, 64)


@plans("LinearAttention")
def _linear_attention(call: Call) -> list[Launch]:
    q, k, v = (call.input(i) for i in range(3))
    past, decay, beta, y, present = call.optional(3), call.optional(4), call.optional(5), call.output(0), call.output(1)
    q_heads, kv_heads = int(call.attrs["q_num_heads"]), int(call.attrs["kv_num_heads"])
    batch, tokens, heads = q.shape[0], q.shape[1], max(q_heads, kv_heads)
    d_k, d_v = q.shape[2] // q_heads, v.shape[2] // kv_heads
    rule = str(call.attrs.get("update_rule", "gated_delta"))
    decay = decay if "gated" in rule else None
    beta = beta if "delta" in rule else None
    widths = (decay.shape[-1] // kv_heads if decay is not None else 1, beta.shape[-1] if beta is not None else 1)
    args = (
        *map(address, (q, k, v, past, decay, beta, y, present)),
        *integers(tokens, q_heads, k.shape[2] // d_k, heads, kv_heads, d_k, d_v, *widths),
        real(call.attrs.get("scale", 0.0) or 1 / math.sqrt(d_k)),
    )
    delta = "true" if "delta" in rule else "false"
    block = -(-d_v // WARP) * WARP
    shared = (d_k * d_v + 3 * d_k) * FLOAT_BYTES
    function = f"linear_attention<{delta}, {ctype(q)}, {ctype(present)}>"
    return [Launch("recurrent", function, (heads, batch, 1), block, args, shared)]


@plans("LinearAttentionGate")
def _linear_attention_gate(call: Call) -> list[Launch]:
    a, bias, scale, b = call.input(0), call.input(1), call.input(2), call.optional(3)
    outputs = (call.output(0), call.optional_output(1))
    count = size(a.shape)
    args = (*map(address, (a, bias, scale, b, *outputs)), *integers(count, a.shape[-1]))
    return flat("recurrent", f"linear_attention_gate<{ctype(a)}>", count, args)
