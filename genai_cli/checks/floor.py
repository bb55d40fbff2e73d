"""The oracle's own noise: how far its logits move under variations that are all equally valid.

Running it twice measures zero. So: decode against prefill, graph optimisation off, and one element of one weight (or of
the embedding output) changed by one ulp, eight times. Without the last, correct engines fail: one ulp in one norm
weight was seen to move logits by up to 24 x what decode against prefill does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath

import numpy as np

from genai_cli.checks import compare
from genai_cli.checks.limits import KAPPA, ROUNDOFF_NMSE
from genai_cli.checks.oracles import Change, Oracle
from genai_cli.checks.paths import Path, Run, prefilled
from genai_cli.graph.cuts import EmbeddingOutput, embedding_output
from genai_cli.report.parity import Floor, Perturbation, Probe

METHOD = "2"  # part of the cache key: counts changes of how floor and liveness are measured
NUM_NUDGES = 8
NUM_EMBEDDING_NUDGES = 2  # of them on the embedding output, the rest on weights
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Noise:
    """How far one run moved from the reference."""

    max_abs: float
    pair: float
    nmse: float
    kv_nmse: float
    flips: int
    n: int


def noise(run: Run, reference: Run) -> Noise:
    """Worst row of the logits and worst component of the KV."""
    rows = compare.row_metrics(run.logits, reference.logits)
    kv = [compare.nmse(a, b) for a, b in zip(run.caches, reference.caches, strict=True) if b.size]
    return Noise(
        float(rows.max_abs.max()), float(rows.pair.max()), float(rows.nmse.max()), max(kv, default=0.0),
        len(rows.flips), len(rows.nmse),
    )  # fmt: skip


def worst_of(parts: Sequence[Noise]) -> Noise:
    """Over several inputs."""
    return Noise(
        max(p.max_abs for p in parts), max(p.pair for p in parts), max(p.nmse for p in parts),
        max(p.kv_nmse for p in parts), sum(p.flips for p in parts), sum(p.n for p in parts),
    )  # fmt: skip


def nudges(oracle: Oracle, seed: int, count: int = NUM_NUDGES) -> list[tuple[str, Change]]:
    """One-ulp changes of the oracle: the embedding output first, then the largest element of weights drawn by `seed`."""
    twin = oracle.twin()
    rng = np.random.default_rng(seed)
    embedding = embedding_output(twin)
    changes: list[tuple[str, Change]] = []
    if embedding is not None:
        changes += [_embedding_nudge(embedding, draw) for draw in rng.integers(0, 2**31, NUM_EMBEDDING_NUDGES).tolist()]
    names = twin.nudgeable()
    for pick in rng.permutation(len(names))[: count - len(changes)]:
        changes.append(_weight_nudge(names[int(pick)], int(np.abs(twin.weight(names[int(pick)])).argmax())))
    return changes


def _embedding_nudge(embedding: EmbeddingOutput, draw: int) -> tuple[str, Change]:
    """Half of the columns: one alone understates what a kernel that sums in another order does to all of them."""
    name, width, dtype = embedding.name, embedding.width, embedding.dtype
    return f"1 ulp on half of `{name}` (draw {draw})", lambda twin: twin.nudge_value(name, width, dtype, draw)


def _weight_nudge(name: str, index: int) -> tuple[str, Change]:
    return f"1 ulp on `{name}`[{index}]", lambda twin: twin.nudge(name, index)


def variations(oracle: Oracle, paths: Sequence[Path], seed: int) -> Iterator[tuple[str, list[Run]]]:
    """Every valid variation and its runs; the caller has the decode run already."""
    unoptimised: Change = lambda twin: twin  # noqa: E731  # the same graph, opened without optimisation
    for name, change, level in [
        ("graph optimisation off", unoptimised, "off"),
        *((name, change, "all") for name, change in nudges(oracle, seed)),
    ]:
        runner = oracle.open(change, optimization=level)
        try:
            yield name, [prefilled(runner, path) for path in paths]
        finally:
            runner.close()


def measure(
    oracle: Oracle, paths: Sequence[Path], references: Sequence[Run], decoded: Sequence[Run], seed: int,
    progress: Progress, kappa: float = KAPPA, key: str = "",
) -> Floor:  # fmt: skip
    """The floor over all inputs: the worst of all variations."""
    found = {"token by token instead of one prefill": worst_of(list(map(noise, decoded, references)))}
    for name, runs in variations(oracle, paths, seed):
        progress(f"floor: {name}")
        found[name] = worst_of(list(map(noise, runs, references)))
    return floor_of(found, kappa, key)


def floor_of(found: dict[str, Noise], kappa: float, key: str) -> Floor:
    """A floor is never below one rounding of the logits themselves."""
    perturbations = [
        Perturbation(name, n.max_abs == 0, n.max_abs, n.nmse, n.flips, n.n, n.pair, n.kv_nmse)
        for name, n in found.items()
    ]
    worst = worst_of(list(found.values()))
    used = {
        "nmse": max(worst.nmse, ROUNDOFF_NMSE), "pair": worst.pair, "max_abs": worst.max_abs,
        "kv_nmse": max(worst.kv_nmse, ROUNDOFF_NMSE),
    }  # fmt: skip
    return Floor(perturbations, used, kappa, cached=False, key=key)


def cache_key(parts: Sequence[str]) -> str:
    """Artifact, oracle kind, ORT version, CPU features, ids, seed: whatever the floor depends on."""
    return hashlib.sha256("\0".join([METHOD, *parts]).encode()).hexdigest()[:32]


def load(folder: FilePath | None, key: str, kappa: float) -> tuple[Floor, list[Probe]] | None:
    """A floor and the liveness probes measured with it, or None. A damaged file counts as none."""
    if folder is None:
        return None
    try:
        data = json.loads((folder / f"floor-{key}.json").read_text())
        perturbations = [Perturbation(**entry) for entry in data["perturbations"]]
        used = {name: float(value) for name, value in data["used"].items()}
        return Floor(perturbations, used, kappa, cached=True, key=key), [Probe(**entry) for entry in data["probes"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save(folder: FilePath | None, floor: Floor, probes: Sequence[Probe]) -> None:
    """Keep a floor for the next run. A folder that cannot be written to costs time, not the verdict."""
    if folder is None:
        return
    perturbations = [asdict(entry) for entry in floor.perturbations]
    text = json.dumps({"used": floor.used, "perturbations": perturbations, "probes": [asdict(p) for p in probes]})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"floor-{floor.key}.partial"
        partial.write_text(text)
        partial.replace(folder / f"floor-{floor.key}.json")
    except OSError:
        return


def pair_floor(floor: Floor, reference: np.ndarray) -> float:
    """The floor in logits: the most that any logit moved, at least one ulp of the largest."""
    return max(floor.used["max_abs"], compare.ulp_size(float(np.abs(reference).max())))
