"""An engine in a process of its own: the first token of a cold start, and whose memory it is."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from genai_cli.errors import GenaiError

if TYPE_CHECKING:
    from genai_cli.bench.trials import Timed

STATUS, MAPS = Path("/proc/self/status"), Path("/proc/self/smaps")
STEPS = 4  # behind the first token, before memory is read
MIB = 2**20


@dataclass(frozen=True)
class Start:
    """What a fresh process is asked to run. The modules above are all it imports before the clock is running."""

    engine: str  # "native", "native exact", "ort", "onnxruntime-genai"
    model: Path
    threads: int
    isa: str | None
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Memory:
    """Bytes. `mapped`: pages of the model's files that are resident, shared with every process that maps them.
    `private`: anonymous memory since before the model was opened: repacked weights, KV, activations."""

    peak_rss: int
    mapped: int
    private: int


@dataclass(frozen=True)
class ProcessTrial:
    """One start: seconds from before the process existed to its first token."""

    engine: str
    first_token_s: float
    memory: Memory | None  # None where the system does not tell


def start(what: Start) -> ProcessTrial:
    """Run it. GenaiError with the child's own words, or when it died without any."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    started = time.perf_counter()
    child = context.Process(target=_child, args=(theirs, what), daemon=True)
    child.start()
    theirs.close()
    try:
        if refused := ours.recv():
            raise GenaiError(refused)
        seconds = time.perf_counter() - started
        memory: Memory | None = ours.recv()
    except EOFError:
        raise GenaiError(f"{what.engine}: the process ended without a first token") from None
    finally:
        child.join()
        ours.close()
    return ProcessTrial(what.engine, seconds, memory)


def _child(pipe: Connection, what: Start) -> None:
    try:
        before = anonymous_bytes()
        runner = _opened(what)
        token = _step(runner, what.ids)
        pipe.send("")
    except GenaiError as error:
        pipe.send(error.message)
        return
    for _ in range(STEPS):
        token = _step(runner, (token,))
    pipe.send(memory_of(what.model, before))


def _opened(what: Start) -> Timed:
    from genai_cli.bench import peer

    if what.engine == peer.NAME:
        return peer.PeerRunner(what.model, what.threads, len(what.ids) + STEPS + 1)
    from genai_cli.model import OpenOptions, open_model

    backend = "ort" if what.engine == "ort" else "native"
    exact = what.engine == "native exact"
    options = OpenOptions(backend, threads=what.threads, isa=what.isa, exact=exact, prefix_cache=False)  # type: ignore[arg-type]
    return open_model(what.model, options).runner


def _step(runner: Timed, ids: Sequence[int]) -> int:
    import numpy as np

    return int(runner.step(np.array(ids, np.int64))[-1].argmax())


def anonymous_bytes(status: Path = STATUS) -> int | None:
    """Resident memory that no file backs; None where the system does not tell."""
    return _status(status).get("RssAnon")


def _status(status: Path) -> dict[str, int]:
    if not status.exists():
        return {}
    lines = (line.split() for line in status.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}


def memory_of(model: Path, before: int | None, status: Path = STATUS, maps: Path = MAPS) -> Memory | None:
    """Of this process now; `before` is what was anonymous before the model was opened."""
    gc.collect()
    now = _status(status)
    if before is None or "RssAnon" not in now or "VmHWM" not in now:
        return None
    return Memory(now["VmHWM"], mapped_bytes(model, maps), now["RssAnon"] - before)


def mapped_bytes(model: Path, maps: Path = MAPS) -> int:
    """Resident pages of files of the model's folder."""
    folder, inside, total = str(model.resolve() if model.is_dir() else model.resolve().parent), False, 0
    for line in maps.read_text().splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head and not head.endswith(":"):
            inside = line.partition("/")[2] != "" and ("/" + line.partition("/")[2]).startswith(folder + "/")
        elif inside and head == "Rss:":
            total += int(rest.split()[0]) * 1024
    return total
