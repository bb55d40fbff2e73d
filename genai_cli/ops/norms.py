"""Normalizations. Statistics and the affine part are computed in f32; the output is rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np

from genai_cli.errors import GenaiError
from genai_cli.ops.infer import Attrs, Inputs, axis_of, dtype, same, same_as, shape, spec
from genai_cli.ops.registry import Spec, op
from genai_cli.ops.unary import Sigmoid

Array = np.ndarray[Any, Any]
F32 = np.dtype(np.float32)


def rms(x: Array, epsilon: float, axes: tuple[int, ...] = (-1,)) -> tuple[Array, Array]:
    """x / sqrt(mean(x^2) + epsilon), and 1 / that root."""
    inverse = 1 / np.sqrt(np.mean(np.square(x), axis=axes, keepdims=True) + x.dtype.type(epsilon))
    return x * inverse, inverse


def standardize(x: Array, epsilon: float, axes: tuple[int, ...] = (-1,)) -> tuple[Array, Array, Array]:
    """(x - mean) / sqrt(var + epsilon), the mean, and 1 / that root."""
    mean = np.mean(x, axis=axes, keepdims=True)
    centred = x - mean
    inverse = 1 / np.sqrt(np.mean(np.square(centred), axis=axes, keepdims=True) + x.dtype.type(epsilon))
    return centred * inverse, mean, inverse


def _trailing(rank: int, axis: int) -> tuple[int, ...]:
    return tuple(range(axis_of(axis, rank), rank))


def _stats(value: Spec, axis: int) -> Spec:
    dims = value[0]
    start = axis_of(axis, len(dims))
    return ((*dims[:start], *(1 for _ in dims[start:])), F32)


def _layer_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    stats = _stats(spec(inputs[0]), attrs.get("axis", -1))
    return [spec(inputs[0]), stats, stats]


@op(since=17, infer=_layer_infer, like=(0, None, None))
def LayerNormalization(
    x: Array, scale: Array, b: Array | None = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[Array, Array, Array]:
    y, mean, inverse = standardize(x, epsilon, _trailing(x.ndim, axis))
    y = y * scale if b is None else y * scale + b
    return y, mean.astype(F32), inverse.astype(F32)


@op(since=23, infer=lambda inputs, attrs: [(shape(inputs[0]), dtype(inputs[1]))], like=1)
def RMSNormalization(x: Array, scale: Array, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Array:
    return rms(x, epsilon, _trailing(x.ndim, axis))[0] * scale


def _simplified_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    stats = _stats(spec(inputs[0]), attrs.get("axis", -1))
    return [(shape(inputs[0]), dtype(inputs[1])), stats]


@op(infer=_simplified_infer, like=(1, None))
@op(domain="com.microsoft", infer=_simplified_infer, like=(1, None))
def SimplifiedLayerNormalization(
    x: Array, scale: Array, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[Array, Array]:
    """RMS norm. ORT registers it in both domains, from opset 1 on."""
    y, inverse = rms(x, epsilon, _trailing(x.ndim, axis))
    return y * scale, inverse.astype(F32)


def _skip_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    stats = _stats(spec(inputs[0]), -1)
    return [spec(inputs[0]), stats, stats, spec(inputs[0])]


def _sum(input: Array, skip: Array, bias: Array | None) -> tuple[Array, Array]:
    """The sum in the input's dtype, and the same values widened: rounded before the norm, as separate nodes would."""
    total = input.astype(F32) + skip.astype(F32)
    rounded = (total if bias is None else total + bias.astype(F32)).astype(input.dtype)
    return rounded, rounded.astype(F32)


@op(domain="com.microsoft", infer=_skip_infer, like=(0, None, None, 0), raw=True)
def SkipSimplifiedLayerNormalization(
    input: Array, skip: Array, gamma: Array, bias: Array | None = None, *, epsilon: float = 1e-12
) -> tuple[Array, Array | None, Array, Array]:
    """Outputs: normed, mean (an RMS norm has none), 1 / root, the sum."""
    total, wide = _sum(input, skip, bias)
    y, inverse = rms(wide, epsilon)
    return y * gamma.astype(F32), None, inverse, total


@op(domain="com.microsoft", infer=_skip_infer, like=(0, None, None, 0), raw=True)
def SkipLayerNormalization(
    input: Array,
    skip: Array,
    gamma: Array,
    beta: Array | None = None,
    bias: Array | None = None,
    *,
    epsilon: float = 1e-12,
) -> tuple[Array, Array, Array, Array]:
    total, wide = _sum(input, skip, bias)
    y, mean, inverse = standardize(wide, epsilon)
    y = y * gamma.astype(F32)
    return y if beta is None else y + beta.astype(F32), mean, inverse, total


def _embed_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    b, t = shape(inputs[0])
    total = ((b, t, shape(inputs[2])[1]), dtype(inputs[2]))
    return [total, ((b,), dtype(inputs[0])), total]


@op(domain="com.microsoft", infer=_embed_infer, like=(2, 0, 2))
def EmbedLayerNormalization(
    input_ids: Array,
    segment_ids: Array | None,
    word_embedding: Array,
    position_embedding: Array,
    segment_embedding: Array | None,
    gamma: Array,
    beta: Array,
    mask: Array | None = None,
    position_ids: Array | None = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int = 0,
) -> tuple[Array, Array, Array]:
    """Sum of embeddings, normed; mask_index counts the ones of each mask row (0 without a mask)."""
    positions = np.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
    total = word_embedding[input_ids] + position_embedding[positions]
    if segment_ids is not None and segment_embedding is not None:
        total = total + segment_embedding[segment_ids]
    counts = np.zeros(input_ids.shape[0], np.int32) if mask is None else mask.sum(axis=1).astype(np.int32)
    return standardize(total, epsilon)[0] * gamma + beta, counts, total


@op(domain="com.microsoft", infer=same)
def GatedRMSNorm(x: Array, scale: Array, gate: Array, *, activation: str = "silu", epsilon: float = 1e-5) -> Array:
    """RMS norm over every group of len(scale) elements of the last dimension, times the activated gate."""
    groups = x.reshape(*x.shape[:-1], -1, scale.shape[0])
    y = (rms(groups, epsilon)[0] * scale).reshape(x.shape)
    if activation not in ("silu", "swish", "sigmoid"):
        raise GenaiError(f"`GatedRMSNorm` activation `{activation}`: wanted silu, swish or sigmoid")
    return y * Sigmoid(gate) if activation == "sigmoid" else y * gate * Sigmoid(gate)


@op(since=1, infer=same)
def LpNormalization(input: Array, *, axis: int = -1, p: int = 2) -> Array:
    """x / its p-norm along the axis; 0 where the norm is 0."""
    norm = np.abs(input).sum(axis, keepdims=True) if p == 1 else np.sqrt(np.square(input).sum(axis, keepdims=True))
    return np.where(norm == 0, 0, input / np.where(norm == 0, 1, norm))


@op(since=6)
def InstanceNormalization(input: Array, scale: Array, b: Array, *, epsilon: float = 1e-5) -> Array:
    y = standardize(input, epsilon, tuple(range(2, input.ndim)))[0]
    return y * _per_channel(scale, input.ndim) + _per_channel(b, input.ndim)


@op(since=21)
def GroupNormalization(
    x: Array, scale: Array, bias: Array, *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1
) -> Array:
    groups = x.reshape(x.shape[0], num_groups, -1)
    y = standardize(groups, epsilon)[0].reshape(x.shape)
    return y * _per_channel(scale, x.ndim) + _per_channel(bias, x.ndim)


@op(since=15)
def BatchNormalization(
    x: Array,
    scale: Array,
    b: Array,
    input_mean: Array,
    input_var: Array,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> Array:
    if training_mode:
        raise GenaiError("`BatchNormalization` in training mode is not supported")
    s, bias, mean, var = (_per_channel(v, x.ndim) for v in (scale, b, input_mean, input_var))
    return (x - mean) / np.sqrt(var + epsilon) * s + bias


def _per_channel(v: Array, rank: int) -> Array:
    return v.reshape(-1, *(1 for _ in range(rank - 2)))


@op(since=13, like=0)
def MeanVarianceNormalization(x: Array, *, axes: list[int] | None = None) -> Array:
    over = tuple(axes or (0, 2, 3))
    centred = x - np.mean(x, axis=over, keepdims=True)
    return centred / (np.sqrt(np.mean(np.square(centred), axis=over, keepdims=True)) + 1e-9)


@op(domain="com.microsoft", infer=same_as(0), raw=True)
def GatedAdd(x: Array, y: Array, gate: Array) -> Array:
    """x + round(y * gate): the product is rounded to the tensors' dtype before the sum, as separate nodes would."""
    product = (y.astype(F32) * gate.astype(F32)).astype(x.dtype)
    return (x.astype(F32) + product.astype(F32)).astype(x.dtype)
