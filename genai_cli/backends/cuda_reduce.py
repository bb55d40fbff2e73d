"""Launches of reductions, softmax and order statistics (native/cuda/reduce.cu)."""

from __future__ import annotations

from collections.abc import Sequence

from genai_cli.backends.cuda_launch import (
    Call,
    Launch,
    address,
    axis_of,
    ctype,
    integers,
    plans,
    pointer,
    rows,
    size,
)

SOURCE = "reduce"
REDUCTIONS = {
    "ReduceSum": "Sum",
    "ReduceMean": "Mean",
    "ReduceMax": "ReduceMax",
    "ReduceMin": "ReduceMin",
    "ReduceSumSquare": "SumSquare",
    "ReduceL1": "L1",
    "ReduceL2": "L2",
    "ReduceLogSum": "LogSum",
}


def reduced_run(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, int, int]:
    """(outer, size, inner) when the axes lie side by side (1-wide dimensions apart)."""
    chosen = sorted({axis_of(int(axis), len(shape)) for axis in axes})
    first, last = chosen[0], chosen[-1]
    return size(shape[:first]), size(shape[first : last + 1]), size(shape[last + 1 :])


@plans(*REDUCTIONS)
def _reduce(call: Call) -> list[Launch]:
    x, y = call.input(0), call.output()
    given = call.optional(1)
    axes = call.attrs.get("axes") or (
        given.host.reshape(-1).tolist() if given is not None and given.host is not None else []
    )
    outer, count, inner = reduced_run(x.shape, axes or range(len(x.shape))) if x.shape else (1, 1, 1)
    args = (address(x), address(y), *integers(count, inner))
    return rows(SOURCE, f"reduce<{REDUCTIONS[call.kernel]}, {ctype(x)}>", outer * inner, count, args)


@plans("Softmax", "LogSoftmax")
def _softmax(call: Call) -> list[Launch]:
    x, y = call.input(0), call.output()
    outer, count, inner = reduced_run(x.shape, [call.attrs.get("axis", -1)])
    log = "true" if call.kernel == "LogSoftmax" else "false"
    args = (address(x), address(y), *integers(count, inner))
    return rows(SOURCE, f"softmax<{log}, {ctype(x)}>", outer * inner if count else 0, count, args)


@plans("ArgMax", "ArgMin")
def _arg(call: Call) -> list[Launch]:
    x, y = call.input(0), call.output()
    outer, count, inner = reduced_run(x.shape, [call.attrs.get("axis", 0)])
    least, last = (
        "true" if flag else "false" for flag in (call.kernel == "ArgMin", call.attrs.get("select_last_index", 0))
    )
    args = (address(x), address(y), *integers(count, inner))
    return rows(SOURCE, f"arg<{least}, {last}, {ctype(x)}>", outer * inner, count, args)


@plans("TopK")
def _top_k(call: Call) -> list[Launch]:
    x, values, at = call.input(0), call.output(0), call.output(1)
    axis = axis_of(int(call.attrs.get("axis", -1)), len(x.shape))
    outer, count, inner = reduced_run(x.shape, [axis])
    taken = pointer(call.scratch(size(x.shape)))
    args = (address(x), address(values), address(at), taken, *integers(count, inner, values.shape[axis]))
    least = "false" if call.attrs.get("largest", 1) else "true"
    return rows(SOURCE, f"top_k<{least}, {ctype(x)}>", outer * inner, count, args)
