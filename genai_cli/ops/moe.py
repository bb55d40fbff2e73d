"""Mixtures of experts: dense and quantized weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from genai_cli.errors import GenaiError
from genai_cli.ops.infer import same
from genai_cli.ops.quant import dequantize_blocks, quantize_rows, unpack_bits
from genai_cli.ops.reduce import TopK, softmax
from genai_cli.ops.registry import op
from genai_cli.ops.unary import Sigmoid, erf_gelu

Array = np.ndarray[Any, Any]
Linear = Callable[[Array, int], Array]  # rows, expert -> rows


def _silu(x: Array) -> Array:
    return x * Sigmoid(x)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": erf_gelu,
    "silu": _silu,
    "identity": lambda x: x,
}


def route(router: Array, k: int, normalize: bool, weights: Array | None) -> tuple[Array, Array]:
    """Experts [rows, k] and their weights: softmax over all experts at the k largest, made to sum to 1 if asked.

    With separate `weights` [rows, experts] the router only selects and the weights mix.
    """
    chosen = TopK(router, np.array([k]))[1]
    mix = np.take_along_axis(softmax(router) if weights is None else weights, chosen, 1)
    if normalize:
        total = mix.sum(1, keepdims=True)
        mix = mix / np.where(total == 0, 1, total)
    return chosen, mix


def swiglu(gate: Array, linear: Array, alpha: float, beta: float, limit: float | None) -> Array:
    """gate * sigmoid(alpha * gate) * (linear + beta), clamped from above (gate) and on both sides (linear)."""
    if limit is not None:
        gate, linear = np.minimum(gate, limit), np.clip(linear, -limit, limit)
    return gate * Sigmoid(alpha * gate) * (linear + beta)


def mixture(
    x: Array,
    chosen: Array,
    mix: Array,
    fc1: Linear,
    fc2: Linear,
    fc3: Linear | None,
    activate: Callable[[Array, Array | None], Array],
) -> Array:
    """Each row through its experts: fc2(activate(fc1(x), fc3(x))), mixed."""
    rows = x.reshape(-1, x.shape[-1])
    out = np.zeros(rows.shape, x.dtype)
    for expert in np.unique(chosen):
        who, slot = np.nonzero(chosen == expert)
        part = rows[who]
        hidden = activate(fc1(part, int(expert)), None if fc3 is None else fc3(part, int(expert)))
        np.add.at(out, who, mix[who, slot, None] * fc2(hidden, int(expert)))
    return out.reshape(x.shape)


def activation(
    name: str, swiglu_fusion: int, alpha: float, beta: float, limit: float | None
) -> Callable[[Array, Array | None], Array]:
    """What stands between the two projections. swiglu_fusion 1: gate and linear interleaved, 2: side by side."""
    if name == "swiglu":

        def gated(h: Array, other: Array | None) -> Array:
            if swiglu_fusion == 1:
                return swiglu(h[:, 0::2], h[:, 1::2], alpha, beta, limit)
            gate, linear = np.split(h, 2, axis=1) if swiglu_fusion == 2 or other is None else (h, other)
            return swiglu(gate, linear, alpha, beta, limit)

        return gated
    if name not in ACTIVATIONS:
        raise GenaiError(f"`MoE` activation_type `{name}`: wanted swiglu or one of {', '.join(sorted(ACTIVATIONS))}")
    function = ACTIVATIONS[name]
    return lambda h, other: function(h) if other is None else function(h) * other


def _dense(weights: Array | None, bias: Array | None) -> Linear | None:
    if weights is None:
        return None

    def linear(rows: Array, expert: int) -> Array:
        y = np.matmul(rows, weights[expert].T)
        return y if bias is None else y + bias[expert]

    return linear


def _needed(linear: Linear | None) -> Linear:
    if linear is None:
        raise GenaiError("a mixture of experts without `fc1` or `fc2` weights")
    return linear


@op(domain="com.microsoft", infer=same)
def MoE(
    input: Array,
    router_probs: Array,
    fc1_experts_weights: Array,
    fc1_experts_bias: Array | None,
    fc2_experts_weights: Array,
    fc2_experts_bias: Array | None = None,
    fc3_experts_weights: Array | None = None,
    fc3_experts_bias: Array | None = None,
    *,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    activation_type: str = "relu",
    k: int = 1,
    normalize_routing_weights: int = 0,
    swiglu_fusion: int = 0,
    swiglu_limit: float | None = None,
    use_sparse_mixer: int = 0,
) -> Array:
    """Weights [E, N, K]; router_probs are logits."""
    if use_sparse_mixer:
        raise GenaiError("`MoE` with use_sparse_mixer is not supported")
    chosen, mix = route(router_probs, k, bool(normalize_routing_weights), None)
    return mixture(
        input, chosen, mix, _needed(_dense(fc1_experts_weights, fc1_experts_bias)),
        _needed(_dense(fc2_experts_weights, fc2_experts_bias)), _dense(fc3_experts_weights, fc3_experts_bias),
        activation(activation_type, swiglu_fusion, activation_alpha, activation_beta, swiglu_limit),
    )  # fmt: skip


def _quantized(
    weights: Array | None,
    scales: Array | None,
    zeros: Array | None,
    bias: Array | None,
    bits: int,
    block_size: int,
    int8: bool,
) -> Linear | None:
    """One expert's linear layer over packed weights [E, N, K * bits / 8]; without blocks a row is one block."""
    if weights is None or scales is None:
        return None
    int8 = block_size > 0 and (int8 or bits == 8)

    def linear(rows: Array, expert: int) -> Array:
        n, k = weights.shape[1], weights.shape[2] * 8 // bits
        size = block_size or k
        zero = None if zeros is None else zeros[expert]
        if zero is not None and not block_size:  # one zero point a row, packed along the rows
            zero = _unpack_rows(zero, bits, n)
        w = dequantize_blocks(weights[expert], scales[expert], zero, n, k, bits, size)
        x = _as_int8(rows, size) if int8 else rows
        y = np.matmul(x, w.T)
        return y if bias is None else y + bias[expert]

    return linear


def _unpack_rows(packed: Array, bits: int, n: int) -> Array:
    return unpack_bits(packed.reshape(1, -1), bits, n).reshape(n, 1).astype(np.float32)


def _as_int8(rows: Array, block_size: int) -> Array:
    levels, scales = quantize_rows(rows, block_size)
    return (levels * scales[..., None]).reshape(rows.shape[0], -1)[:, : rows.shape[1]].astype(rows.dtype)


@op(domain="com.microsoft", infer=same)
def QMoE(
    input: Array,
    router_probs: Array,
    fc1_experts_weights: Array,
    fc1_scales: Array | None,
    fc1_experts_bias: Array | None,
    fc2_experts_weights: Array,
    fc2_scales: Array | None,
    fc2_experts_bias: Array | None = None,
    fc3_experts_weights: Array | None = None,
    fc3_scales: Array | None = None,
    fc3_experts_bias: Array | None = None,
    fc1_zero_points: Array | None = None,
    fc2_zero_points: Array | None = None,
    fc3_zero_points: Array | None = None,
    router_weights: Array | None = None,
    *,
    accuracy_level: int = 0,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    activation_type: str = "relu",
    block_size: int = 0,
    expert_weight_bits: int = 4,
    fc1_expert_weight_bits: int = 0,
    fc2_expert_weight_bits: int = 0,
    fc3_expert_weight_bits: int = 0,
    k: int = 1,
    normalize_routing_weights: int = 0,
    quant_type: str = "int",
    swiglu_fusion: int = 0,
    swiglu_limit: float | None = None,
    use_sparse_mixer: int = 0,
    weights_prepacked: int = -1,
) -> Array:
    """MoE over block- or row-quantized integer weights.

    As ORT's CPU kernel has it: mixing weights are the softmax over the k chosen experts, whatever
    normalize_routing_weights says, and 8-bit blocks take int8 activations at every accuracy level.
    """
    if quant_type != "int" or use_sparse_mixer or weights_prepacked > 0:
        raise GenaiError("`QMoE`: only quant_type `int`, plain weights and no sparse mixer are supported")
    chosen, mix = route(router_probs, k, router_weights is None or bool(normalize_routing_weights), router_weights)
    parts = (
        (fc1_experts_weights, fc1_scales, fc1_zero_points, fc1_experts_bias, fc1_expert_weight_bits),
        (fc2_experts_weights, fc2_scales, fc2_zero_points, fc2_experts_bias, fc2_expert_weight_bits),
        (fc3_experts_weights, fc3_scales, fc3_zero_points, fc3_experts_bias, fc3_expert_weight_bits),
    )
    fc1, fc2, fc3 = (
        _quantized(w, s, z, b, bits or expert_weight_bits, block_size, accuracy_level == 4)
        for w, s, z, b, bits in parts
    )
    activate = activation(activation_type, swiglu_fusion, activation_alpha, activation_beta, swiglu_limit)
    return mixture(input, chosen, mix, _needed(fc1), _needed(fc2), fc3, activate)
