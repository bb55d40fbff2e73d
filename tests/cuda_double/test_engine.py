"""A whole decoder on the device against the same decoder on the CPU: tokens, KV, growth, graphs, mirror and seed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuda_double import tiny_decoder
from genai_cli.backends.cpu import CpuBackend
from genai_cli.generate import Limits, generate
from genai_cli.graph.ir import Graph
from genai_cli.kv.pages import pages_for
from genai_cli.kv.session import PagedKv
from genai_cli.runners.native import NativeRunner
from genai_cli.sampling import SamplingOptions

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))
from tolerance import SOURCES

Make = Callable[..., Any]
PROMPT = np.array([3, 7, 11, 5, 66, 0, 20])
KINDS = ("float32", "float16")


@pytest.fixture(scope="module", params=KINDS)
def graph(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return tiny_decoder.make(tmp_path_factory.mktemp("tiny"), request.param)


def greedy(runner: NativeRunner, steps: int, prompt: np.ndarray = PROMPT) -> tuple[list[int], np.ndarray]:
    """Tokens, and every step's last logits [steps + 1, V]."""
    logits, tokens = [runner.step(prompt)], []
    for _ in range(steps):
        tokens.append(int(logits[-1][0].argmax()))
        logits.append(runner.step(np.array(tokens[-1:])))
    return tokens, np.concatenate(logits)


def close(got: Any, want: Any, dtype: np.dtype[Any]) -> None:
    """Values after two layers and a head: three times the op limits of the dtype."""
    rtol, atol, _ = SOURCES[np.dtype(dtype).name]
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=3 * rtol, atol=3 * atol)


def test_tokens_and_kv_are_the_cpus(graph: Graph, cuda_backend: Make) -> None:
    cpu, cuda = NativeRunner(graph, CpuBackend(threads=1)), NativeRunner(graph, cuda_backend())
    wanted, found = greedy(cpu, 6), greedy(cuda, 6)
    assert wanted[0] == found[0]
    kind = cpu.kv_layout.components[0].dtype
    close(found[1], wanted[1], kind)
    for a, b in zip(cpu.kv_rows(0, cpu.length), cuda.kv_rows(0, cuda.length), strict=True):
        assert b.dtype == kind
        close(b, a, kind)


def test_nothing_falls_back_to_the_host(graph: Graph, cuda_backend: Make) -> None:
    """Decoding is one graph: a host step between kernels would show as a second segment."""
    runner = NativeRunner(graph, cuda_backend())
    greedy(runner, 4)
    captures = runner._backend.captures
    assert (captures.captures, captures.graph_launches, captures.eager_replays) == (1, 3, 0)


def test_eager_and_captured_over_three_growths(
    graph: Graph, cuda_backend: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts end just before 64, 128 and 256: decoding crosses each. Same tokens, same logits, same KV bytes."""
    monkeypatch.setattr("genai_cli.backends.cuda.FIRST_CAPACITY", 64)  # the double takes seconds for long prompts
    seen = []
    for capture in (False, True):
        runner = NativeRunner(graph, cuda_backend(capture=capture))
        tokens, logits, rows = [], [], b""
        for stop in (62, 126, 254):
            prompt = np.arange(stop - runner.length) % tiny_decoder.VOCAB
            more = greedy(runner, 4, prompt)
            tokens += more[0]
            logits.append(more[1])
        rows = b"".join(np.ascontiguousarray(part).tobytes() for part in runner.kv_rows(0, runner.length))
        seen.append((tokens, np.concatenate(logits).tobytes(), rows))
        captures = runner._backend.captures
        assert (captures.captures > 3) == capture
        assert captures.invalidations == 3
        assert captures.declined == []
    assert seen[0] == seen[1]
    assert np.isfinite(np.frombuffer(seen[0][1], np.float32)).all()


def test_growth_moves_every_row(graph: Graph, cuda_backend: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step before a growth left rows too: a decoder that had the room from the start says the same, bit by bit."""
    prompt = np.arange(14) % tiny_decoder.VOCAB
    roomy = greedy(NativeRunner(graph, cuda_backend()), 20, prompt)
    monkeypatch.setattr("genai_cli.backends.cuda.FIRST_CAPACITY", 16)
    grown = greedy(NativeRunner(graph, cuda_backend()), 20, prompt)
    assert np.isfinite(roomy[1]).all()
    for a, b in zip(roomy, grown, strict=True):
        np.testing.assert_array_equal(a, b)


def test_chunks_and_single_tokens_leave_the_same_kv(graph: Graph, cuda_backend: Make) -> None:
    """What a prompt leaves in the slots does not depend on how it was cut: pages may be shared between the two."""
    whole, cut = (NativeRunner(graph, cuda_backend()) for _ in range(2))
    prompt = np.arange(24) % tiny_decoder.VOCAB
    last = whole.step(prompt)
    for part in (prompt[:20], prompt[20:21], prompt[21:]):
        again = cut.step(part)
    assert last.tobytes() == again.tobytes()
    for a, b in zip(whole.kv_rows(0, 24), cut.kv_rows(0, 24), strict=True):
        assert np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def test_a_seeded_prefix_goes_on_like_the_original(graph: Graph, cuda_backend: Make) -> None:
    first, second = (NativeRunner(graph, cuda_backend()) for _ in range(2))
    tokens, logits = greedy(first, 5)
    cold = NativeRunner(graph, cuda_backend())
    cold.step(PROMPT)
    rows = [np.array(part) for part in cold.kv_rows(0, len(PROMPT) - 1)]
    second.seed(rows)
    again, warm = greedy(second, 5, PROMPT[-1:])
    assert again == tokens
    assert warm.tobytes() == logits.tobytes()


def test_pages_by_dtoh_and_seed_by_htod(graph: Graph, cuda_backend: Make) -> None:
    """Mirror, publish, reuse: the second conversation feeds only what is new, and says what a cold one says."""
    runner, cold = (NativeRunner(graph, cuda_backend()) for _ in range(2))
    kv = PagedKv(runner.kv_layout, page_size=3, num_pages=40)
    first, second = [*range(11)], [*range(9), 50, 51, 52]
    with kv.sequence(first) as sequence:
        runner.step(np.array(first))
        sequence.mirror(runner.kv_rows, runner.length)
        sequence.publish(first)
    counters = runner._backend.device.counters
    with kv.sequence(second) as sequence:
        assert sequence.num_cached_tokens == 9  # three pages
        runner.seed(*sequence.prefix())
        warm = runner.step(np.array(second[9:]))
        before = counters.dtoh
        sequence.mirror(runner.kv_rows, runner.length)
        assert counters.dtoh == before + 1  # the new rows of all layers in one copy
    assert warm.tobytes() == cold.step(np.array(second)).tobytes()
    assert kv.pool.pages_used == pages_for(len(first), 3)


def test_the_loop_reuses_prefixes_as_on_the_cpu(tmp_path: Path, cuda_backend: Make) -> None:
    """Three conversations on one prefix, one of them interrupted: the CPU's tokens, its reuse, and no page lost.

    In f32: in f16 the random weights' near-ties fall differently on two engines.
    """
    graph, seen = tiny_decoder.make(tmp_path), []
    for backend in (CpuBackend(threads=1), cuda_backend()):
        runner = NativeRunner(graph, backend)
        kv = PagedKv(runner.kv_layout, page_size=3, num_pages=40)
        shared, told = [*range(10)], []

        def interrupt(token: int) -> bool:
            raise KeyboardInterrupt

        for tail in ([40], [41, 42], [43]):
            if tail == [41, 42]:
                with pytest.raises(KeyboardInterrupt):
                    generate(runner, [*shared, 44], SamplingOptions(), Limits(4), on_token=interrupt, kv=kv)
            made = generate(runner, shared + tail, SamplingOptions(), Limits(6), kv=kv)
            told.append((made.token_ids, made.num_cached_tokens))
        seen.append((told, kv.pool.pages_used))
    assert seen[0] == seen[1]
    assert [cached for _, cached in seen[1][0]] == [0, 10, 10]


def test_the_kv_is_really_read(graph: Graph, cuda_backend: Make) -> None:
    """Liveness: with zeroed KV the logits move, or none of the above would mean anything."""
    honest, blind = (NativeRunner(graph, cuda_backend()) for _ in range(2))
    honest.step(PROMPT[:-1])
    rows = honest.kv_rows(0, len(PROMPT) - 1)
    blind.seed([np.zeros_like(part) for part in rows])
    assert not np.allclose(honest.step(PROMPT[-1:]), blind.step(PROMPT[-1:]), atol=1e-2)


def test_a_greedy_token_moves_few_bytes(graph: Graph, cuda_backend: Make) -> None:
    """Up: the token and the length. Down: the logits the loop samples from."""
    runner = NativeRunner(graph, cuda_backend())
    greedy(runner, 3)
    counters = runner._backend.device.counters
    before = (counters.htod, counters.htod_bytes, counters.dtoh)
    runner.step(PROMPT[:1])
    moved = (counters.htod - before[0], counters.htod_bytes - before[1], counters.dtoh - before[2])
    assert moved == (2, 16, 1)


@pytest.mark.slow
def test_a_thousand_generations_leave_the_pool_where_it_was(tmp_path: Path, cuda_backend: Make, double: Any) -> None:
    runner = NativeRunner(tiny_decoder.make(tmp_path), cuda_backend())
    greedy(runner, 2)
    held = double.memory_used()
    for _ in range(1000):
        runner.reset()
        greedy(runner, 2)
    runner._backend.synchronize()
    assert double.memory_used() == held
