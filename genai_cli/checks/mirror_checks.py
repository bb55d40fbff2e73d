"""The checks of mirror-check. Each compares something, says how many bytes, and names the cause of a difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from genai_cli.checks.forensics import compare_rows
from genai_cli.checks.mirror_scene import ClosedFormDecoder, Ran, Scene
from genai_cli.kv.layout import KvComponent, KvLayout, KvRows
from genai_cli.kv.page_table import PageTable
from genai_cli.kv.pages import PagePool

ENUMERATED = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


@dataclass(frozen=True)
class Outcome:
    """One check: what it compared, and the first thing it found wrong."""

    id: str
    compared_bytes: int
    ok: bool
    detail: str
    applies: bool = True  # False: the decoder has nothing of the kind, `detail` says what


Check = Callable[[Scene], Outcome]


def lossless(dtype: np.dtype) -> Outcome:
    """Every bit pattern of an 8- or 16-bit dtype (structured patterns of f32) through the real page path and back."""
    layout = KvLayout((KvComponent(0, "key", 2, 32, dtype), KvComponent(0, "value", 2, 32, dtype)))
    if dtype.itemsize <= 2:
        bits = 8 * dtype.itemsize
        patterns: np.ndarray = np.arange(2**bits, dtype=f"u{dtype.itemsize}")
    else:
        exponent = np.arange(512, dtype=np.uint32) << 23  # sign and exponent, all of them
        patterns = (exponent[:, None] | np.array([0, 1, 0x400000, 0x7FFFFF] * 32, np.uint32)).reshape(-1)
    rows = patterns.view(dtype).reshape(2, -1, 32)
    table = PageTable(PagePool(layout, 7, 400))
    table.write(0, [rows, rows[::-1].copy()])
    back = table.read(0, rows.shape[1])
    compared, cause = compare_rows(back, [rows, rows[::-1].copy()], layout)
    count = len(patterns)
    detail = f"all {count:,} {dtype.name} patterns come back bit for bit" if cause is None else str(cause)
    return Outcome(f"lossless.{dtype.name}", compared, cause is None and compared > 0, detail)


def address_map(scene: Scene) -> Outcome:
    """Self-naming values written through the mirror and read back through the seed: a wrong address names itself."""
    layout = scene.runner.kv_layout
    length = 2 * scene.page_size + 1
    compared = 0
    for shift in (0, 1):  # which half of the element's number the bits carry
        wanted = [_named(c, component, length, shift) for c, component in enumerate(layout.components)]
        table = PageTable(PagePool(layout, scene.page_size, 8), copy=scene.copy)
        for start, stop in ((0, length - 1), (length - 1, length)):
            rows = scene.hooks.mirror([np.array(array[:, start:stop]) for array in wanted], start)
            if rows is None:
                return Outcome("address", compared, False, "nothing was mirrored")
            table.write(start, rows)
        found = scene.hooks.seed(table.read(0, length), 0)
        size, cause = compare_rows(found, wanted, layout)
        compared += size
        if cause is not None:
            return Outcome("address", compared, False, str(cause))
    return Outcome("address", compared, compared > 0, f"{compared:,} bytes at their own addresses")


def _named(component: int, about: KvComponent, length: int, half: int) -> np.ndarray:
    """Bits that number every element of the whole KV; 16-bit dtypes take the low and the high half in two passes."""
    size = about.num_heads * length * about.head_dim
    number = np.arange(size, dtype=np.uint64) + np.uint64(component) * np.uint64(size)
    if about.dtype.itemsize == 2:
        number = (number >> np.uint64(16 * half)) ^ np.uint64(0x5A5A * half + component)
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[about.dtype.itemsize]
    return number.astype(unsigned).view(about.dtype).reshape(about.num_heads, length, about.head_dim)


def transport(scene: Scene) -> Outcome:
    """Pages against present after prefill, after steps across page borders, and after the pages were reused."""
    scene.restart()
    compared = 0
    borders = _lengths(scene)
    for length in borders:
        scene.kv.pool.fill_free(0xFF)
        ran = scene.run(scene.prompt[:length], scene.more(length))
        size, cause = compare_rows(ran.pages, ran.present, scene.runner.kv_layout)
        compared += size
        if cause is not None:
            return Outcome("transport", compared, False, f"after {length} + {scene.page_size} tokens: {cause}")
    return Outcome("transport", compared, compared > 0, f"{compared:,} bytes equal over prompts of {borders} tokens")


def _lengths(scene: Scene) -> list[int]:
    """Prompt lengths at page borders, one below, one above."""
    size, whole = scene.page_size, len(scene.prompt)
    return sorted({length for length in (1, size - 1, size, size + 1, 2 * size, whole) if 1 <= length <= whole})


def warm_is_cold(scene: Scene, tolerance: float = 0.0) -> Outcome:
    """A prompt run again from its pages: KV bytes equal, logits within `tolerance` (0: bit for bit), reuse cut by one."""
    scene.restart()
    prompt, steps = scene.prompt, scene.more(len(scene.prompt))
    follow = [*prompt, *steps, *scene.more(1, 2)]
    cold = scene.run(prompt, steps)
    warm = scene.run(prompt, steps)
    turn = scene.run(follow, [])
    scene.restart()
    fresh = scene.run(follow, [])
    recurrent = bool(scene.runner.snapshot_state())
    expected = (0, 0 if recurrent else len(prompt) - 1, len(prompt) + len(steps))
    found = (cold.cached, warm.cached, turn.cached)
    compared = sum(array.nbytes for ran in (warm, turn) for array in ran.present)
    if found != expected:
        return Outcome("warm", compared, False, f"reused {found} tokens, wanted {expected}")
    for name, one, other in (("again", warm, cold), ("follow-up", turn, fresh)):
        wrong = _differs(one, other, scene, tolerance)
        if wrong:
            return Outcome("warm", compared, False, f"{name}: {wrong}")
    return Outcome("warm", compared, compared > 0, f"reused {found} tokens; logits and KV equal the cold run's")


def _differs(one: Ran, other: Ran, scene: Scene, tolerance: float) -> str:
    if not np.isfinite(other.logits).all():
        return "the cold run's logits are not finite"
    delta = float(np.abs(one.logits - other.logits).max()) if one.logits.shape == other.logits.shape else np.inf
    if not delta <= tolerance:
        return f"logits differ by {delta:.3g}, limit {tolerance:.3g}"
    if tolerance == 0.0:
        _, cause = compare_rows(one.present, other.present, scene.runner.kv_layout)
        return "" if cause is None else str(cause)
    return ""


def separation(scene: Scene) -> Outcome:
    """What must not be shared: other identities, ids that agree in 8 bits, evicted prefixes."""
    scene.restart()
    prompt = scene.prompt
    scene.run(prompt, [], key=b"one image")
    other = scene.kv.lookup(scene.hooks.ids(list(prompt)), scene.hooks.key(b"another image")).length
    if other:
        return Outcome("separation", 1, False, f"{other} tokens reused across identities")
    scene.run(prompt, [])
    alias = [prompt[0] + 256, *prompt[1:]]
    shared = scene.kv.lookup(scene.hooks.ids(alias)).length
    if shared:
        return Outcome("separation", 2, False, f"{shared} tokens reused though the first id differs ({alias[0]})")
    foreign = scene.hooks.other_weights(scene.kv).lookup(list(prompt)).length
    if foreign:
        return Outcome("separation", 2, False, f"{foreign} tokens reused by a decoder of other weights")
    scene.hooks.evict(scene.kv, scene.num_pages)
    stale = scene.kv.lookup(scene.hooks.ids(list(prompt))).length
    if stale:
        return Outcome("separation", 3, False, f"{stale} tokens reused after eviction")
    used = scene.kv.pool.pages_used
    if used:
        return Outcome("separation", 4, False, f"{used} pages are still in use after everything was given back")
    return Outcome("separation", 4, True, "identities, ids and evicted prefixes are kept apart; every page came back")


def rewinds(scene: Scene) -> Outcome:
    """Pages rewound to every border and written on: they read back what is there now. Forks see the old."""
    layout = scene.runner.kv_layout
    source = ClosedFormDecoder(layout, 3 * scene.page_size + 3)
    source.step(np.arange(3 * scene.page_size))
    compared = 0
    for keep in sorted({0, 1, scene.page_size - 1, scene.page_size, scene.page_size + 1, 2 * scene.page_size}):
        table = PageTable(PagePool(layout, scene.page_size, 16), copy=scene.copy)
        table.write(0, source.kv_rows(0, 2 * scene.page_size))
        branch = table.fork(keep)
        table.rewind(keep + scene.hooks.rewind if keep + scene.hooks.rewind <= table.length else keep)
        fresh = source.kv_rows(2 * scene.page_size, 3 * scene.page_size)
        table.write(table.length, fresh)
        wanted = [np.concatenate([a[:, :keep], b], 1) for a, b in zip(source.kv_rows(0, keep), fresh, strict=True)]
        for found, want in ((table.read(0, table.length), wanted), (branch.read(0, keep), source.kv_rows(0, keep))):
            size, cause = compare_rows(found, [np.array(array) for array in want], layout)
            compared += size
            if cause is not None:
                return Outcome("rewind", compared, False, f"rewound to {keep}: {cause}")
    return Outcome(
        "rewind", compared, compared > 0, f"{compared:,} bytes equal after rewinds and forks at page borders"
    )


def liveness(scene: Scene) -> Outcome:
    """Zeroed KV must move the logits, else nothing here would notice a wrong one."""
    runner, prompt = scene.runner, scene.prompt
    runner.reset()
    runner.step(np.array(prompt, np.int64))
    rows, state = in_order(runner.kv_rows(0, len(prompt))), runner.snapshot_state()
    answers = []
    for seeded in (rows, [np.zeros_like(array) for array in rows]):
        runner.reset()
        runner.seed(seeded, state or None)
        answers.append(runner.step(np.array(scene.more(0, 1), np.int64)))
    size = sum(array.nbytes for array in rows)
    if not all(np.isfinite(answer).all() for answer in answers):
        return Outcome(
            "liveness", size, False, "the logits are not finite: they cannot tell a wrong KV from a right one"
        )
    moved = float(np.abs(answers[0] - answers[1]).max())
    return Outcome("liveness", size, moved > 0, f"zeroing the KV moves the logits by {moved:.3g}")


def value_parity(native: Sequence[np.ndarray], oracle: Sequence[np.ndarray], limit: float) -> Outcome:
    """NMSE of every component against the oracle's KV of the same ids."""
    worst, where, compared = 0.0, 0, 0
    if not any(mine.size for mine in native):
        return Outcome("value", 0, False, "nothing was compared")
    for c, (mine, theirs) in enumerate(zip(native, oracle, strict=True)):
        a, b = mine.astype(np.float64), theirs.astype(np.float64)
        compared += mine.nbytes
        energy = float((b * b).mean())
        error = float(((a - b) ** 2).mean()) / (energy or 1.0)
        if not error <= worst:
            worst, where = error, c
    ok = compared > 0 and bool(worst <= limit)
    return Outcome("value", compared, ok, f"worst NMSE {worst:.2g} (component {where}), limit {limit:.2g}")


def in_order(rows: KvRows) -> KvRows:
    """Copies, so that the decoder may go on."""
    return [np.array(array) for array in rows]
