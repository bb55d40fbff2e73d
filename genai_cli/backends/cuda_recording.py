"""A recorded step on a device: run eagerly while recorded (warm-up), captured as graphs at the first replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from genai_cli.backends.base import Tensor
from genai_cli.backends.cuda_device import Memory
from genai_cli.backends.cuda_launch import TABLE, Call, Launch
from genai_cli.errors import GenaiError

if TYPE_CHECKING:
    from genai_cli.backends.cuda import CudaBackend

MIN_GRAPH = 2  # launches: a graph of one is slower than the launch


@dataclass(frozen=True)
class Declined:
    """A run of kernels that could not be captured, and why; it goes on eagerly."""

    first_kernel: str
    num_launches: int
    reason: str


@dataclass
class CaptureCounters:
    """How recordings were run, over the life of a backend."""

    warm_ups: int = 0  # recordings made, each of which ran eagerly
    captures: int = 0
    graph_launches: int = 0
    eager_replays: int = 0  # replays in which some kernels ran without a graph
    replays: int = 0
    invalidations: int = 0
    declined: list[Declined] = field(default_factory=list)


@dataclass
class Segment:
    """Kernel calls without a host step between them."""

    calls: list[Call] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    graph: Any = None
    declined: bool = False

    def names(self) -> list[str]:
        return [launch.name for launch in self.launches]


class CudaRecording:
    """Implements `backends.base.Recording`."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend, self._device = backend, backend.device
        self._segments: list[Segment | Callable[[], None]] = []
        self._kept: list[Tensor | None] = []  # memory lives as long as the launches that hold its address
        self._scratch: dict[int, Memory] = {}  # by address; kept for the launches that hold it
        self._requests = 0  # scratch asked for by the call being planned
        self._generation = backend.generation
        self.advances = False  # past_len grows by one with every run
        backend.captures.warm_ups += 1

    def call(
        self, kernel: str, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None], attrs: dict[str, Any]
    ) -> None:
        """Plan, run and record one kernel call."""
        if kernel not in TABLE:
            raise GenaiError(f"kernel `{kernel}` does not exist on `cuda`")
        call = Call(kernel, inputs, outputs, attrs, self._backend, self._take_scratch, self._device.fault_address)
        launches = self._plan(call)
        for launch in launches:
            self._device.launch(launch)
        segment = self._open_segment()
        segment.calls.append(call)
        segment.launches += launches
        self._kept += [*inputs, *outputs]
        self._backend.touch()

    def host(self, function: Callable[[], None]) -> None:
        """Run and record a host step; it reads and writes tensors through the backend, which waits where it must."""
        self._device.wait()
        function()
        self._segments.append(function)
        self._backend.touch()

    def replay(self) -> None:
        """Run everything again, as graphs where that is possible."""
        if self._generation != self._backend.generation:
            self._invalidate()
        counters = self._backend.captures
        counters.replays += 1
        eager = False
        for segment in self._segments:
            if isinstance(segment, Segment):
                eager |= not self._run(segment)
            else:
                self._device.wait()
                segment()
        counters.eager_replays += eager
        if self.advances:
            self._backend.moved_on()
        self._backend.touch()

    def _plan(self, call: Call) -> list[Launch]:
        self._requests = 0
        return TABLE[call.kernel](call)

    def _take_scratch(self, nbytes: int) -> int:
        """The call's next piece of scratch. Calls run one after another, so all of them share the same pieces."""
        memory = self._backend.scratch(self._requests, nbytes)
        self._requests += 1
        self._scratch[memory.address] = memory
        return memory.address

    def _open_segment(self) -> Segment:
        last = self._segments[-1] if self._segments else None
        if isinstance(last, Segment):
            return last
        self._segments.append(Segment())
        return self._open_segment()

    def _invalidate(self) -> None:
        """The KV buffers grew: grids chosen by their capacity, and graphs that hold them, are stale."""
        self._scratch.clear()
        for segment in self._segments:
            if isinstance(segment, Segment):
                segment.launches = [launch for call in segment.calls for launch in self._plan(call)]
                segment.graph, segment.declined = None, False
        self._generation = self._backend.generation
        self._backend.captures.invalidations += 1

    def _run(self, segment: Segment) -> bool:
        """True when it ran as a graph."""
        if segment.graph is None and not segment.declined and self._backend.options.capture:
            self._capture(segment)
        if segment.graph is None:
            for launch in segment.launches:
                self._device.launch(launch)
            return False
        segment.graph.launch(self._device.stream)
        self._device.ran(segment.names())
        self._backend.captures.graph_launches += 1
        return True

    def _capture(self, segment: Segment) -> None:
        if len(segment.launches) < MIN_GRAPH:
            return
        for launch in segment.launches:
            self._device.prepare(launch)
        try:
            with self._device.capture() as builder:
                segment.graph = self._build(builder, segment.launches)
        except GenaiError as error:
            segment.declined = True
            declined = Declined(segment.launches[0].name, len(segment.launches), error.message)
            self._backend.captures.declined.append(declined)
            return
        self._backend.captures.captures += 1

    def _build(self, builder: Any, launches: Sequence[Launch]) -> Any:
        try:
            builder.begin_building()
            for launch in launches:
                self._device.launch(launch, builder)
            return builder.end_building().complete()
        except BaseException:  # neither an error nor an interrupt may leave the stream capturing
            _abandon(builder)
            raise


def _abandon(builder: Any) -> None:
    """End a capture that failed, so that the stream works again; that it is broken is known by now."""
    from cuda.core._utils.cuda_utils import CUDAError

    with suppress(CUDAError):
        builder.close()
