"""A graph without a past, on the native engine: vision encoders, embeddings."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import numpy as np

from genai_cli.backends.base import Backend, Recording, Tensor
from genai_cli.engine.arena import Arena
from genai_cli.engine.plan import refuse, unsupported
from genai_cli.engine.trace import Constants, StaleRecording, Tracer
from genai_cli.engine.values import Dynamic, Static
from genai_cli.errors import GenaiError
from genai_cli.graph.fuse import fold_transposes
from genai_cli.graph.ir import Graph
from genai_cli.graph.prune import prune

KEPT_RECORDINGS = 4  # shapes of decode steps and of a few prompts or pictures
Shapes = tuple[tuple[str, tuple[int, ...]], ...]
Recorded = tuple[dict[str, Tensor], Recording, dict[str, Tensor | np.ndarray]]


class NativeComponent:
    """Recorded once for each set of input shapes, then replayed. Nothing is handed to another engine."""

    def __init__(self, graph: Graph, backend: Backend) -> None:
        """GenaiError lists every node native cannot run."""
        self._outputs = [value.name for value in graph.outputs]
        self._graph = fold_transposes(prune(graph, self._outputs))
        refuse(unsupported(self._graph))
        self._dtypes = {value.name: value.dtype for value in graph.inputs}
        self._shapes = {value.name: value.shape for value in graph.inputs}
        self._backend, self._constants, self._arena = backend, Constants(backend), Arena(backend)
        self._recordings: OrderedDict[Shapes, Recorded] = OrderedDict()

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All outputs by name, as copies. GenaiError when an input is missing or too many are given."""
        if set(feeds) != set(self._dtypes):
            raise GenaiError(f"inputs {sorted(feeds)} were given, the component takes {sorted(self._dtypes)}")
        arrays = {name: np.ascontiguousarray(array, self._dtypes[name]) for name, array in feeds.items()}
        for name, array in arrays.items():
            self._check_shape(name, array.shape)
        shapes = tuple((name, array.shape) for name, array in sorted(arrays.items()))
        recorded = self._replay(shapes, arrays) or self._record(shapes, arrays)
        self._backend.synchronize()
        return {name: self._read(value) for name, value in recorded[2].items()}

    def _check_shape(self, name: str, found: tuple[int, ...]) -> None:
        wanted = self._shapes[name]
        if wanted is None:
            return
        pairs = zip(found, wanted, strict=False)
        if len(found) != len(wanted) or any(isinstance(want, int) and got != want for got, want in pairs):
            raise GenaiError(f"`{name}` has the shape {list(found)}; wanted {list(wanted)}")

    def _read(self, value: Tensor | np.ndarray) -> np.ndarray:
        return value.copy() if isinstance(value, np.ndarray) else self._backend.download(value).copy()

    def _replay(self, shapes: Shapes, arrays: dict[str, np.ndarray]) -> Recorded | None:
        recorded = self._recordings.get(shapes)
        if recorded is None:
            return None
        self._recordings.move_to_end(shapes)
        self._upload(recorded[0], arrays)
        try:
            recorded[1].replay()
        except StaleRecording:  # a host step made another shape than before
            del self._recordings[shapes]
            return None
        return recorded

    def _record(self, shapes: Shapes, arrays: dict[str, np.ndarray]) -> Recorded:
        inputs = {name: self._backend.empty(array.shape, array.dtype) for name, array in arrays.items()}
        self._upload(inputs, arrays)
        self._arena.restart()
        recording = self._backend.record()
        tracer = Tracer(
            self._backend, recording, self._arena, self._constants, self._graph.initializers, [],
            {name: Dynamic(tensor) for name, tensor in inputs.items()}, frozenset(self._outputs),
        )  # fmt: skip
        tracer.run(self._graph.nodes)
        recorded = (inputs, recording, {name: _place(tracer, name) for name in self._outputs})
        if not tracer.one_shot:
            self._recordings[shapes] = recorded
            if len(self._recordings) > KEPT_RECORDINGS:
                self._recordings.popitem(last=False)
        return recorded

    def _upload(self, tensors: dict[str, Tensor], arrays: dict[str, np.ndarray]) -> None:
        for name, tensor in tensors.items():
            self._backend.upload(tensor, arrays[name])


def _place(tracer: Tracer, name: str) -> Tensor | np.ndarray:
    value = tracer.value(name)
    if isinstance(value, Dynamic):
        return value.tensor
    assert isinstance(value, Static)  # there is no KV here
    return value.array
