"""Scaled dot-product attention: the core, and the ONNX op."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from genai_cli.errors import GenaiError
from genai_cli.ops.dtypes import ONNX_DTYPES
from genai_cli.ops.infer import Attrs, Inputs, dtype, optional, shape
from genai_cli.ops.registry import Spec, op
from genai_cli.ops.rotary import heads

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Attended:
    """The output [B, H, T, D_v] and the scores at every stage [B, H, T, S]."""

    output: Array
    scores: Array  # scaled products
    capped: Array  # after softcap
    biased: Array  # after bias and mask
    weights: Array  # after softmax


def softmax_with_sink(biased: Array, sink: Array | None) -> Array:
    """Softmax over keys. A sink is one more score a head whose weight is dropped; a row without any key is all 0."""
    top = biased.max(axis=-1, keepdims=True, initial=-np.inf)
    if sink is not None:
        top = np.maximum(top, sink)
    top = np.where(np.isneginf(top), 0, top)
    raised = np.exp(biased - top)
    total = raised.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - top)
    return raised / np.where(total == 0, 1, total)


def attend(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    *,
    scale: float,
    softcap: float = 0.0,
    sink: Array | None = None,
) -> Attended:
    """q [B, H, T, D], k [B, H_kv, S, D], v [B, H_kv, S, D_v]; bias broadcasts to [B, H, T, S], -inf hides a key."""
    group = q.shape[1] // k.shape[1]
    keys, content = (np.repeat(x, group, 1) for x in (k, v))
    scores = np.matmul(q * q.dtype.type(scale), keys.swapaxes(-1, -2))
    capped = softcap * np.tanh(scores / softcap) if softcap else scores
    biased = capped if bias is None else capped + bias
    weights = softmax_with_sink(biased, sink).astype(v.dtype)
    if bias is not None:  # a row without any key is 0, whatever its scores were
        weights = np.where(np.isneginf(np.broadcast_to(bias, weights.shape).max(-1, keepdims=True)), 0, weights)
    return Attended(np.matmul(weights, content), scores, capped, biased, weights)


def allowed(
    num_queries: int, num_keys: int, offset: Array | int, causal: bool, left: int = -1, right: int = -1
) -> Array:
    """[B or 1, 1, T, S] bool: query i stands at offset + i; `left`/`right` keys beside itself are seen (-1: all)."""
    position = np.reshape(offset, (-1, 1, 1, 1)) + np.arange(num_queries)[:, None]
    behind = position - np.arange(num_keys)  # [B or 1, 1, T, S]
    seen = np.ones(behind.shape, bool)
    if causal:
        seen &= behind >= 0
    if left >= 0:
        seen &= behind <= left
    if right >= 0:
        seen &= -behind <= right
    return seen


def as_bias(seen: Array, kind: Any) -> Array:
    """0 where seen, -inf elsewhere."""
    return np.where(seen, 0, -np.inf).astype(kind)


def _mask_bias(mask: Array, num_keys: int, kind: Any) -> Array:
    """A bool or additive mask as a bias; keys beyond the mask's last dimension are hidden."""
    bias = as_bias(mask, kind) if mask.dtype == np.bool_ else mask.astype(kind)
    missing = num_keys - bias.shape[-1]
    if missing > 0:
        bias = np.pad(bias, [(0, 0)] * (bias.ndim - 1) + [(0, missing)], constant_values=-np.inf)
    return bias


def _attention_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    q, k, v = (shape(inputs[i]) for i in range(3))
    past = optional(inputs, 4)
    before = 0 if past is None else shape(past)[2]
    if len(q) == 4:
        b, h, t, _ = q
        h_kv, s, d, d_v = k[1], k[2] + before, k[3], v[3]
    else:
        b, t, h, h_kv = q[0], q[1], attrs["q_num_heads"], attrs["kv_num_heads"]
        s, d, d_v = k[1] + before, k[2] // h_kv, v[2] // h_kv
    y = (b, h, t, d_v) if len(q) == 4 else (b, t, h * d_v)
    kind, kind_v = dtype(inputs[0]), dtype(inputs[2])
    return [(y, kind), ((b, h_kv, s, d), dtype(inputs[1])), ((b, h_kv, s, d_v), kind_v), ((b, h, t, s), kind)]


@op(name="AttentionDense", domain="genai", infer=_attention_infer, like=(0, 1, 2, 0))
@op(since=23, infer=_attention_infer, like=(0, 1, 2, 0))
def Attention(
    q: Array,
    k: Array,
    v: Array,
    attn_mask: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    nonpad_kv_seqlen: Array | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
) -> tuple[Array, Array, Array, Array]:
    """Query i stands at past length + i; with nonpad_kv_seqlen at nonpad_kv_seqlen - T + i; without both at i.

    So a causal mask is aligned to the upper left when neither is given, and to the lower right otherwise (opset 24's
    text and ORT agree).
    """
    query, keys, values = (heads(x, n or 0) for x, n in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads)))
    new = query.shape[2]
    before = 0
    if past_key is not None and past_value is not None:
        before = past_key.shape[2]
        keys, values = np.concatenate((past_key, keys), 2), np.concatenate((past_value, values), 2)
    total = keys.shape[2]
    kind = ONNX_DTYPES[softmax_precision] if softmax_precision in (1, 11) else query.dtype
    offset: Array | int = before if nonpad_kv_seqlen is None else nonpad_kv_seqlen.reshape(-1) - new
    seen = allowed(new, total, offset, bool(is_causal), left_window_size, right_window_size)
    if nonpad_kv_seqlen is not None:
        seen = seen & (np.arange(total) < nonpad_kv_seqlen.reshape(-1, 1, 1, 1))
    bias = as_bias(seen, kind)
    if attn_mask is not None:
        bias = bias + _mask_bias(attn_mask, total, kind)
    done = attend(
        query, keys, values, bias, scale=1 / math.sqrt(query.shape[3]) if scale is None else scale, softcap=softcap
    )
    stages = (done.scores if not softcap else done.capped, done.capped, done.biased, done.weights)
    output = done.output if q.ndim == 4 else merge_heads(done.output)
    return output, keys, values, stages[qk_matmul_output_mode]


def merge_heads(x: Array) -> Array:
    """[B, H, T, D] as [B, T, H * D]."""
    b, h, t, d = x.shape
    return x.transpose(0, 2, 1, 3).reshape(b, t, h * d)


def split_heads(x: Array, count: int) -> Array:
    """[B, T, H * D] as [B, H, T, D]."""
    if x.shape[-1] % count:
        raise GenaiError(f"a width of {x.shape[-1]} does not split into {count} heads")
    return x.reshape(*x.shape[:2], count, x.shape[2] // count).transpose(0, 2, 1, 3)
