"""com.microsoft attention: GroupQueryAttention, MultiHeadAttention and the older Attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from genai_cli.errors import GenaiError
from genai_cli.ops.attention import allowed, as_bias, attend, merge_heads, split_heads
from genai_cli.ops.infer import Attrs, Inputs, dtype, optional, shape, values
from genai_cli.ops.norms import rms
from genai_cli.ops.registry import Spec, op
from genai_cli.ops.rotary import rotate

Array = np.ndarray[Any, Any]


def unpack(q: Array, k: Array | None, v: Array | None, num_heads: int, kv_num_heads: int) -> tuple[Array, Array, Array]:
    """Queries, keys and values [B, heads, T, D]; without k and v the first input holds q, k, v side by side."""
    if k is None or v is None:
        d = q.shape[2] // (num_heads + 2 * kv_num_heads)
        q, k, v = np.split(q, (num_heads * d, (num_heads + kv_num_heads) * d), axis=2)
    return split_heads(q, num_heads), split_heads(k, kv_num_heads), split_heads(v, kv_num_heads)


def resident_rows(length: int, capacity: int, window: int) -> int:
    """How many of the newest positions a window-sized buffer holds after `length` tokens (L(T) of the op's text)."""
    if length <= capacity:
        return length
    step = capacity - window + 1
    return length - step * -(-(length - capacity) // step)


def _store(new: Array, past: Array | None, start: int, keep: int, capacity: int) -> tuple[Array, Array]:
    """A row [H, T, D] after `start` rows of the past: all in order, and a buffer of the last `keep`, then 0."""
    before = new[:, :0] if past is None else past[:, :start]
    full = np.concatenate((before, new), 1)
    present: Array = np.zeros((new.shape[0], capacity, new.shape[2]), new.dtype)
    present[:, :keep] = full[:, full.shape[1] - keep :]
    return full, present


def _gqa_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    b, t, width = shape(inputs[0])
    h, h_kv = attrs["num_heads"], attrs["kv_num_heads"]
    d = width // (h + 2 * h_kv) if optional(inputs, 1) is None else width // h
    past = optional(inputs, 3)
    total = (values(inputs, 6) or [0])[0]
    held = 0 if past is None else shape(past)[2]
    capacity = held if attrs.get("sliding_window_cache", 0) else max(held, total)
    kind = dtype(inputs[0]) if past is None else dtype(past)
    present = ((b, h_kv, capacity, d), kind)
    return [((b, t, h * d), dtype(inputs[0])), present, present]


def _refuse(op_type: str, **given: Any) -> None:
    for name, value in given.items():
        if value not in (None, 0, "NONE"):
            raise GenaiError(f"`{op_type}` with `{name}` is not supported")


@op(domain="com.microsoft", infer=_gqa_infer, like=(0, 0, 0), host_inputs=(6,))
def GroupQueryAttention(
    query: Array,
    key: Array | None,
    value: Array | None,
    past_key: Array | None,
    past_value: Array | None,
    seqlens_k: Array,
    total_sequence_length: Array,
    cos_cache: Array | None = None,
    sin_cache: Array | None = None,
    position_ids: Array | None = None,
    attention_bias: Array | None = None,
    head_sink: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    q_norm_weight: Array | None = None,
    k_norm_weight: Array | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    causal: int = 1,
    do_rotary: int = 0,
    k_quant_type: str = "NONE",
    kv_cache_bit_width: int = 0,
    local_window_size: int = -1,
    qk_norm_epsilon: float = 1e-6,
    qk_output: int = 0,
    rotary_interleaved: int = 0,
    scale: float = 0.0,
    sliding_window_cache: int = 0,
    smooth_softmax: int = -1,
    softcap: float = 0.0,
    v_quant_type: str = "NONE",
) -> tuple[Array, Array, Array]:
    """Row b holds seqlens_k[b] + 1 tokens after this step; its T new ones stand behind its past.

    In a prompt (T = total_sequence_length) the past is empty and shorter rows are padded on the right. A window of w is
    the token itself and w - 1 before it. Buffers longer than the sequence are kept at their length.
    """
    _refuse("GroupQueryAttention", k_scale=k_scale, v_scale=v_scale, kv_cache_bit_width=kv_cache_bit_width,
            k_quant_type=k_quant_type, v_quant_type=v_quant_type, qk_output=qk_output)  # fmt: skip
    q, k, v = unpack(query, key, value, num_heads, kv_num_heads)
    if q_norm_weight is not None and k_norm_weight is not None:
        q, k = rms(q, qk_norm_epsilon)[0] * q_norm_weight, rms(k, qk_norm_epsilon)[0] * k_norm_weight
    new, total = q.shape[2], int(total_sequence_length.reshape(-1)[0])
    lengths = seqlens_k.reshape(-1).astype(np.int64) + 1
    starts = np.zeros_like(lengths) if new == total else lengths - new  # past length of each row
    if do_rotary:
        if cos_cache is None or sin_cache is None:
            raise GenaiError("`GroupQueryAttention` with do_rotary=1 needs cos_cache and sin_cache")
        where = _positions(starts, new, position_ids, cos_cache.shape[0])
        cos, sin = cos_cache[where][:, None], sin_cache[where][:, None]
        q, k = (rotate(x, cos, sin, bool(rotary_interleaved)) for x in (q, k))
    held = 0 if past_key is None else past_key.shape[2]
    capacity = held if sliding_window_cache else max(held, total)
    cache = Cache(capacity, local_window_size, bool(sliding_window_cache))
    sink = sinks(head_sink, smooth_softmax, q.dtype)
    rule = {"scale": scale or 1 / math.sqrt(q.shape[3]), "softcap": softcap, "sink": sink}
    rows = [
        _attend_row((q[b], k[b], v[b]), (_row(past_key, b), _row(past_value, b)), start, length, cache, bool(causal),
                    _row(attention_bias, b), rule)
        for b, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True))
    ]  # fmt: skip
    outputs, present_k, present_v = (np.stack(part) for part in zip(*rows, strict=True))
    return merge_heads(outputs), present_k, present_v


@dataclass(frozen=True)
class Cache:
    """A KV buffer: rows it has, the attention window (<= 0: none), and whether it lets go of what leaves the window."""

    capacity: int
    window: int
    evicts: bool

    def held(self, length: int) -> int:
        """How many of `length` tokens are in the buffer."""
        window = self.window if self.window > 0 else self.capacity
        return resident_rows(length, self.capacity, window) if self.evicts else length


def _row(array: Array | None, b: int) -> Array | None:
    """Row b of a batch, or the only one."""
    return None if array is None else array[b if array.shape[0] > 1 else 0]


def _attend_row(
    qkv: tuple[Array, Array, Array], past: tuple[Array | None, Array | None], start: int, length: int, cache: Cache,
    causal: bool, attention_bias: Array | None, rule: dict[str, Any],
) -> tuple[Array, Array, Array]:  # fmt: skip
    """One sequence: q, k, v [heads, T, D] at `start`; of its tokens `length` are real, the rest is padding."""
    q, k, v = qkv
    new = q.shape[1]
    had, keep = cache.held(start), cache.held(start + new)
    keys, buffer_k = _store(k, past[0], had, keep, cache.capacity)
    content, buffer_v = _store(v, past[1], had, keep, cache.capacity)
    seen = allowed(new, had + new, had, causal, cache.window - 1 if cache.window > 0 else -1)[0]
    bias = as_bias(seen & (np.arange(had + new) < had + max(length - start, 1)), q.dtype)
    if attention_bias is not None:
        bias = bias + attention_bias[..., start - had : start + new]
    return attend(q[None], keys[None], content[None], bias[None], **rule).output[0], buffer_k, buffer_v


def _positions(starts: Array, new: int, position_ids: Array | None, limit: int) -> Array:
    """[B, T] rotary positions: the given ones, else past length + i (rows of padding are clamped into the cache)."""
    if position_ids is not None:
        return position_ids
    return np.minimum(starts[:, None] + np.arange(new), limit - 1)


def sinks(head_sink: Array | None, smooth_softmax: int, kind: Any) -> Array | None:
    """[1, H, 1, 1] extra scores; smooth softmax is a sink of 0."""
    if head_sink is not None:
        return head_sink.reshape(1, -1, 1, 1).astype(kind)
    return np.zeros((1, 1, 1, 1), kind) if smooth_softmax > 0 else None


def _hide(mask: Array | None, shape_: tuple[int, int, int], value: float, kind: Any) -> Array:
    """[B, 1, T or 1, S] additive bias of a key padding mask: lengths [B], or 0/1 in [B, S] or [B, T, S]."""
    b, t, s = shape_
    if mask is None:
        return np.zeros((1, 1, 1, 1), kind)
    if mask.shape == (b,):
        seen = np.arange(s) < mask.reshape(b, 1, 1, 1)
    elif mask.shape == (2 * b,):
        ends, begins = mask[:b].reshape(b, 1, 1, 1), mask[b:].reshape(b, 1, 1, 1)
        seen = (np.arange(s) < ends) & (np.arange(s) >= begins)
    elif mask.shape in ((b, s), (b, t, s)):
        seen = mask.reshape(b, 1, -1, s) != 0
    else:
        raise GenaiError(f"a mask of shape {list(mask.shape)} for batch {b}, {t} queries, {s} keys is not supported")
    return np.where(seen, 0, value).astype(kind)


def _mha(
    q: Array, k: Array, v: Array, past_k: Array | None, past_v: Array | None, mask: Array | None, bias: Array | None,
    *, causal: bool, scale: float, fill: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    if past_k is not None and past_v is not None:
        k, v = np.concatenate((past_k, k), 2), np.concatenate((past_v, v), 2)
    (b, _, t, d), s = q.shape, k.shape[2]
    total = _hide(mask, (b, t, s), fill, q.dtype)
    if causal:
        total = total + np.where(allowed(t, s, s - t, True), 0, np.finfo(np.float32).min).astype(q.dtype)
        total = np.maximum(total, np.finfo(np.float32).min)
    if bias is not None:
        total = total + bias
    return attend(q, k, v, total, scale=scale or 1 / math.sqrt(d)).output, k, v


def _mha_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    q, kind, h = shape(inputs[0]), dtype(inputs[0]), attrs["num_heads"]
    if len(q) == 5:
        b, t, d = q[0], q[1], q[4]
        keys, value_size = t, d
    else:
        k, (b, t, d) = shape(inputs[1]), (q[0], q[1], q[2] // h)
        keys = k[2] if len(k) == 4 else k[1]
        value = None if len(k) == 5 else shape(inputs[2])
        value_size = d if value is None else value[3] if len(value) == 4 else value[2] // h
    past = optional(inputs, 6)
    total = keys + (0 if past is None else shape(past)[2])
    return [((b, t, h * value_size), kind), ((b, h, total, d), kind), ((b, h, total, value_size), kind)]


@op(domain="com.microsoft", infer=_mha_infer, like=0)
def MultiHeadAttention(
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    bias: Array | None = None,
    key_padding_mask: Array | None = None,
    attention_bias: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    past_sequence_length: Array | None = None,
    cache_indirection: Array | None = None,
    *,
    num_heads: int,
    mask_filter_value: float = -10000.0,
    scale: float = 0.0,
    unidirectional: int = 0,
) -> tuple[Array, Array, Array]:
    """Keys may be packed with values [B, S, H, 2, D], the query with both [B, S, H, 3, D], or both be [B, H, S, D]."""
    _refuse("MultiHeadAttention", past_sequence_length=past_sequence_length, cache_indirection=cache_indirection)
    q, k, v = _mha_inputs(query, key, value, num_heads)
    if bias is not None:
        width = num_heads * q.shape[3]
        parts = np.split(bias, (width, 2 * width))
        q, k, v = (x + p.reshape(1, num_heads, 1, -1) for x, p in zip((q, k, v), parts, strict=True))
    y, k, v = _mha(
        q, k, v, past_key, past_value, key_padding_mask, attention_bias,
        causal=bool(unidirectional), scale=scale, fill=mask_filter_value,
    )  # fmt: skip
    return merge_heads(y), k, v


def _mha_inputs(query: Array, key: Array | None, value: Array | None, num_heads: int) -> tuple[Array, Array, Array]:
    if query.ndim == 5:
        q, k, v = (query[:, :, :, i].transpose(0, 2, 1, 3) for i in range(3))
        return q, k, v
    q = split_heads(query, num_heads)
    if key is None:
        raise GenaiError("`MultiHeadAttention` needs keys, or a packed query of rank 5")
    if key.ndim == 5:
        return q, key[:, :, :, 0].transpose(0, 2, 1, 3), key[:, :, :, 1].transpose(0, 2, 1, 3)
    if value is None:
        raise GenaiError("`MultiHeadAttention` has keys but no values")
    return (q, key, value) if key.ndim == 4 else (q, split_heads(key, num_heads), split_heads(value, num_heads))


@op(name="Attention", domain="com.microsoft", like=0)
def ms_Attention(
    input: Array,
    weights: Array,
    bias: Array | None = None,
    mask_index: Array | None = None,
    past: Array | None = None,
    attention_bias: Array | None = None,
    past_sequence_length: Array | None = None,
    *,
    num_heads: int,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    past_present_share_buffer: int = 0,
    qkv_hidden_sizes: list[int] | None = None,
    rotary_embedding_dim: int = 0,
    scale: float = 0.0,
    unidirectional: int = 0,
) -> tuple[Array, Array]:
    """Projects the input to q, k, v itself; past and present are [2, B, H, S, D]."""
    _refuse("com.microsoft::Attention", do_rotary=do_rotary, rotary_embedding_dim=rotary_embedding_dim,
            past_present_share_buffer=past_present_share_buffer, past_sequence_length=past_sequence_length)  # fmt: skip
    projected = np.matmul(input, weights) if bias is None else np.matmul(input, weights) + bias
    third = projected.shape[-1] // 3
    widths = qkv_hidden_sizes or [third, third, third]
    q, k, v = (split_heads(x, num_heads) for x in np.split(projected, (widths[0], widths[0] + widths[1]), axis=2))
    past_k, past_v = (None, None) if past is None else (past[0], past[1])
    y, k, v = _mha(
        q, k, v, past_k, past_v, mask_index, attention_bias,
        causal=bool(unidirectional), scale=scale, fill=mask_filter_value,
    )  # fmt: skip
    return merge_heads(y), np.stack((k, v)) if k.shape == v.shape else k
