"""What one kernel call becomes on a device: plain data, planned without touching CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from genai_cli.backends.base import Tensor
from genai_cli.errors import GenaiError

Scalar: TypeAlias = "np.generic[Any]"
Dims = tuple[int, ...]

# The C++ type for a dtype, as it stands in a kernel's template arguments.
CTYPES = {
    "float32": "float",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float64": "double",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned int",
    "int64": "long long",
    "uint64": "unsigned long long",
    "bool": "bool",
}
BLOCK = 256  # threads of a block where nothing speaks for another number
WARP = 32


@dataclass(frozen=True)
class Launch:
    """One kernel on one grid. `function` is the template instantiation in native/cuda/`source`.cu."""

    source: str
    function: str
    grid: tuple[int, int, int]
    block: int
    args: tuple[Scalar, ...]
    shared: int = 0  # bytes of dynamic shared memory

    @property
    def name(self) -> str:
        return self.function.split("<")[0]


class Slots(Protocol):
    """What attention must know of the KV on the device."""

    state_address: int  # int64: past_len, then (address, capacity) of each slot
    num_sms: int
    tensor_cores: bool  # whether 16-bit products may run on them (mma.cu)

    def capacity_of(self, slot: int) -> int: ...

    def dtype_of(self, slot: int) -> np.dtype[Any]: ...


@dataclass
class Call:
    """A kernel call as the engine makes it; planners read it and answer with launches."""

    kernel: str
    inputs: Sequence[Tensor | None]
    outputs: Sequence[Tensor | None]
    attrs: dict[str, Any]
    slots: Slots
    scratch: Callable[[int], int]  # bytes -> address of device memory that lives as long as the recording
    fault_address: int  # an int64 the host reads after each wait: kernels store what went wrong there

    def input(self, index: int) -> Tensor:
        tensor = self.optional(index)
        if tensor is None:
            raise GenaiError(f"kernel `{self.kernel}`: input {index} is missing")
        return tensor

    def optional(self, index: int) -> Tensor | None:
        return self.inputs[index] if index < len(self.inputs) else None

    def output(self, index: int = 0) -> Tensor:
        tensor = self.outputs[index] if index < len(self.outputs) else None
        if tensor is None:
            raise GenaiError(f"kernel `{self.kernel}`: output {index} is missing")
        return tensor

    def optional_output(self, index: int) -> Tensor | None:
        return self.outputs[index] if index < len(self.outputs) else None

    def refuse(self, found: str, wanted: str) -> GenaiError:
        return GenaiError(f"kernel `{self.kernel}`: found {found}, wanted {wanted}")


Planner = Callable[[Call], list[Launch]]
TABLE: dict[str, Planner] = {}
"""Kernel name (as the registry's "cuda" rules give it) -> planner. Filled by the cuda_<family> modules."""


def plans(*kernels: str) -> Callable[[Planner], Planner]:
    """Enter the decorated planner for these kernel names."""

    def enter(planner: Planner) -> Planner:
        for kernel in kernels:
            if kernel in TABLE:
                raise ValueError(f"kernel `{kernel}` has two planners")
            TABLE[kernel] = planner
        return planner

    return enter


def ctype(tensor: Tensor) -> str:
    """The C++ type of a tensor's elements."""
    return CTYPES[tensor.dtype.name]


def pointer(value: int) -> Scalar:
    return np.uint64(value)


def address(tensor: Tensor | None) -> Scalar:
    """A kernel's pointer argument; 0 for a missing tensor."""
    return np.uint64(0 if tensor is None else tensor.address)


def integer(value: int) -> Scalar:
    """An i64 argument."""
    return np.int64(value)


def integers(*values: int) -> tuple[Scalar, ...]:
    return tuple(np.int64(value) for value in values)


def flag(value: Any) -> Scalar:
    """An int argument."""
    return np.int32(value)


def real(value: float) -> Scalar:
    """A float argument."""
    return np.float32(value)


def double(value: float) -> Scalar:
    return np.float64(value)


def size(shape: Sequence[int]) -> int:
    """Elements of a shape."""
    total = 1
    for dim in shape:
        total *= int(dim)
    return total


def blocks(count: int, block: int = BLOCK) -> tuple[int, int, int]:
    """A grid with one thread for each of `count`."""
    return (-(-count // block), 1, 1)


def flat(source: str, function: str, count: int, args: Sequence[Scalar], block: int = BLOCK) -> list[Launch]:
    """One thread an element; nothing at all for an empty tensor."""
    if count == 0:
        return []
    block = min(block, -(-count // WARP) * WARP)
    return [Launch(source, function, blocks(count, block), block, tuple(args))]


def rows(
    source: str, function: str, num_rows: int, width: int, args: Sequence[Scalar], shared: int = 0
) -> list[Launch]:
    """One block a row, with as many threads as the row needs."""
    if num_rows == 0:
        return []
    block = min(BLOCK, max(WARP, -(-width // WARP) * WARP))
    return [Launch(source, function, (num_rows, 1, 1), block, tuple(args), shared)]


def axis_of(axis: int, rank: int) -> int:
    return axis % rank if rank else 0


@dataclass
class Strided:
    """A walk over `dims` with one stride list an operand; adjacent dimensions are merged where all operands allow."""

    dims: list[int]
    strides: list[list[int]] = field(default_factory=list)

    def merged(self) -> Strided:
        dims: list[int] = []
        strides: list[list[int]] = [[] for _ in self.strides]
        for i, dim in enumerate(self.dims):
            if dim == 1:
                continue
            if dims and all(s[-1] == own[i] * dim for s, own in zip(strides, self.strides, strict=True)):
                dims[-1] *= dim
                for s, own in zip(strides, self.strides, strict=True):
                    s[-1] = own[i]
            else:
                dims.append(dim)
                for s, own in zip(strides, self.strides, strict=True):
                    s.append(own[i])
        return Strided(dims or [1], [s or [0] for s in strides])


MAX_RANK = 6  # dimensions left after merging; the kernels take them as scalars


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Element strides of a dense row-major shape."""
    strides, step = [0] * len(shape), 1
    for i in reversed(range(len(shape))):
        strides[i] = step
        step *= shape[i]
    return strides


def broadcast_strides(shape: Sequence[int], to: Sequence[int]) -> list[int]:
    """Element strides of `shape` seen as `to`: 0 where it repeats."""
    own = contiguous_strides(shape)
    lead = len(to) - len(shape)
    return [0] * lead + [0 if dim == 1 else stride for dim, stride in zip(shape, own, strict=True)]


def walk_args(walk: Strided, what: str) -> tuple[Scalar, ...]:
    """MAX_RANK dims, then MAX_RANK strides an operand, outermost padded with 1 and 0."""
    lead = MAX_RANK - len(walk.dims)
    if lead < 0:
        found = f"`{len(walk.dims)}` dimensions that do not merge"
        raise GenaiError(f"kernel `{what}`: found {found}, wanted at most `{MAX_RANK}`")
    values = [1] * lead + walk.dims
    for strides in walk.strides:
        values += [0] * lead + strides
    return integers(*values)
