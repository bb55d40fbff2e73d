"""Cases of the ops that only ONNX Runtime specifies: seeded, with odd sizes, size 1, empty rows, and no multiple of a vector.

A case is named by what is special about it. The judge is ORT (oracle.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np
from cases import Array, Case

MS = "com.microsoft"
KINDS = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
SIZES = (1, 3, 8, 17, 33, 64, 100)  # hidden sizes
ROWS = ((1, 1), (2, 3), (1, 0))  # batch, tokens
Rng = np.random.Generator

_FAMILIES: list[Callable[[], Iterator[Case]]] = []


def family(function: Callable[[], Iterator[Case]]) -> Callable[[], Iterator[Case]]:
    """Add a generator of cases."""
    _FAMILIES.append(function)
    return function


def rng(*words: Any) -> Rng:
    """A generator whose seed is its words: adding a case never changes another."""
    return np.random.default_rng(crc32(repr(words).encode()))


def normal(random: Rng, *shape: int, kind: str = "f32", scale: float = 1.0) -> Array:
    return (random.standard_normal(shape) * scale).astype(np.float32).astype(KINDS[kind])


def case(
    op: str, inputs: tuple[Array | None, ...], name: str, outputs: int | tuple[bool, ...] = 1, **attrs: Any
) -> Case:
    """A com.microsoft case."""
    wanted = (True,) * outputs if isinstance(outputs, int) else outputs
    return Case(op, MS, 1, inputs, attrs, wanted, None, f"{op}:{name}")


@family
def skip_norms() -> Iterator[Case]:
    for kind in KINDS:
        for e in SIZES:
            r = rng("skip", kind, e)
            for b, t in ROWS:
                x, skip = normal(r, b, t, e, kind=kind), normal(r, b, t, e, kind=kind)
                gamma, beta, bias = (normal(r, e, kind=kind) for _ in range(3))
                name = f"{kind}-{b}x{t}x{e}"
                four = (True, False, False, True)
                yield case("SkipSimplifiedLayerNormalization", (x, skip, gamma), name, four, epsilon=1e-5)
                yield case("SkipSimplifiedLayerNormalization", (x, skip, gamma, bias), name + "-bias", epsilon=1e-6)
                yield case("SkipLayerNormalization", (x, skip, gamma, beta, bias), name, four, epsilon=1e-5)
                yield case("SkipLayerNormalization", (x, skip, gamma), name + "-plain")


@family
def simplified() -> Iterator[Case]:
    """ORT has it in the ONNX domain."""
    for kind in KINDS:
        for e in SIZES:
            r = rng("simplified", kind, e)
            for b, t in ROWS:
                x, scale = normal(r, b, t, e, kind=kind), normal(r, e, kind=kind)
                attrs = {"epsilon": 1e-5, "axis": -1, "stash_type": 1}
                yield Case("SimplifiedLayerNormalization", "", 21, (x, scale), attrs, (True,), None,
                           f"SimplifiedLayerNormalization:{kind}-{b}x{t}x{e}")  # fmt: skip


@family
def activations() -> Iterator[Case]:
    for kind in KINDS:
        for e in SIZES:
            r = rng("activations", kind, e)
            x, bias = normal(r, 2, 3, e, kind=kind, scale=3), normal(r, e, kind=kind)
            name = f"{kind}-{e}"
            yield case("FastGelu", (x,), name)
            yield case("FastGelu", (x, bias), name + "-bias")
            yield case("BiasGelu", (x, bias), name)
            yield case("QuickGelu", (x,), name, alpha=1.702)
            yield case("QuickGelu", (x,), name + "-alpha1", alpha=1.0)
            yield case("Gelu", (x,), name)
        yield case("FastGelu", (normal(rng(0), 0, 5, kind=kind),), f"{kind}-empty")


@family
def embed_layer_norm() -> Iterator[Case]:
    for e in (3, 16, 33):
        r = rng("embed", e)
        ids, segments = r.integers(0, 7, (2, 5)).astype(np.int32), r.integers(0, 2, (2, 5)).astype(np.int32)
        word, position, segment = normal(r, 7, e), normal(r, 9, e), normal(r, 2, e)
        gamma, beta = normal(r, e), normal(r, e)
        mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
        yield case("EmbedLayerNormalization", (ids, segments, word, position, segment, gamma, beta, mask),
                   f"{e}-mask", 3, epsilon=1e-12)  # fmt: skip
        yield case("EmbedLayerNormalization", (ids, None, word, position, None, gamma, beta), f"{e}-plain", 2)
        where = r.integers(0, 9, (2, 5)).astype(np.int32)
        yield case("EmbedLayerNormalization", (ids, None, word, position, None, gamma, beta, None, where),
                   f"{e}-positions", 2)  # fmt: skip


def cos_sin(length: int, width: int, kind: str = "f32") -> tuple[Array, Array]:
    """Rotary caches [length, width / 2]."""
    angles = np.arange(length)[:, None] * 10000.0 ** (-np.arange(width // 2) / max(width // 2, 1))
    return np.cos(angles).astype(np.float32).astype(KINDS[kind]), np.sin(angles).astype(np.float32).astype(KINDS[kind])


@family
def rotary() -> Iterator[Case]:
    for kind in KINDS:
        for d in (2, 6, 16, 34, 64):
            r = rng("rotary", kind, d)
            cos, sin = cos_sin(20, d, kind)
            x = normal(r, 2, 3, 5 * d, kind=kind)
            ids = r.integers(0, 20, (2, 3))
            for interleaved in (0, 1):
                name = f"{kind}-{d}-{'interleaved' if interleaved else 'halves'}"
                yield case("RotaryEmbedding", (x, ids, cos, sin), name, interleaved=interleaved)
                first = np.array([4], np.int64)
                yield case("RotaryEmbedding", (x, first, cos, sin), name + "-first", interleaved=interleaved)
                four = normal(r, 2, 5, 3, d, kind=kind)
                yield case("RotaryEmbedding", (four, ids, cos, sin), name + "-4d", interleaved=interleaved)
        cos, sin = cos_sin(20, 8, kind)
        x = normal(rng("partial", kind), 1, 3, 2 * 12, kind=kind)
        yield case("RotaryEmbedding", (x, np.array([[0, 5, 19]]), cos, sin), f"{kind}-partial", num_heads=2,
                   rotary_embedding_dim=8)  # fmt: skip


def pack(levels: Array, bits: int) -> Array:
    """Unsigned levels [..., n] as bytes, low bits first; n * bits must fill bytes."""
    per = 8 // bits
    padded = np.pad(levels, [(0, 0)] * (levels.ndim - 1) + [(0, -levels.shape[-1] % per)])
    lanes = padded.reshape(*padded.shape[:-1], -1, per).astype(np.uint8)
    return np.bitwise_or.reduce(lanes << (np.arange(per, dtype=np.uint8) * bits), -1)


def nbits(
    r: Rng, m: tuple[int, ...], k: int, n: int, *, bits: int, block: int, zero: str, kind: str = "f32", level: int = 0,
    bias: bool = False, name: str = "",
) -> Case:  # fmt: skip
    """One MatMulNBits; `zero` is none, packed or float; scales may be negative."""
    blocks = -(-k // block)
    levels = r.integers(0, 1 << bits, (n, blocks, block))
    scales = normal(r, n, blocks, kind=kind, scale=0.1)
    zeros: Array | None = None
    if zero == "packed":
        zeros = pack(r.integers(0, 1 << bits, (n, blocks)), bits)
    elif zero == "float":
        zeros = r.uniform(0, 1 << bits, (n, blocks)).astype(np.float32).astype(KINDS[kind])
    inputs = (normal(r, *m, k, kind=kind), pack(levels, bits), scales, zeros)
    inputs = (*inputs, None, normal(r, n, kind=kind)) if bias else inputs
    label = f"{kind}-{'x'.join(map(str, m))}x{k}x{n}-b{bits}-g{block}-{zero}-acc{level}{name}"
    return case("MatMulNBits", inputs, label, K=k, N=n, bits=bits, block_size=block, accuracy_level=level)


@family
def matmul_nbits() -> Iterator[Case]:
    for bits in (4, 8):
        for block in (16, 32, 64, 128, 256):
            for zero in ("none", "packed"):
                r = rng("nbits", bits, block, zero)
                yield nbits(r, (1, 3), block * 2, 17, bits=bits, block=block, zero=zero)
                yield nbits(r, (1, 1), block * 3, 5, bits=bits, block=block, zero=zero, level=4)
                yield nbits(r, (2, 5), block * 2, 33, bits=bits, block=block, zero=zero, level=4)
    for kind in ("f16", "bf16"):
        for level in (0, 4):
            r = rng("nbits", kind, level)
            yield nbits(r, (1, 1), 96, 19, bits=4, block=32, zero="none", kind=kind, level=level)
            yield nbits(r, (1, 4), 64, 16, bits=4, block=32, zero="packed", kind=kind, level=level)
            yield nbits(r, (1, 2), 64, 16, bits=8, block=64, zero="none", kind=kind, level=level)
    r = rng("nbits", "odd")
    for k in (40, 100, 129):  # the last block is not full
        yield nbits(r, (1, 3), k, 7, bits=4, block=32, zero="packed")
        yield nbits(r, (1, 1), k, 7, bits=4, block=32, zero="none", level=4)
    yield nbits(r, (1, 3), 64, 9, bits=4, block=32, zero="float")
    yield nbits(r, (1, 2), 64, 9, bits=4, block=32, zero="none", bias=True, name="-bias")
    yield nbits(r, (1, 2), 64, 9, bits=4, block=32, zero="none", bias=True, level=4, name="-bias")
    yield nbits(r, (1, 2), 64, 1, bits=2, block=32, zero="none")
    yield nbits(r, (2, 64), 256, 70, bits=4, block=32, zero="none", level=4, name="-prefill")
    yield nbits(r, (1, 64), 256, 70, bits=8, block=128, zero="packed", name="-prefill")


@family
def gather_block_quantized() -> Iterator[Case]:
    for bits in (4, 8):
        for block in (16, 32, 128):
            for zero in (False, True):
                for kind in ("f32", "f16"):
                    r = rng("gbq", bits, block, zero, kind)
                    k, v = block * 2, 11
                    data = pack(r.integers(0, 1 << bits, (v, k)), bits)
                    zeros = pack(r.integers(0, 1 << bits, (v, 2)), bits) if zero else None
                    ids = r.integers(0, v, (2, 3))
                    inputs = (data, ids, normal(r, v, 2, kind=kind), zeros)
                    name = f"{kind}-b{bits}-g{block}{'-zero' if zero else ''}"
                    yield case("GatherBlockQuantized", inputs, name, bits=bits, block_size=block, gather_axis=0,
                               quantize_axis=1)  # fmt: skip


def gqa(
    name: str, *, b: int = 1, t: int = 1, past: int = 0, h: int = 4, h_kv: int = 2, d: int = 8, kind: str = "f32",
    packed: bool = False, rotary: int = 0, capacity: int = 0, lengths: list[int] | None = None, bias: bool = False,
    sink: bool = False, positions: bool = False, qk_norm: bool = False, **attrs: Any,
) -> Case:  # fmt: skip
    """One GroupQueryAttention. `capacity` > past makes a longer buffer; `lengths` are each row's tokens after the step."""
    r = rng("gqa", name)
    q, k, v = (
        normal(r, b, t, h * d, kind=kind),
        normal(r, b, t, h_kv * d, kind=kind),
        normal(r, b, t, h_kv * d, kind=kind),
    )
    held = max(capacity, past)
    past_k, past_v = (normal(r, b, h_kv, held, d, kind=kind) for _ in range(2))
    total = max(lengths) if lengths else past + t
    seqlens = np.array(lengths or [total] * b, np.int32) - 1
    first = (np.concatenate((q, k, v), 2), None, None) if packed else (q, k, v)
    cos, sin = cos_sin(max(64, held), rotary, kind) if rotary else (None, None)
    where = (np.arange(t)[None] + past).repeat(b, 0).astype(np.int64) if positions else None
    extra = normal(r, b, 1, t, total, kind=kind) if bias else None
    sinks = normal(r, h, kind=kind) if sink else None
    norms = (normal(r, d, kind=kind), normal(r, d, kind=kind)) if qk_norm else ()
    inputs: tuple[Array | None, ...] = (
        *first, past_k, past_v, seqlens, np.array([total], np.int32), cos, sin, where, extra, sinks, None, None, *norms,
    )  # fmt: skip
    while inputs[-1] is None:
        inputs = inputs[:-1]
    attrs = {"num_heads": h, "kv_num_heads": h_kv, "do_rotary": int(rotary > 0), **attrs}
    return case("GroupQueryAttention", inputs, name, 3, **attrs)


@family
def group_query_attention() -> Iterator[Case]:
    for d in (8, 16, 32, 64, 80):
        yield gqa(f"prompt-{d}", t=5, d=d)
        yield gqa(f"decode-{d}", t=1, past=7, d=d)
    for kind in ("f16", "bf16"):
        yield gqa(f"prompt-{kind}", t=5, kind=kind, rotary=8)
        yield gqa(f"decode-{kind}", past=6, kind=kind, rotary=8)
    yield gqa("chunk", t=3, past=7)
    yield gqa("chunk-rotary", t=3, past=7, rotary=8)
    yield gqa("packed", t=5, packed=True, rotary=8)
    yield gqa("packed-decode", past=4, packed=True, rotary=8)
    yield gqa("one-head", h=1, h_kv=1, t=3)
    yield gqa("seven-to-one", h=7, h_kv=1, t=3, d=16, past=0)
    yield gqa("rotary-prompt", t=6, rotary=8)
    yield gqa("rotary-decode", past=9, rotary=8)
    yield gqa("rotary-interleaved", t=4, rotary=8, rotary_interleaved=1)
    yield gqa("rotary-partial", t=4, d=32, rotary=16)
    yield gqa("rotary-positions", t=4, rotary=8, positions=True)
    yield gqa("rotary-positions-decode", past=5, rotary=8, positions=True)
    for window in (1, 2, 4, 9):
        yield gqa(f"window-{window}-prompt", t=7, local_window_size=window)
        yield gqa(f"window-{window}-decode", past=7, local_window_size=window)
        yield gqa(f"window-{window}-chunk", t=3, past=5, local_window_size=window)
    yield gqa("softcap", t=5, softcap=2.0)
    yield gqa("softcap-decode", past=5, softcap=30.0)
    yield gqa("scale", t=5, scale=0.3)
    yield gqa("smooth", t=5, smooth_softmax=1)
    yield gqa("sink", t=5, sink=True)
    yield gqa("sink-window-decode", past=8, sink=True, local_window_size=4)
    yield gqa("bias", t=4, bias=True)
    yield gqa("bias-decode", past=4, bias=True, b=2)
    yield gqa("bias-softcap", t=4, bias=True, softcap=2.0)
    yield gqa("batch", b=3, t=4, rotary=8)
    yield gqa("batch-decode-rows", b=3, past=9, lengths=[10, 4, 7], rotary=8)
    yield gqa("batch-decode-rows-window", b=3, past=9, lengths=[10, 4, 7], local_window_size=3)
    yield gqa("capacity", past=5, capacity=20, rotary=8)
    yield gqa("capacity-prompt", t=5, capacity=20)
    yield gqa("bidirectional", t=4, causal=0)
    yield gqa("window-cache", past=5, capacity=12, local_window_size=8, sliding_window_cache=1)
    yield gqa("qk-norm", t=4, qk_norm=True, rotary=8)


@family
def multi_head_attention() -> Iterator[Case]:
    def tensors(name: str, b: int, t: int, s: int, h: int, d: int) -> tuple[Rng, Array, Array, Array]:
        r = rng("mha", name)
        return r, normal(r, b, t, h * d), normal(r, b, s, h * d), normal(r, b, s, h * d)

    for d in (4, 16, 33):
        _, q, k, v = tensors(f"plain{d}", 2, 3, 5, 2, d)
        yield case("MultiHeadAttention", (q, k, v), f"cross-{d}", num_heads=2)
    r, q, k, v = tensors("self", 2, 4, 4, 2, 8)
    yield case("MultiHeadAttention", (q, k, v, normal(r, 48)), "bias", num_heads=2)
    yield case("MultiHeadAttention", (q, k, v), "causal", num_heads=2, unidirectional=1)
    yield case("MultiHeadAttention", (q, k, v), "scale", num_heads=2, scale=0.2)
    lengths = np.array([4, 2], np.int32)
    yield case("MultiHeadAttention", (q, k, v, None, lengths), "mask-lengths", num_heads=2)
    mask = np.array([[1, 1, 0, 1], [0, 1, 1, 0]], np.int32)
    yield case("MultiHeadAttention", (q, k, v, None, mask), "mask", num_heads=2)
    extra = normal(r, 2, 2, 4, 4)
    yield case("MultiHeadAttention", (q, k, v, None, None, extra), "attention-bias", num_heads=2)
    yield case("MultiHeadAttention", (q, k, v, None, None, normal(r, 1, 1, 4, 4)), "attention-bias-1", num_heads=2)
    past = (normal(r, 2, 2, 3, 8), normal(r, 2, 2, 3, 8))
    yield case("MultiHeadAttention", (q, k, v, None, None, None, *past), "past", 3, num_heads=2)
    yield case("MultiHeadAttention", (q[:, :1], k[:, :1], v[:, :1], None, None, None, *past), "past-decode", 3,
               num_heads=2, unidirectional=1)  # fmt: skip


@family
def ms_attention() -> Iterator[Case]:
    r = rng("attention")
    x, w, b = normal(r, 2, 4, 10), normal(r, 10, 48, scale=0.3), normal(r, 48)
    yield case("Attention", (x, w, b), "plain", num_heads=2)
    yield case("Attention", (x, w, b), "causal", num_heads=2, unidirectional=1)
    yield case("Attention", (x, w, b, None, normal(r, 2, 2, 2, 3, 8)), "past", 2, num_heads=2, unidirectional=1)
    yield case("Attention", (x, w, b, np.array([4, 2], np.int32)), "mask-lengths", num_heads=2)
    yield case("Attention", (x, w, b, np.array([[1, 1, 0, 1], [0, 1, 1, 0]], np.int32)), "mask", num_heads=2)


@family
def mixtures() -> Iterator[Case]:
    for act, extra in (("relu", False), ("gelu", False), ("silu", False), ("identity", False), ("silu", True)):
        r = rng("moe", act, extra)
        e, hidden, inner = 5, 12, 20
        x, router = normal(r, 2, 3, hidden), normal(r, 6, e)
        fc1, b1, fc2, b2 = (
            normal(r, e, inner, hidden),
            normal(r, e, inner),
            normal(r, e, hidden, inner),
            normal(r, e, hidden),
        )
        fc3 = (normal(r, e, inner, hidden),) if extra else ()
        for k, norm in ((1, 0), (2, 1), (3, 0)):
            yield case("MoE", (x, router, fc1, b1, fc2, b2, *fc3), f"{act}{'-fc3' if extra else ''}-{k}-{norm}",
                       activation_type=act, k=k, normalize_routing_weights=norm)  # fmt: skip
    r = rng("moe", "swiglu")
    x, router = normal(r, 4, 12), normal(r, 4, 5)
    fc1, b1, fc2, b2 = normal(r, 5, 40, 12), normal(r, 5, 40), normal(r, 5, 12, 20), normal(r, 5, 12)
    for fusion in (1, 2):
        for limit in ({}, {"swiglu_limit": 7.0, "activation_alpha": 1.702, "activation_beta": 1.0}):
            yield case("MoE", (x, router, fc1, b1, fc2, b2), f"swiglu-{fusion}-{len(limit)}", activation_type="swiglu",
                       swiglu_fusion=fusion, k=2, normalize_routing_weights=1, **limit)  # fmt: skip


def qmoe(
    name: str, *, bits: int, block: int, zero: bool = False, act: str = "swiglu", fusion: int = 1, **attrs: Any
) -> Case:
    """One QMoE over 4 experts, hidden 64, inner 32."""
    r = rng("qmoe", name)
    e, hidden, inner = 4, 64, 32
    wide = inner * (2 if act == "swiglu" else 1)

    def weights(n: int, k: int) -> tuple[Array, Array, Array | None]:
        packed = pack(r.integers(0, 1 << bits, (e, n, k)), bits)
        shape = (e, n, k // block) if block else (e, n)
        zeros = pack(r.integers(0, 1 << bits, shape), bits) if zero else None
        return packed, (np.abs(normal(r, *shape)) * 0.05 + 0.01).astype(np.float32), zeros

    (w1, s1, z1), (w2, s2, z2) = weights(wide, hidden), weights(hidden, inner)
    x, router = normal(r, 6, hidden, scale=0.3), normal(r, 6, e)
    inputs = (x, router, w1, s1, normal(r, e, wide), w2, s2, normal(r, e, hidden), None, None, None, z1, z2)
    while inputs[-1] is None:
        inputs = inputs[:-1]
    given = {"expert_weight_bits": bits, "activation_type": act, "k": 2, **attrs}
    given |= {"block_size": block} if block else {}
    given |= {"swiglu_fusion": fusion} if act == "swiglu" else {}
    return case("QMoE", inputs, name, **given)


@family
def quantized_mixtures() -> Iterator[Case]:
    for bits in (4, 8):
        yield qmoe(f"rows-{bits}", bits=bits, block=0)
        yield qmoe(f"blocks-{bits}", bits=bits, block=32)
        yield qmoe(f"blocks-{bits}-zero", bits=bits, block=32, zero=True)
        yield qmoe(f"silu-{bits}", bits=bits, block=32, act="silu")
        yield qmoe(f"norm-{bits}", bits=bits, block=16, normalize_routing_weights=1)
    yield qmoe("int8-activations-4", bits=4, block=32, accuracy_level=4)


@family
def recurrent() -> Iterator[Case]:
    for kind in ("f32", "f16", "bf16"):
        for t in (1, 2, 7):
            r = rng("conv", kind, t)
            x, w, bias = normal(r, 2, 5, t, kind=kind), normal(r, 5, 1, 4, kind=kind), normal(r, 5, kind=kind)
            past = normal(r, 2, 5, 3, kind=kind)
            yield case("CausalConvWithState", (x, w, bias, past), f"{kind}-{t}", 2, activation="silu")
            yield case("CausalConvWithState", (x, w), f"{kind}-{t}-bare", 2)
            for rule in ("linear", "gated", "delta", "gated_delta"):
                yield linear(f"{rule}-{kind}-{t}", rule, t, kind)
    yield linear("shared-keys", "gated_delta", 3, "f32", h_q=2, h_kv=4)
    yield linear("shared-values", "gated_delta", 3, "f32", h_q=4, h_kv=2)
    yield linear("per-key-decay", "gated", 3, "f32", per_key=True)
    yield linear("scaled", "gated_delta", 3, "f32", scale=0.25)


def linear(
    name: str, rule: str, t: int, kind: str, *, h_q: int = 2, h_kv: int = 2, per_key: bool = False, **attrs: Any
) -> Case:
    """One LinearAttention with keys of 6 and values of 10."""
    r = rng("linear", name)
    b, d_k, d_v = 2, 6, 10
    h_k = h_kv if h_q >= h_kv else h_q
    q, k = normal(r, b, t, h_q * d_k, kind=kind), normal(r, b, t, h_k * d_k, kind=kind, scale=0.3)
    v, state = normal(r, b, t, h_kv * d_v, kind=kind), normal(r, b, h_kv, d_k, d_v, kind=kind)
    width = h_kv * (d_k if per_key else 1)
    decay = (-np.abs(normal(r, b, t, width))).astype(KINDS[kind]) if "gated" in rule else None
    beta = (1 / (1 + np.exp(-normal(r, b, t, h_kv)))).astype(KINDS[kind]) if "delta" in rule else None
    inputs: tuple[Array | None, ...] = (q, k, v, state, decay, beta)
    while inputs[-1] is None:
        inputs = inputs[:-1]
    return case("LinearAttention", inputs, name, 2, q_num_heads=h_q, kv_num_heads=h_kv, update_rule=rule, **attrs)


@family
def gates() -> Iterator[Case]:
    for kind in KINDS:
        r = rng("gates", kind)
        x, gate = normal(r, 2, 3, 12, kind=kind), normal(r, 2, 3, 12, kind=kind)
        yield case("GatedRMSNorm", (x, normal(r, 4, kind=kind), gate), kind)
        yield case("GatedRMSNorm", (x, normal(r, 12, kind=kind), gate), f"{kind}-sigmoid", activation="sigmoid")
        yield case("GatedAdd", (x, gate, normal(r, 2, 3, 1, kind=kind)), kind)
        a, b = normal(r, 2, 3, 4, kind=kind), normal(r, 2, 3, 4, kind=kind)
        yield case("LinearAttentionGate", (a, normal(r, 4), normal(r, 4), b), kind, 2)
        cos, sin = cos_sin(20, 12, kind)
        ids = r.integers(0, 20, (3, 2, 3))
        for layout in (0, 1):
            yield case("MRotaryEmbedding", (normal(r, 2, 3, 24, kind=kind), ids, cos, sin), f"{kind}-{layout}",
                       mrope_section=[2, 2, 2], mrope_layout=layout)  # fmt: skip


@family
def products() -> Iterator[Case]:
    r = rng("fused")
    yield case("FusedMatMul", (normal(r, 2, 3, 5), normal(r, 2, 5, 4)), "plain", alpha=0.5)
    yield case("FusedMatMul", (normal(r, 2, 5, 3), normal(r, 2, 4, 5)), "transposed", transA=1, transB=1)
    x, scale, zero = r.integers(0, 255, (3, 5)).astype(np.uint8), np.array(0.1, np.float32), np.array(7, np.uint8)
    yield case("DequantizeLinear", (x, scale, zero), "u8")
    yield case("QuantizeLinear", (normal(r, 3, 5), scale, zero), "u8")
    yield case("Trilu", (normal(r, 3, 5), np.array(1, np.int64)), "upper", upper=1)
    yield case("Trilu", (normal(r, 3, 5), np.array(-1, np.int64)), "lower", upper=0)


@cache
def contrib_cases() -> tuple[Case, ...]:
    """All of them."""
    made = [one for generate in _FAMILIES for one in generate()]
    names = [one.id for one in made]
    assert len(set(names)) == len(names), "two cases have one name"
    return tuple(made)
