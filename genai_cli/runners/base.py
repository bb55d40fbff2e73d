"""What the loop knows of a decoder. Two implementations, `runners.native` and `runners.ort`, know nothing of each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from genai_cli.kv.layout import KvLayout, KvRows

LogitsMode = Literal["last", "all", "none"]
StateSnapshot = list[np.ndarray]
"""Recurrent and convolution states at one position, in graph order; copies, owned by the receiver."""


@dataclass(frozen=True)
class Gate:
    """A capability with its reason: `reason` says why not, or by what means."""

    supported: bool
    reason: str


@dataclass(frozen=True)
class RunnerInfo:
    """Read back from the live side, for reports; never what was merely asked for."""

    name: Literal["native", "ort"]
    version: str
    device: str  # "cpu", "cuda:0"
    providers: tuple[str, ...]  # ORT: session.get_providers(); native: ("cpu:avx512vnni",) and so on
    nodes: int  # nodes of the graph this side runs
    nodes_fallback: int  # nodes handed to someone else; always 0 for native
    threads: int
    options: dict[str, str] = field(default_factory=dict)


class Runner(Protocol):
    """A decoder of one sequence (B = 1). Not thread-safe. Positions start at 0; `length` tokens lie in past."""

    kv_layout: KvLayout
    context_len: int | None  # the smallest of config, metadata and buffer capacity
    vocab_size: int

    @property
    def length(self) -> int:
        """Tokens whose KV (and state) is held."""
        ...

    @property
    def info(self) -> RunnerInfo: ...

    def reset(self) -> None:
        """Length 0, recurrent state zeroed."""
        ...

    def step(self, ids: np.ndarray, *, embeds: np.ndarray | None = None, logits: LogitsMode = "last") -> np.ndarray:
        """Feed T tokens (int64 [T]; `embeds` f32 [T, E] for decoders without input_ids) after `length`.

        Returns f32 logits [1, V] ("last"), [T, V] ("all") or [0, V] ("none"). Non-finite logits are returned as
        they are: the caller judges. Raises GenaiError when length + T would exceed `context_len`.
        """
        ...

    def kv_rows(self, start: int, stop: int) -> KvRows:
        """Present KV of positions [start, stop), valid until the next step; views where the place allows."""
        ...

    def seed(self, rows: KvRows, state: StateSnapshot | None = None) -> None:
        """Replace everything held by `rows` (n = rows[0].shape[1] >= 1 tokens) and, for hybrids, `state` at n."""
        ...

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens. Raises GenaiError, state untouched, when length > self.length or when
        recurrent state makes it impossible (then: reset and feed again)."""
        ...

    def snapshot_state(self) -> StateSnapshot:
        """Recurrent/conv states now; [] when there are none."""
        ...

    def supports_paged_kv(self) -> Gate:
        """Whether `kv_rows` and `seed` can carry a prefix, and why not."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class TopRunner(Runner, Protocol):
    """A decoder on a device that can choose the largest logits there, so that they need not be fetched."""

    def supports_top(self, count: int) -> Gate:
        """Whether `step_top` can choose so many, and why not."""
        ...

    def step_top(self, ids: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Feed T tokens; ids (int64 [k]) and f32 values [k] of the `count` largest logits of the last one, fewer when
        there are fewer: best first, equal ones by id, NaN before all."""
        ...


@runtime_checkable
class RowsRunner(Runner, Protocol):
    """A decoder that holds several sequences and can feed one token to each of them in one step."""

    def supports_rows(self) -> Gate:
        """Whether sequences can share a step, and why not."""
        ...

    def seat(self) -> Runner:
        """A new, empty sequence with KV of its own; weights and recordings are shared."""
        ...

    def step_rows(self, ids: np.ndarray, seats: Sequence[Runner]) -> np.ndarray:
        """Feed ids[r] (int64 [R]) to seats[r], made by `seat`. f32 logits [R, V], each row as if it were alone."""
        ...
