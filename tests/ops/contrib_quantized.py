"""Cases of ops with quantized weights and of mixtures of experts. The judge is ORT (oracle.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from cases import Array, Case
from contrib import KINDS, Rng, case, family, normal, rng


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
    yield nbits(r, (1, 3), 64, 9, bits=4, block=32, zero="float", level=4)
    yield nbits(r, (1, 2), 64, 9, bits=4, block=32, zero="none", bias=True, name="-bias")
    yield nbits(r, (1, 2), 64, 9, bits=4, block=32, zero="none", bias=True, level=4, name="-bias")
    yield nbits(r, (1, 2), 64, 1, bits=2, block=32, zero="none")
    yield nbits(r, (2, 64), 256, 70, bits=4, block=32, zero="none", level=4, name="-prefill")
    yield nbits(r, (1, 64), 256, 70, bits=8, block=128, zero="packed", name="-prefill")


@family
def gather_four_bit() -> Iterator[Case]:
    """4-bit tensors, and other axes."""
    places = (
        (0, 1, (11, 64), (11, 2)),
        (1, 0, (64, 11), (2, 11)),
        (0, 2, (3, 5, 64), (3, 5, 2)),
        (2, 1, (3, 64, 5), (3, 2, 5)),
    )
    for kind, low in ((ml_dtypes.int4, -8), (ml_dtypes.uint4, 0)):
        for axis, quantized, shape, blocks in places:
            r = rng("gather4", kind.__name__, axis, quantized)
            data, zero = (r.integers(low, low + 16, dims).astype(kind) for dims in (shape, blocks))
            inputs = (data, np.array([[1, 2], [0, -1]]), normal(r, *blocks), zero)
            name = f"{kind.__name__}-{axis}-{quantized}"
            yield case("GatherBlockQuantized", inputs, name, block_size=32, gather_axis=axis, quantize_axis=quantized)


def gather_outside() -> Case:
    """Indices outside the table: ORT gives zeros, kernels refuse them by name."""
    r = rng("gather4", "outside")
    data, scales = pack(r.integers(0, 16, (11, 64)), 4), normal(r, 11, 2)
    return case(
        "GatherBlockQuantized", (data, np.array([[0, 11, -12, 3, -1]]), scales), "outside", bits=4, block_size=32
    )


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


def interleaved(gate: Array, linear: Array) -> Array:
    """Rows of both in turn: what swiglu_fusion=1 wants, the only fused form ORT's CPU kernel has."""
    return np.stack((gate, linear), 2).reshape(gate.shape[0], -1, *gate.shape[2:])


@family
def mixtures() -> Iterator[Case]:
    """ORT's CPU kernel has no fc3; silu(fc1 x) * (fc3 x) is a swiglu with alpha 1 and beta 0."""
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
        fc3 = normal(r, e, inner, hidden)
        for k, norm in ((1, 0), (2, 1), (3, 0)):
            given = {"k": k, "normalize_routing_weights": norm}
            plain = case("MoE", (x, router, fc1, b1, fc2, b2), f"{act}-{k}-{norm}", activation_type=act, **given)
            if not extra:
                yield plain
                continue
            both = interleaved(fc1, fc3), interleaved(b1, np.zeros_like(b1))
            gated = case("MoE", (x, router, *both, fc2, b2), "", activation_type="swiglu", swiglu_fusion=1, **given)
            yield replace(plain, inputs=(*plain.inputs, fc3), id=plain.id + "-fc3", judged_as=gated)
    r = rng("moe", "swiglu")
    x, router = normal(r, 4, 12), normal(r, 4, 5)
    fc1, b1, fc2, b2 = normal(r, 5, 40, 12), normal(r, 5, 40), normal(r, 5, 12, 20), normal(r, 5, 12)
    for fusion in (1, 2):
        for limit in ({}, {"swiglu_limit": 7.0, "activation_alpha": 1.702, "activation_beta": 1.0}):
            given = {"activation_type": "swiglu", "k": 2, "normalize_routing_weights": 1, **limit}
            one = case(
                "MoE", (x, router, fc1, b1, fc2, b2), f"swiglu-{fusion}-{len(limit)}", swiglu_fusion=fusion, **given
            )
            both = interleaved(*np.split(fc1, 2, 1)), interleaved(*np.split(b1, 2, 1))
            same = case("MoE", (x, router, *both, fc2, b2), "", swiglu_fusion=1, **given)
            yield replace(one, judged_as=same) if fusion == 2 else one


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
