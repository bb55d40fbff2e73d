"""The shortest prompt that still fails in the same way.

A reduction counts only if the failure has the same signature (class and layer); anything else is another failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Fails = Callable[[Sequence[int]], bool]
MAX_RUNS = 200  # predicate calls; the best found so far is kept


@dataclass(frozen=True)
class Minimised:
    """What is left, and what it cost."""

    ids: list[int]
    before: int
    runs: int
    complete: bool  # False: stopped at MAX_RUNS


class _Budget:
    def __init__(self, fails: Fails, runs: int) -> None:
        self.fails, self.left, self.used = fails, runs, 0
        self.seen: dict[tuple[int, ...], bool] = {}

    def __call__(self, ids: Sequence[int]) -> bool:
        key = tuple(ids)
        if key not in self.seen:
            if self.left == 0:
                return False
            self.left -= 1
            self.used += 1
            self.seen[key] = bool(ids) and self.fails(ids)
        return self.seen[key]


def minimise(ids: Sequence[int], fails: Fails, max_runs: int = MAX_RUNS) -> Minimised:
    """ddmin over ids (Zeller and Hildebrandt 2002): 1-minimal unless the budget ends. `fails(ids)` must hold."""
    budget = _Budget(fails, max_runs)
    if not budget(ids):
        raise ValueError("the failure to minimise does not show on the whole input")
    current, parts = list(ids), 2
    while len(current) > 1 and budget.left:
        reduced = _reduce(current, parts, budget)
        if reduced is not None:
            current, parts = reduced, max(parts - 1, 2)
        elif parts >= len(current):
            break
        else:
            parts = min(2 * parts, len(current))
    return Minimised(current, len(ids), budget.used, budget.left > 0)


def _reduce(current: list[int], parts: int, fails: Fails) -> list[int] | None:
    """A chunk that fails alone, or everything but one chunk."""
    chunks = _chunks(current, parts)
    for chunk in chunks:
        if len(chunk) < len(current) and fails(chunk):
            return chunk
    for skipped in range(len(chunks)):
        rest = [token for index, chunk in enumerate(chunks) if index != skipped for token in chunk]
        if len(rest) < len(current) and fails(rest):
            return rest
    return None


def _chunks(items: list[int], parts: int) -> list[list[int]]:
    size, extra = divmod(len(items), parts)
    bounds = [index * size + min(index, extra) for index in range(parts + 1)]
    return [items[a:b] for a, b in pairwise(bounds) if b > a]
