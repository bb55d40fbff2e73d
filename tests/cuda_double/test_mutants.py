"""Mistakes planted in the device's copies and order, under the mirror's whole way: pages by dtoh, seed by htod, warm
against cold. The battery passes on honest code and fails on every mutant.

A mutant is killed when the battery's bytes differ from an honest run's, or when the double reports it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cuda_double import tiny_decoder
from genai_cli.backends.cuda import CudaBackend
from genai_cli.backends.cuda_device import CudaDevice
from genai_cli.backends.cuda_launch import flat, integers, pointer
from genai_cli.errors import GenaiError
from genai_cli.graph.ir import Graph
from genai_cli.kv.session import PagedKv
from genai_cli.runners.native import NativeRunner

Make = Callable[..., Any]
Mutant = Callable[[pytest.MonkeyPatch], None]
PAGE, CAPACITY = 3, 16
FIRST, SECOND = [*range(11)], [*range(9), 50, 51, 52]
STEPS = 9  # across a growth: 11 and 12 tokens, buffers of 16


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return tiny_decoder.make(tmp_path_factory.mktemp("tiny"))


def battery(graph: Graph, make: Make) -> list[bytes]:
    """A conversation whose pages a second one reuses, both across a growth: tokens, logits and KV of all of it."""
    kv, seen = PagedKv(NativeRunner(graph, make()).kv_layout, page_size=PAGE, num_pages=40), []
    for ids in (FIRST, SECOND):
        runner = NativeRunner(graph, make())  # buffers of its own: rows of the other would hide what a seed misses
        with kv.sequence(ids) as sequence:
            if sequence.num_cached_tokens:
                runner.seed(*sequence.prefix())
            logits = runner.step(np.array(ids[sequence.num_cached_tokens :]))
            sequence.mirror(runner.kv_rows, runner.length)
            for _ in range(STEPS):
                seen.append(logits.tobytes())
                logits = runner.step(np.array([tiny_decoder.VOCAB - 1 - len(seen)]))
            sequence.mirror(runner.kv_rows, runner.length)
            seen += [np.ascontiguousarray(rows).tobytes() for rows in runner.kv_rows(0, runner.length)]
            fed = [tiny_decoder.VOCAB - 1 - n for n in range(STEPS)]
            sequence.publish([*ids, *fed][: runner.length])
        with kv.sequence(ids) as sequence:  # what lies in the pages now
            seen += [np.ascontiguousarray(rows).tobytes() for rows in sequence.prefix()[0]]
    return seen


def read_before_sync(patch: pytest.MonkeyPatch) -> None:
    """The read-out takes the staging's bytes before the copy has run."""
    download = CudaDevice.download

    def early(device: CudaDevice, address: int, nbytes: int) -> np.ndarray:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(CudaDevice, "wait", lambda self: None)
            return download(device, address, nbytes)

    patch.setattr(CudaDevice, "download", early)


def seed_before_sync(patch: pytest.MonkeyPatch) -> None:
    """Staging is written again while queued copies still read it."""
    patch.setattr(CudaDevice, "_reserve", lambda device, nbytes: 0)


def wrong_stream(patch: pytest.MonkeyPatch) -> None:
    """Rows move on a stream of their own, which waits for nobody."""
    move = CudaBackend._move_rows

    def elsewhere(backend: CudaBackend, *args: Any) -> None:
        own, backend.device.stream = backend.device.stream, backend.device.core.create_stream()
        try:
            move(backend, *args)
        finally:
            backend.device.stream = own

    patch.setattr(CudaBackend, "_move_rows", elsewhere)


def read_by_length(patch: pytest.MonkeyPatch) -> None:
    """Heads are taken to lie `count` rows apart where the read-out finds them `capacity` rows apart."""
    fetch, move = CudaBackend._fetch, CudaBackend._move_rows

    def fetched(backend: CudaBackend, start: int, stop: int) -> Any:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(
                CudaBackend, "_move_rows", lambda b, slot, to, s, source, _, n: move(b, slot, to, s, source, n, n)
            )
            return fetch(backend, start, stop)

    patch.setattr(CudaBackend, "_fetch", fetched)


def seed_by_length(patch: pytest.MonkeyPatch) -> None:
    """The same where a seed puts them."""
    write, move = CudaBackend.kv_write, CudaBackend._move_rows

    def written(backend: CudaBackend, *args: Any, **kwargs: Any) -> None:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(
                CudaBackend, "_move_rows", lambda b, slot, to, _, source, s, n: move(b, slot, to, n, source, s, n)
            )
            write(backend, *args, **kwargs)

    patch.setattr(CudaBackend, "kv_write", written)


def frozen_mask(patch: pytest.MonkeyPatch) -> None:
    """All rows of the buffer count as held, whatever the length is."""

    def full(backend: CudaBackend, past_len: int) -> None:
        backend._past_len = past_len
        state = np.array([backend.capacity - 1 if past_len else 0], np.int64)
        backend.device.upload(backend.state_address, state.view(np.uint8))

    patch.setattr(CudaBackend, "set_past_len", full)


def growth_of_one_head(patch: pytest.MonkeyPatch) -> None:
    """Growth copies one run of bytes, as if the heads lay side by side in the new buffer too."""
    reserve = CudaBackend.reserve

    def one_run(b: CudaBackend, slot: Any, to: int, to_stride: int, source: int, source_stride: int, n: int) -> None:
        units = slot.num_heads * n * slot.row_bytes // 4
        args = (pointer(to), pointer(source), *integers(1, 1, units, units, units))
        for launch in flat("kv", "move_rows<4>", units, args):
            b.device.launch(launch)

    def grown(backend: CudaBackend, capacity: int) -> None:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(CudaBackend, "_move_rows", one_run)
            reserve(backend, capacity)

    patch.setattr(CudaBackend, "reserve", grown)


MUTANTS: list[Mutant] = [
    read_before_sync, seed_before_sync, wrong_stream, read_by_length, seed_by_length, frozen_mask, growth_of_one_head,
]  # fmt: skip
"""A stale graph needs more keys than a tile has: test_backend.test_a_stale_graph_is_seen."""


@pytest.fixture(scope="module")
def honest() -> list[list[bytes]]:
    """Filled by the first test that runs the battery on honest code."""
    return []


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genai_cli.backends.cuda.FIRST_CAPACITY", CAPACITY)


def unchanged(graph: Graph, make: Make, honest: list[list[bytes]]) -> list[bytes]:
    if not honest:
        honest.append(battery(graph, make))
    return honest[0]


def test_honest_code_passes(graph: Graph, cuda_backend: Make, small_buffers: None, honest: list[list[bytes]]) -> None:
    """Twice the same, graphs or not, and every number finite."""
    first = unchanged(graph, cuda_backend, honest)
    assert first == battery(graph, lambda: cuda_backend(capture=False))
    assert all(np.isfinite(np.frombuffer(part, np.float32)).all() for part in first)


@pytest.mark.skipif(os.environ.get("CUDA_DOUBLE_MODE") == "thread", reason="there a mutant may win its race")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_killed(
    mutant: Mutant, graph: Graph, cuda_backend: Make, double: Any, small_buffers: None, honest: list[list[bytes]]
) -> None:
    wanted = unchanged(graph, cuda_backend, honest)
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        try:
            found = battery(graph, cuda_backend)
        except GenaiError:  # a fault is a verdict too; the double says which
            found = []
    reported = double.reports()
    double.clear_error()
    assert found != wanted or reported, "survived"
