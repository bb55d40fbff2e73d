"""Pages, tables and the prefix tree against a plain dictionary model."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from genai_cli.kv.layout import KvComponent, KvLayout, KvRows
from genai_cli.kv.page_table import GapError, PageTable
from genai_cli.kv.pages import PageError, PagePool, PoolExhausted
from genai_cli.kv.prefix_cache import PrefixCache, identity
from genai_cli.kv.session import PagedKv

BF16 = np.dtype(ml_dtypes.bfloat16)
# two layers of different geometry; heads, dims and the page size are distinct primes, so no two strides coincide
LAYOUT = KvLayout(
    (
        KvComponent(0, "key", 2, 7, np.dtype(np.float32)),
        KvComponent(0, "value", 2, 7, np.dtype(np.float32)),
        KvComponent(3, "key", 5, 11, BF16),
        KvComponent(3, "value", 5, 11, BF16),
    )
)
PAGE = 3


def rows_of(tokens: list[int], start: int = 0) -> KvRows:
    """KV in closed form: an element names component, head, position, dim and token (exact in bf16: all below 256)."""
    made: KvRows = []
    for c, component in enumerate(LAYOUT.components):
        head, dim = np.arange(component.num_heads)[:, None], np.arange(component.head_dim)[None, :]
        parts = [(13 * c + 3 * head + dim + 17 * token + 5 * (start + i)) % 251 for i, token in enumerate(tokens)]
        array = np.zeros((component.num_heads, len(tokens), component.head_dim))
        for i, part in enumerate(parts):
            array[:, i] = part
        made.append(array.astype(component.dtype))
    return made


def same(found: KvRows, wanted: KvRows) -> bool:
    """Byte equality of every component, and as many of them."""
    return all(a.tobytes() == b.tobytes() for a, b in zip(found, wanted, strict=True))


class Pages(RuleBasedStateMachine):
    """Random writes, forks, rewinds and removals; every table always reads back what a list of tokens says."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(LAYOUT, PAGE, 12)
        self.tables: list[tuple[PageTable, list[int]]] = []

    @rule(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=8))
    def start(self, tokens: list[int]) -> None:
        table = PageTable(self.pool)
        try:
            table.write(0, rows_of(tokens))
        except PoolExhausted:
            assert table.pages == []
            return
        self.tables.append((table, list(tokens)))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99), at=st.integers(0, 99), tokens=st.lists(st.integers(0, 9), min_size=1, max_size=5))
    def write(self, which: int, at: int, tokens: list[int]) -> None:
        table, model = self.tables[which % len(self.tables)]
        start = at % (len(model) + 1)
        try:
            table.write(start, rows_of(tokens, start))
        except PoolExhausted:
            return
        model[start : start + len(tokens)] = tokens

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99), at=st.integers(0, 99))
    def fork(self, which: int, at: int) -> None:
        table, model = self.tables[which % len(self.tables)]
        length = at % (len(model) + 1)
        self.tables.append((table.fork(length), model[:length]))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99), at=st.integers(0, 99))
    def rewind(self, which: int, at: int) -> None:
        table, model = self.tables[which % len(self.tables)]
        length = at % (len(model) + 1)
        table.rewind(length)
        del model[length:]

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def remove(self, which: int) -> None:
        table, _ = self.tables.pop(which % len(self.tables))
        table.remove()

    @rule(byte=st.sampled_from([0, 0x7F, 0xFF]))
    def poison(self, byte: int) -> None:
        self.pool.fill_free(byte)

    @invariant()
    def reads_back(self) -> None:
        for table, model in self.tables:
            assert table.length == len(model)
            assert same(table.read(0, table.length), rows_of(model))

    @invariant()
    def bounded(self) -> None:
        assert self.pool.pages_minted <= 12
        owned = [page for table, _ in self.tables for page in table.pages]
        assert all(self.pool.refcount(page) == owned.count(page) for page in set(owned))
        assert self.pool.pages_used == len(set(owned))


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_bytes_per_token_is_the_sum_over_components() -> None:
    assert LAYOUT.bytes_per_token == 2 * 2 * 7 * 4 + 2 * 5 * 11 * 2
    assert PagePool(LAYOUT, PAGE, 4).page_bytes == PAGE * LAYOUT.bytes_per_token


def test_releasing_twice_is_an_error() -> None:
    pool = PagePool(LAYOUT, PAGE, 2)
    page = pool.allocate()
    assert pool.release(page)
    with pytest.raises(PageError, match="not allocated"):
        pool.release(page)


def test_writing_past_the_end_and_into_a_gap_are_different_errors() -> None:
    table = PageTable(PagePool(LAYOUT, PAGE, 8))
    table.write(0, rows_of([1, 2, 3, 4, 5, 6, 7]))
    with pytest.raises(PageError, match="ends at `7`"):
        table.write(8, rows_of([1]))
    assert table.drop_before(6) == 2
    with pytest.raises(GapError):
        table.write(2, rows_of([1]))


def test_a_pool_that_fits_exactly_admits_the_prompt() -> None:
    """onnxruntime-genai #2333: page 4, prompt 15, 4 pages; here 3 tokens a page, 12 tokens, 4 pages."""
    pool = PagePool(LAYOUT, PAGE, 4)
    table = PageTable(pool)
    table.write(0, rows_of([*range(10), 1, 2]))
    assert pool.pages_used == 4


def publish(kv: PagedKv, tokens: list[int], key: bytes = b"") -> int:
    """Run one request over closed-form KV; returns the tokens it reused."""
    full = rows_of(tokens)
    with kv.sequence(tokens, key) as sequence:
        cached = sequence.num_cached_tokens
        if cached:
            assert same(sequence.prefix()[0], [array[:, :cached] for array in full])
        sequence.mirror(lambda start, stop: [array[:, start:stop] for array in full], len(tokens))
        sequence.publish(tokens)
    return cached


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])
def test_a_full_hit_is_cut_by_one(length: int) -> None:
    kv = PagedKv(LAYOUT, PAGE, 16)
    tokens = list(range(1, length + 1))
    assert publish(kv, tokens) == 0
    assert publish(kv, tokens) == length - 1


def test_four_requests_on_one_system_prompt_reuse_it() -> None:
    kv = PagedKv(LAYOUT, PAGE, 64)
    system = [5, 6, 7, 8, 9]
    assert [publish(kv, [*system, 20 + i, 30 + i]) for i in range(4)] == [0, 5, 5, 5]


def test_a_follow_up_of_seven_tokens_reuses_five() -> None:
    kv = PagedKv(LAYOUT, 2, 16)
    publish(kv, [3, 7, 0, 5, 1])
    assert kv.lookup([3, 7, 0, 5, 1, 2, 6]).length == 5
    assert kv.lookup([4, 7, 0, 5, 1]).length == 0


def test_another_identity_reuses_nothing() -> None:
    kv = PagedKv(LAYOUT, PAGE, 16)
    publish(kv, [1, 2, 3, 4], identity({"image": b"cat"}))
    assert kv.lookup([1, 2, 3, 4], identity({"image": b"dog"})).length == 0
    assert kv.lookup([1, 2, 3, 4], identity({"image": b"cat"})).length == 3


def test_identity_separates_its_parts() -> None:
    array = np.arange(4, dtype=np.float32)
    keys = [
        identity({"a": b"bc"}), identity({"ab": b"c"}), identity({}), identity({"a": array}),
        identity({"a": array.reshape(2, 2)}), identity({"a": array.view(np.int32)}), identity({"a": array.tobytes()}),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert identity({"a": b"1", "b": b"2"}) == identity({"b": b"2", "a": b"1"})


def test_tokens_are_compared_whole() -> None:
    """65 and 321 are the same in 8 bits; a tree keyed by a truncated or constant hash would hit."""
    kv = PagedKv(LAYOUT, PAGE, 16)
    publish(kv, [65, 2, 3, 4])
    assert kv.lookup([321, 2, 3, 4]).length == 0


def test_lookup_and_materialize_change_nothing() -> None:
    kv = PagedKv(LAYOUT, PAGE, 16)
    publish(kv, [1, 2, 3, 4, 5])
    before = (kv.cache.fingerprint(), kv.pool.pages_used, kv.pool.free_pages())
    kv.lookup([1, 2, 3, 9])
    rows = kv.materialize([1, 2, 3, 4, 9])
    assert same(rows or [], rows_of([1, 2, 3, 4]))
    assert before == (kv.cache.fingerprint(), kv.pool.pages_used, kv.pool.free_pages())


def test_unrelated_conversations_stay_within_the_pool() -> None:
    kv = PagedKv(LAYOUT, PAGE, 24)
    for i in range(50):
        publish(kv, [100 + i, *range(11)])
        assert kv.pool.pages_minted <= 24
    assert kv.unmirrored == 0
    assert kv.pool.counters.evictions > 0


def test_an_evicted_prefix_is_computed_again() -> None:
    """vllm #4764: A fills the pool, B evicts it, A again must find nothing and leave the right bytes."""
    kv = PagedKv(LAYOUT, PAGE, 4)
    first = list(range(1, 13))
    publish(kv, first)
    publish(kv, [50 + token for token in first])
    assert publish(kv, first) == 0
    assert same(kv.materialize([*first, 0]) or [], rows_of(first))


def test_interrupted_and_short_requests_give_every_page_back() -> None:
    kv = PagedKv(LAYOUT, PAGE, 16)
    rows = rows_of([1, 2, 3, 4])

    def interrupted(length: int) -> None:
        with kv.sequence([1, 2, 3, 4]) as sequence:
            sequence.mirror(lambda start, stop: [array[:, start:stop] for array in rows], length)
            raise KeyboardInterrupt

    for i in range(500):
        with pytest.raises(KeyboardInterrupt):
            interrupted(1 + i % 4)
    assert kv.pool.pages_used == 0
    for i in range(2000):
        publish(kv, [i % 7, 1, 2])
    kv.cache.clear()
    assert kv.pool.pages_used == 0


def test_a_full_pool_goes_on_without_a_mirror() -> None:
    kv = PagedKv(LAYOUT, PAGE, 1)
    assert publish(kv, [1, 2, 3, 4, 5]) == 0
    assert kv.unmirrored == 1
    assert kv.pool.pages_used == 0


def test_recurrent_decoders_need_the_state_at_the_cut() -> None:
    kv = PagedKv(LAYOUT, PAGE, 16, needs_state=True)
    tokens, full = [1, 2, 3, 4], rows_of([1, 2, 3, 4])
    with kv.sequence(tokens) as sequence:
        sequence.mirror(lambda start, stop: [array[:, start:stop] for array in full], 4)
        sequence.remember(4, [np.array([10.0])])
        sequence.publish(tokens)
    assert kv.lookup([1, 2, 3, 4]).length == 0  # the state at 3 is not known
    match = kv.lookup([1, 2, 3, 4, 5])
    assert (match.length, float((match.state or [np.zeros(1)])[0][0])) == (4, 10.0)


def test_the_dirty_tail_of_a_page_is_never_read() -> None:
    results = []
    for byte in (0x00, 0x7F, 0xFF):
        kv = PagedKv(LAYOUT, PAGE, 8)
        publish(kv, [9] * 7)
        kv.cache.clear()
        kv.pool.fill_free(byte)
        publish(kv, [1, 2, 3, 4])
        results.append([array.tobytes() for array in kv.materialize([1, 2, 3, 4, 0]) or []])
    assert results[0] == results[1] == results[2] != []


def test_eviction_prefers_what_was_used_longest_ago() -> None:
    pool = PagePool(LAYOUT, PAGE, 8)
    cache = PrefixCache(pool)
    for name in (1, 2):
        page = pool.allocate()
        cache.insert([name] * PAGE, [page])
        pool.release(page)
    cache.touch(cache.lookup([1] * (PAGE + 1)))
    assert cache.evict(1) == 1
    assert cache.lookup([1] * (PAGE + 1)).length == PAGE
    assert cache.lookup([2] * (PAGE + 1)).length == 0
