"""Launches of norms (native/cuda/norm.cu)."""

from __future__ import annotations

from genai_cli.backends.base import Tensor
from genai_cli.backends.cuda_launch import (
    Call,
    Launch,
    address,
    axis_of,
    ctype,
    integer,
    integers,
    plans,
    real,
    rows,
    size,
)

SOURCE = "norm"


def _norm(
    call: Call,
    *,
    center: bool,
    width: int,
    gamma: Tensor,
    epsilon: float,
    skip: Tensor | None = None,
    add: Tensor | None = None,
    beta: Tensor | None = None,
    mean: Tensor | None = None,
    inverse: Tensor | None = None,
    total: Tensor | None = None,
) -> list[Launch]:
    x, y = call.input(0), call.output()
    skip_rows = size(skip.shape) // width if skip is not None else 0
    types = f"{'true' if center else 'false'}, {ctype(x)}, {ctype(gamma)}, {ctype(y)}"
    pointers = tuple(map(address, (x, skip, add, gamma, beta, y, mean, inverse, total)))
    args = (*pointers, *integers(width, skip_rows), real(epsilon))
    return rows(SOURCE, f"norm<{types}>", size(x.shape) // width if width else 0, width, args)


@plans("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
def _plain(call: Call) -> list[Launch]:
    x, center = call.input(0), call.kernel == "LayerNormalization"
    axis = axis_of(int(call.attrs.get("axis", -1)), len(x.shape))
    return _norm(
        call,
        center=center,
        width=size(x.shape[axis:]),
        gamma=call.input(1),
        epsilon=float(call.attrs.get("epsilon", 1e-5)),
        beta=call.optional(2) if center else None,
        mean=call.optional_output(1) if center else None,
        inverse=call.optional_output(2 if center else 1),
    )


@plans("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
def _skip(call: Call) -> list[Launch]:
    center = call.kernel == "SkipLayerNormalization"
    return _norm(
        call,
        center=center,
        width=call.input(0).shape[-1],
        gamma=call.input(2),
        epsilon=float(call.attrs.get("epsilon", 1e-12)),
        skip=call.input(1),
        add=call.optional(4 if center else 3),
        beta=call.optional(3) if center else None,
        mean=call.optional_output(1) if center else None,
        inverse=call.optional_output(2),
        total=call.optional_output(3),
    )


@plans("LpNormalization")
def _lp(call: Call) -> list[Launch]:
    x, y = call.input(0), call.output()
    axis = axis_of(int(call.attrs.get("axis", -1)), len(x.shape))
    inner, count = size(x.shape[axis + 1 :]), x.shape[axis]
    args = (address(x), address(y), *integers(count, inner))
    return rows(SOURCE, f"lp_norm<{call.attrs.get('p', 2)}, {ctype(x)}>", size(x.shape) // max(count, 1), count, args)


@plans("GatedRMSNorm")
def _gated(call: Call) -> list[Launch]:
    x, gamma, gate, y = call.input(0), call.input(1), call.input(2), call.output()
    activation = {"silu": "SILU", "swish": "SILU", "sigmoid": "SIGMOID"}[call.attrs.get("activation", "silu")]
    width = size(gamma.shape)
    args = (*map(address, (x, gamma, gate, y)), integer(width), real(call.attrs.get("epsilon", 1e-5)))
    return rows(SOURCE, f"gated_rms_norm<{activation}, {ctype(x)}>", size(x.shape) // width, width, args)
