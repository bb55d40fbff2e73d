"""Launches at the end of a step: states carried, largest logits chosen, the next step prepared (native/cuda/step.cu)."""

from __future__ import annotations

from genai_cli.backends.cuda_launch import (
    Call,
    Launch,
    address,
    ctype,
    flat,
    integers,
    plans,
    pointer,
    size,
)

SOURCE = "step"
STEP_KERNELS = frozenset(("genai.Carry", "genai.Top", "genai.Advance"))
"""Kernels that no node asks for: the engine does, on a DeviceBackend."""
UNITS = {16: "uint4", 8: "uint2", 4: "unsigned", 2: "unsigned short", 1: "unsigned char"}
SLICE = 1024  # logits a block looks at, at least; the second pass looks at what they leave
TOP_THREADS = 256


@plans("genai.Carry")
def _carry(call: Call) -> list[Launch]:
    """inputs -> outputs, byte for byte; not when the step has failed."""
    stop = pointer(call.scratch(8))
    launches = [Launch(SOURCE, "seen", (1, 1, 1), 1, (pointer(call.fault_address), stop))]
    for index in range(len(call.inputs)):
        source, to = call.input(index), call.output(index)
        unit = next(n for n in UNITS if not any(value % n for value in (to.nbytes, to.address, source.address)))
        count = to.nbytes // unit
        launches += flat(SOURCE, f"carry<{UNITS[unit]}>", count, (address(to), address(source), *integers(count), stop))
    return launches


@plans("genai.Top")
def _top(call: Call) -> list[Launch]:
    """Logits [V] -> bytes: ids int64 [k], values f32 [k]; slices first, then the best of theirs."""
    x, y, k = call.input(0), call.output(), int(call.attrs["count"])
    n = size(x.shape)
    slices = max(1, min(call.slots.num_sms, n // SLICE))
    ids, values = call.scratch(slices * k * 8), call.scratch(slices * k * 4)
    found = (pointer(y.address), pointer(y.address + 8 * k))
    if slices == 1:
        args = (address(x), pointer(0), *found, *integers(n, n, k))
        return [Launch(SOURCE, f"top<{ctype(x)}>", (1, 1, 1), TOP_THREADS, args)]
    width = -(-n // slices)
    first = (address(x), pointer(0), pointer(ids), pointer(values), *integers(n, width, k))
    second = (pointer(values), pointer(ids), *found, *integers(slices * k, slices * k, k))
    return [
        Launch(SOURCE, f"top<{ctype(x)}>", (slices, 1, 1), TOP_THREADS, first),
        Launch(SOURCE, "top<float>", (1, 1, 1), TOP_THREADS, second),
    ]


@plans("genai.Advance")
def _advance(call: Call) -> list[Launch]:
    """top, and in place: input ids?, then positions. past_len moves with the first launch alone."""
    top, ids = call.input(0), call.optional_output(0)
    launches = []
    for index in range(max(1, len(call.outputs) - 1)):
        positions = call.optional_output(index + 1)
        first = index == 0
        count = size(positions.shape) if positions else 0
        types = f"{ctype(ids) if ids else 'long long'}, {ctype(positions) if positions else 'long long'}"
        args = (
            address(top),
            address(ids if first else None),
            address(positions),
            *integers(count),
            pointer(call.slots.state_address if first else 0),
        )
        launches += flat(SOURCE, f"advance<{types}>", max(count, 1), args, 32)
    return launches
