"""The engine: a plan on a backend, stepped token by token. Recordings are kept per T and replayed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from genai_cli.backends.base import Backend, DeviceBackend, KvSequence, PatientBackend, Recording, RowsBackend, Tensor
from genai_cli.engine.arena import Arena
from genai_cli.engine.feeds import cached_inputs, dynamic, known_inputs, step_inputs
from genai_cli.engine.plan import Plan
from genai_cli.engine.trace import Constants, StaleRecording, Tracer
from genai_cli.engine.values import Cached, Dynamic, Static, Value
from genai_cli.errors import GenaiError

LONG_RUN = 64  # replayed steps after which a process is taken for one that runs long
KEPT_RECORDINGS = 8  # prefill lengths come and go; T = 1 is used at every token and stays by itself
TOP = "+top"  # in a step's kind, before the number of largest logits
Key = tuple[int, str, tuple[bool, ...]]  # T, kind of step, branches taken


@dataclass(frozen=True)
class Fed:
    """What a step is given: ids [T] or embeddings [T, E], and the position [T] of each."""

    ids: np.ndarray
    embeds: np.ndarray | None
    positions: np.ndarray


@dataclass
class Recorded:
    """A replayable step: its inputs, its recording, where its logits and taps are."""

    inputs: dict[str, Tensor]
    recording: Recording
    outputs: dict[str, Tensor | np.ndarray]
    ahead: tuple[int, int] | None = None  # (id, position) that the device itself has put into the inputs


@dataclass(eq=False)
class Seat:
    """A sequence: what the backend holds of it, and its length."""

    sequence: KvSequence | None  # None: the only one of a backend that holds no more
    length: int = 0


@dataclass
class Counters:
    """How steps were run; tests see here that replay really happened."""

    recorded: int = 0
    replayed: int = 0
    invalidated: int = 0


class Engine:
    """One sequence on one backend. Not thread-safe."""

    def __init__(self, plan: Plan, backend: Backend) -> None:
        self.plan, self.backend = plan, backend
        self.counters = Counters()
        self.slots = [backend.kv_slot(b.num_heads, b.head_dim, b.dtype) for b in plan.io.kv]
        self._states = {state.past: self._zeros(state.shape, state.dtype) for state in plan.io.states}
        self._constants = Constants(backend)
        self._arena = Arena(backend)
        self._recordings: OrderedDict[Key, Recorded] = OrderedDict()
        self.taps: tuple[str, ...] = ()
        self._seat = Seat(backend.sequence if isinstance(backend, RowsBackend) else None)

    @property
    def length(self) -> int:
        """Tokens the selected sequence holds."""
        return self._seat.length

    @length.setter
    def length(self, length: int) -> None:
        self._seat.length = length

    def _zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> Tensor:
        tensor = self.backend.empty(shape, dtype)
        self.backend.upload(tensor, np.zeros(shape, dtype))
        return tensor

    def reset(self) -> None:
        """Length 0, states zeroed."""
        self.length = 0
        for tensor in self._states.values():
            self.backend.upload(tensor, np.zeros(tensor.shape, tensor.dtype))

    def tap(self, names: tuple[str, ...]) -> None:
        """Keep these intermediate values readable after each step (`tapped`). Drops all recordings."""
        self.taps = names
        self.counters.invalidated += len(self._recordings)
        self._recordings.clear()

    def step(self, ids: np.ndarray, embeds: np.ndarray | None, kind: str) -> dict[str, np.ndarray]:
        """Feed T tokens; returns f32-readable logits under the plan's name (unless kind is "none") and all taps.

        A failure leaves length and states as they were (KV rows past `length` are never read)."""
        num_new = len(ids) if embeds is None else embeds.shape[-2]
        kind = "all" if num_new == 1 and kind == "last" else kind
        self.backend.set_past_len(self.length)  # first: growth keeps past_len rows
        self.backend.reserve(self.length + num_new)
        key = (num_new, kind, self.plan.guard(num_new, self.length))
        recorded = self._run(key, Fed(ids, embeds, np.arange(self.length, self.length + num_new)))
        self.length += num_new
        return {name: self._read(value) for name, value in recorded.outputs.items()}

    def step_top(self, ids: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Feed T tokens on a DeviceBackend; ids (int64 [k]) and f32 values [k] of the `count` largest logits of the last
        one. A failure leaves length and states as they were."""
        num_new, backend = len(ids), self.backend
        backend.set_past_len(self.length)  # first: growth keeps past_len rows
        backend.reserve(self.length + num_new)
        kind = f"{'all' if num_new == 1 else 'last'}{TOP}{count}"
        key = (num_new, kind, self.plan.guard(num_new, self.length))
        recorded = self._run(key, Fed(ids, None, np.arange(self.length, self.length + num_new)))
        self.length += num_new
        data = self._read(recorded.outputs[TOP])
        chosen, values = data[: 8 * count].view(np.int64), data[8 * count :].view(np.float32)
        if num_new == 1:
            recorded.ahead = (int(chosen[0]), self.length)
        return chosen[chosen >= 0], values[chosen >= 0]

    def _run(self, key: Key, fed: Fed) -> Recorded:
        try:
            recorded = self._replay(key, fed) if key in self._recordings else None
            if recorded is None:
                recorded = self._record(key, fed)
            self.backend.synchronize()
        except BaseException:
            if isinstance(self.backend, DeviceBackend):
                self.backend.forget()
            raise
        return recorded

    # -- several sequences -------------------------------------------------------------------------------------------

    @property
    def selected(self) -> Seat:
        """The sequence that `step`, `seed`, `kv_rows` and `length` mean."""
        return self._seat

    def seat(self) -> Seat:
        """A new, empty sequence. The backend must be a RowsBackend."""
        return Seat(self._many.new_sequence())

    def select(self, seat: Seat) -> None:
        """`step`, `seed`, `kv_rows` and `length` mean this sequence from now on."""
        if seat is not self._seat and seat.sequence is not None:
            self._many.select(seat.sequence)
            self._seat = seat

    def step_rows(self, ids: np.ndarray, seats: Sequence[Seat]) -> np.ndarray:
        """Feed ids[r] (int64 [R]) to the sequence of seats[r]; logits [R, V], each row as if it had been fed alone.

        The plan must allow it (`engine.rows.mixing`). A failure leaves every length as it was."""
        held = [self._with_room(seat) for seat in seats]
        lengths = [seat.length for seat in seats]
        with self._many.rows(held, lengths):
            recorded = self._run((len(seats), "rows", ()), Fed(ids, None, np.array(lengths)))
        for seat in seats:
            seat.length += 1
        logits = self._read(recorded.outputs[self.plan.io.logits])
        return logits.reshape(len(seats), -1)

    def _with_room(self, seat: Seat) -> KvSequence:
        if seat.sequence is None:
            raise GenaiError("a sequence without memory of its own cannot be a row")
        if seat.sequence.capacity <= seat.length:
            before = self._seat
            self.select(seat)
            self.backend.set_past_len(seat.length)  # first: growth keeps past_len rows
            self.backend.reserve(seat.length + 1)
            self.select(before)
        return seat.sequence

    @property
    def _many(self) -> RowsBackend:
        if not isinstance(self.backend, RowsBackend):
            raise GenaiError(f"the backend `{self.backend.name}` holds one sequence")
        return self.backend

    def _read(self, value: Tensor | np.ndarray) -> np.ndarray:
        return value if isinstance(value, np.ndarray) else self.backend.download(value)

    def _replay(self, key: Key, fed: Fed) -> Recorded | None:
        recorded = self._recordings[key]
        self._recordings.move_to_end(key)
        ahead, recorded.ahead = recorded.ahead, None
        if ahead is None or ahead != (fed.ids[0], fed.positions[0]):
            self._upload(recorded.inputs, fed)
        try:
            recorded.recording.replay()
        except StaleRecording:
            self.counters.invalidated += 1
            del self._recordings[key]
            return None
        self.counters.replayed += 1
        self._settle()
        return recorded

    def _settle(self) -> None:
        """After many steps the backend may lay weights out anew; steps recorded before hold the old addresses."""
        if self.counters.replayed == LONG_RUN and isinstance(self.backend, PatientBackend) and self.backend.runs_long():
            self.counters.invalidated += len(self._recordings)
            self._recordings.clear()

    def _record(self, key: Key, fed: Fed) -> Recorded:
        num_new, kind, _ = key
        kind, _, top = ("all" if kind == "rows" else kind).partition(TOP)
        plan, io = self.plan, self.plan.io
        width = 0 if fed.embeds is None else fed.embeds.shape[-1]
        inputs = step_inputs(plan.graph, io, self.backend, num_new, width)
        self._upload(inputs, fed)
        env: dict[str, Value] = dynamic(inputs | self._states)
        env |= known_inputs(plan.graph, io, num_new, self.length) | cached_inputs(io, num_new, self.length)
        wanted = [*self.taps] if kind == "none" else [io.logits, *self.taps]
        presents = [binding.present for binding in io.kv] + [state.present for state in io.states]
        self._arena.restart()
        recording = self.backend.record()
        tracer = Tracer(
            self.backend, recording, self._arena, self._constants, plan.graph.initializers, self.slots, env,
            frozenset([*wanted, *presents]),
        )  # fmt: skip
        tracer.run(plan.nodes[kind])
        self._store_presents(tracer)
        self._carry_states(tracer, recording)
        self.counters.recorded += 1
        recorded = Recorded(inputs, recording, {name: _output(tracer, name) for name in wanted})
        if top:
            recorded.outputs = {TOP: self._record_top(recorded, num_new, int(top))}
        if not tracer.one_shot:
            self._keep(key, recorded)
        return recorded

    def _keep(self, key: Key, recorded: Recorded) -> None:
        self._recordings[key] = recorded
        long = [kept for kept in self._recordings if kept[0] > 1 and kept[1] != "rows"]
        for kept in long[: max(0, len(long) - KEPT_RECORDINGS)]:
            del self._recordings[kept]

    def _upload(self, tensors: dict[str, Tensor], fed: Fed) -> None:
        io = self.plan.io
        for name, tensor in tensors.items():
            if name == io.input_ids:
                value = fed.ids.reshape(1, -1)
            elif name == io.inputs_embeds:
                if fed.embeds is None:
                    raise GenaiError("this decoder reads `inputs_embeds`; give embeddings, not ids")
                value = fed.embeds.reshape(tensor.shape)
            else:
                value = np.broadcast_to(fed.positions, tensor.shape)
            self.backend.upload(tensor, np.ascontiguousarray(value, tensor.dtype))

    def _store_presents(self, tracer: Tracer) -> None:
        """Present KV that the graph computed by itself (no attention op owned the slot) goes into its slot."""
        for slot, binding in zip(self.slots, self.plan.io.kv, strict=True):
            value = tracer.value(binding.present)
            if isinstance(value, Cached):
                continue
            tracer.one_shot = True
            array = value.array if isinstance(value, Static) else self.backend.view(value.tensor)
            if binding.axes == "BSM":
                array = array.reshape(1, -1, binding.num_heads, binding.head_dim).transpose(0, 2, 1, 3)
            stop = self.length + self._num_new(tracer)
            rows = array[0, :, self.length : stop] if array.shape[2] >= stop else array[0]
            self.backend.kv_write(slot, np.ascontiguousarray(rows), self.length)

    def _num_new(self, tracer: Tracer) -> int:
        io = self.plan.io
        value = tracer.value(io.input_ids or io.inputs_embeds or "")
        assert isinstance(value, Dynamic)
        return value.tensor.shape[1]

    def _carry_states(self, tracer: Tracer, recording: Recording) -> None:
        pairs = []
        for state in self.plan.io.states:
            made = tracer.value(state.present)
            if not isinstance(made, Dynamic):
                raise GenaiError(f"state `{state.present}` is not computed from the input")
            pairs.append((self._states[state.past], made.tensor))
        if isinstance(self.backend, DeviceBackend):
            self.backend.carry(recording, pairs)
            return
        for to, source in pairs:
            recording.host(_copy(self.backend, to, source))

    def _record_top(self, recorded: Recorded, num_new: int, count: int) -> Tensor:
        """The choice of the last token's largest logits; after a step of one token, what feeding the best needs."""
        backend, io, logits = self.backend, self.plan.io, recorded.outputs[self.plan.io.logits]
        assert isinstance(backend, DeviceBackend)
        if isinstance(logits, np.ndarray):
            raise GenaiError(f"`{io.logits}` is not computed from the input")
        width = logits.shape[-1]
        row = backend.alias(logits, (width,), logits.dtype, logits.nbytes - width * logits.dtype.itemsize)
        top = backend.top(recorded.recording, row, count)
        if num_new == 1:
            positions = [tensor for name, tensor in recorded.inputs.items() if name != io.input_ids]
            backend.advance(recorded.recording, top, recorded.inputs.get(io.input_ids or ""), positions)
        return top

    # -- KV and state, for the runner --------------------------------------------------------------------------------

    def snapshot(self) -> list[np.ndarray]:
        """Copies of all states, in graph order."""
        return [self.backend.download(self._states[state.past]) for state in self.plan.io.states]

    def restore(self, states: list[np.ndarray]) -> None:
        """Overwrite all states."""
        if len(states) != len(self._states):
            raise GenaiError(f"{len(states)} states were given, the model has {len(self._states)}")
        for state, array in zip(self.plan.io.states, states, strict=True):
            self.backend.upload(self._states[state.past], np.ascontiguousarray(array, state.dtype))

    def kv_rows(self, start: int, stop: int) -> list[np.ndarray]:
        """Rows [H_kv, stop - start, D] per component, in layout order."""
        if not 0 <= start <= stop <= self.length:
            raise GenaiError(f"KV rows {start}..{stop} were asked for, {self.length} are held")
        self.backend.synchronize()
        return [self.backend.kv_view(slot, start, stop) for slot in self.slots]

    def seed(self, rows: list[np.ndarray]) -> None:
        """Positions [0, n) of every slot from rows; the caller checked shapes."""
        self.length = 0
        self.backend.set_past_len(0)
        num_tokens = rows[0].shape[1]
        self.backend.reserve(num_tokens)
        for slot, array in zip(self.slots, rows, strict=True):
            self.backend.kv_write(slot, array)
        self.length = num_tokens
        self.backend.set_past_len(num_tokens)


def _copy(backend: Backend, to: Tensor, source: Tensor):  # type: ignore[no-untyped-def]
    return lambda: backend.upload(to, backend.view(source))


def _output(tracer: Tracer, name: str) -> Tensor | np.ndarray:
    value = tracer.value(name)
    if isinstance(value, Dynamic):
        return value.tensor
    if isinstance(value, Static):
        return value.array
    raise GenaiError(f"output `{name}` lies in a KV slot; read it with `kv_rows`")
