"""Pages: the bounded store that holds published prefixes and the mirror of running sequences.

One page is `page_size` token slots for all layers, K and V together, in the model's own dtype. Component
c = 2 * layer_index + (kind is value) starts at the sum of the earlier ones; within it the axes are head, slot, dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from genai_cli.errors import ExitCode, GenaiError
from genai_cli.kv.layout import KvLayout

DEFAULT_PAGE_SIZE = 16


class PoolExhausted(GenaiError):
    """No free page within the bound. The loop goes on without mirroring."""


class PageError(GenaiError):
    """A page was used against the rules (double free, write past the end): a bug in the caller, never in the model."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=ExitCode.INTERNAL)


@dataclass
class PageCounters:
    """Events since the pool was made. `allocations - frees` is the number of pages in use."""

    allocations: int = 0
    failures: int = 0
    frees: int = 0
    evictions: int = 0
    copies: int = 0  # copy-on-write


class PagePool:
    """At most `num_pages` pages, ever. Memory is taken when a page is first needed and kept until the pool goes.

    A new page holds whatever its last owner left: readers must never look past a sequence's length.
    """

    def __init__(self, layout: KvLayout, page_size: int, num_pages: int) -> None:
        if page_size < 1 or num_pages < 0:
            raise GenaiError(f"page size `{page_size}` and page count `{num_pages}` must be positive")
        self.layout = layout
        self.page_size = page_size
        self.num_pages = num_pages
        self.counters = PageCounters()
        sizes = [page_size * component.bytes_per_token for component in layout.components]
        self.component_offsets = [sum(sizes[:c]) for c in range(len(sizes))]  # bytes from a page's start
        self.num_heads = np.array([component.num_heads for component in layout.components], np.int64)
        self.row_bytes = np.array([component.row_bytes for component in layout.components], np.int64)
        self._buffers: list[np.ndarray] = []
        self._views: list[list[np.ndarray]] = []
        self._refs: list[int] = []
        self._free: list[int] = []

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.layout.bytes_per_token

    @property
    def pages_used(self) -> int:
        return len(self._refs) - len(self._free)

    @property
    def pages_shared(self) -> int:
        return sum(refs > 1 for refs in self._refs)

    @property
    def pages_minted(self) -> int:
        """Pages that ever got memory; never more than the bound."""
        return len(self._buffers)

    @property
    def pages_available(self) -> int:
        return self.num_pages - self.pages_used

    def allocate(self) -> int:
        """A page with refcount 1 and undefined contents. Raises PoolExhausted at the bound."""
        if self._free:
            page = self._free.pop()
        elif len(self._buffers) < self.num_pages:
            page = self._mint()
        else:
            self.counters.failures += 1
            raise PoolExhausted(
                f"all `{self.num_pages}` KV pages are in use", hint="raise --kv-pages, or go on without prefix reuse"
            )
        self._refs[page] = 1
        self.counters.allocations += 1
        return page

    def _mint(self) -> int:
        buffer = np.empty(self.page_bytes, np.uint8)
        self._buffers.append(buffer)
        self._views.append(page_views(self.layout, self.page_size, buffer))
        self._refs.append(0)
        return len(self._buffers) - 1

    def retain(self, page: int) -> None:
        """One more owner."""
        self._check_live(page)
        self._refs[page] += 1

    def release(self, page: int) -> bool:
        """One owner fewer; True when that freed the page. Releasing a free page is an error."""
        self._check_live(page)
        self._refs[page] -= 1
        if self._refs[page]:
            return False
        self._free.append(page)
        self.counters.frees += 1
        return True

    def refcount(self, page: int) -> int:
        return self._refs[page] if 0 <= page < len(self._refs) else 0

    def views(self, page: int) -> list[np.ndarray]:
        """One array [H_kv, page_size, D] per component, in layout order, on the page's memory."""
        self._check_live(page)
        return self._views[page]

    def addresses(self, pages: list[int]) -> np.ndarray:
        """Where live pages begin, int64 [k]."""
        for page in pages:
            self._check_live(page)
        return np.array([self._buffers[page].__array_interface__["data"][0] for page in pages], np.int64)

    def copy_page(self, page: int) -> int:
        """A new page (refcount 1) with the same bytes: the copy of copy-on-write."""
        self._check_live(page)
        new = self.allocate()
        self._buffers[new][:] = self._buffers[page]
        self.counters.copies += 1
        return new

    def fill_free(self, byte: int) -> int:
        """Overwrite the bytes of every free page (a test of who reads past a length); returns how many there were."""
        for page in self._free:
            self._buffers[page][:] = byte
        return len(self._free)

    def free_pages(self) -> tuple[int, ...]:
        """Free pages that have memory, for forensics: a stale row may come from one of them."""
        return tuple(self._free)

    def freed_views(self, page: int) -> list[np.ndarray]:
        """What the last owner of a free page left in it; for forensics and the tests' poison only."""
        return self._views[page]

    def _check_live(self, page: int) -> None:
        if self.refcount(page) < 1:
            raise PageError(f"page `{page}` is not allocated (freed twice, or used after it was freed)")


def page_views(layout: KvLayout, page_size: int, buffer: np.ndarray) -> list[np.ndarray]:
    """The components of one page buffer (uint8 [page_bytes]) as arrays [H_kv, page_size, D]."""
    views = []
    offset = 0
    for component in layout.components:
        size = page_size * component.bytes_per_token
        flat = buffer[offset : offset + size].view(component.dtype)
        views.append(flat.reshape(component.num_heads, page_size, component.head_dim))
        offset += size
    return views


def pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


def default_num_pages(layout: KvLayout, page_size: int, context_len: int, available_bytes: int) -> int:
    """10 % of the memory available, at least one context."""
    page_bytes = page_size * layout.bytes_per_token
    return max(available_bytes // 10 // page_bytes, pages_for(context_len, page_size))
