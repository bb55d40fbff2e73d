"""Our own engine behind the runner protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from genai_cli import __version__
from genai_cli.backends.base import Backend, DeviceBackend, RowsBackend
from genai_cli.engine.engine import Engine
from genai_cli.engine.plan import Plan, make_plan
from genai_cli.engine.rows import mixing
from genai_cli.errors import GenaiError
from genai_cli.graph.exact import exact as exact_graph
from genai_cli.graph.io import DecoderIo, decoder_io
from genai_cli.graph.ir import Graph
from genai_cli.kv.layout import KvComponent, KvLayout, KvRows
from genai_cli.runners.base import Gate, LogitsMode, Runner, RunnerInfo, StateSnapshot

MOST_TOP = 64  # as ops.kernels_cuda.FEW: one round for each value
PREFILL_CHUNK = 512  # tokens fed at once: bounds activation memory; results do not depend on it
Transform = Callable[[Graph], Graph]


class NativeRunner:
    """Implements `runners.base.Runner` on the native engine."""

    def __init__(
        self,
        graph: Graph,
        backend: Backend,
        *,
        io: DecoderIo | None = None,
        context_len: int | None = None,
        exact: bool = False,
        transform: Transform | None = None,
    ) -> None:
        """Plan `graph` on `backend`. `exact`: f32 activations and intermediates everywhere. `transform` rewrites the
        graph first (mutants, taps). GenaiError lists every node native cannot run."""
        graph = exact_graph(graph) if exact else graph
        graph = transform(graph) if transform else graph
        io = decoder_io(graph) if io is None or exact else io
        capacities = [binding.capacity for binding in io.kv if binding.capacity]
        self.context_len = min([*capacities, *([context_len] if context_len else [])], default=None)
        self._backend, self._num_nodes, self._exact = backend, len(graph.nodes), exact
        width = _embed_width(graph, io)
        self._engine = Engine(make_plan(graph, io, self.context_len, backend.name, width), backend)
        self.kv_layout = KvLayout(
            tuple(KvComponent(b.layer, b.kind, b.num_heads, b.head_dim, b.dtype, b.window) for b in io.kv)
        )
        self.vocab_size = _vocab_size(graph, io)

    @property
    def engine(self) -> Engine:
        """The engine, for counters, taps and profiles."""
        return self._engine

    @property
    def length(self) -> int:
        """Tokens whose KV (and state) is held."""
        return self._engine.length

    @property
    def info(self) -> RunnerInfo:
        """What really runs."""
        return RunnerInfo(
            name="native",
            version=__version__,
            device=self._backend.name,
            providers=(self._backend.description,),
            nodes=self._num_nodes,
            nodes_fallback=0,
            threads=getattr(self._backend, "threads", 1),
            options={"exact": str(self._exact).lower()},
        )

    def reset(self) -> None:
        """Length 0, states zeroed."""
        self._engine.reset()

    def step(self, ids: np.ndarray, *, embeds: np.ndarray | None = None, logits: LogitsMode = "last") -> np.ndarray:
        """Feed T tokens in chunks; f32 logits [1, V], [T, V] or [0, V]."""
        num_new = len(ids) if embeds is None else int(embeds.reshape(-1, embeds.shape[-1]).shape[0])
        self._check_room(num_new)
        embeds = None if embeds is None else embeds.reshape(num_new, -1)
        parts: list[np.ndarray] = []
        for start in range(0, num_new, PREFILL_CHUNK):
            stop = min(start + PREFILL_CHUNK, num_new)
            kind: LogitsMode = logits if logits != "last" or stop == num_new else "none"
            part = None if embeds is None else embeds[start:stop]
            parts.append(self._chunk(ids[start:stop], part, kind))
        return np.concatenate(parts)

    def supports_top(self, count: int) -> Gate:
        """Whether the backend chooses the largest logits itself."""
        if not isinstance(self._backend, DeviceBackend):
            return Gate(False, f"the backend `{self._backend.name}` has its logits in the host's memory")
        few = 0 < count <= MOST_TOP
        return Gate(few, "chosen on the device" if few else f"more than {MOST_TOP} values are fetched with all others")

    def step_top(self, ids: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Feed T tokens in chunks; ids (int64 [k]) and f32 values [k] of the largest logits of the last one."""
        self._check_room(len(ids))
        last = (len(ids) - 1) // PREFILL_CHUNK * PREFILL_CHUNK
        if last:
            self.step(ids[:last], logits="none")
        return self._engine.step_top(np.asarray(ids[last:]), count)

    def _check_room(self, num_new: int) -> None:
        if num_new < 1:
            raise GenaiError("a step of 0 tokens was asked for, wanted at least 1")
        if self.context_len is not None and self.length + num_new > self.context_len:
            raise GenaiError(
                f"{self.length} + {num_new} tokens do not fit into the context of {self.context_len}",
                hint="use a shorter prompt or fewer new tokens",
            )

    def _chunk(self, ids: np.ndarray, embeds: np.ndarray | None, kind: LogitsMode) -> np.ndarray:
        outputs = self._engine.step(np.asarray(ids), embeds, kind)
        if kind == "none":
            return np.empty((0, self.vocab_size), np.float32)
        logits = outputs[self._engine.plan.io.logits]
        rows = logits.reshape(-1, logits.shape[-1]).astype(np.float32)
        return rows[-1:] if kind == "last" else rows

    def kv_rows(self, start: int, stop: int) -> KvRows:
        """Present KV of positions [start, stop); strided views of the capacity buffers on the CPU."""
        return self._engine.kv_rows(start, stop)

    def seed(self, rows: KvRows, state: StateSnapshot | None = None) -> None:
        """Replace everything held by `rows`; checks the geometry first."""
        self._check_rows(rows)
        has_state = bool(self._engine.plan.io.states)
        if has_state and not state:
            raise GenaiError("this decoder has recurrent state: a KV prefix without the state at its end is useless")
        self._engine.seed(list(rows))
        if state:
            self._engine.restore(list(state))

    def _check_rows(self, rows: KvRows) -> None:
        wanted = [(c.num_heads, c.head_dim, c.dtype) for c in self.kv_layout.components]
        found = [(a.shape[0], a.shape[2], a.dtype) for a in rows if a.ndim == 3]
        lengths = {a.shape[1] for a in rows if a.ndim == 3}
        if wanted != found or len(lengths) != 1 or 0 in lengths:
            raise GenaiError(f"seed: found {len(rows)} components of lengths {sorted(lengths)}, wanted {len(wanted)}")
        length = lengths.pop()
        if self.context_len is not None and length > self.context_len:
            raise GenaiError(f"seed: {length} tokens do not fit into the context of {self.context_len}")

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens. Recurrent state cannot go back: only to where it is, or to 0."""
        if not 0 <= length <= self.length:
            raise GenaiError(f"rewind to {length} was asked for, {self.length} tokens are held")
        if self._engine.plan.io.states and length not in (0, self.length):
            raise GenaiError("recurrent state cannot be rewound", hint="reset, and feed the prefix again")
        if length == 0:
            self._engine.reset()
        self._engine.length = length

    def snapshot_state(self) -> StateSnapshot:
        """Recurrent/conv states now; [] when there are none."""
        return self._engine.snapshot()

    def supports_paged_kv(self) -> Gate:
        """Whether prefixes can be mirrored and seeded."""
        return paged_kv_gate(self._engine.plan.io)

    def tap(self, names: Sequence[str], ids: np.ndarray) -> dict[str, np.ndarray]:
        """Feed `ids` once with these intermediate values read out (all logits too); recordings are dropped after."""
        self._check_room(len(ids))
        self._engine.tap(tuple(names))
        try:
            return self._engine.step(np.asarray(ids), None, "all")
        finally:
            self._engine.tap(())

    def supports_rows(self) -> Gate:
        """Whether one step can serve several sequences, as proved on the plan."""
        if not isinstance(self._backend, RowsBackend):
            return Gate(False, f"the backend `{self._backend.name}` holds one sequence")
        return rows_gate(self._engine.plan)

    def seat(self) -> NativeSeat:
        """A new, empty sequence beside the others."""
        return NativeSeat(self)

    def step_rows(self, ids: np.ndarray, seats: Sequence[Runner]) -> np.ndarray:
        """Feed ids[r] to seats[r]; f32 logits [R, V]."""
        own = [seat.held for seat in seats if isinstance(seat, NativeSeat)]
        full = [seat.length for seat in own if self.context_len is not None and seat.length >= self.context_len]
        if full:
            raise GenaiError(f"{full[0]} + 1 tokens do not fit into the context of {self.context_len}")
        return self._engine.step_rows(np.asarray(ids), own).astype(np.float32)

    def close(self) -> None:
        """Nothing to free that the garbage collector does not."""


class NativeSeat:
    """One sequence of a NativeRunner beside others: the runner protocol, on KV of its own."""

    def __init__(self, runner: NativeRunner) -> None:
        self._runner = runner
        self.held = runner.engine.seat()
        self.kv_layout, self.context_len, self.vocab_size = runner.kv_layout, runner.context_len, runner.vocab_size

    @contextmanager
    def _selected(self) -> Iterator[NativeRunner]:
        """The runner, working on this sequence; afterwards on the one it worked on before."""
        engine = self._runner.engine
        before = engine.selected
        engine.select(self.held)
        try:
            yield self._runner
        finally:
            engine.select(before)

    @property
    def length(self) -> int:
        """Tokens whose KV is held."""
        return self.held.length

    @property
    def info(self) -> RunnerInfo:
        """What really runs."""
        return self._runner.info

    def reset(self) -> None:
        """Length 0."""
        with self._selected() as runner:
            runner.reset()

    def step(self, ids: np.ndarray, *, embeds: np.ndarray | None = None, logits: LogitsMode = "last") -> np.ndarray:
        """Feed T tokens of this sequence alone."""
        with self._selected() as runner:
            return runner.step(ids, embeds=embeds, logits=logits)

    def kv_rows(self, start: int, stop: int) -> KvRows:
        """Present KV of positions [start, stop)."""
        with self._selected() as runner:
            return runner.kv_rows(start, stop)

    def seed(self, rows: KvRows, state: StateSnapshot | None = None) -> None:
        """Replace everything held."""
        with self._selected() as runner:
            runner.seed(rows, state)

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens."""
        with self._selected() as runner:
            runner.rewind(length)

    def snapshot_state(self) -> StateSnapshot:
        """[]: decoders with states have no seats."""
        with self._selected() as runner:
            return runner.snapshot_state()

    def supports_paged_kv(self) -> Gate:
        """As the runner's."""
        return self._runner.supports_paged_kv()

    def close(self) -> None:
        """Nothing to free that the garbage collector does not."""


def paged_kv_gate(io: DecoderIo) -> Gate:
    """Whether this decoder's prefixes can be mirrored and seeded here, and by what means."""
    if not io.kv:
        return Gate(False, "the graph has recurrent state only, no KV to page" if io.states else "the graph has no KV")
    if io.states:
        return Gate(True, "KV in capacity buffers; recurrent state by snapshots at page boundaries")
    return Gate(True, "KV in capacity buffers [H_kv, capacity, D]")


def rows_gate(plan: Plan) -> Gate:
    """Whether prompts of a batch can share this plan's steps, and why not."""
    reason = "the decoder reads embeddings" if plan.io.inputs_embeds else mixing(plan)
    return Gate(not reason, reason or "tokens of a step meet only in attention")


def _embed_width(graph: Graph, io: DecoderIo) -> int:
    if not io.inputs_embeds:
        return 0
    info = next(value for value in graph.inputs if value.name == io.inputs_embeds)
    width = info.shape[-1] if info.shape else None
    if not isinstance(width, int):
        raise GenaiError(f"`{io.inputs_embeds}` has the shape {info.shape}; wanted a fixed last dimension")
    return width


def _vocab_size(graph: Graph, io: DecoderIo) -> int:
    info = next(value for value in graph.outputs if value.name == io.logits)
    size = info.shape[-1] if info.shape else None
    return size if isinstance(size, int) else 0
