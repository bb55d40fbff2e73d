"""ΔNLL of a text long enough to say something about the mean: the mode the user runs against the oracle.

The text lies beside this module, in our own words. Where the context is shorter it is read in windows of that length.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from genai_cli.checks import compare
from genai_cli.checks.floor import cache_key
from genai_cli.runners.base import Runner

SCORED_TOKENS = 1024  # beyond the 1,000 that a statement about the mean needs; a few of them may be padding
CHUNK = 256  # tokens a step: all logits of a long text at once would be hundreds of megabytes


def text() -> str:
    """About a thousand words."""
    return (resources.files("genai_cli.checks") / "likelihood.txt").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Text:
    """Ids of a text; not `natural` where the package has no tokenizer that knows it: ids drawn at random then."""

    ids: np.ndarray
    natural: bool = True


@dataclass(frozen=True)
class Likelihood:
    """Windows of ids, and what the oracle gave: NLL f64 of every id but the first of each window."""

    windows: tuple[np.ndarray, ...]
    nll: np.ndarray
    natural: bool


def windows(ids: np.ndarray, context_len: int | None) -> tuple[np.ndarray, ...]:
    """Consecutive windows of `ids` that fit, until SCORED_TOKENS are scored."""
    length = min(SCORED_TOKENS, context_len or SCORED_TOKENS) + 1  # the last id is a target only
    made: list[np.ndarray] = []
    left, start = SCORED_TOKENS, 0
    while left > 0 and len(ids) - start > 1:
        made.append(ids[start : start + min(length, left + 1)])
        left -= len(made[-1]) - 1
        start += length
    return tuple(made)


def score(runner: Runner, given: Sequence[np.ndarray]) -> np.ndarray:
    """NLL f64 in nats of every id but the first of each window."""
    made: list[np.ndarray] = []
    for ids in given:
        runner.reset()
        for start in range(0, len(ids) - 1, CHUNK):
            part = ids[start : min(start + CHUNK, len(ids) - 1)]
            logits = runner.step(part, logits="all")
            made.append(compare.nll(logits, ids[start + 1 : start + 1 + len(part)]))
    return np.concatenate(made) if made else np.empty(0)


def oracle_score(runner: Runner, text: Text, folder: Path | None, parts: Sequence[str]) -> Likelihood:
    """The oracle's side, kept in `folder` under everything it depends on: `parts` and the ids."""
    chosen = windows(text.ids, runner.context_len)
    key = cache_key(["likelihood", *parts, *(part.astype("<i8").tobytes().hex() for part in chosen)])
    file = folder / f"nll-{key}.json" if folder is not None else None
    known = _load(file, sum(len(part) - 1 for part in chosen))
    if known is not None:
        return Likelihood(chosen, known, text.natural)
    made = Likelihood(chosen, score(runner, chosen), text.natural)
    if file is not None and np.isfinite(made.nll).all():
        _save(file, made.nll)
    return made


def _load(file: Path | None, count: int) -> np.ndarray | None:
    """A damaged file counts as none."""
    if file is None:
        return None
    try:
        values = np.array(json.loads(file.read_text()), np.float64)
    except (OSError, ValueError, TypeError):
        return None
    return values if values.shape == (count,) and np.isfinite(values).all() else None


def _save(file: Path, values: np.ndarray) -> None:
    """A folder that cannot be written to costs time, not the verdict."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(values.tolist()))
        partial.replace(file)
    except OSError:
        return
