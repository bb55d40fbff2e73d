"""Rotary position embedding in its three spellings."""

from __future__ import annotations

from typing import Any

import numpy as np

from genai_cli.errors import GenaiError
from genai_cli.ops.infer import same
from genai_cli.ops.registry import op

Array = np.ndarray[Any, Any]


def rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Rotate the first 2 * cos.shape[-1] of x's last dimension; cos and sin broadcast over the rest."""
    half = cos.shape[-1]
    part, rest = x[..., : 2 * half], x[..., 2 * half :]
    if part.shape[-1] != 2 * half:
        raise GenaiError(f"rotary width {2 * half} is larger than the head size {x.shape[-1]}")
    first, second = (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., :half], part[..., half:])
    real, imaginary = cos * first - sin * second, sin * first + cos * second
    if interleaved:
        turned = np.stack((real, imaginary), -1).reshape(part.shape)
    else:
        turned = np.concatenate((real, imaginary), -1)
    return np.concatenate((turned, rest), -1)


def heads(x: Array, num_heads: int) -> Array:
    """[B, T, H * D] as [B, H, T, D]; 4-D is that already."""
    if x.ndim == 4:
        return x
    if not num_heads:
        raise GenaiError("a 3-D input needs the attribute `num_heads`")
    return x.reshape(*x.shape[:2], num_heads, x.shape[2] // num_heads).transpose(0, 2, 1, 3)


def merged(x: Array, like: Array) -> Array:
    """Back from [B, H, T, D] to the rank of `like`."""
    return x if like.ndim == 4 else x.transpose(0, 2, 1, 3).reshape(like.shape)


def _check_width(cos: Array, rotary_embedding_dim: int, head_size: int) -> None:
    width = rotary_embedding_dim or head_size
    if 2 * cos.shape[-1] != width:
        raise GenaiError(f"`RotaryEmbedding`: the cos cache is {cos.shape[-1]} wide, wanted {width // 2}")


@op(since=23, infer=same)
def RotaryEmbedding(
    x: Array,
    cos_cache: Array,
    sin_cache: Array,
    position_ids: Array | None = None,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Array:
    """Caches [max_position, width / 2] with position_ids [B, T], or [B, T, width / 2] without."""
    split = heads(x, num_heads)
    _check_width(cos_cache, rotary_embedding_dim, split.shape[-1])
    cos, sin = (c if position_ids is None else c[position_ids] for c in (cos_cache, sin_cache))
    return merged(rotate(split, cos[:, None], sin[:, None], bool(interleaved)), x)


@op(name="RotaryEmbedding", domain="com.microsoft", infer=same)
def ms_RotaryEmbedding(
    input: Array,
    position_ids: Array,
    cos_cache: Array,
    sin_cache: Array,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Array:
    """position_ids [B, T], or [1]: the position of the first token. Head size without num_heads: 2 * cache width."""
    if scale != 1.0 or is_packed_batching:
        raise GenaiError("`com.microsoft::RotaryEmbedding` with scale or is_packed_batching is not supported")
    count = num_heads or (input.shape[-1] // (2 * cos_cache.shape[-1]) if input.ndim == 3 else input.shape[1])
    split = heads(input, count)
    if position_ids.size == 1 and position_ids.ndim == 1:
        position_ids = position_ids[0] + np.arange(split.shape[2])[None]
    cos, sin = cos_cache[position_ids][:, None], sin_cache[position_ids][:, None]
    return merged(rotate(split, cos, sin, bool(interleaved)), input)


def mrope_streams(section: list[int], layout: int) -> Array:
    """Which of the three position streams (time, height, width) each cache column reads."""
    if layout == 0:
        return np.repeat(np.arange(3), section)
    streams = np.zeros(sum(section), np.int64)
    for stream in (1, 2):
        streams[stream : section[stream] * 3 : 3] = stream
    return streams


@op(domain="com.microsoft", infer=same)
def MRotaryEmbedding(
    input: Array,
    position_ids: Array,
    cos_cache: Array,
    sin_cache: Array,
    *,
    mrope_section: list[int],
    interleaved: int = 0,
    is_packed_batching: int = 0,
    mrope_layout: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Array:
    """Rotary with three position streams: position_ids [3, B, T], each cache column reads one of them."""
    if scale != 1.0 or is_packed_batching:
        raise GenaiError("`MRotaryEmbedding` with scale or is_packed_batching is not supported")
    streams = mrope_streams(mrope_section, mrope_layout)
    if streams.size != cos_cache.shape[1]:
        raise GenaiError(
            f"`MRotaryEmbedding`: mrope_section {mrope_section} is not the cache width {cos_cache.shape[1]}"
        )
    columns = np.arange(streams.size)
    positions = position_ids[streams].transpose(1, 2, 0)  # [B, T, width / 2]
    count = num_heads or (input.shape[-1] // (2 * cos_cache.shape[-1]) if input.ndim == 3 else input.shape[1])
    cos, sin = (cache[positions, columns][:, None] for cache in (cos_cache, sin_cache))
    return merged(rotate(heads(input, count), cos, sin, bool(interleaved)), input)
