"""The oracle: plain onnxruntime behind the runner protocol. The only file that imports it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnxruntime as ort

from genai_cli.errors import GenaiError
from genai_cli.graph.io import DecoderIo, KvBinding, decoder_io
from genai_cli.graph.ir import Graph
from genai_cli.graph.loader import graph_from_bytes, load_graph
from genai_cli.kv.layout import KvComponent, KvLayout, KvRows
from genai_cli.runners.base import Gate, LogitsMode, RunnerInfo, StateSnapshot

Optimization = Literal["all", "basic", "off"]
_LEVELS = {
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "off": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
_BF16 = np.dtype(ml_dtypes.bfloat16)
_ONNX_BF16 = 16  # TensorProto.BFLOAT16, which numpy does not know
_DTYPES: dict[str, np.dtype] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(bfloat16)": _BF16,
    "tensor(double)": np.dtype(np.float64),
    "tensor(int64)": np.dtype(np.int64),
    "tensor(int32)": np.dtype(np.int32),
    "tensor(int8)": np.dtype(np.int8),
    "tensor(uint8)": np.dtype(np.uint8),
    "tensor(bool)": np.dtype(np.bool_),
}
_FIRST_CAPACITY = 256  # tokens; window caches double from here
ort.disable_telemetry_events()
ort.set_default_logger_severity(4)  # what it says about devices it lacks is in our own error


def open_session(
    model: Path | bytes,
    folder: Path | None = None,
    *,
    device: str = "cpu",
    threads: int | None = None,
    optimization: Optimization = "all",
    prepacking: bool = True,
    debug: bool = False,
) -> ort.InferenceSession:
    """A session whose providers are really those asked for. GenaiError with ORT's own first line when it refuses."""
    options = ort.SessionOptions()
    options.graph_optimization_level = _LEVELS[optimization]
    options.log_severity_level = 2 if debug else 4
    options.intra_op_num_threads = threads or 0
    if not prepacking:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if isinstance(model, bytes) and folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    wanted = _providers(device)
    try:
        session = ort.InferenceSession(model if isinstance(model, bytes) else str(model), options, providers=wanted)
    except Exception as error:  # ORT raises its own C++ types, all of them below Exception
        raise GenaiError(f"ONNX Runtime {ort.__version__} cannot load the model: {_first_line(error)}") from error
    _check_providers(session, device)
    return session


def _providers(device: str) -> list[Any]:
    if device == "cpu":
        return ["CPUExecutionProvider"]
    _, _, index = device.partition(":")
    return [("CUDAExecutionProvider", {"device_id": int(index or 0)}), "CPUExecutionProvider"]


def _check_providers(session: ort.InferenceSession, device: str) -> None:
    live = session.get_providers()
    if device != "cpu" and "CUDAExecutionProvider" not in live:
        built = "CUDAExecutionProvider" in ort.get_available_providers()
        missing = "the NVIDIA driver, CUDA 12 or 13 runtime and cuDNN 9" if built else "a build with the CUDA provider"
        raise GenaiError(
            f"`{device}` was asked for, ONNX Runtime {ort.__version__} runs on {live}: it lacks {missing}",
            hint="run it on the cpu, or install onnxruntime-gpu and the CUDA libraries",
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]


def _run(
    session: ort.InferenceSession, outputs: Sequence[str], feeds: Mapping[str, ort.OrtValue]
) -> list[ort.OrtValue]:
    try:
        return list(session.run_with_ort_values(list(outputs), dict(feeds)))
    except Exception as error:  # as above
        raise GenaiError(f"ONNX Runtime {ort.__version__} failed while running: {_first_line(error)}") from error


def to_ort(array: np.ndarray) -> ort.OrtValue:
    """An OrtValue over a copy-free contiguous array; bf16 travels as its bits."""
    array = np.ascontiguousarray(array).reshape(array.shape)  # a scalar stays one
    if array.dtype == _BF16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _ONNX_BF16)
    return ort.OrtValue.ortvalue_from_numpy(array)


def to_numpy(value: ort.OrtValue) -> np.ndarray:
    """Values of a CPU OrtValue; bf16 read through its address, since ORT's own reader refuses it. A view for bf16."""
    dtype = _DTYPES.get(value.data_type())
    if dtype is None:
        raise GenaiError(f"ONNX Runtime returned a `{value.data_type()}`, which is not supported")
    if dtype != _BF16:
        return np.asarray(value.numpy())
    shape = tuple(value.shape())
    size = int(np.prod(shape, dtype=np.int64))
    if size == 0:
        return np.empty(shape, dtype)
    raw = (ctypes.c_uint16 * size).from_address(value.data_ptr())
    return np.asarray(np.array(raw, np.uint16).view(_BF16).reshape(shape))


class OrtComponent:
    """Any graph, run once per call: vision and embedding parts, one-node models."""

    def __init__(self, model: Path | bytes, folder: Path | None = None, **options: Any) -> None:
        self._session = open_session(model, folder, **options)
        self.inputs = {value.name: value for value in self._session.get_inputs()}
        self.outputs = [value.name for value in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All outputs by name."""
        results = _run(self._session, self.outputs, {name: to_ort(array) for name, array in feeds.items()})
        return {name: to_numpy(value).copy() for name, value in zip(self.outputs, results, strict=True)}

    def prepared(self, feeds: Mapping[str, np.ndarray]) -> Callable[[], object]:
        """A run on feeds that were handed over once, outputs left where they are: for timing."""
        values = {name: to_ort(array) for name, array in feeds.items()}
        return lambda: _run(self._session, self.outputs, values)


class OrtRunner:
    """Implements `runners.base.Runner` on one ONNX Runtime session. `taps` holds extra outputs of the last step."""

    def __init__(
        self,
        model: Path | bytes,
        *,
        folder: Path | None = None,
        io: DecoderIo | None = None,
        graph: Graph | None = None,
        context_len: int | None = None,
        device: str = "cpu",
        threads: int | None = None,
        optimization: Optimization = "all",
        prepacking: bool = True,
        outputs: tuple[str, ...] = (),
        debug: bool = False,
    ) -> None:
        """`model` is a file, or the bytes of a rewritten one whose external data lies in `folder`."""
        if graph is None:
            graph = graph_from_bytes(model, folder or Path()) if isinstance(model, bytes) else load_graph(model)
        self._graph = graph
        self._io = io or decoder_io(graph, {"logits": "logits"} if outputs else None)
        self._session = open_session(
            model, folder, device=device, threads=threads, optimization=optimization, prepacking=prepacking, debug=debug
        )
        self._threads, self._optimization, self._prepacking = threads or 0, optimization, prepacking
        self._extra = outputs
        self.taps: dict[str, np.ndarray] = {}
        self._windowed = _windowed(graph)
        capacities = [binding.capacity for binding in self._io.kv if binding.capacity]
        self.context_len = min([*capacities, *([context_len] if context_len else [])], default=None)
        self.kv_layout = KvLayout(
            tuple(KvComponent(b.layer, b.kind, b.num_heads, b.head_dim, b.dtype, b.window) for b in self._io.kv)
        )
        logits = next(value for value in graph.outputs if value.name == self._io.logits)
        size = logits.shape[-1] if logits.shape else None
        self.vocab_size = size if isinstance(size, int) else 0
        self._length = 0
        self._kv: dict[str, ort.OrtValue] = {}
        self._states: dict[str, ort.OrtValue] = {}
        self.reset()

    @property
    def length(self) -> int:
        """Tokens whose KV (and state) is held."""
        return self._length

    @property
    def info(self) -> RunnerInfo:
        """Read back from the live session."""
        providers = tuple(self._session.get_providers())
        return RunnerInfo(
            name="ort",
            version=ort.__version__,
            device="cuda" if "CUDAExecutionProvider" in providers else "cpu",
            providers=providers,
            nodes=len(self._graph.nodes),
            nodes_fallback=0,
            threads=self._threads,
            options={"optimization": self._optimization, "prepacking": str(self._prepacking).lower()},
        )

    def reset(self) -> None:
        """Length 0, recurrent state zeroed."""
        self._length = 0
        self._kv = {b.past: to_ort(self._past(b, 0)) for b in self._io.kv}
        self._states = {s.past: to_ort(np.zeros(s.shape, s.dtype)) for s in self._io.states}

    def _past(self, binding: KvBinding, length: int, rows: np.ndarray | None = None) -> np.ndarray:
        """A past of `length` tokens in the graph's axes, filled from rows [H_kv, length, D]; the rest is zero."""
        capacity = self._capacity(binding, length)
        full = np.zeros((1, binding.num_heads, capacity, binding.head_dim), binding.dtype)
        if rows is not None:
            full[0, :, :length] = rows
        if binding.axes == "BSM":
            return np.ascontiguousarray(full.transpose(0, 2, 1, 3)).reshape(1, capacity, -1)
        return full

    def _capacity(self, binding: KvBinding, length: int) -> int:
        if binding.capacity:
            return binding.capacity
        if binding.past not in self._windowed:
            return length
        capacity = max(_FIRST_CAPACITY, binding.window or 0)
        while capacity < length:
            capacity *= 2
        return capacity

    def step(self, ids: np.ndarray, *, embeds: np.ndarray | None = None, logits: LogitsMode = "last") -> np.ndarray:
        """Feed T tokens; f32 logits [1, V], [T, V] or [0, V]. A failure leaves everything as it was."""
        num_new = len(ids) if embeds is None else embeds.reshape(-1, embeds.shape[-1]).shape[0]
        self._check_room(num_new)
        self._make_room(self._length + num_new)
        feeds = self._feeds(np.asarray(ids), embeds, num_new) | self._kv | self._states
        io = self._io
        names = [io.logits, *(b.present for b in io.kv), *(s.present for s in io.states), *self._extra]
        made = dict(zip(names, _run(self._session, names, feeds), strict=True))
        self._kv = {b.past: made[b.present] for b in io.kv}
        self._states = {s.past: made[s.present] for s in io.states}
        self.taps = {name: to_numpy(made[name]) for name in self._extra}
        self._length += num_new
        return self._rows(to_numpy(made[io.logits]), logits)

    def _rows(self, values: np.ndarray, logits: LogitsMode) -> np.ndarray:
        rows = values.reshape(-1, values.shape[-1])
        if logits == "none":
            rows = rows[:0]
        return (rows[-1:] if logits == "last" else rows).astype(np.float32)

    def _check_room(self, num_new: int) -> None:
        if num_new < 1:
            raise GenaiError("a step of 0 tokens was asked for, wanted at least 1")
        if self.context_len is not None and self._length + num_new > self.context_len:
            raise GenaiError(
                f"{self._length} + {num_new} tokens do not fit into the context of {self.context_len}",
                hint="use a shorter prompt or fewer new tokens",
            )

    def _make_room(self, total: int) -> None:
        """Window caches slide when they are full; bound larger than the sequence, slot = position."""
        for binding in self._io.kv:
            if binding.past in self._windowed and self._kv[binding.past].shape()[2] < total:
                rows = to_numpy(self._kv[binding.past])[0, :, : self._length]
                capacity = self._capacity(binding, total)
                grown = np.zeros((1, binding.num_heads, capacity, binding.head_dim), binding.dtype)
                grown[0, :, : self._length] = rows
                self._kv[binding.past] = to_ort(grown)

    def _feeds(self, ids: np.ndarray, embeds: np.ndarray | None, num_new: int) -> dict[str, ort.OrtValue]:
        io, past_len, total = self._io, self._length, self._length + num_new
        arrays: dict[str, np.ndarray] = {}
        if io.input_ids:
            arrays[io.input_ids] = ids.reshape(1, -1)
        if io.inputs_embeds:
            if embeds is None:
                raise GenaiError("this decoder reads `inputs_embeds`; give embeddings, not ids")
            arrays[io.inputs_embeds] = embeds.reshape(1, num_new, -1)
        if io.attention_mask:
            arrays[io.attention_mask] = np.ones((1, total), np.int64)
        if io.position_ids:
            arrays[io.position_ids] = self._positions(io.position_ids, past_len, total)
        if io.cache_position:
            arrays[io.cache_position] = np.arange(past_len, total)
        for name, number in ((io.write_indices, past_len), (io.kv_seq_len, total)):
            if name:
                arrays[name] = np.array([number])
        if io.past_seq_len:
            rank = len(self._input(io.past_seq_len).shape or ())
            arrays[io.past_seq_len] = np.full((1,) * rank, past_len)
        return {name: to_ort(array.astype(self._input(name).dtype)) for name, array in arrays.items()}

    def _input(self, name: str) -> Any:
        return next(value for value in self._graph.inputs if value.name == name)

    def _positions(self, name: str, past_len: int, total: int) -> np.ndarray:
        positions = np.arange(past_len, total).reshape(1, -1)
        shape: tuple[Any, ...] = self._input(name).shape or ()
        if len(shape) == 3:
            axes = shape[0] if isinstance(shape[0], int) else 3
            return np.broadcast_to(positions, (axes, *positions.shape))
        return positions

    def kv_rows(self, start: int, stop: int) -> KvRows:
        """Present KV of positions [start, stop), valid until the next step."""
        if not 0 <= start <= stop <= self._length:
            raise GenaiError(f"KV rows {start}..{stop} were asked for, {self._length} are held")
        return [self._component(binding)[:, start:stop] for binding in self._io.kv]

    def _component(self, binding: KvBinding) -> np.ndarray:
        full = to_numpy(self._kv[binding.past])
        if binding.axes == "BSM":
            full = full.reshape(1, full.shape[1], binding.num_heads, binding.head_dim).transpose(0, 2, 1, 3)
        return np.asarray(full[0])

    def seed(self, rows: KvRows, state: StateSnapshot | None = None) -> None:
        """Replace everything held by `rows` and, for hybrids, `state` at their end."""
        wanted = [(b.num_heads, b.head_dim, b.dtype) for b in self._io.kv]
        found = [(a.shape[0], a.shape[2], a.dtype) for a in rows if a.ndim == 3]
        lengths = {a.shape[1] for a in rows if a.ndim == 3}
        if wanted != found or len(lengths) != 1 or 0 in lengths:
            raise GenaiError(f"seed: found {len(rows)} components of lengths {sorted(lengths)}, wanted {len(wanted)}")
        if self._io.states and (state is None or len(state) != len(self._io.states)):
            raise GenaiError("this decoder has recurrent state: a KV prefix without the state at its end is useless")
        length = lengths.pop()
        if self.context_len is not None and length > self.context_len:
            raise GenaiError(f"seed: {length} tokens do not fit into the context of {self.context_len}")
        self._kv = {b.past: to_ort(self._past(b, length, a)) for b, a in zip(self._io.kv, rows, strict=True)}
        self._states = {s.past: to_ort(a.copy()) for s, a in zip(self._io.states, state or [], strict=True)}
        self._length = length

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens. Recurrent state cannot go back: only to where it is, or to 0."""
        if not 0 <= length <= self._length:
            raise GenaiError(f"rewind to {length} was asked for, {self._length} tokens are held")
        if self._io.states and length not in (0, self._length):
            raise GenaiError("recurrent state cannot be rewound", hint="reset, and feed the prefix again")
        if length == 0:
            self.reset()
        elif length < self._length:
            rows = [array.copy() for array in self.kv_rows(0, length)]
            self._kv = {b.past: to_ort(self._past(b, length, a)) for b, a in zip(self._io.kv, rows, strict=True)}
            self._length = length

    def snapshot_state(self) -> StateSnapshot:
        """Recurrent/conv states now; [] when there are none."""
        return [to_numpy(self._states[s.past]).copy() for s in self._io.states]

    def supports_paged_kv(self) -> Gate:
        """Whether prefixes can be mirrored and seeded."""
        return paged_kv_gate(self._io, self._graph)

    def close(self) -> None:
        """Drop the session's buffers."""
        self._kv, self._states, self.taps = {}, {}, {}


def paged_kv_gate(io: DecoderIo, graph: Graph) -> Gate:
    """Whether this decoder's prefixes can be mirrored and seeded here, and by what means."""
    if not io.kv:
        return Gate(False, "the graph has no KV to page")
    place = "static cache" if io.kv[0].axes == "BSM" else "growing past"
    place = "window cache bound at full capacity" if _windowed(graph) else place
    states = "; recurrent state by snapshots at page boundaries" if io.states else ""
    return Gate(True, f"host KV, {place}{states}")


def _windowed(graph: Graph) -> set[str]:
    """Past inputs of attention ops that want a KV buffer of at least their window."""
    return {
        name
        for node in graph.nodes
        if node.op_type == "GroupQueryAttention" and node.attrs.get("sliding_window_cache", 0)
        for name in node.inputs[3:5]
    }
