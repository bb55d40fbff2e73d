"""Launches of mixtures of experts (native/cuda/moe.cu)."""

from __future__ import annotations

from dataclasses import dataclass

from genai_cli.backends.base import Tensor
from genai_cli.backends.cuda_launch import (
    WARP,
    Call,
    Launch,
    Scalar,
    address,
    ctype,
    flag,
    flat,
    integers,
    plans,
    pointer,
    real,
    size,
)

SOURCE = "moe"
WARPS = 4  # columns of a block
FLOAT_BYTES = 4
ACTIVATIONS = {"relu": "Relu", "gelu": "GeluErf", "silu": "Silu", "identity": "Identity"}


@dataclass(frozen=True)
class Rows:
    """[count, width] activations in memory, and how many slots share one of them."""

    at: Scalar
    ctype: str
    width: int
    slots_a_row: int


@dataclass(frozen=True)
class Linear:
    """One projection of every expert: dense [E, N, K], or packed with scales (and zero points)."""

    weights: Tensor
    bias: Tensor | None
    scales: Tensor | None = None
    zeros: Tensor | None = None
    bits: int = 0
    block_size: int = 0
    int8: bool = False  # activations are rounded to int8 first

    @property
    def num_columns(self) -> int:
        return self.weights.shape[1]


class _Plan:
    """The launches of one mixture, in order."""

    def __init__(self, call: Call, num_rows: int, k: int) -> None:
        self.call, self.num_rows, self.k = call, num_rows, k
        self.num_slots = num_rows * k
        self.chosen = pointer(call.scratch(self.num_slots * FLOAT_BYTES))
        self.mix = pointer(call.scratch(self.num_slots * FLOAT_BYTES))
        self.launches: list[Launch] = []

    def floats(self, count: int) -> Scalar:
        return pointer(self.call.scratch(count * FLOAT_BYTES))

    def route(self, router: Tensor, weights: Tensor | None, normalize: bool) -> None:
        experts = router.shape[-1]
        args = (address(router), address(weights), self.chosen, self.mix, *integers(experts, self.k), flag(normalize))
        self.launches.append(Launch(SOURCE, f"route<{ctype(router)}>", (self.num_rows, 1, 1), WARP, args))

    def project(self, x: Rows, linear: Linear) -> Scalar:
        """f32 [slots, N]."""
        y, n = self.floats(self.num_slots * linear.num_columns), linear.num_columns
        grid = (-(-n // WARPS), self.num_slots, 1)
        if linear.scales is None:
            args = (x.at, self.chosen, address(linear.weights), address(linear.bias), y)
            function = f"expert<{x.ctype}, {ctype(linear.weights)}>"
            sizes = integers(n, x.width, x.slots_a_row)
            self.launches.append(Launch(SOURCE, function, grid, WARPS * WARP, (*args, *sizes)))
        else:
            self.launches.append(self._packed(x, linear, linear.scales, y, grid))
        return y

    def _packed(self, x: Rows, linear: Linear, scales: Tensor, y: Scalar, grid: tuple[int, int, int]) -> Launch:
        block = linear.block_size or x.width
        blocks = -(-x.width // block)
        if linear.int8:
            x = self._rounded(x, block, blocks)
        pointers = (address(linear.weights), address(scales), address(linear.zeros), address(linear.bias))
        args = (x.at, self.chosen, *pointers, y, *integers(linear.num_columns, x.width, block, blocks))
        bias = ctype(linear.bias) if linear.bias else "float"
        function = f"expert_nbits<{linear.bits}, {x.ctype}, {ctype(scales)}, {bias}>"
        tail = (flag(linear.block_size == 0), *integers(x.slots_a_row))
        return Launch(SOURCE, function, grid, WARPS * WARP, (*args, *tail))

    def _rounded(self, x: Rows, block: int, blocks: int) -> Rows:
        count = self.num_slots // x.slots_a_row
        y = self.floats(count * x.width)
        args = (x.at, y, *integers(count * blocks, x.width, block, blocks))
        self.launches += flat(SOURCE, f"as_int8<{x.ctype}>", count * blocks, args, 64)
        return Rows(y, "float", x.width, x.slots_a_row)

    def activate(self, h: Scalar, other: Scalar | None, width: int) -> tuple[Scalar, int]:
        """What stands between the projections: f32 [slots, inner], and inner."""
        attrs = self.call.attrs
        name, third = str(attrs.get("activation_type", "relu")), other if other is not None else pointer(0)
        if name != "swiglu":
            y, count = self.floats(self.num_slots * width), self.num_slots * width
            args = (h, third, y, *integers(count))
            self.launches += flat(SOURCE, f"activate<{ACTIVATIONS[name]}>", count, args)
            return y, width
        fusion = int(attrs.get("swiglu_fusion", 0)) or (2 if other is None else 0)
        inner = width // 2 if fusion else width
        y, count = self.floats(self.num_slots * inner), self.num_slots * inner
        numbers = (
            attrs.get("activation_alpha", 1.0),
            attrs.get("activation_beta", 0.0),
            attrs.get("swiglu_limit") or 0.0,
        )
        args = (h, third, y, *integers(count, inner), *map(real, numbers))
        self.launches += flat(SOURCE, f"swiglu<{fusion}>", count, args)
        return y, inner

    def finish(self, slots: Scalar, y: Tensor) -> list[Launch]:
        count = size(y.shape)
        args = (slots, self.mix, address(y), *integers(count, y.shape[-1], self.k))
        return [*self.launches, *flat(SOURCE, f"mix_slots<{ctype(y)}>", count, args)]


def _mixture(
    call: Call, weights: Tensor | None, normalize: bool, fc1: Linear, fc2: Linear, fc3: Linear | None
) -> list[Launch]:
    x, y = call.input(0), call.output()
    num_rows = size(x.shape[:-1])
    if num_rows == 0:
        return []
    k = int(call.attrs.get("k", 1))
    plan = _Plan(call, num_rows, k)
    plan.route(call.input(1), weights, normalize)
    given = Rows(address(x), ctype(x), x.shape[-1], k)
    other = None if fc3 is None else plan.project(given, fc3)
    hidden, inner = plan.activate(plan.project(given, fc1), other, fc1.num_columns)
    return plan.finish(plan.project(Rows(hidden, "float", inner, 1), fc2), y)


@plans("MoE")
def _dense(call: Call) -> list[Launch]:
    third = call.optional(6)
    return _mixture(
        call,
        None,
        bool(call.attrs.get("normalize_routing_weights", 0)),
        Linear(call.input(2), call.optional(3)),
        Linear(call.input(4), call.optional(5)),
        None if third is None else Linear(third, call.optional(7)),
    )


@plans("QMoE")
def _quantized(call: Call) -> list[Launch]:
    attrs, weights = call.attrs, call.optional(14)
    block = int(attrs.get("block_size", 0))

    def linear(first: int, zeros: int, name: str) -> Linear:
        bits = int(attrs.get(name, 0)) or int(attrs.get("expert_weight_bits", 4))
        int8 = block > 0 and (attrs.get("accuracy_level", 0) == 4 or bits == 8)
        packed, scales, bias = call.input(first), call.input(first + 1), call.optional(first + 2)
        return Linear(packed, bias, scales, call.optional(zeros), bits, block, int8)

    return _mixture(
        call,
        weights,
        weights is None or bool(attrs.get("normalize_routing_weights", 0)),
        linear(2, 11, "fc1_expert_weight_bits"),
        linear(5, 12, "fc2_expert_weight_bits"),
        None if call.optional(8) is None else linear(8, 13, "fc3_expert_weight_bits"),
    )
