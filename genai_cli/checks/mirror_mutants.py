"""Planted defects of the mirror, and the check that should kill each. A survivor means the checks are blind there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np

from genai_cli.checks import mirror_checks as checks
from genai_cli.checks import mirror_script as script
from genai_cli.checks.mirror_scene import BF16, F16, F32, Hooks, Scene, closed_form_scene
from genai_cli.errors import ExitCode, GenaiError, worst
from genai_cli.kv.layout import KvRows
from genai_cli.kv.session import KvSequence, PagedKv

MutantState = Literal["killed", "killed for another reason", "survived", "not applied"]
Rows = Callable[[KvRows, int], KvRows]


@dataclass(frozen=True)
class Mutant:
    """A defect, what it runs on, and the checks that may kill it."""

    id: str
    hooks: Hooks
    expected: tuple[str, ...]
    dtype: np.dtype = F32
    recurrent: bool = False


@dataclass(frozen=True)
class Judged:
    """What became of a mutant."""

    id: str
    state: MutantState
    expected: tuple[str, ...]
    failed: str
    detail: str


BATTERY: tuple[tuple[str, checks.Check], ...] = (
    ("liveness", checks.liveness), ("address", checks.address_map), ("transport", checks.transport),
    ("rewind", checks.rewinds), ("warm", checks.warm_is_cold), ("separation", checks.separation),
    ("rewound", script.rewound), ("forked", script.forked), ("evicted", script.evicted), ("rows", script.batch_rows),
    ("formula", script.closed_form),
)  # fmt: skip


def battery(scene: Scene) -> list[checks.Outcome]:
    """Every check on one scene; one that crashes has failed."""
    made: list[checks.Outcome] = []
    for name, check in BATTERY:
        try:
            made.append(check(scene))
        except (GenaiError, ValueError, IndexError) as error:
            made.append(checks.Outcome(name, 0, False, str(error)))
    return made


def judge(mutant: Mutant) -> Judged:
    """Run the battery on a mutant. Killed for the right reason means that an expected check failed."""
    outcomes = battery(closed_form_scene(mutant.dtype, mutant.hooks, recurrent=mutant.recurrent))
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if not failed:
        return Judged(mutant.id, "survived", mutant.expected, "", "")
    right = next((outcome for outcome in failed if outcome.id in mutant.expected), None)
    shown = right or failed[0]
    return Judged(
        mutant.id, "killed" if right else "killed for another reason", mutant.expected, shown.id, shown.detail
    )


def controls() -> list[Judged]:
    """The unmutated scenes, which must stay green."""
    made = []
    for dtype in (F32, F16, BF16):
        for recurrent in (False, True):
            failed = [o for o in battery(closed_form_scene(dtype, recurrent=recurrent)) if not o.ok]
            name = f"control {dtype.name}{' recurrent' if recurrent else ''}"
            detail = f"{failed[0].id}: {failed[0].detail}" if failed else ""
            made.append(Judged(name, "killed" if failed else "survived", (), failed[0].id if failed else "", detail))
    return made


# -- row transforms -----------------------------------------------------------------------------------------------------


def each(change: Callable[[np.ndarray], np.ndarray]) -> Rows:
    """The same change to every component."""
    return lambda rows, start: [np.ascontiguousarray(change(array)) for array in rows]


def swap_kv(rows: KvRows, start: int) -> KvRows:
    """K in V's place and the other way round."""
    return [rows[c ^ 1] for c in range(len(rows))]


def swap_layers(rows: KvRows, start: int) -> KvRows:
    """Layer 10 before layer 2, as sorting their names would."""
    return [*rows[2:4], *rows[:2], *rows[4:]]


def decode_zeroed(rows: KvRows, start: int) -> KvRows:
    """Only what single steps made is lost."""
    return [np.zeros_like(array) if array.shape[1] == 1 else array for array in rows]


def transposed(array: np.ndarray) -> np.ndarray:
    """[S, H, D] memory taken for [H, S, D]."""
    return array.transpose(1, 0, 2).reshape(array.shape)


def by_length(array: np.ndarray) -> np.ndarray:
    """Head stride taken as length * D where the buffer's is capacity * D: later heads start too early."""
    heads, length, dim = array.shape
    capacity = length + 2
    buffer = np.zeros((heads, capacity, dim), array.dtype)
    buffer[:, :length] = array
    return buffer.reshape(-1)[: heads * length * dim].reshape(heads, length, dim)


def rolled(array: np.ndarray) -> np.ndarray:
    """K and V permuted together along positions: attention would not notice."""
    return np.roll(array, 1, axis=1)


def as_numbers(array: np.ndarray) -> np.ndarray:
    """16-bit patterns converted as integers."""
    return array.view(np.uint16).astype(np.float32).astype(array.dtype)


def as_half(array: np.ndarray) -> np.ndarray:
    """bf16 bits read as f16."""
    return array.view(np.float16).astype(ml_dtypes.bfloat16)


def one_bit(array: np.ndarray) -> np.ndarray:
    """The lowest bit of one element."""
    changed = array.copy()
    flat = changed.reshape(-1).view(np.uint8)
    flat[-array.itemsize] ^= 1
    return changed


def dirty_tail(rows: KvRows, start: int) -> KvRows:
    """The last slots of a page read past the length: whatever their last owner left there, NaN here."""
    return [np.concatenate([array, np.full_like(array[:, :1], np.nan)], axis=1) for array in rows]


# -- policy changes -----------------------------------------------------------------------------------------------------


def leak(kv: PagedKv, sequence: KvSequence) -> None:
    """One reference too many on a page."""
    page = next((page for page in sequence.table.pages if page is not None), None)
    if page is not None:
        kv.pool.retain(page)


def used_after_free(kv: PagedKv, sequence: KvSequence) -> None:
    """Published pages are released while the tree still points at them, and handed to somebody else."""
    for page in {page for page in sequence.table.pages if page is not None}:
        if kv.pool.refcount(page) > 1:
            kv.pool.release(page)
    for view in (view for page in sequence.table.pages if page is not None for view in kv.pool.views(page)):
        view[...] = 0


def forgets_pages(kv: PagedKv, count: int) -> int:
    """Eviction frees pages and leaves the tree as it was."""
    nodes = list(kv.cache._nodes())
    for node in nodes[:count]:
        kv.pool.release(node.page)
    return len(nodes)


MUTANTS: tuple[Mutant, ...] = (
    Mutant("mirror off", Hooks(mirror=lambda rows, start: None), ("address", "transport")),
    Mutant("mirror zeroed", Hooks(mirror=each(np.zeros_like)), ("address",)),
    Mutant("mirror K/V swapped", Hooks(mirror=swap_kv), ("address",)),
    Mutant("mirror off by one position", Hooks(mirror=each(lambda a: np.roll(a, -1, 1))), ("address",)),
    Mutant("decode steps zeroed", Hooks(mirror=decode_zeroed), ("address", "transport")),
    Mutant("logical for capacity stride in read", Hooks(mirror=each(by_length)), ("address", "transport")),
    Mutant("logical for capacity stride in seed", Hooks(seed=each(by_length)), ("address", "warm")),
    Mutant("heads swapped", Hooks(mirror=each(lambda a: a[::-1])), ("address",)),
    Mutant("layers swapped (10 before 2)", Hooks(mirror=swap_layers), ("address",)),
    Mutant("slot and head transposed", Hooks(mirror=each(transposed)), ("address",)),
    Mutant("seed zeroed", Hooks(seed=each(np.zeros_like)), ("address", "warm")),
    Mutant("seed K/V swapped", Hooks(seed=swap_kv), ("address", "warm")),
    Mutant("seed reversed", Hooks(seed=each(lambda a: a[:, ::-1])), ("address", "warm")),
    Mutant("seed shifted", Hooks(seed=each(rolled)), ("address", "warm")),
    Mutant("extraction broken alike on both ways", Hooks(mirror=each(one_bit), seed=each(lambda a: a)), ("address",)),
    Mutant("K and V permuted together", Hooks(mirror=each(rolled)), ("address",)),
    Mutant("one bit of one element", Hooks(mirror=each(one_bit)), ("address", "transport")),
    Mutant("reuse forced to 0", Hooks(reuse=lambda cached, length: 0), ("warm",)),
    Mutant("full hit not cut", Hooks(reuse=lambda cached, length: cached + int(cached == length - 1)), ("warm",)),
    Mutant("hash made constant", Hooks(ids=lambda ids: [0] * len(ids)), ("separation", "warm")),
    Mutant("identity without the weights", Hooks(other_weights=lambda kv: kv), ("separation",)),
    Mutant("extraction broken alike everywhere", Hooks(extract=swap_kv), ("warm", "formula")),
    Mutant("extraction and seed broken alike", Hooks(extract=swap_kv, seed=swap_kv), ("formula",)),
    Mutant("dirty page tail seeded", Hooks(seed=dirty_tail), ("warm", "address")),
    Mutant("batch rows exchanged", Hooks(rows=lambda seats: seats[::-1]), ("rows",)),
    Mutant("refcount leak", Hooks(after=leak), ("separation",)),
    Mutant("page used after free", Hooks(after=used_after_free), ("warm", "transport")),
    Mutant("stale page after eviction", Hooks(evict=forgets_pages), ("separation",)),
    Mutant("ids compared in 8 bits", Hooks(ids=lambda ids: [i & 255 for i in ids]), ("separation",)),
    Mutant("identity without the image", Hooks(key=lambda key: b""), ("separation",)),
    Mutant("f16 bits read as numbers", Hooks(mirror=each(as_numbers)), ("address",), F16),
    Mutant("bf16 read as f16", Hooks(mirror=each(as_half)), ("address",), BF16),
    Mutant("rewind off by one", Hooks(rewind=1), ("rewind",)),
    Mutant("recurrent state not zeroed", Hooks(reset=False), ("warm",), F32, True),
    Mutant("recurrent state not restored", Hooks(state=lambda state: None), ("warm",), F32, True),
)


def checker_mutants() -> list[Judged]:
    """Defects of the checks themselves, each against a case it must then get wrong."""
    return [_compares_nothing(), _tolerance(), _exit_codes(), _nan_equals_nan()]


def _compares_nothing() -> Judged:
    layout = closed_form_scene(F32).runner.kv_layout
    empty = [np.zeros((c.num_heads, 0, c.head_dim), c.dtype) for c in layout.components]
    outcome = checks.value_parity(empty, empty, 1.0)
    return _seen("comparison that compares nothing", not outcome.ok, outcome.detail)


def _tolerance() -> Judged:
    good = np.ones((2, 3, 5), np.float32)
    bad = good * (1 + 1e-2)
    strict, loose = checks.value_parity([bad], [good], 1e-6), checks.value_parity([bad], [good], 1e-6 * 1000)
    return _seen("tolerance x 1000", not strict.ok and loose.ok, strict.detail)


def _exit_codes() -> Judged:
    straight = worst([ExitCode.OK, ExitCode.NOT_COMPARED, ExitCode.DIFFERENT])
    return _seen(
        "exit codes swapped", straight is ExitCode.DIFFERENT and worst([]) is ExitCode.NOT_COMPARED, str(straight)
    )


def _nan_equals_nan() -> Judged:
    nan = np.full((2, 3, 5), np.nan, np.float32)
    return _seen("two NaN sides", not checks.value_parity([nan], [nan], 1.0).ok, "NaN against NaN")


def _seen(name: str, killed: bool, detail: str) -> Judged:
    return Judged(name, "killed" if killed else "survived", ("checker",), "checker" if killed else "", detail)


def prove() -> list[Judged]:
    """Every mutant's fate, KV and checker."""
    return [judge(mutant) for mutant in MUTANTS] + checker_mutants()
