"""Launches of kernels that go along an axis in order (native/cuda/lines.cu)."""

from __future__ import annotations

from genai_cli.backends.cuda_launch import (
    Call,
    Launch,
    address,
    axis_of,
    ctype,
    flag,
    flat,
    integers,
    plans,
    pointer,
    size,
)
from genai_cli.backends.cuda_shape import as_is

SOURCE = "lines"
BLOCK = 64  # a thread has a whole line
REDUCTIONS = {"none": "REPLACE", "add": "ADD", "mul": "MULTIPLY", "max": "LARGER", "min": "SMALLER"}


@plans("CumSum")
def _cum_sum(call: Call) -> list[Launch]:
    x, y, given = call.input(0), call.output(), call.input(1)
    if given.host is None:
        raise call.refuse("an axis that only a step knows", "one known while recording")
    axis = axis_of(int(given.host.reshape(-1)[0]), len(x.shape))
    inner, length = size(x.shape[axis + 1 :]), x.shape[axis]
    lines = size(x.shape) // length if length else 0
    flags = (flag(call.attrs.get("exclusive", 0)), flag(call.attrs.get("reverse", 0)))
    args = (address(x), address(y), *integers(lines, length, inner), *flags)
    return flat(SOURCE, f"cum_sum<{ctype(x)}>", lines, args, BLOCK)


@plans("ScatterElements")
def _scatter_elements(call: Call) -> list[Launch]:
    """Only the axis may differ from the data's shape (the rule sees to it)."""
    data, indices, updates, y = call.input(0), call.input(1), call.input(2), call.output()
    axis = axis_of(int(call.attrs.get("axis", 0)), len(data.shape))
    inner, count = size(data.shape[axis + 1 :]), indices.shape[axis]
    lines = size(indices.shape) // count if count else 0
    pointers = (*map(address, (indices, updates, y)), pointer(call.fault_address))
    args = (*pointers, *integers(lines, data.shape[axis], inner, count))
    types = f"{REDUCTIONS[call.attrs.get('reduction', 'none')]}, {ctype(data)}, {ctype(indices)}"
    return [*as_is(call), *flat(SOURCE, f"scatter_elements<{types}>", lines, args, BLOCK)]


@plans("MRotaryEmbedding")
def _m_rotary(call: Call) -> list[Launch]:
    x, ids, cos, sin, y = *(call.input(i) for i in range(4)), call.output()
    half = cos.shape[-1]
    if len(x.shape) == 4:
        batch, heads, tokens, dim = x.shape
        strides = (heads * tokens * dim, dim, tokens * dim)
    else:
        batch, tokens, width = x.shape
        heads = int(call.attrs.get("num_heads", 0)) or width // (2 * half)
        dim = width // heads
        strides = (tokens * width, width, dim)
    count = batch * heads * tokens * (dim - half)
    _, second, third = (int(value) for value in call.attrs["mrope_section"])
    args = (
        *map(address, (x, ids, cos, sin, y)),
        *integers(count, *strides, batch, heads, tokens, dim, half, second, third),
        flag(call.attrs.get("mrope_layout", 0)),
        flag(call.attrs.get("interleaved", 0)),
        *integers(cos.shape[0]),
        pointer(call.fault_address),
    )
    return flat(SOURCE, f"m_rotary<{ctype(x)}, {ctype(cos)}, {ctype(ids)}>", count, args)
