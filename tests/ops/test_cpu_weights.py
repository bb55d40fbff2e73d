"""Weights that move: out of a mapped file into huge pages, once a process has run for a while, with the same bits."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from genai_cli.backends.cpu import CpuBackend
from genai_cli.backends.cpu_weights import HugeWeights, mapping_of
from genai_cli.engine.engine import LONG_RUN
from genai_cli.package.decoder import load_decoder
from genai_cli.package.open import open_package
from genai_cli.runners.native import NativeRunner

F32 = np.dtype(np.float32)
PACKAGES = Path(__file__).parents[2] / "fixtures" / "packages"


@pytest.fixture
def mapped(tmp_path: Path) -> np.ndarray:
    """[1024, 128] f32 in a mapped file."""
    values = np.random.default_rng(0).standard_normal((1024, 128)).astype(F32)
    (tmp_path / "weights").write_bytes(values.tobytes())
    with (tmp_path / "weights").open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(memory, F32).reshape(values.shape)


def test_a_mapped_weight_moves_once_and_keeps_its_values(mapped: np.ndarray) -> None:
    tensor, before = CpuBackend().constant(mapped), mapped.copy()
    weights = HugeWeights()
    weights.move(tensor)
    assert tensor.address == mapped.ctypes.data  # nobody runs long yet
    weights.wanted = True
    weights.move(tensor)
    moved = tensor.address
    assert moved != mapped.ctypes.data
    assert moved % 64 == 0
    assert isinstance(tensor.owner, np.ndarray)
    assert mapping_of(tensor.owner) is None
    assert tensor.owner.tobytes() == before.tobytes() == mapped.tobytes()
    weights.move(tensor)
    assert tensor.address == moved


def test_a_budget_is_kept(mapped: np.ndarray) -> None:
    weights = HugeWeights(budget=mapped.nbytes + mapped.nbytes // 2)
    weights.wanted = True
    first, second = CpuBackend().constant(mapped), CpuBackend().constant(mapped)
    weights.move(first)
    weights.move(second)
    assert first.address != mapped.ctypes.data
    assert second.address == mapped.ctypes.data


def test_memory_that_is_no_file_stays(mapped: np.ndarray) -> None:
    weights = HugeWeights()
    weights.wanted = True
    own = mapped.copy()
    tensor = CpuBackend().constant(own)
    weights.move(tensor)
    assert tensor.address == own.ctypes.data


def test_a_long_run_records_again_once_with_the_same_bits() -> None:
    decoder = load_decoder(open_package(PACKAGES / "llama-optimum"))
    settled, never = (
        NativeRunner(decoder.graph, CpuBackend(), io=decoder.io, context_len=decoder.context_len) for _ in range(2)
    )
    never._backend.runs_long = lambda: False  # type: ignore[attr-defined]
    for step in range(LONG_RUN + 20):
        token = np.array([step % 50 + 3])
        assert settled.step(token).tobytes() == never.step(token).tobytes(), step
    assert (never.engine.counters.recorded, never.engine.counters.invalidated) == (1, 0)
    assert (settled.engine.counters.recorded, settled.engine.counters.invalidated) == (2, 1)
