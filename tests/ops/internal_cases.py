"""Cases of our own ops: the judge is what they stand for, the separate nodes or the op of another name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from cases import Array, Case, node_cases
from contrib import KINDS, normal, rng

from genai_cli.ops import lookup, run_reference


def node(op: str, *inputs: Array) -> Array:
    """One separate node; its output is rounded to its dtype."""
    opdef = lookup(op, "", 22)
    assert opdef is not None
    (made,) = run_reference(opdef, inputs, {})
    assert made is not None
    return made


def silu_mul() -> Iterator[Case]:
    for kind in KINDS:
        for n in (1, 7, 33, 100):
            r = rng("silu", kind, n)
            gate, up = normal(r, 2, 3, n, kind=kind, scale=3), normal(r, 2, 3, n, kind=kind)
            separate = node("Mul", node("Mul", gate, node("Sigmoid", gate)), up)
            yield Case(
                "SiluMul", "genai", 1, (gate, up), {}, (True,), (separate,), f"SiluMul:{kind}-{n}", rtol=1e-6, atol=1e-6
            )


def dense_attention() -> Iterator[Case]:
    for case in node_cases():
        if case.op == "Attention" and not case.domain:
            yield replace(case, op="AttentionDense", domain="genai", opset=1, id=case.id + "-dense")


@cache
def internal_cases() -> tuple[Case, ...]:
    """All of them."""
    return (*silu_mul(), *dense_attention())
