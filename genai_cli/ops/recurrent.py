"""Layers with a recurrent state: causal convolution and linear attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from genai_cli.errors import GenaiError
from genai_cli.ops.infer import Attrs, Inputs, dtype, optional, shape, spec
from genai_cli.ops.registry import Spec, op
from genai_cli.ops.unary import Sigmoid, Softplus

Array = np.ndarray[Any, Any]


def causal_conv(
    x: Array, weight: Array, bias: Array | None, past: Array | None, activation: str
) -> tuple[Array, Array]:
    """x [B, C, T], weight [C, 1, k], past [B, C, k-1]: depthwise over past ++ x; the last k-1 columns are the state."""
    if activation not in ("none", "silu", "swish"):
        raise GenaiError(f"`CausalConvWithState` activation `{activation}`: wanted none, silu or swish")
    width = weight.shape[-1]
    state = np.zeros((*x.shape[:2], width - 1), x.dtype) if past is None else past
    full = np.concatenate((state, x), 2)
    y = np.zeros(x.shape, x.dtype)
    for tap in range(width):
        y = y + weight[:, 0, tap, None] * full[:, :, tap : tap + x.shape[2]]
    y = y if bias is None else y + bias[:, None]
    return y if activation == "none" else y * Sigmoid(y), full[:, :, x.shape[2] :]


def _conv_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    b, c, _ = shape(inputs[0])
    return [spec(inputs[0]), ((b, c, shape(inputs[1])[-1] - 1), dtype(inputs[0]))]


@op(since=27, infer=_conv_infer)
def CausalConvWithState(
    input: Array,
    weight: Array,
    bias: Array | None = None,
    past_state: Array | None = None,
    *,
    activation: str = "none",
) -> tuple[Array, Array]:
    return causal_conv(input, weight, bias, past_state, activation)


@op(name="CausalConvWithState", domain="com.microsoft", infer=_conv_infer)
def ms_CausalConvWithState(
    input: Array,
    weight: Array,
    bias: Array | None = None,
    past_state: Array | None = None,
    *,
    activation: str = "none",
    channels_last: int = 0,
    dilation: int = 1,
    ndim: int = 1,
    state_window: int = 0,
) -> tuple[Array, Array]:
    if (channels_last, dilation, ndim, state_window) != (0, 1, 1, 0):
        raise GenaiError("`CausalConvWithState` with channels_last, dilation, ndim or state_window is not supported")
    return causal_conv(input, weight, bias, past_state, activation)


def _per_key(decay: Array | None, b: int, t: int, h: int, d: int, x: Array) -> Array:
    """exp(decay) as [B, T, H, D]; one value a head is the same for all its keys; no decay is 1."""
    if decay is None:
        return np.ones((b, t, h, d), x.dtype)
    return np.broadcast_to(np.exp(decay).reshape(b, t, h, -1), (b, t, h, d))


def linear_attention(
    q: Array, k: Array, v: Array, state: Array, keep: Array, beta: Array, delta: bool
) -> tuple[Array, Array]:
    """q, k [B, T, H, d_k], v [B, T, H, d_v], state [B, H, d_k, d_v], keep like k, beta [B, T, H].

    S = keep * S; S += beta * k (v - S'k)' with the delta rule, k v' without; output q'S after the update.
    """
    out = np.empty(v.shape, v.dtype)
    for t in range(q.shape[1]):
        state = keep[:, t, :, :, None] * state
        target = v[:, t] - np.einsum("bhk,bhkv->bhv", k[:, t], state) if delta else v[:, t]
        state = state + np.einsum("bhk,bhv->bhkv", k[:, t], target * beta[:, t, :, None])
        out[:, t] = np.einsum("bhk,bhkv->bhv", q[:, t], state)
    return out, state


def _linear_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    q, v = shape(inputs[0]), shape(inputs[2])
    h_q, h_kv = attrs["q_num_heads"], attrs["kv_num_heads"]
    d_k, d_v = q[2] // h_q, v[2] // h_kv
    past = optional(inputs, 3)
    kind = dtype(inputs[0]) if past is None else dtype(past)
    return [((*q[:2], max(h_q, h_kv) * d_v), dtype(inputs[0])), ((q[0], h_kv, d_k, d_v), kind)]


@op(domain="com.microsoft", infer=_linear_infer, like=(0, 3))
@op(since=27, infer=_linear_infer, like=(0, 3))
def LinearAttention(
    query: Array,
    key: Array,
    value: Array,
    past_state: Array | None = None,
    decay: Array | None = None,
    beta: Array | None = None,
    *,
    kv_num_heads: int,
    q_num_heads: int,
    chunk_size: int = 64,
    scale: float = 0.0,
    state_window: int = 0,
    update_rule: str = "gated_delta",
) -> tuple[Array, Array]:
    """Query heads share key/value heads (GQA), or the other way round; key heads may be fewer than value heads."""
    if update_rule not in ("linear", "gated", "delta", "gated_delta"):
        raise GenaiError(f"`LinearAttention` update_rule `{update_rule}`: wanted linear, gated, delta or gated_delta")
    if state_window:
        raise GenaiError("`LinearAttention` with state_window is not supported")
    b, t, d = query.shape[0], query.shape[1], query.shape[2] // q_num_heads
    count = max(q_num_heads, kv_num_heads)
    q, k, v = (
        _share(x.reshape(b, t, -1, w), count)
        for x, w in ((query, d), (key, d), (value, value.shape[2] // kv_num_heads))
    )
    state = np.zeros((b, kv_num_heads, d, v.shape[3]), query.dtype) if past_state is None else past_state
    keep = _per_key(decay if "gated" in update_rule else None, b, t, kv_num_heads, d, query)
    rate = np.ones((b, t, 1), query.dtype) if beta is None or "delta" not in update_rule else beta
    rate = np.broadcast_to(rate, (b, t, kv_num_heads))
    shared = count // kv_num_heads
    out, last = linear_attention(
        q * (scale or 1 / np.sqrt(d, dtype=query.dtype)), k, v, np.repeat(state, shared, 1), np.repeat(keep, shared, 2),
        np.repeat(rate, shared, 2), "delta" in update_rule,
    )  # fmt: skip
    return out.reshape(b, t, -1), last[:, ::shared]


def _share(x: Array, count: int) -> Array:
    """[B, T, h, D] with every head repeated so that there are `count`."""
    return np.repeat(x, count // x.shape[2], 2)


def _gate_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    outputs = [spec(inputs[0])]
    return outputs if optional(inputs, 3) is None else [*outputs, spec(inputs[3])]


@op(domain="com.microsoft", infer=_gate_infer, like=(0, 0))
def LinearAttentionGate(
    a: Array, dt_bias: Array, decay_scale: Array, b: Array | None = None
) -> tuple[Array, Array | None]:
    """decay = decay_scale * softplus(a + dt_bias), beta = sigmoid(b); all in f32."""
    return decay_scale * Softplus(a + dt_bias), None if b is None else Sigmoid(b)
