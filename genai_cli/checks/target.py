"""A model package as parity sees it: one artifact, and how each engine opens it."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from genai_cli.backends.base import Backend
from genai_cli.checks.oracles import OpenModel, OracleRunner
from genai_cli.checks.parity import OpenNative, Target, Transform
from genai_cli.checks.taps import TappedRunner
from genai_cli.engine.component import NativeComponent
from genai_cli.engine.engine import Engine
from genai_cli.graph.io import DecoderIo
from genai_cli.graph.ir import Graph
from genai_cli.graph.loader import graph_from_bytes, load_graph
from genai_cli.package.decoder import LoadedDecoder, load_decoder
from genai_cli.package.model import ModelPackage
from genai_cli.package.open import open_package
from genai_cli.runners.native import NativeRunner
from genai_cli.runners.ort import OrtComponent, OrtRunner
from genai_cli.runners.pipeline import Component, PipelineRunner, wiring


@dataclass(frozen=True)
class Place:
    """Where and how wide both sides run."""

    threads: int
    open_backend: Callable[[], Backend]
    description: str  # of the native side's instruction set or device
    oracle_device: str = "cpu"  # of ONNX Runtime's side: cpu or cuda[:N]


def open_target(path: Path, place: Place, *, isolated: bool = False) -> Target:
    """Read the package and bind its decoder. GenaiError (2) for whatever is wrong with it.

    `isolated`: what comes before the decoder runs on ONNX Runtime on both sides, so that only decoders differ."""
    package = open_package(path)
    loaded = load_decoder(package)
    return Target(
        name=path.resolve().name,
        model_path=loaded.path,
        graph=loaded.graph,
        open_native=_native_opener(package, loaded, place, isolated),
        open_ort=_ort_opener(package, loaded, place),
        open_backend=place.open_backend,
        run_ort=lambda model, feeds: run_one(model, feeds, place.oracle_device),
        tokenizer_path=package.tokenizer,
        typed=str(path),
        context_len=loaded.context_len,
        environment=environment(place),
        warnings=(*package.warnings, *loaded.warnings),
    )


class NativePipeline(PipelineRunner):
    """Ids to embeddings by native's own components, then the decoder; taps are the decoder's."""

    decoder: NativeRunner

    @property
    def engine(self) -> Engine:
        """The decoder's."""
        return self.decoder.engine

    def tap(self, names: Sequence[str], ids: np.ndarray) -> dict[str, np.ndarray]:
        """The decoder's values while it is fed the embeddings of `ids`."""
        self.engine.tap(tuple(names))
        try:
            return self.engine.step(np.asarray(ids), self.embed(ids), "all")
        finally:
            self.engine.tap(())


class OraclePipeline(PipelineRunner):
    """The same on ONNX Runtime."""

    decoder: OrtRunner

    @property
    def taps(self) -> dict[str, np.ndarray]:
        """The decoder's."""
        return self.decoder.taps


def _native_opener(package: ModelPackage, loaded: LoadedDecoder, place: Place, isolated: bool) -> OpenNative:
    def open_part(file: Path, backend: Backend) -> Component:
        if isolated:
            return OrtComponent(file, threads=place.threads, device=place.oracle_device)
        return NativeComponent(load_graph(file), backend)

    def open_native(*, exact: bool, transform: Transform | None = None) -> TappedRunner:
        backend = place.open_backend()
        decoder = NativeRunner(
            loaded.graph, backend, io=loaded.io, context_len=loaded.context_len, exact=exact, transform=transform
        )
        if loaded.io.input_ids:
            return decoder
        parts = _parts(package, lambda file: open_part(file, backend))
        return NativePipeline(decoder, *parts, wiring(package), _width(loaded))

    return open_native


def _ort_opener(package: ModelPackage, loaded: LoadedDecoder, place: Place) -> OpenModel:
    def open_ort(model: bytes | None, *, optimization: str = "all", outputs: tuple[str, ...] = ()) -> OracleRunner:
        folder = loaded.path.parent
        graph = loaded.graph if model is None else graph_from_bytes(model, folder)
        decoder = OrtRunner(
            loaded.path if model is None else model, folder=folder, io=bound_to(loaded.io, graph), graph=graph,
            context_len=loaded.context_len, threads=place.threads, device=place.oracle_device,
            optimization=optimization, outputs=outputs,  # type: ignore[arg-type]
        )  # fmt: skip
        if loaded.io.input_ids:
            return decoder
        parts = _parts(package, lambda file: OrtComponent(file, threads=place.threads, device=place.oracle_device))
        return OraclePipeline(decoder, *parts, wiring(package), _width(loaded))

    return open_ort


def _parts(package: ModelPackage, open_one: Callable[[Path], Component]) -> tuple[Component, Component | None]:
    """The embedding, and the vision encoder where there is one. `wiring` refuses a package without the first."""
    wiring(package)
    embedding, vision = package.component("embedding"), package.component("vision")
    assert embedding is not None
    return open_one(embedding.path), open_one(vision.path) if vision else None


def _width(loaded: LoadedDecoder) -> int:
    """E of the embeddings the decoder reads; 0 where the graph does not say."""
    info = next(value for value in loaded.graph.inputs if value.name == loaded.io.inputs_embeds)
    width = info.shape[-1] if info.shape else None
    return width if isinstance(width, int) else 0


def bound_to(io: DecoderIo, graph: Graph) -> DecoderIo:
    """The same roles with the dtypes of another graph: a widened twin carries f32 KV."""
    dtypes = {value.name: value.dtype for value in graph.inputs}
    kv = tuple(replace(binding, dtype=dtypes[binding.past] or binding.dtype) for binding in io.kv)
    states = tuple(replace(state, dtype=dtypes[state.past] or state.dtype) for state in io.states)
    return replace(io, kv=kv, states=states)


def run_one(model: bytes, feeds: dict[str, np.ndarray], device: str = "cpu") -> list[np.ndarray]:
    """A model in memory on ONNX Runtime, unoptimised so that nothing replaces the op under test."""
    component = OrtComponent(model, threads=1, optimization="off", device=device)
    made = component.run(feeds)
    return [made[name] for name in component.outputs]


def environment(place: Place) -> dict[str, object]:
    """Machine and instruction sets, for reports and for the floor's cache key."""
    model, flags = processor()
    return {
        "cpu": model, "cpu_flags_sha256": flags, "features": place.description, "os": platform.platform(),
        "cores": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__,
    }  # fmt: skip


def processor() -> tuple[str, str]:
    """Its name, and a hash over the instruction sets it says it has: ONNX Runtime chooses kernels by them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    facts: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    flags = facts.get("flags") or facts.get("Features") or platform.machine()
    model = facts.get("model name") or platform.processor() or platform.machine()
    return model, hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:16]
