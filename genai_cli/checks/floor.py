"""The oracle's own noise: how far its logits move under variations that are all equally valid.

Running it twice measures zero. So: decode against prefill, graph optimisation off, and one element of one weight (or of
the embedding output) changed by one ulp, eight times. Without the last, correct engines fail: one ulp in one norm
weight was seen to move logits by up to 24 x what decode against prefill does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath

import numpy as np

from genai_cli.checks import compare
from genai_cli.checks.limits import KAPPA, ROUNDOFF_NMSE
from genai_cli.checks.oracles import Change, Oracle
from genai_cli.checks.paths import Path, Run, prefilled
from genai_cli.graph.cuts import EmbeddingOutput, embedding_output
from genai_cli.report.parity import Floor, Perturbation, Probe
from genai_cli.runners.base import Runner

METHOD = "5"  # part of the cache key: counts changes of how floor and liveness are measured
NUM_NUDGES = 8
NUM_EMBEDDING_NUDGES = 2  # of them on the embedding output, the rest on weights
Progress = Callable[[str], None]
Ask = Callable[[Runner, Path], Run]


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


def variations(oracle: Oracle, seed: int) -> list[tuple[str, Change, str]]:
    """Every valid variation but decoding, which the caller has already: name, change, optimisation level."""
    unchanged: Change = lambda twin: twin  # noqa: E731  # the same graph, opened at another level
    other = "off" if oracle.level != "off" else "all"
    return [
        (f"graph optimisation {other}", unchanged, other),
        *((name, change, oracle.level) for name, change in nudges(oracle, seed)),
    ]


def measure(
    oracle: Oracle, paths: Sequence[Path], references: Sequence[Run], decoded: Sequence[Run], seed: int,
    progress: Progress, kappa: float = KAPPA, key: str = "", folder: FilePath | None = None, ask: Ask = prefilled,
) -> Floor:  # fmt: skip
    """The floor over all inputs: the worst of all variations. What was measured before an interrupt is in `folder`;
    `ask` is how the references were asked, and where that was step by step, decoding is no variation."""
    found: dict[str, Noise] = {}
    if ask is prefilled:
        found["token by token instead of one prefill"] = worst_of(list(map(noise, decoded, references)))
    kept = _kept(folder, key)
    for name, change, level in variations(oracle, seed):
        progress(f"floor: {name}")
        if name not in kept:
            kept[name] = _moved(oracle, change, level, paths, references, ask)
            _write(folder, f"floor-{key}.part.json", {n: asdict(entry) for n, entry in kept.items()})
        found[name] = kept[name]
    return floor_of(found, kappa, key)


def _moved(
    oracle: Oracle, change: Change, level: str, paths: Sequence[Path], references: Sequence[Run], ask: Ask
) -> Noise:
    runner = oracle.open(change, optimization=level)
    try:
        return worst_of([noise(ask(runner, path), run) for path, run in zip(paths, references, strict=True)])
    finally:
        runner.close()


def _kept(folder: FilePath | None, key: str) -> dict[str, Noise]:
    """Variations of a measurement that was interrupted; a damaged file counts as none."""
    if folder is None:
        return {}
    try:
        data = json.loads((folder / f"floor-{key}.part.json").read_text())
        return {name: Noise(**entry) for name, entry in data.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


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


@dataclass(frozen=True)
class Kept:
    """One measurement in the cache: the floor, the liveness probes made with it, and the ids of the oracle's paths."""

    floor: Floor
    probes: list[Probe]
    paths: list[list[int]]


def load(folder: FilePath | None, key: str, kappa: float) -> Kept | None:
    """What `save` kept, or None. A damaged file counts as none."""
    if folder is None:
        return None
    try:
        data = json.loads((folder / f"floor-{key}.json").read_text())
        perturbations = [Perturbation(**entry) for entry in data["perturbations"]]
        used = {name: float(value) for name, value in data["used"].items()}
        probes = [Probe(**entry) for entry in data["probes"]]
        paths = [[int(token) for token in ids] for ids in data["paths"]]
        return Kept(Floor(perturbations, used, kappa, cached=True, key=key), probes, paths)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save(folder: FilePath | None, floor: Floor, probes: Sequence[Probe], paths: Sequence[Path]) -> None:
    """Keep a floor for the next run. A folder that cannot be written to costs time, not the verdict."""
    data = {
        "used": floor.used, "perturbations": [asdict(entry) for entry in floor.perturbations],
        "probes": [asdict(probe) for probe in probes], "paths": [path.ids.tolist() for path in paths],
    }  # fmt: skip
    _write(folder, f"floor-{floor.key}.json", data)
    if folder is not None:
        (folder / f"floor-{floor.key}.part.json").unlink(missing_ok=True)


def _write(folder: FilePath | None, name: str, data: object) -> None:
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{name}.partial"
        partial.write_text(json.dumps(data))
        partial.replace(folder / name)
    except OSError:
        return


def pair_floor(floor: Floor, reference: np.ndarray) -> float:
    """The floor in logits: the most that any logit moved, at least one ulp of the largest."""
    return max(floor.used["max_abs"], compare.ulp_size(max(float(reference.max()), -float(reference.min()))))
