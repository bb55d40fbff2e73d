"""Energy as the processor's own counters tell it (RAPL), in joules since some moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


@dataclass
class Counter:
    """One package's counter, in microjoules; it starts again from 0 at `range_uj`."""

    path: Path
    range_uj: int
    last_uj: int
    total_uj: int = 0

    def read(self) -> int:
        """Microjoules since the counter was opened; exact while it is read more often than it wraps (minutes)."""
        now = int(self.path.read_text())
        self.total_uj += (now - self.last_uj) % self.range_uj
        self.last_uj = now
        return self.total_uj


def open_joules(root: Path = POWERCAP) -> tuple[Callable[[], float] | None, str]:
    """Joules of all packages since now, and what is read; None and the reason where nothing can be read."""
    counters: list[Counter] = []
    for folder in sorted(root.glob("*-rapl:*")) if root.is_dir() else []:
        if folder.name.count(":") != 1:  # the parts of a package are in it already
            continue
        try:
            most, now = (int((folder / name).read_text()) for name in ("max_energy_range_uj", "energy_uj"))
        except (OSError, ValueError) as error:
            return None, f"not available: `{folder}` cannot be read ({error})"
        counters.append(Counter(folder / "energy_uj", most + 1, now))
    if not counters:
        return None, f"not available: no energy counter under `{root}`"
    return lambda: sum(counter.read() for counter in counters) / 1e6, f"RAPL of {len(counters)} packages"
