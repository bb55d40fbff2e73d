"""One sequence's page table: token positions → pages. Copy-on-write, fork, rewind, windows."""

from __future__ import annotations

import numpy as np

from genai_cli.kv.layout import KvRows
from genai_cli.kv.mirror import CopyRows, address, check_rows, copy_lines, copy_rows, packed
from genai_cli.kv.pages import PageError, PagePool, pages_for


class GapError(PageError):
    """A position whose page a sliding window has dropped."""


class PageTable:
    """Pages of one sequence of `length` tokens. Owns one reference on each; `remove` gives them back.

    >>> table = PageTable(pool); table.write(0, rows); branch = table.fork(3); table.rewind(2); table.remove()
    """

    def __init__(self, pool: PagePool, *, num_sinks: int = 0, copy: CopyRows = copy_rows) -> None:
        self.pool = pool
        self.pages: list[int | None] = []  # None: dropped by a window
        self.length = 0
        self._sink_pages = pages_for(num_sinks, pool.page_size)
        self._copy = copy

    @property
    def gap(self) -> tuple[int, int]:
        """Positions [start, stop) whose pages were dropped; (0, 0) when none were."""
        dropped = [index for index, page in enumerate(self.pages) if page is None]
        size = self.pool.page_size
        return (dropped[0] * size, (dropped[-1] + 1) * size) if dropped else (0, 0)

    def write(self, start: int, rows: KvRows) -> None:
        """Copy rows [H_kv, n, D] to positions [start, start+n): rewrites below `length`, appends at it.

        All pages are allocated before the first byte is written, so PoolExhausted leaves the table as it was.
        """
        num_rows = check_rows(self.pool.layout, rows)
        if not 0 <= start <= self.length:
            raise PageError(f"KV write at position `{start}`, the sequence ends at `{self.length}`")
        self._check_gap(start, start + num_rows)
        if num_rows == 0:
            return
        self._own(start, start + num_rows)
        self._copy(self._lines(start, packed(rows), into_pages=True))
        self.length = max(self.length, start + num_rows)

    def read(self, start: int, stop: int, out: KvRows | None = None) -> KvRows:
        """Rows [start, stop) gathered into `out` (or new arrays) [H_kv, stop-start, D]. Changes nothing."""
        if not 0 <= start <= stop <= self.length:
            raise PageError(f"KV read of positions `{start}..{stop}`, the sequence ends at `{self.length}`")
        self._check_gap(start, stop)
        if out is None:
            out = [np.empty((c.num_heads, stop - start, c.head_dim), c.dtype) for c in self.pool.layout.components]
        if check_rows(self.pool.layout, out) != stop - start:
            raise PageError(f"KV read of `{stop - start}` rows into `{out[0].shape[1]}`")
        if stop > start:
            self._copy(self._lines(start, out, into_pages=False))
        return out

    def fork(self, length: int | None = None) -> PageTable:
        """A second sequence that shares the first `length` tokens (all by default), page by page."""
        length = self.length if length is None else length
        if not 0 <= length <= self.length:
            raise PageError(f"fork at `{length}`, the sequence ends at `{self.length}`")
        branch = PageTable(self.pool, copy=self._copy)
        branch._sink_pages = self._sink_pages
        branch.adopt(self.pages[: pages_for(length, self.pool.page_size)], length)
        return branch

    def adopt(self, pages: list[int | None], length: int) -> None:
        """Become a sharer of `pages`, holding `length` tokens; the table must be empty."""
        if self.pages or len(pages) != pages_for(length, self.pool.page_size):
            raise PageError(f"`{len(pages)}` pages cannot hold `{length}` tokens in an empty sequence")
        for page in pages:
            if page is not None:
                self.pool.retain(page)
        self.pages = list(pages)
        self.length = length

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens; whole pages behind them are given back."""
        if not 0 <= length <= self.length:
            raise PageError(f"rewind to `{length}`, the sequence ends at `{self.length}`")
        self._check_gap(length - 1, length)  # the token before the new end must still be there
        keep = pages_for(length, self.pool.page_size)
        self._release(self.pages[keep:])
        del self.pages[keep:]
        self.length = length

    def remove(self) -> None:
        """Give every page back."""
        self._release(self.pages)
        self.pages.clear()
        self.length = 0

    def drop_before(self, position: int) -> int:
        """Drop whole leading pages that end at or before `position` (every layer's window has left them), sinks
        excepted. Returns how many pages that released."""
        last = min(position, self.length) // self.pool.page_size
        dropped = 0
        for index in range(self._sink_pages, last):
            if self.pages[index] is not None:
                self._release([self.pages[index]])
                self.pages[index] = None
                dropped += 1
        return dropped

    def _release(self, pages: list[int | None]) -> None:
        for page in pages:
            if page is not None:
                self.pool.release(page)

    def _check_gap(self, start: int, stop: int) -> None:
        size = self.pool.page_size
        for index in range(max(start, 0) // size, min(pages_for(stop, size), len(self.pages))):
            if self.pages[index] is None:
                raise GapError(f"KV positions `{start}..{stop}` touch a page that the sliding window dropped")

    def _own(self, start: int, stop: int) -> None:
        """Make every page of [start, stop) exist and be ours alone; all or nothing."""
        size = self.pool.page_size
        fresh: dict[int, int] = {}
        try:
            for index in range(start // size, pages_for(stop, size)):
                page = self.pages[index] if index < len(self.pages) else None
                if page is None:
                    fresh[index] = self.pool.allocate()
                elif self.pool.refcount(page) > 1:
                    fresh[index] = self.pool.copy_page(page)
        except BaseException:
            for page in fresh.values():
                self.pool.release(page)
            raise
        for index, page in fresh.items():
            if index < len(self.pages):
                self._release([self.pages[index]])
                self.pages[index] = page
            else:
                self.pages.append(page)

    def _lines(self, start: int, rows: KvRows, *, into_pages: bool) -> np.ndarray:
        """The copy table between `rows` and the slots of [start, start+n): one line per component and page."""
        size, stop = self.pool.page_size, start + rows[0].shape[1]
        index = np.arange(start // size, pages_for(stop, size))
        first, last = np.maximum(start, index * size), np.minimum(stop, (index + 1) * size)
        bases = self.pool.addresses([page for page in self.pages[index[0] : index[-1] + 1] if page is not None])
        row_bytes, offsets = self.pool.row_bytes, np.array(self.pool.component_offsets)
        strides = np.array([array.strides[:2] for array in rows], np.int64)
        outside = np.array([address(array) for array in rows])[:, None] + np.outer(strides[:, 1], first - start)
        slots = bases + offsets[:, None] + np.outer(row_bytes, first - index * size)
        return copy_lines(
            slots, outside, last - first, self.pool.num_heads, strides[:, 1], (size * row_bytes, strides[:, 0]), row_bytes,
            into_pages=into_pages,
        )  # fmt: skip
