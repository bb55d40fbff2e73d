"""One policy for paged KV and prefix reuse, the same for every engine.

>>> kv = PagedKv(runner.kv_layout, page_size=16, num_pages=256)
>>> with kv.sequence(prompt_ids) as sequence:          # nothing is kept when the block raises
...     if sequence.num_cached_tokens:
...         runner.seed(*sequence.prefix())            # rows of the shared prefix
...     runner.step(prompt_ids[sequence.num_cached_tokens:])
...     sequence.mirror(runner.kv_rows)                # new rows only, present -> pages
...     sequence.publish(fed_ids)                      # the last sampled token was never fed: it has no KV
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np

from genai_cli.kv.layout import KvLayout, KvRows
from genai_cli.kv.mirror import CopyRows, copy_rows
from genai_cli.kv.page_table import PageTable
from genai_cli.kv.pages import PagePool, PoolExhausted, pages_for
from genai_cli.kv.prefix_cache import Match, PrefixCache, State

ReadRows = Callable[[int, int], KvRows]  # runner.kv_rows


@dataclass
class PagedKv:
    """Pool, prefix tree and counters of one loaded decoder."""

    layout: KvLayout
    page_size: int
    num_pages: int
    needs_state: bool = False  # recurrent decoders reuse a prefix only with the state at its end
    reuse: bool = True  # False: mirror only (`--no-prefix-cache`)
    copy: CopyRows = copy_rows
    pool: PagePool = field(init=False)
    cache: PrefixCache = field(init=False)
    unmirrored: int = 0  # sequences that ran out of pages and went on without a mirror

    def __post_init__(self) -> None:
        self.pool = PagePool(self.layout, self.page_size, self.num_pages)
        self.cache = PrefixCache(self.pool, needs_state=self.needs_state)

    def lookup(self, ids: Sequence[int], key: bytes = b"") -> Match:
        """What could be reused; changes nothing."""
        return self.cache.lookup([int(token) for token in ids], key) if self.reuse else Match(0)

    def sequence(self, ids: Sequence[int], key: bytes = b"") -> KvSequence:
        """A sequence that starts from the deepest published prefix of `ids`."""
        return KvSequence(self, self.lookup(ids, key), key)

    def materialize(self, ids: Sequence[int], key: bytes = b"") -> KvRows | None:
        """Rows of the deepest stored prefix of `ids`; None when there is none. Read-only."""
        match = self.lookup(ids, key)
        return self._gather(match)[0] if match.length else None

    def _gather(self, match: Match) -> tuple[KvRows, State | None]:
        table = PageTable(self.pool, copy=self.copy)
        table.adopt(list(match.pages), match.length)
        try:
            return table.read(0, match.length), match.state
        finally:
            table.remove()

    def make_room(self, num_pages: int) -> bool:
        """Evict until `num_pages` more pages fit; False when they cannot."""
        short = num_pages - self.pool.pages_available
        return short <= 0 or self.cache.evict(short) >= short


class KvSequence:
    """One running sequence: its page table and what it may publish. A context manager; leaving it gives pages back."""

    def __init__(self, kv: PagedKv, match: Match, key: bytes) -> None:
        self._kv, self._match, self._key = kv, match, key
        self.table = PageTable(kv.pool, copy=kv.copy)
        self.table.adopt(list(match.pages), match.length)
        kv.cache.touch(match)
        self._states: dict[int, State] = {}
        self.mirroring = True

    @property
    def num_cached_tokens(self) -> int:
        """Tokens whose KV is seeded instead of computed."""
        return self._match.length

    def state_stop(self, length: int) -> int | None:
        """Where a prefill of `length` tokens should stop to remember the recurrent state: where this prompt leaves others
        that were seen (the next one like it starts there), else at the last page border. None: states do not matter."""
        if not self._kv.needs_state or not self._kv.reuse:
            return None
        seen, border = self._match.stateless, (length - 1) // self._kv.page_size * self._kv.page_size
        stop = seen if seen > self._match.length else border
        return stop if stop > self._match.length else None

    def prefix(self) -> tuple[KvRows, State | None]:
        """Rows [H_kv, n, D] of the cached prefix, and the recurrent state at its end."""
        return self.table.read(0, self._match.length), self._match.state

    def mirror(self, read: ReadRows, length: int) -> int:
        """Copy positions [mirrored, length) into pages; returns how many. Without pages the sequence goes on unmirrored."""
        start = self.table.length
        if not self.mirroring or length <= start:
            return 0
        try:
            self._ensure(start, length)
            self.table.write(start, read(start, length))
        except PoolExhausted:
            self.mirroring = False
            self._kv.unmirrored += 1
            return 0
        return length - start

    def _ensure(self, start: int, length: int) -> None:
        """Room for the pages [start, length) needs, the copy of a shared last page included."""
        size = self._kv.page_size
        last = self.table.pages[-1] if self.table.pages else None
        copied = int(start % size != 0 and last is not None and self._kv.pool.refcount(last) > 1)
        self._kv.make_room(pages_for(length, size) - pages_for(start, size) + copied)

    def remember(self, length: int, state: State) -> None:
        """The recurrent state at `length`, to be published with the prefix that ends there."""
        if state:
            self._states[length] = [np.array(array) for array in state]

    def publish(self, ids: Sequence[int]) -> int:
        """Put the mirrored prefix of the fed `ids` into the tree; returns new pages. Windows that dropped pages publish
        nothing."""
        length = min(len(ids), self.table.length)
        pages = [page for page in self.table.pages[: pages_for(length, self._kv.page_size)] if page is not None]
        if not self._kv.reuse or self.table.gap != (0, 0) or not length:
            return 0
        return self._kv.cache.insert(list(ids)[:length], pages, self._states, self._key)

    def close(self) -> None:
        """Give every page back; what was published stays with the tree."""
        self.table.remove()

    def __enter__(self) -> KvSequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
