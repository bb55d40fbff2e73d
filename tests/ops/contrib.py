"""Cases of the ops only ONNX Runtime specifies: seeded; odd sizes, size 1, empty, no multiple of a vector.

A case is named by what is special about it. The judge is ORT (oracle.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
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
FIRST_WEIGHT = {"MatMulNBits": 1, "MoE": 2, "QMoE": 2, "GatherBlockQuantized": 2}

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
    """A com.microsoft case. Of ops with quantized weights every input but the activations is a weight."""
    wanted = (True,) * outputs if isinstance(outputs, int) else outputs
    first = FIRST_WEIGHT.get(op, len(inputs))
    weights = tuple(i for i in range(first, len(inputs)) if inputs[i] is not None)
    weights = (0, *weights) if op == "GatherBlockQuantized" else weights
    return Case(op, MS, 1, inputs, attrs, wanted, None, f"{op}:{name}", weights)


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


def gqa(
    name: str, *, b: int = 1, t: int = 1, past: int = 0, h: int = 4, h_kv: int = 2, d: int = 16, kind: str = "f32",
    packed: bool = False, rotary: int = 0, capacity: int = 0, lengths: list[int] | None = None, bias: bool = False,
    sink: bool = False, positions: bool = False, qk_norm: bool = False, **attrs: Any,
) -> Case:  # fmt: skip
    """One GroupQueryAttention. `capacity` > past: a longer buffer; `lengths`: each row's tokens after the step."""
    r = rng("gqa", name)
    q, k, v = (
        normal(r, b, t, h * d, kind=kind),
        normal(r, b, t, h_kv * d, kind=kind),
        normal(r, b, t, h_kv * d, kind=kind),
    )
    held = capacity or past
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


def with_norms(one: Case) -> Case:
    """ORT's CPU kernel has no q/k norm: it is given the queries and keys already normed (an independent formula)."""
    q, k, q_norm, k_norm = (one.inputs[i] for i in (0, 1, 14, 15))
    assert q is not None
    assert k is not None
    assert q_norm is not None
    assert k_norm is not None
    normed = (
        np.concatenate([part / np.linalg.norm(part, axis=-1, keepdims=True) * len(w) ** 0.5 * w for part in parts], -1)
        for w, parts in (
            (q_norm, np.split(q, q.shape[2] // len(q_norm), 2)),
            (k_norm, np.split(k, k.shape[2] // len(k_norm), 2)),
        )
    )
    first, second = (array.astype(np.float32) for array in normed)
    return replace(one, judged_as=replace(one, inputs=(first, second, *one.inputs[2:9])))


def window_cache(past: int, t: int, capacity: int, window: int, rotary: int = 0) -> Case:
    """A buffer of `capacity` rows that evicts; what lies behind the rows it keeps is unspecified."""
    name = f"window-cache-{past}-{t}-{capacity}{'-rotary' if rotary else ''}"
    one = gqa(name, past=past, t=t, capacity=capacity, rotary=rotary, local_window_size=window, sliding_window_cache=1)
    total, step = past + t, capacity - window + 1
    kept = total if total <= capacity else total - step * -((capacity - total) // step)  # L(T) of the op's text
    tail = (slice(None), slice(None), slice(kept, None))
    return replace(one, unspecified=((1, tail), (2, tail)))


@family
def group_query_attention() -> Iterator[Case]:
    for d in (8, 16, 32, 64, 80):
        yield gqa(f"prompt-{d}", t=5, d=d)
        yield gqa(f"decode-{d}", t=1, past=7, d=d)
    for kind in ("f16", "bf16"):
        yield gqa(f"prompt-{kind}", t=5, kind=kind, rotary=16)
        yield gqa(f"decode-{kind}", past=6, kind=kind, rotary=16)
    yield gqa("chunk", t=3, past=7)
    yield gqa("chunk-rotary", t=3, past=7, rotary=16)
    yield gqa("packed", t=5, packed=True, rotary=16)
    yield gqa("packed-decode", past=4, packed=True, rotary=16)
    yield gqa("one-head", h=1, h_kv=1, t=3)
    yield gqa("seven-to-one", h=7, h_kv=1, t=3, d=16, past=0)
    yield gqa("rotary-prompt", t=6, rotary=16)
    yield gqa("rotary-decode", past=9, rotary=16)
    yield gqa("rotary-interleaved", t=4, rotary=16, rotary_interleaved=1)
    yield gqa("rotary-partial", t=4, d=32, rotary=16)
    yield gqa("rotary-positions", t=4, rotary=16, positions=True)
    yield gqa("rotary-positions-decode", past=5, rotary=16, positions=True)
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
    yield gqa("batch", b=3, t=4, rotary=16)
    yield gqa("batch-decode-rows", b=3, past=9, lengths=[10, 4, 7], rotary=16)
    yield gqa("batch-decode-rows-window", b=3, past=9, lengths=[10, 4, 7], local_window_size=3)
    yield gqa("capacity", past=5, capacity=20, rotary=16)
    yield gqa("capacity-prompt", t=5, capacity=20)
    yield gqa("bidirectional", t=4, causal=0)
    for past, t, capacity in (
        (5, 1, 12),
        (11, 1, 12),
        (12, 1, 12),
        (13, 1, 10),
        (20, 1, 8),
        (6, 4, 9),
        (9, 7, 8),
        (0, 6, 8),
    ):
        yield window_cache(past, t, capacity, 8)
        yield window_cache(past, t, capacity, 8, rotary=16)
    yield with_norms(gqa("qk-norm", t=4, qk_norm=True, rotary=16))
    yield with_norms(gqa("qk-norm-decode", past=4, qk_norm=True, rotary=16))


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
                       mrope_section=[2, 2, 2], mrope_layout=layout, num_heads=2)  # fmt: skip


@family
def products() -> Iterator[Case]:
    r = rng("fused")
    yield case("FusedMatMul", (normal(r, 2, 3, 5), normal(r, 2, 5, 4)), "plain", alpha=0.5)
    yield case("FusedMatMul", (normal(r, 2, 5, 3), normal(r, 2, 4, 5)), "transposed", transA=1, transB=1)
    for kind in KINDS:
        for m, k, n in ((1, 1, 1), (1, 64, 33), (5, 100, 17), (70, 33, 65), (0, 8, 3)):
            q = rng("transB", kind, m, k, n)
            x, w = normal(q, 1, m, k, kind=kind), normal(q, n, k, kind=kind)
            one = case("FusedMatMul", (x, w), f"{kind}-{m}x{k}x{n}", transB=1)
            yield replace(one, constants=(1,))
    x, scale, zero = r.integers(0, 255, (3, 5)).astype(np.uint8), np.array(0.1, np.float32), np.array(7, np.uint8)
    yield case("DequantizeLinear", (x, scale, zero), "u8")
    yield case("QuantizeLinear", (normal(r, 3, 5), scale, zero), "u8")
    yield case("Trilu", (normal(r, 3, 5), np.array(1, np.int64)), "upper", upper=1)
    yield case("Trilu", (normal(r, 3, 5), np.array(-1, np.int64)), "lower", upper=0)


@cache
def contrib_cases() -> tuple[Case, ...]:
    """All of them."""
    import contrib_quantized  # noqa: F401  (adds its families)

    made = [one for generate in _FAMILIES for one in generate()]
    names = [one.id for one in made]
    assert len(set(names)) == len(names), "two cases have one name"
    return tuple(made)
