"""Named micro-benchmarks: what they are, how they are timed, and what was found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch

from genai_cli.bench.machine import Ceilings
from genai_cli.bench.report import Spread, spread
from genai_cli.errors import GenaiError

SCHEMA = "genai.micro/1"
TRIALS = 9
SETTLE_S = 0.02  # before a trial, so that the other engine's spinning threads are asleep; then one untimed call
LEAST_S = 1e-3  # of one trial: shorter ones are repeated inside it
Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One thing to time. `native` does it `copies` times; `peer` is ORT doing the same, or `peer_reason` says why not."""

    name: str
    shape: str
    native: Call
    copies: int = 1
    num_bytes: int = 0  # of one copy
    num_ops: int = 0
    num_items: int = 0  # tokens, pages: whatever `items` names
    items: str = ""
    peer: Call | None = None
    peer_reason: str = ""


@dataclass(frozen=True)
class Found:
    """Seconds of one copy, and rates of its median. `ratio` is ORT's time over native's, of neighbouring trials."""

    name: str
    shape: str
    native_s: Spread
    gb_s: float | None
    gop_s: float | None
    items_s: float | None
    items: str
    ort_s: Spread | None
    ort_reason: str
    ratio: Spread | None


@dataclass(frozen=True)
class MicroReport:
    """The document of `--micro --json`."""

    model: str
    threads: int
    isa: str
    ceilings: Ceilings
    results: list[Found]
    others_cpu: float | None = None
    schema: str = field(default=SCHEMA)


def chosen(cases: Iterable[Callable[[], Case]], names: Iterable[str], pattern: str) -> Iterator[Case]:
    """Cases whose name matches, made only now: weights are copied for each. GenaiError (2) when none does."""
    known = list(names)
    if not any(fnmatch(name, pattern) for name in known):
        listed = ", ".join(dict.fromkeys(known))
        raise GenaiError(f"--only `{pattern}` names no micro-benchmark; there are {listed}", hint="--only '*'")
    return (make() for name, make in zip(known, cases, strict=True) if fnmatch(name, pattern))


def measure(
    case: Case, clock: Callable[[], float] = time.perf_counter, settle: Callable[[float], None] = time.sleep
) -> Found:
    """Warm up, then native and ORT in turn."""
    sides = [case.native, *([case.peer] if case.peer else [])]
    repeats = [_repeats(side, clock) for side in sides]
    spent: list[list[float]] = [[] for _ in sides]
    for trial in range(TRIALS):
        for index in range(len(sides)) if trial % 2 == 0 else reversed(range(len(sides))):
            settle(SETTLE_S)
            sides[index]()
            spent[index].append(_timed(sides[index], repeats[index], clock) / case.copies)
    native = spread(spent[0])
    ort = spread(spent[1]) if case.peer else None
    ratio = spread([b / a for a, b in zip(*spent, strict=True)]) if case.peer else None
    return Found(
        case.name, case.shape, native,
        case.num_bytes / native.median / 1e9 if case.num_bytes else None,
        case.num_ops / native.median / 1e9 if case.num_ops else None,
        case.num_items / native.median if case.num_items else None,
        case.items, ort, case.peer_reason, ratio,
    )  # fmt: skip


def _repeats(call: Call, clock: Callable[[], float]) -> int:
    call()
    once = _timed(call, 1, clock)
    return max(1, int(LEAST_S / once)) if once > 0 else 1000


def _timed(call: Call, repeats: int, clock: Callable[[], float]) -> float:
    started = clock()
    for _ in range(repeats):
        call()
    return (clock() - started) / repeats
