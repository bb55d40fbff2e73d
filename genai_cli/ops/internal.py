"""Ops of our own that rewrites make (domain `genai`): attention bound to KV slots, and fusions.

A fused op rounds its intermediates to the tensors' dtype exactly where the separate nodes would.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from genai_cli.errors import GenaiError
from genai_cli.ops.attention import allowed, as_bias, attend, merge_heads, split_heads
from genai_cli.ops.dtypes import is_16_bit
from genai_cli.ops.group_query_attention import sinks, unpack
from genai_cli.ops.infer import Attrs, Inputs, dtype, optional, same, shape
from genai_cli.ops.norms import rms
from genai_cli.ops.registry import Spec, op
from genai_cli.ops.rotary import rotate
from genai_cli.ops.unary import Sigmoid

Array = np.ndarray[Any, Any]
DOMAIN = "genai"


def _attention_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    """Y only: present lies in the slots."""
    q, kind = shape(inputs[0]), dtype(inputs[0])
    h, h_kv, value = attrs["num_heads"], attrs["kv_num_heads"], optional(inputs, 2)
    if len(q) == 4:
        wide = attrs.get("value_head_size", 0) or (q[3] if value is None else shape(value)[-1])
        return [((q[0], h, q[2], wide), kind)]
    if value is not None:
        wide = shape(value)[-1] if len(shape(value)) == 4 else shape(value)[2] // h_kv
    else:
        packed = not attrs.get("reads_only", 0)
        wide = attrs.get("value_head_size", 0) or q[2] // (h + 2 * h_kv if packed else h)
    return [((q[0], q[1], h * wide), kind)]


@op(name="Attention", domain=DOMAIN, infer=_attention_infer, like=(0, 0, 0))
def slot_Attention(
    q: Array,
    k: Array | None = None,
    v: Array | None = None,
    cos_cache: Array | None = None,
    sin_cache: Array | None = None,
    position_ids: Array | None = None,
    bias: Array | None = None,
    head_sink: Array | None = None,
    q_norm_weight: Array | None = None,
    k_norm_weight: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    bias_before_softcap: int = 0,
    is_causal: int = 1,
    key_slot: int = 0,
    local_window_size: int = -1,
    qk_norm_epsilon: float = 1e-6,
    reads_only: int = 0,
    rotary_interleaved: int = 0,
    scale: float = 0.0,
    smooth_softmax: int = -1,
    softcap: float = 0.0,
    value_head_size: int = 0,
    value_slot: int = 0,
) -> tuple[Array, Array, Array]:
    """Attention of new tokens over past [1, H_kv, P, D] ++ themselves; also returns the new past.

    The kernel's past is in its slots and it has no past inputs: without them this reference refuses, so a graph that
    needs a slot never runs on the host by accident. `reads_only`: nothing is appended, q is the only new tensor.
    """
    if past_key is None or past_value is None:
        raise GenaiError("`genai::Attention` reads KV slots, which only a kernel has")
    if bias_before_softcap:
        raise GenaiError("`genai::Attention` with bias_before_softcap has no reference: no exported op means that")
    if reads_only:
        queries, start = q if q.ndim == 4 else split_heads(q, num_heads), past_key.shape[2] - q.shape[-2]
        keys, content = past_key, past_value
    else:
        queries, keys, content = _heads(q, k, v, num_heads, kv_num_heads)
        if q_norm_weight is not None and k_norm_weight is not None:
            queries = rms(queries, qk_norm_epsilon)[0] * q_norm_weight
            keys = rms(keys, qk_norm_epsilon)[0] * k_norm_weight
        start = past_key.shape[2]
        if cos_cache is not None and sin_cache is not None:
            where = start + np.arange(keys.shape[2])[None] if position_ids is None else position_ids
            cos, sin = cos_cache[where][:, None], sin_cache[where][:, None]
            queries, keys = (rotate(x, cos, sin, bool(rotary_interleaved)) for x in (queries, keys))
        keys, content = np.concatenate((past_key, keys), 2), np.concatenate((past_value, content), 2)
    new, total = queries.shape[2], keys.shape[2]
    left = local_window_size - 1 if local_window_size > 0 else -1
    hidden = as_bias(allowed(new, total, start, bool(is_causal), left), queries.dtype)
    if bias is not None:
        extra = as_bias(bias, queries.dtype) if bias.dtype == np.bool_ else bias
        hidden = hidden + extra[..., :total]
    done = attend(queries, keys, content, hidden, scale=scale or 1 / math.sqrt(queries.shape[3]), softcap=softcap,
                  sink=sinks(head_sink, smooth_softmax, queries.dtype))  # fmt: skip
    return (done.output if q.ndim == 4 else merge_heads(done.output)), keys, content


@op(domain=DOMAIN, infer=same, raw=True)
def SiluMul(gate: Array, up: Array) -> Array:
    """gate * sigmoid(gate) * up, rounded after the sigmoid and after each product."""
    kind, g = gate.dtype, _wide(gate)
    activated = _wide(g * _wide(Sigmoid(g).astype(kind))).astype(kind)
    return (_wide(activated) * _wide(up)).astype(kind)


def _wide(x: Array) -> Array:
    return x.astype(np.float32) if is_16_bit(x.dtype) else x


def _heads(q: Array, k: Array | None, v: Array | None, num_heads: int, kv_num_heads: int) -> tuple[Array, Array, Array]:
    if q.ndim == 4 and k is not None and v is not None:
        return q, k, v
    return unpack(q, k, v, num_heads, kv_num_heads)
