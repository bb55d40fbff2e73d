"""How much of the machine others used while something was measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

STAT = Path("/proc/stat")
IDLE = (3, 4)  # of the fields behind `cpu`: idle and waiting for a disk
NUM_FIELDS = 8  # what virtual machines got is counted as user time already


def busy_s(stat: Path = STAT) -> float | None:
    """Seconds that all cores together were busy since the system started; None where it does not tell."""
    if not stat.exists():
        return None
    fields = [int(word) for word in stat.read_text().split("\n", 1)[0].split()[1 : 1 + NUM_FIELDS]]
    return sum(value for i, value in enumerate(fields) if i not in IDLE) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """Seconds of this process and of its children that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


@dataclass
class Crowd:
    """From when it is made."""

    busy: Callable[[], float | None] = busy_s
    own: Callable[[], float] = own_s
    clock: Callable[[], float] = time.perf_counter
    cores: int = os.cpu_count() or 1
    _started: tuple[float | None, float, float] = field(init=False)

    def __post_init__(self) -> None:
        self._started = (self.busy(), self.own(), self.clock())

    def share(self) -> float | None:
        """Of all cores' time since, what went to other processes: 0 to 1."""
        busy, own, clock = self.busy(), self.own(), self.clock()
        if busy is None or self._started[0] is None or clock <= self._started[2]:
            return None
        others = (busy - self._started[0]) - (own - self._started[1])
        return min(1.0, max(0.0, others / (clock - self._started[2]) / self.cores))
