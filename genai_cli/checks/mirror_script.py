"""The script of mirror-check: rewinds, forks, eviction, growth and batch rows, all through the decoder itself."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from genai_cli.backends.cpu import FIRST_CAPACITY
from genai_cli.checks.forensics import compare_rows
from genai_cli.checks.mirror_checks import Outcome
from genai_cli.checks.mirror_scene import ClosedFormDecoder, Scene
from genai_cli.errors import GenaiError
from genai_cli.kv.layout import KvRows
from genai_cli.kv.page_table import PageTable
from genai_cli.kv.pages import PageError, PagePool, pages_for
from genai_cli.kv.session import PagedKv
from genai_cli.runners.base import RowsRunner, Runner

Pair = tuple[str, KvRows, KvRows]  # what is compared, found, wanted


def judged(name: str, scene: Scene, pairs: Iterator[Pair], what: str) -> Outcome:
    """The first pair that differs, or how many bytes were equal."""
    compared = 0
    try:
        for where, found, wanted in pairs:
            size, cause = compare_rows(found, wanted, scene.runner.kv_layout)
            compared += size
            if cause is not None:
                return Outcome(name, compared, False, f"{where}: {cause}")
    except PageError as error:  # a page used against the rules; what the decoder refuses is not ours to judge
        return Outcome(name, compared, False, error.message)
    return Outcome(name, compared, compared > 0, f"{compared:,} bytes equal {what}")


def feed(runner: Runner, ids: list[int]) -> np.ndarray:
    """Logits after `ids`; of no ids, none."""
    return runner.step(np.array(ids, np.int64)) if ids else np.empty((0, 0), np.float32)


def write(scene: Scene, table: PageTable, length: int, runner: Runner | None = None) -> None:
    """Mirror what the decoder computed since the table's end."""
    rows = scene.hooks.mirror(scene.rows(table.length, length, runner), table.length)
    if rows is not None:
        table.write(table.length, rows)


def borders(scene: Scene) -> list[int]:
    """Places of a cut: both ends, and around the first page border."""
    size, whole = scene.page_size, len(scene.prompt)
    cuts = {0, 1, size - 1, size, size + 1, whole - 1, whole}
    return sorted(cut for cut in cuts if 0 <= cut <= whole)


def rewound(scene: Scene) -> Outcome:
    """The decoder and its pages go back to every border and on with other tokens, as if the rest had never been."""

    def pairs() -> Iterator[Pair]:
        for keep in borders(scene):
            table = PageTable(PagePool(scene.runner.kv_layout, scene.page_size, scene.num_pages), copy=scene.copy)
            scene.runner.reset()
            feed(scene.runner, scene.prompt)
            write(scene, table, len(scene.prompt))
            _rewind(scene.runner, scene.prompt, keep)
            table.rewind(keep)
            table.pool.fill_free(0xFF)
            suffix = scene.more(keep + 1, scene.page_size + 1)
            feed(scene.runner, suffix)
            write(scene, table, keep + len(suffix))
            yield f"rewound to {keep}", table.read(0, table.length), scene.rows(0, keep + len(suffix))

    return judged("rewound", scene, pairs(), "after the decoder went back to a border and on")


def _rewind(runner: Runner, prompt: list[int], keep: int) -> None:
    """Recurrent state cannot go back: then the prefix is fed again, as the contract of `rewind` says."""
    try:
        runner.rewind(keep)
    except GenaiError:
        if not runner.snapshot_state():
            raise
        runner.reset()
        feed(runner, prompt[:keep])


def forked(scene: Scene) -> Outcome:
    """A second prompt leaves the first in the middle of a page: both keep their own bytes."""
    scene.restart()
    prompt, size = scene.prompt, scene.page_size
    cut = min(len(prompt) - 1, size + max(1, size // 2))
    other = next((token for token in scene.more(cut, len(prompt)) if token != prompt[cut]), prompt[cut] + 1)

    def pairs() -> Iterator[Pair]:
        trunk = scene.run(prompt, scene.more(len(prompt)))
        branch = scene.run([*prompt[:cut], other], scene.more(cut))
        yield f"the branch at {cut}", branch.pages, branch.present
        again = scene.kv.materialize([*prompt, *scene.more(len(prompt)), other])
        if again is not None:  # a recurrent decoder may hold no state at a place that could be reused
            held = again[0].shape[1]
            yield "the trunk after the branch was written", again, [a[:, :held] for a in trunk.present]

    return judged("forked", scene, pairs(), f"after two prompts parted at position {cut}")


def evicted(scene: Scene) -> Outcome:
    """A pool that holds one request: another takes its pages, and the first is computed again into those."""
    prompt, more = scene.prompt, scene.more(len(scene.prompt))
    other = scene.more(1, len(prompt))
    other[0] = next((token for token in scene.more(0, len(prompt)) if token != prompt[0]), other[0])
    if other[0] == prompt[0]:
        return Outcome("evicted", 0, True, "the prompt repeats one token, nothing starts otherwise", applies=False)
    fits = pages_for(len(prompt) + len(more), scene.page_size)
    scene.restart()
    scene.kv = PagedKv(
        scene.kv.layout, scene.page_size, fits, needs_state=scene.kv.needs_state, copy=scene.copy
    )  # fmt: skip
    stale: list[str] = []

    def pairs() -> Iterator[Pair]:
        for name, ids in (("first", prompt), ("another", other), ("first again", prompt)):
            ran = scene.run(ids, more)
            if ran.cached:
                stale.append(f"{ran.cached} tokens reused by the {name} request after their pages were given away")
            yield f"the {name} request", ran.pages, ran.present

    outcome = judged("evicted", scene, pairs(), f"in a pool of {fits} pages, each of them used three times")
    minted = scene.kv.pool.pages_minted
    if minted > fits:
        stale.append(f"{minted} pages in a pool of {fits}")
    scene.restart()
    return Outcome("evicted", outcome.compared_bytes, False, stale[0]) if stale and outcome.ok else outcome


def grown(scene: Scene) -> Outcome:
    """Past the first capacity of the buffers, where every head but the first moves."""
    runner, before, size = scene.runner, FIRST_CAPACITY - 2, scene.page_size
    context = runner.context_len
    if context is not None and context < FIRST_CAPACITY + size:
        return Outcome("growth", 0, True, f"the context of {context} tokens ends before buffers grow", applies=False)
    ids = scene.more(0, FIRST_CAPACITY + size)
    table = PageTable(PagePool(runner.kv_layout, size, pages_for(len(ids), size)), copy=scene.copy)

    def pairs() -> Iterator[Pair]:
        runner.reset()
        feed(runner, ids[:before])
        write(scene, table, before)
        held = scene.rows(0, before)
        feed(runner, ids[before:])
        write(scene, table, len(ids))
        yield f"the first {before} tokens after growth", scene.rows(0, before), held
        yield f"{len(ids)} tokens", table.read(0, table.length), scene.rows(0, len(ids))

    return judged("growth", scene, pairs(), f"over the growth of buffers at {FIRST_CAPACITY} tokens")


def batch_rows(scene: Scene) -> Outcome:
    """Rows of different lengths in one step: each row's pages hold its own KV, which is that of a run alone."""
    runner = scene.runner
    reason = "this engine runs one sequence"
    if isinstance(runner, RowsRunner):
        gate = runner.supports_rows()
        reason = "" if gate.supported else gate.reason
    if reason or not isinstance(runner, RowsRunner):
        return Outcome("rows", 0, True, reason, applies=False)
    size = scene.page_size
    prompts = [scene.more(3 * row, length) for row, length in enumerate((max(1, size - 1), size + 1, 2 * size))]
    steps = [scene.more(row, size + 1) for row in range(len(prompts))]
    pool = PagePool(runner.kv_layout, size, len(prompts) * pages_for(3 * size + 1, size))
    seats, tables = [runner.seat() for _ in prompts], [PageTable(pool, copy=scene.copy) for _ in prompts]

    def pairs() -> Iterator[Pair]:
        for seat, prompt in zip(seats, prompts, strict=True):
            feed(seat, prompt)
        for at in range(size + 1):
            runner.step_rows(np.array([step[at] for step in steps], np.int64), seats)
            for table, seat in zip(tables, scene.hooks.rows(list(seats)), strict=True):
                write(scene, table, seat.length, seat)
        for row, (prompt, step, table) in enumerate(zip(prompts, steps, tables, strict=True)):
            runner.reset()
            for part in (prompt, *([token] for token in step)):
                feed(runner, part)
            yield f"row {row}", table.read(0, table.length), scene.rows(0, runner.length)

    return judged("rows", scene, pairs(), f"in {len(prompts)} rows of a batch, each as in a run alone")


def closed_form(scene: Scene) -> Outcome:
    """Pages against the formula, where there is one: what is broken alike in reading and writing shows nowhere else."""
    runner = scene.runner
    if not isinstance(runner, ClosedFormDecoder):
        return Outcome("formula", 0, True, "the KV of this decoder is not known in closed form", applies=False)
    scene.restart()
    ran = scene.run(scene.prompt, [])
    wanted = [
        np.stack([runner.row(c, token, position) for position, token in enumerate(scene.prompt)], 1)
        for c in range(len(runner.kv_layout.components))
    ]
    return judged("formula", scene, iter([("pages", ran.pages, wanted)]), "to the formula")
