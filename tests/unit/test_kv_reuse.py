"""Prefix reuse against the plainest model: a list of everything ever published, compared token by token."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_kv_pages import LAYOUT, PAGE, rows_of, same

from genai_cli.kv.page_table import PageTable
from genai_cli.kv.pages import PagePool
from genai_cli.kv.session import KvSequence, PagedKv

IDS = st.lists(st.integers(0, 2), min_size=1, max_size=9)  # three ids: prefixes are often shared
KEYS = st.sampled_from([b"", b"cat", b"dog"])


def common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Reuse(RuleBasedStateMachine):
    """Requests start, advance, publish or break off in any order; what is reused is what was published, no more."""

    published: list[tuple[bytes, list[int]]]
    open: list[tuple[KvSequence, bytes, list[int]]]

    @initialize(num_pages=st.sampled_from([3, 8, 500]))
    def make(self, num_pages: int) -> None:
        self.kv = PagedKv(LAYOUT, PAGE, num_pages)
        self.published, self.open = [], []

    def best(self, ids: list[int], key: bytes) -> int:
        hits = [common(ids, known) for owner, known in self.published if owner == key]
        return min(max(hits, default=0), len(ids) - 1)

    @rule(ids=IDS, key=KEYS)
    def start(self, ids: list[int], key: bytes) -> None:
        sequence = self.kv.sequence(ids, key)
        cached, best = sequence.num_cached_tokens, self.best(ids, key)
        assert cached == best if self.kv.pool.counters.evictions == self.kv.unmirrored == 0 else cached <= best
        assert same(sequence.prefix()[0], [array[:, :cached] for array in rows_of(ids)])
        self.open.append((sequence, key, ids))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99), by=st.integers(1, 9))
    def advance(self, which: int, by: int) -> None:
        sequence, _, ids = self.open[which % len(self.open)]
        full = rows_of(ids)
        sequence.mirror(
            lambda start, stop: [array[:, start:stop] for array in full], min(sequence.table.length + by, len(ids))
        )

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99))
    def finish(self, which: int) -> None:
        sequence, key, ids = self.open.pop(which % len(self.open))
        with sequence:
            sequence.publish(ids)
            self.published.append((key, ids[: sequence.table.length]))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99))
    def interrupt(self, which: int) -> None:
        self.open.pop(which % len(self.open))[0].close()

    @rule(count=st.integers(1, 3))
    def evict(self, count: int) -> None:
        free = self.kv.pool.pages_available
        in_use = {page for sequence, _, _ in self.open for page in sequence.table.pages}
        kept = [node.page for node in self.kv.cache._nodes() if node.page in in_use]
        freed = self.kv.cache.evict(count)
        assert self.kv.pool.pages_available == free + freed  # freed pages are counted, not dropped references
        assert set(kept) <= {node.page for node in self.kv.cache._nodes()}  # dropping a page in use would free nothing

    @rule(byte=st.sampled_from([0, 0x7F, 0xFF]))
    def poison(self, byte: int) -> None:
        self.kv.pool.fill_free(byte)

    @invariant()
    def every_sequence_reads_its_own_rows(self) -> None:
        for sequence, _, ids in getattr(self, "open", []):
            length = sequence.table.length
            assert same(sequence.table.read(0, length), [array[:, :length] for array in rows_of(ids)])

    @invariant()
    def pages_are_accounted_for(self) -> None:
        if not hasattr(self, "kv"):
            return
        pool = self.kv.pool
        held = {page for sequence, _, _ in self.open for page in sequence.table.pages}
        assert pool.pages_minted <= pool.num_pages
        assert len(held | {node.page for node in self.kv.cache._nodes()}) == pool.pages_used

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for sequence, _, _ in self.open:
                sequence.close()
            self.kv.cache.clear()
            assert self.kv.pool.pages_used == 0


TestReuse = Reuse.TestCase
TestReuse.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("keep", [0, 1, PAGE - 1, PAGE, PAGE + 1, 10, 11])
def test_rewind_then_the_same_suffix_equals_a_fresh_run(keep: int) -> None:
    """onnxruntime-genai #2140: at 0, around a page border, one before the end and at the end."""
    ids, pool = list(range(11)), PagePool(LAYOUT, PAGE, 8)
    table = PageTable(pool)
    table.write(0, rows_of(ids))
    table.rewind(keep)
    pool.fill_free(0x7F)
    assert table.length == keep
    table.write(keep, [array[:, keep:] for array in rows_of(ids)]) if keep < 11 else None
    assert same(table.read(0, 11), rows_of(ids))
    assert pool.pages_used == 4


def test_a_forked_branch_reuses_exactly_what_it_shares() -> None:
    """Four tokens shared, in the middle of the second page; writing behind them leaves the trunk as it was."""
    pool = PagePool(LAYOUT, PAGE, 8)
    trunk = PageTable(pool)
    trunk.write(0, rows_of([1, 2, 3, 4, 5, 6]))
    branch = trunk.fork(4)
    assert pool.pages_used == 2
    branch.write(4, rows_of([8, 9], 4))
    assert (pool.pages_used, pool.counters.copies) == (3, 1)
    assert same(trunk.read(0, 6), rows_of([1, 2, 3, 4, 5, 6]))
    assert same(branch.read(0, 6), rows_of([1, 2, 3, 4, 8, 9]))
