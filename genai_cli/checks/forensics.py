"""Why two sets of KV rows differ: exact transforms first, then where each row came from, then single elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from genai_cli.kv.layout import KvLayout, KvRows

Transform = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Cause:
    """One sentence, and the smallest address that proves it."""

    sentence: str
    layer: int
    kind: str
    head: int
    position: int
    dim: int
    bytes_different: int

    def __str__(self) -> str:
        where = f"layer {self.layer} {self.kind} head {self.head} position {self.position} dim {self.dim}"
        return f"{self.sentence} (first at {where}; {self.bytes_different} bytes differ)"


def bits(array: np.ndarray) -> np.ndarray:
    """Elements as unsigned integers: NaNs and zeros compare by their bytes."""
    return np.ascontiguousarray(array).view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[array.itemsize])


def compare_rows(found: KvRows, wanted: KvRows, layout: KvLayout) -> tuple[int, Cause | None]:
    """(bytes compared, cause or None). Rows [H_kv, n, D] per component, valid positions only."""
    compared = 0
    for c, (got, want) in enumerate(zip(found, wanted, strict=True)):
        if got.shape != want.shape:
            about = layout.components[c]
            sentence = f"{got.shape[1]} positions were mirrored, {want.shape[1]} were computed"
            return compared, Cause(
                sentence, about.layer, about.kind, 0, min(got.shape[1], want.shape[1]), 0, want.nbytes
            )
        compared += want.nbytes
        if not np.array_equal(bits(got), bits(want)):
            return compared, explain(c, found, wanted, layout)
    return compared, None


def explain(component: int, found: KvRows, wanted: KvRows, layout: KvLayout) -> Cause:
    """Name the cause of a difference in one component."""
    got, want = found[component], wanted[component]
    about = layout.components[component]
    different = bits(got) != bits(want)
    head, position, dim = (int(i) for i in np.argwhere(different)[0])
    for sentence in _sentences(component, got, found, wanted, layout):
        return Cause(sentence, about.layer, about.kind, head, position, dim, int(different.sum()) * want.itemsize)
    map_ = np.argwhere(different.any(axis=2))
    sentence = f"unexplained: {len(map_)} of {different.shape[0] * different.shape[1]} (head, position) rows differ"
    return Cause(sentence, about.layer, about.kind, head, position, dim, int(different.sum()) * want.itemsize)


def _sentences(component: int, got: np.ndarray, found: KvRows, wanted: KvRows, layout: KvLayout) -> Iterator[str]:
    want = wanted[component]
    yield from _whole(got, want)
    yield from _elsewhere(component, got, wanted, layout)
    yield from _transformed(got, want)
    yield from _rows(got, want)
    yield from _single(got, want)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(bits(a), bits(b))


def _whole(got: np.ndarray, want: np.ndarray) -> Iterator[str]:
    if not bits(got).any():
        yield "all zero: nothing was copied, or it was cleared afterwards"
    zero = np.logical_not(np.any(bits(got), axis=(0, 2)))
    others = ~zero
    if zero.any() and _same(got[:, others], want[:, others]):
        yield f"positions {_span(zero)} are zero"


def _span(mask: np.ndarray) -> str:
    where = np.flatnonzero(mask)
    return f"{where[0]}..{where[-1]}" if len(where) > 1 else str(where[0])


def _elsewhere(component: int, got: np.ndarray, wanted: KvRows, layout: KvLayout) -> Iterator[str]:
    """A whole component that belongs to another (layer, kind)."""
    for other, array in enumerate(wanted):
        if other != component and _same(got, array):
            about = layout.components[other]
            yield f"holds layer {about.layer} {about.kind}: components were exchanged"


def _transformed(got: np.ndarray, want: np.ndarray) -> Iterator[str]:
    heads, length, dim = want.shape
    for shift in (1, -1, 2, -2):
        if length > abs(shift) and _same(np.roll(got, shift, 1), want):
            yield f"positions are off by {-shift}"
    if _same(got[:, ::-1], want):
        yield "positions are reversed"
    for shift in range(1, heads):
        if _same(np.roll(got, shift, 0), want):
            yield f"heads are exchanged: head h holds head (h + {shift}) mod {heads}"
    flat = np.ascontiguousarray(want)
    if _same(got, flat.transpose(1, 0, 2).reshape(heads, length, dim)):
        yield "slot and head are transposed: [S, H, D] was read as [H, S, D]"
    if _same(got, flat.reshape(length, heads, dim).transpose(1, 0, 2)):
        yield "slot and head are transposed: [H, S, D] was read as [S, H, D]"
    yield from _converted(got, want)


def _converted(got: np.ndarray, want: np.ndarray) -> Iterator[str]:
    if want.itemsize == 2:
        as_numbers = bits(want).astype(np.float32).astype(want.dtype)
        if _same(got, as_numbers):
            yield f"{want.dtype.name} bits were read as integers"
        for other in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
            if other != want.dtype and _same(got, bits(want).view(other).astype(want.dtype)):
                yield f"{want.dtype.name} was read as {other.name}"


def _rows(got: np.ndarray, want: np.ndarray) -> Iterator[str]:
    """Where each wrong row really belongs: the head and position whose bytes it holds."""
    table = {want[h, p].tobytes(): (h, p) for h in range(want.shape[0]) for p in range(want.shape[1])}
    wrong = [(h, p) for h in range(want.shape[0]) for p in range(want.shape[1]) if not _same(got[h, p], want[h, p])]
    origins = [table.get(got[h, p].tobytes()) for h, p in wrong]
    known = [(at, origin) for at, origin in zip(wrong, origins, strict=True) if origin is not None]
    if not known:
        return
    steps = {(origin[0] - at[0], origin[1] - at[1]) for at, origin in known}
    at, origin = known[0]
    first = f"head {at[0]} position {at[1]} holds head {origin[0]} position {origin[1]}"
    if at[0] and len(steps) > 1:
        capacity = _stride(got, want)
        if capacity:
            yield f"head stride was read with another capacity: {first}"
    share = f"{len(known)} of {len(wrong)} wrong rows"
    yield f"rows from elsewhere: {first} ({share})"


def _stride(got: np.ndarray, want: np.ndarray) -> bool:
    """Head 0 is right and later heads hold rows of earlier ones."""
    return _same(got[0], want[0]) and not _same(got[1:], want[1:])


def _single(got: np.ndarray, want: np.ndarray) -> Iterator[str]:
    """One element, or the same bit of several."""
    flipped = bits(got) ^ bits(want)
    wrong = flipped[flipped != 0]
    pattern = int(wrong[0])
    same_bit = bool((wrong == wrong[0]).all()) and pattern & (pattern - 1) == 0
    elements = "one element" if len(wrong) == 1 else f"{len(wrong)} elements"
    if same_bit:
        yield f"bit {pattern.bit_length() - 1} of {elements} flipped"
    elif len(wrong) == 1:
        yield "one element differs"
