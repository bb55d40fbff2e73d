"""Published prefixes: a tree of pages, looked up by token ids that are compared one by one on every hit.

A node is one page of tokens after its parent's. Roots are identities: what else the KV depends on (images, adapters; the
model itself is fixed, a cache belongs to one loaded decoder).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from genai_cli.kv.pages import PagePool

State = list[np.ndarray]


def identity(inputs: Mapping[str, np.ndarray | bytes]) -> bytes:
    """blake2b over external inputs, sorted by name, every part tagged and length-prefixed: ("a", "bc") is not ("ab", "c").

    Content only: never a path, a name of a file, or an address."""
    digest = hashlib.blake2b(digest_size=32)
    for name in sorted(inputs):
        value = inputs[name]
        if isinstance(value, np.ndarray):
            parts = [
                b"array",
                str(value.dtype).encode(),
                repr(value.shape).encode(),
                np.ascontiguousarray(value).tobytes(),
            ]
        else:
            parts = [b"bytes", value]
        for part in [name.encode(), *parts]:
            digest.update(struct.pack("<Q", len(part)))
            digest.update(part)
    return digest.digest()


@dataclass
class Node:
    """`tokens` (at most a page) that follow the parent's; `page` holds their KV; `state` is the recurrent state after."""

    tokens: tuple[int, ...]
    page: int
    parent: Node | None
    last_used: int = 0
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    state: State | None = None


@dataclass(frozen=True)
class Match:
    """A stored prefix of `length` tokens: the pages that hold it (the last one perhaps in part) and the state at its end.

    `stateless`: up to where whole pages match, though no state is stored there; 0 for decoders without states."""

    length: int
    pages: tuple[int, ...] = ()
    state: State | None = None
    nodes: tuple[Node, ...] = field(default=(), repr=False)
    stateless: int = 0


class PrefixCache:
    """The tree. It owns one pool reference on every node's page."""

    def __init__(self, pool: PagePool, *, needs_state: bool = False) -> None:
        self.pool, self.needs_state = pool, needs_state
        self._roots: dict[bytes, Node] = {}
        self._clock = 0

    def lookup(self, ids: Sequence[int], key: bytes = b"") -> Match:
        """The deepest stored prefix, at most len(ids) - 1 tokens: one token is always fed, for its logits.

        Changes nothing: no refcount, no order of use."""
        limit = len(ids) - 1
        node = self._roots.get(key)
        path: list[Node] = []
        matched, whole, states = 0, 0, Match(0)
        while node is not None and matched < limit:
            child, common = self._best_child(node, ids, matched)
            if child is None or common == 0:
                break
            path.append(child)
            matched += common
            if child.state is not None and common == len(child.tokens) and matched <= limit:
                states = self._match(path, matched, child.state)
            node = child if common == len(child.tokens) == self.pool.page_size else None
            whole = matched if node is not None and matched <= limit else whole
        return replace(states, stateless=whole) if self.needs_state else self._match(path, min(matched, limit), None)

    def _match(self, path: list[Node], length: int, state: State | None) -> Match:
        used = path[: -(-length // self.pool.page_size)]
        return Match(length, tuple(node.page for node in used), state, tuple(used))

    @staticmethod
    def _best_child(node: Node, ids: Sequence[int], start: int) -> tuple[Node | None, int]:
        best, longest = None, 0
        for child in node.children.values():
            common = 0
            for token, wanted in zip(child.tokens, ids[start:], strict=False):
                if token != wanted:
                    break
                common += 1
            if common > longest:
                best, longest = child, common
        return best, longest

    def touch(self, match: Match) -> None:
        """Mark a match as used, for the order of eviction."""
        self._clock += 1
        for node in match.nodes:
            node.last_used = self._clock

    def insert(
        self, ids: Sequence[int], pages: Sequence[int], states: Mapping[int, State] | None = None, key: bytes = b""
    ) -> int:
        """Publish `ids`, whose KV lies in `pages`; returns how many pages are new here. A page the tree already has
        (same tokens) is kept, the given one stays its owner's. `states` are recurrent states by position."""
        states = states or {}
        self._clock += 1
        node = self._roots.setdefault(key, Node((), -1, None))
        added, size = 0, self.pool.page_size
        for index, page in enumerate(pages):
            tokens = tuple(int(token) for token in ids[index * size : (index + 1) * size])
            if not tokens:
                break
            child = node.children.get(tokens)
            if child is None:
                self.pool.retain(page)
                child = node.children[tokens] = Node(tokens, page, node)
                added += 1
            child.last_used = self._clock
            end = index * size + len(tokens)
            child.state = states.get(end, child.state)
            node = child
        return added

    def evict(self, num_pages: int) -> int:
        """Free `num_pages` pages, least recently used leaves first; returns how many were freed (fewer: all the rest is
        in use). A page that a sequence shares stays: dropping it would free nothing and lose the prefix."""
        freed = 0
        while freed < num_pages:
            leaves = [node for node in self._nodes() if not node.children]
            free_now = [node for node in leaves if self.pool.refcount(node.page) == 1]
            if not free_now:
                break
            oldest = min(free_now, key=lambda node: node.last_used)
            freed += self._remove(oldest)
        return freed

    def clear(self) -> None:
        """Give every page back."""
        for node in list(self._nodes()):
            self.pool.release(node.page)
        self._roots.clear()

    @property
    def num_pages(self) -> int:
        """Pages the tree holds."""
        return sum(1 for _ in self._nodes())

    def fingerprint(self) -> bytes:
        """A hash of tokens, pages and shape: equal before and after anything that must not change the tree."""
        digest = hashlib.blake2b(digest_size=16)
        for node in self._nodes():
            digest.update(repr((node.tokens, node.page, node.last_used, len(node.children))).encode())
        return digest.digest()

    def _remove(self, node: Node) -> int:
        assert node.parent is not None  # roots hold no page and are never leaves of `_nodes`
        del node.parent.children[node.tokens]
        freed = int(self.pool.release(node.page))
        self.pool.counters.evictions += freed
        return freed

    def _nodes(self) -> Iterator[Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
