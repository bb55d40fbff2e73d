"""The ids both sides are fed, and the logits and KV they answer with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from genai_cli.checks.compare import first_max
from genai_cli.kv.layout import KvRows
from genai_cli.runners.base import Runner, StateSnapshot


@dataclass(frozen=True)
class Path:
    """Ids [T] of one input: prompt, then the oracle's greedy continuation. Row t of the logits follows ids[t]."""

    id: str
    ids: np.ndarray  # int64 [T]
    prompt_len: int

    @property
    def steps(self) -> int:
        """Decode steps after the prompt."""
        return len(self.ids) - self.prompt_len

    @property
    def sha256(self) -> str:
        """Of the ids as little-endian int64."""
        return hashlib.sha256(self.ids.astype("<i8").tobytes()).hexdigest()


@dataclass(frozen=True)
class Run:
    """What one side said on a path: logits f32 [T, V], KV rows [H_kv, T, D] and recurrent states, all copies."""

    logits: np.ndarray
    kv: KvRows
    state: StateSnapshot = field(default_factory=list)

    @property
    def caches(self) -> list[np.ndarray]:
        """KV, then states: everything that carries the past."""
        return [*self.kv, *self.state]


def greedy_path(runner: Runner, prompt: np.ndarray, steps: int, input_id: str) -> tuple[Path, Run]:
    """The runner's greedy path and what it said on the way: the prompt's rows at once, then token by token.

    `steps` tokens are fed after the prompt, fewer where the context ends.
    """
    runner.reset()
    rows = [runner.step(prompt, logits="all")]
    ids = [int(token) for token in prompt]
    room = steps if runner.context_len is None else min(steps, runner.context_len - len(ids))
    for _ in range(room):
        ids.append(int(first_max(rows[-1][-1:])[0]))
        rows.append(runner.step(np.array(ids[-1:], np.int64), logits="all"))
    run = Run(np.concatenate(rows), copied_kv(runner), runner.snapshot_state())
    return Path(input_id, np.array(ids, np.int64), len(prompt)), run


def forced(runner: Runner, path: Path) -> Run:
    """Prompt at once, then one token a step, as a user's generation does."""
    runner.reset()
    rows = [runner.step(path.ids[: path.prompt_len], logits="all")]
    rows += [runner.step(path.ids[t : t + 1], logits="all") for t in range(path.prompt_len, len(path.ids))]
    return Run(np.concatenate(rows), copied_kv(runner), runner.snapshot_state())


def prefilled(runner: Runner, path: Path) -> Run:
    """All ids in one call."""
    runner.reset()
    return Run(runner.step(path.ids, logits="all"), copied_kv(runner), runner.snapshot_state())


def token_by_token(runner: Runner, path: Path) -> Run:
    """Every id in a step of its own."""
    runner.reset()
    rows = [runner.step(path.ids[t : t + 1], logits="all") for t in range(len(path.ids))]
    return Run(np.concatenate(rows), copied_kv(runner), runner.snapshot_state())


def copied_kv(runner: Runner) -> KvRows:
    """Everything held, as copies in the runner's own dtype."""
    return [np.array(rows) for rows in runner.kv_rows(0, runner.length)]
