"""Tokens chosen on the device: the CPU's tokens and draws, without the logits, by one small copy a token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cuda_double import tiny_decoder
from genai_cli.backends.cpu import CpuBackend
from genai_cli.errors import GenaiError
from genai_cli.generate import Limits, generate
from genai_cli.graph.ir import Graph
from genai_cli.runners.native import MOST_TOP, NativeRunner
from genai_cli.sampling import SamplingOptions, sample, sample_top

Make = Callable[..., Any]
PROMPT = [3, 7, 11, 5, 66, 0, 20]
F32 = np.dtype(np.float32)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return tiny_decoder.make(tmp_path_factory.mktemp("tiny"))


def chosen(backend: Any, logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    data = backend.download(backend.top(backend.record(), backend.constant(logits), count))
    return data[: 8 * count].view(np.int64), data[8 * count :].view(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("size", "count"), [(1, 1), (77, 5), (5000, 1), (5000, 40)])
def test_the_largest_logits(dtype: Any, size: int, count: int, cuda_backend: Make) -> None:
    """In 16 bits most values are equal to others: those go by id."""
    logits = np.random.default_rng(size).standard_normal(size).round(1).astype(dtype)
    ids, values = chosen(cuda_backend(), logits, count)
    wide = logits.astype(np.float32)
    wanted = np.argsort(-wide, kind="stable")[:count]
    np.testing.assert_array_equal(ids, wanted)
    np.testing.assert_array_equal(values, wide[wanted])


def test_fewer_than_asked_and_nan(cuda_backend: Make) -> None:
    ids, values = chosen(cuda_backend(), np.array([-np.inf, 2, np.nan, 2, np.inf], np.float32), 7)
    np.testing.assert_array_equal(ids, [2, 4, 1, 3, 0, -1, -1])
    assert np.isnan(values[0])


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(),
        SamplingOptions(greedy=False, temperature=0.7, top_k=5, seed=3),
        SamplingOptions(greedy=False, temperature=1.3, top_k=MOST_TOP, top_p=0.8, min_p=0.05, seed=9),
    ],
)
def test_the_loop_chooses_on_the_device_what_it_chooses_on_the_host(
    options: SamplingOptions, graph: Graph, cuda_backend: Make
) -> None:
    host, there = NativeRunner(graph, CpuBackend(threads=1)), NativeRunner(graph, cuda_backend())
    wanted = generate(host, PROMPT, options, Limits(8))
    found = generate(there, PROMPT, options, Limits(8))
    assert found.token_ids == wanted.token_ids
    logits = NativeRunner(graph, cuda_backend())
    again = generate(logits, PROMPT, options, Limits(8), num_logprobs=1)  # asks for logits: nothing else may change
    assert again.token_ids == found.token_ids
    assert logits.kv_rows(0, 9)[0].tobytes() == there.kv_rows(0, 9)[0].tobytes()


def test_a_greedy_token_is_one_copy_of_twelve_bytes(graph: Graph, cuda_backend: Make) -> None:
    runner = NativeRunner(graph, cuda_backend())
    counters, seen = runner._backend.device.counters, []
    before: list[int] = []

    def told(token: int) -> bool:
        now = [counters.htod, counters.dtoh, counters.dtoh_bytes, counters.htod_bytes]
        seen.append([b - a for a, b in zip(before or now, now, strict=True)])
        before[:] = now
        return False

    generate(runner, PROMPT, SamplingOptions(), Limits(8), on_token=told)
    assert seen[3:] == [[0, 1, 12, 0]] * 5  # the first tokens record the step and make it ready


def test_another_token_than_the_best_is_uploaded(graph: Graph, cuda_backend: Make) -> None:
    """The device has prepared the best one; what is fed decides."""
    runner, plain = (NativeRunner(graph, cuda_backend()) for _ in range(2))
    runner.step_top(np.array(PROMPT), 1)
    plain.step(np.array(PROMPT))
    for token in (9, 9, 1, 40):
        found, value = runner.step_top(np.array([token]), 1)
        logits = plain.step(np.array([token]))[0]
        assert (found[0], value[0]) == (logits.argmax(), logits.max())
    best = int(found[0])
    runner.rewind(len(PROMPT) + 1)  # back again: the prepared position is not the next one
    plain.rewind(len(PROMPT) + 1)
    assert runner.step_top(np.array([best]), 1)[0][0] == plain.step(np.array([best]))[0].argmax()


def test_an_interrupted_step_is_fed_again(graph: Graph, cuda_backend: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have moved the device's length on, or not: both are put right."""
    runner, plain = (NativeRunner(graph, cuda_backend()) for _ in range(2))
    backend = runner._backend
    for one in (runner, plain):
        token = one.step_top(np.array(PROMPT), 1)[0]
        token = one.step_top(token, 1)[0]
        token = one.step_top(token, 1)[0]

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(backend, "synchronize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner.step_top(token, 1)
    for _ in range(3):
        found, wanted = runner.step_top(token, 1), plain.step_top(token, 1)
        assert (found[0][0], found[1][0]) == (wanted[0][0], wanted[1][0])
        token = wanted[0]


def test_what_is_not_finite_is_told(cuda_backend: Make) -> None:
    for bad in ([np.nan, 1.0], [np.inf, 1.0], [-np.inf, -np.inf]):
        ids, values = chosen(cuda_backend(), np.array(bad, np.float32), 1)
        with pytest.raises(GenaiError, match="logits at position 3 are not finite"):
            sample_top(ids, values, SamplingOptions(), 3)


def test_the_draw_is_that_of_all_logits() -> None:
    logits = np.random.default_rng(4).standard_normal(500).astype(np.float32)
    for seed in range(50):
        options = SamplingOptions(greedy=False, top_k=20, top_p=0.9, seed=seed)
        ids = np.argsort(-logits, kind="stable")[:20]
        assert sample_top(ids, logits[ids], options, 4) == sample(logits, options, [1, 2, 3, 4], 0)


def test_options_that_look_at_all_logits_fetch_them(tmp_path: Path, cuda_backend: Make) -> None:
    graph = tiny_decoder.make(tmp_path)
    runner = NativeRunner(graph, cuda_backend())
    counters = runner._backend.device.counters
    generate(runner, PROMPT, SamplingOptions(repetition_penalty=1.2), Limits(3))
    assert counters.kernels["top"] == 0
    generate(runner, PROMPT, SamplingOptions(), Limits(3))
    assert counters.kernels["top"] > 0


def test_eager_and_captured_loops_are_the_same_over_three_growths(
    graph: Graph, cuda_backend: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16, 32, 64, 128: the device advances its own length, growth writes it anew; the CPU's tokens all the way."""
    monkeypatch.setattr("genai_cli.backends.cuda.FIRST_CAPACITY", 16)
    wanted = generate(NativeRunner(graph, CpuBackend(threads=1)), PROMPT, SamplingOptions(), Limits(70)).token_ids
    seen = []
    for capture in (False, True):
        runner = NativeRunner(graph, cuda_backend(capture=capture))
        made = generate(runner, PROMPT, SamplingOptions(), Limits(70))
        rows = b"".join(np.ascontiguousarray(part).tobytes() for part in runner.kv_rows(0, runner.length))
        seen.append((made.token_ids, rows))
        captures = runner._backend.captures
        assert captures.declined == []
        assert captures.invalidations == 3
        assert (captures.captures, captures.eager_replays) == ((4, 0) if capture else (0, 68))
    assert seen[0] == seen[1]
    assert seen[1][0] == wanted
