"""A model package as parity sees it: one artifact, and how each engine opens it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from genai_cli.backends.base import Backend
from genai_cli.checks.parity import Target, Transform
from genai_cli.errors import GenaiError
from genai_cli.graph.io import DecoderIo
from genai_cli.graph.ir import Graph
from genai_cli.graph.loader import graph_from_bytes
from genai_cli.package.decoder import LoadedDecoder, load_decoder
from genai_cli.package.open import open_package
from genai_cli.runners.native import NativeRunner
from genai_cli.runners.ort import Optimization, OrtComponent, OrtRunner


@dataclass(frozen=True)
class Place:
    """Where and how wide both sides run."""

    threads: int
    open_backend: Callable[[], Backend]
    description: str  # of the native side's instruction set or device


def open_target(path: Path, place: Place) -> Target:
    """Read the package and bind its decoder. GenaiError (2) for whatever is wrong with it."""
    package = open_package(path)
    loaded = load_decoder(package)
    if not loaded.io.input_ids:
        raise GenaiError(
            f"the decoder of `{path}` reads `{loaded.io.inputs_embeds}`, not token ids; parity feeds ids to both sides",
            hint=f"genai generate {path} --backend ort",
        )
    return Target(
        name=path.name,
        model_path=loaded.path,
        graph=loaded.graph,
        open_native=_native_opener(loaded, place),
        open_ort=_ort_opener(loaded, place),
        open_backend=place.open_backend,
        run_ort=run_one,
        tokenizer_path=package.tokenizer,
        environment=environment(place),
        warnings=(*package.warnings, *loaded.warnings),
    )


def _native_opener(loaded: LoadedDecoder, place: Place):  # type: ignore[no-untyped-def]
    def open_native(*, exact: bool, transform: Transform | None = None) -> NativeRunner:
        return NativeRunner(
            loaded.graph,
            place.open_backend(),
            io=loaded.io,
            context_len=loaded.context_len,
            exact=exact,
            transform=transform,
        )

    return open_native


def _ort_opener(loaded: LoadedDecoder, place: Place):  # type: ignore[no-untyped-def]
    def open_ort(
        model: bytes | None, *, optimization: Optimization = "all", outputs: tuple[str, ...] = ()
    ) -> OrtRunner:
        folder = loaded.path.parent
        graph = loaded.graph if model is None else graph_from_bytes(model, folder)
        return OrtRunner(
            loaded.path if model is None else model, folder=folder, io=bound_to(loaded.io, graph), graph=graph,
            context_len=loaded.context_len, threads=place.threads, optimization=optimization, outputs=outputs,
        )  # fmt: skip

    return open_ort


def bound_to(io: DecoderIo, graph: Graph) -> DecoderIo:
    """The same roles with the dtypes of another graph: a widened twin carries f32 KV."""
    dtypes = {value.name: value.dtype for value in graph.inputs}
    kv = tuple(replace(binding, dtype=dtypes[binding.past] or binding.dtype) for binding in io.kv)
    states = tuple(replace(state, dtype=dtypes[state.past] or state.dtype) for state in io.states)
    return replace(io, kv=kv, states=states)


def run_one(model: bytes, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """A model in memory on ONNX Runtime, unoptimised so that nothing replaces the op under test."""
    component = OrtComponent(model, threads=1, optimization="off")
    made = component.run(feeds)
    return [made[name] for name in component.outputs]


def environment(place: Place) -> dict[str, object]:
    """Machine and instruction set, for reports and for the floor's cache key."""
    return {
        "cpu": platform.processor() or platform.machine(), "features": place.description, "os": platform.platform(),
        "cores": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__,
    }  # fmt: skip
