"""What mirror-check runs on: a decoder, its paged KV, and the places where a mutant may interfere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from genai_cli.kv.layout import KvComponent, KvLayout, KvRows
from genai_cli.kv.mirror import CopyRows, copy_rows
from genai_cli.kv.prefix_cache import State
from genai_cli.kv.session import KvSequence, PagedKv
from genai_cli.runners.base import Gate, LogitsMode, Runner, RunnerInfo, StateSnapshot

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)


def unchanged(rows: KvRows, start: int) -> KvRows:
    """The clean hook."""
    return rows


@dataclass(frozen=True)
class Hooks:
    """Where mutants interfere; the defaults are the product's own behaviour."""

    extract: Callable[[KvRows, int], KvRows] = unchanged  # rows as read from the decoder, from start on
    mirror: Callable[[KvRows, int], KvRows | None] = unchanged  # rows about to be written at start; None: not written
    seed: Callable[[KvRows, int], KvRows] = unchanged  # rows about to be seeded
    state: Callable[[StateSnapshot | None], StateSnapshot | None] = lambda state: state
    reset: bool = True  # recurrent state is zeroed between sequences
    reuse: Callable[[int, int], int] = lambda cached, prompt_len: cached
    key: Callable[[bytes], bytes] = lambda key: key
    ids: Callable[[list[int]], list[int]] = lambda ids: ids  # what the tree is keyed by
    rewind: int = 0  # off by this many
    rows: Callable[[list[Runner]], list[Runner]] = lambda seats: seats  # whose KV belongs to which row of a batch
    other_weights: Callable[[PagedKv], PagedKv] = lambda kv: PagedKv(kv.layout, kv.page_size, kv.num_pages)
    after: Callable[[PagedKv, KvSequence], None] = lambda kv, sequence: None  # once a sequence was published
    evict: Callable[[PagedKv, int], int] = lambda kv, count: kv.cache.evict(count)


@dataclass
class Scene:
    """One decoder with its pages. `prompt` crosses page borders and ends off one."""

    runner: Runner
    prompt: list[int]
    page_size: int
    num_pages: int
    hooks: Hooks = Hooks()
    copy: CopyRows = copy_rows
    image_token: int | None = None  # stands for a feature row, which only the prompt has
    kv: PagedKv = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A fresh pool and tree."""
        needs_state = bool(self.runner.snapshot_state())
        self.kv = PagedKv(self.runner.kv_layout, self.page_size, self.num_pages, needs_state, copy=self.copy)

    def rows(self, start: int, stop: int, runner: Runner | None = None) -> KvRows:
        """Copies of what the decoder (or another sequence of it) holds at [start, stop)."""
        held = (runner or self.runner).kv_rows(start, stop)
        return self.hooks.extract([np.array(array) for array in held], start)

    def more(self, length: int, count: int | None = None) -> list[int]:
        """`count` tokens (a page by default) to feed after `length` others: the prompt's own, pictures left out."""
        text = [token for token in self.prompt if token != self.image_token] or [0]
        count = self.page_size if count is None else count
        return [text[(length + i) % len(text)] for i in range(count)]

    def run(self, ids: list[int], steps: list[int], key: bytes = b"") -> Ran:
        """Prefill `ids` (seeded where a prefix is known), feed `steps` one by one, mirror after each, publish."""
        hooks, runner = self.hooks, self.runner
        keyed = hooks.ids(ids)
        with self.kv.sequence(keyed, hooks.key(key)) as sequence:
            cached = hooks.reuse(sequence.num_cached_tokens, len(ids))
            left = runner.snapshot_state()
            runner.reset()
            if not hooks.reset and isinstance(runner, ClosedFormDecoder):
                runner.keep_state(left)
            if cached:
                rows, state = sequence.prefix()
                runner.seed(hooks.seed(rows, 0), hooks.state(state))
            logits = [runner.step(np.array(ids[cached:], np.int64))]
            self._mirror(sequence, len(ids))
            for done, token in enumerate(steps, len(ids) + 1):
                logits.append(runner.step(np.array([token], np.int64)))
                self._mirror(sequence, done)
            fed = [*ids, *steps]
            sequence.publish(hooks.ids(fed))
            mirrored = sequence.table.length
            pages = sequence.table.read(0, mirrored)
            present = self.rows(0, len(fed))
            hooks.after(self.kv, sequence)
        return Ran(cached, np.concatenate(logits), pages, present, mirrored)

    def _mirror(self, sequence: KvSequence, length: int) -> None:
        start = sequence.table.length
        rows = self.hooks.mirror(self.rows(start, length), start)
        if rows is not None:
            sequence.mirror(lambda first, last: rows, length)
        sequence.remember(length, self.runner.snapshot_state())


@dataclass(frozen=True)
class Ran:
    """One request: reused tokens, logits [1 + steps, V], KV as read back from pages, KV as the decoder holds it."""

    cached: int
    logits: np.ndarray
    pages: KvRows
    present: KvRows
    mirrored: int


class ClosedFormDecoder:
    """A decoder whose KV is a formula and whose logits read every element of it. Implements `runners.base.Runner`.

    KV element = 1 + (7 * layer + 3 * kind + 11 * head + 5 * dim + 13 * token + 17 * position) mod 239: exact in every
    dtype here. Logits weigh every element by component, head, position and dim, so that no exchange cancels out.
    Present lies in capacity buffers, poisoned past the length.
    """

    vocab_size = 5

    def __init__(self, layout: KvLayout, capacity: int, *, recurrent: bool = False) -> None:
        self.kv_layout, self.recurrent = layout, recurrent
        self.context_len: int | None = capacity
        self._buffers = [np.empty((c.num_heads, capacity, c.head_dim), c.dtype) for c in layout.components]
        self._state = np.zeros(3)
        self._length = 0
        self.reset()

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._length

    @property
    def info(self) -> RunnerInfo:
        """Named as what it stands in for."""
        return RunnerInfo("native", "closed form", "cpu", ("numpy",), 0, 0, 1)

    def reset(self) -> None:
        """Length 0, state zero, buffers poisoned."""
        self._length = 0
        self._state = np.zeros(3)
        for buffer in self._buffers:
            buffer.view(np.uint8)[...] = 0xFF

    def step(self, ids: np.ndarray, *, embeds: np.ndarray | None = None, logits: LogitsMode = "last") -> np.ndarray:
        """Append closed-form KV for `ids`; logits are a weighted sum over everything held."""
        if len(ids) == 0:
            raise ValueError("a step of 0 tokens")
        for token in ids:
            for c, buffer in enumerate(self._buffers):
                buffer[:, self._length] = self.row(c, int(token), self._length)
            self._state = self._state + float(token + 1)
            self._length += 1
        return self._logits()

    def row(self, component: int, token: int, position: int) -> np.ndarray:
        """[H_kv, D] of one token."""
        about = self.kv_layout.components[component]
        head, dim = np.arange(about.num_heads)[:, None], np.arange(about.head_dim)[None, :]
        kind = int(about.kind == "value")
        value = 7 * about.layer + 3 * kind + 11 * head + 5 * dim + 13 * token + 17 * position
        return (1 + value % 239).astype(about.dtype)

    def _logits(self) -> np.ndarray:
        total = np.zeros(self.vocab_size)
        for c, buffer in enumerate(self._buffers):
            held = buffer[:, : self._length].astype(np.float64)
            weights = np.sin(1 + c + np.arange(held.size).reshape(held.shape))
            total += (held * weights).sum() * (1 + np.arange(self.vocab_size))
        return (total + (self._state.sum() if self.recurrent else 0.0)).astype(np.float32)[None]

    def kv_rows(self, start: int, stop: int) -> KvRows:
        """Strided views of the capacity buffers."""
        return [buffer[:, start:stop] for buffer in self._buffers]

    def seed(self, rows: KvRows, state: StateSnapshot | None = None) -> None:
        """Overwrite everything held."""
        length = rows[0].shape[1]
        for buffer, array in zip(self._buffers, rows, strict=True):
            buffer[:, :length] = array
        self._length = length
        if state:
            self._state = np.array(state[0])

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self._length = length

    def keep_state(self, state: StateSnapshot) -> None:
        """A reset that forgets the state: for one mutant."""
        if state:
            self._state = np.array(state[0])

    def snapshot_state(self) -> StateSnapshot:
        """The running sum, when there is one."""
        return [self._state.copy()] if self.recurrent else []

    def supports_paged_kv(self) -> Gate:
        """Always."""
        return Gate(True, "closed form")

    def supports_rows(self) -> Gate:
        """As the engines: not with recurrent state."""
        return Gate(not self.recurrent, "recurrent state" if self.recurrent else "closed form")

    def seat(self) -> Runner:
        """Another decoder."""
        return ClosedFormDecoder(self.kv_layout, self.context_len or 0)

    def step_rows(self, ids: np.ndarray, seats: Sequence[Runner]) -> np.ndarray:
        """One after another."""
        return np.concatenate([seat.step(ids[row : row + 1]) for row, seat in enumerate(seats)])

    def close(self) -> None:
        """Nothing to free."""


def prime_layout(dtype: np.dtype) -> KvLayout:
    """Layers 2 and 10 (sorted as text they would swap) of different geometry; heads, dims distinct primes."""
    return KvLayout(
        (
            KvComponent(2, "key", 3, 7, dtype),
            KvComponent(2, "value", 3, 7, dtype),
            KvComponent(10, "key", 3, 7, dtype),
            KvComponent(10, "value", 3, 7, dtype),
            KvComponent(11, "key", 2, 11, dtype),
            KvComponent(11, "value", 2, 11, dtype),
        )
    )


def closed_form_scene(dtype: np.dtype, hooks: Hooks = Hooks(), *, recurrent: bool = False) -> Scene:
    """The scene mutants are run on: page size 5, a prompt of 13, capacity 37."""
    runner = ClosedFormDecoder(prime_layout(dtype), 37, recurrent=recurrent)
    return Scene(runner, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9], 5, 24, hooks)


__all__ = [
    "BF16",
    "F16",
    "F32",
    "ClosedFormDecoder",
    "Hooks",
    "Ran",
    "Scene",
    "State",
    "closed_form_scene",
    "prime_layout",
]
