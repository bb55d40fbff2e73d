"""Failures that other engines met with KV, prefixes and sessions, on packages whose every KV element is known.

Also here by other names: growth (`e2e/test_engines_agree.py`), bytes a token, double release, exact fit, eviction, tokens
compared whole, dirty pages (`test_kv_pages.py`), reuse in any order (`test_kv_reuse.py`), pictures as identity
(`test_model_images.py`), and every corruption that the mirror's mutants plant (`mutation/test_mirror_mutants.py`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from genai_cli.backends.cpu import CpuBackend
from genai_cli.errors import GenaiError
from genai_cli.generate import Generated, Limits, generate
from genai_cli.graph.loader import load_graph
from genai_cli.kv.session import PagedKv
from genai_cli.model import Ask, OpenOptions, open_model
from genai_cli.runners.base import Runner
from genai_cli.runners.native import NativeRunner
from genai_cli.runners.ort import OrtRunner
from genai_cli.sampling import SamplingOptions

FIXTURES = Path(__file__).parents[2] / "fixtures"
PAGE = 4
GREEDY = SamplingOptions(greedy=True)
ENGINES = ("native", "ort")
NINE = (3, 7, 0, 5, 7, 16, 4, 9, 2)


def _open(name: str, engine: str) -> Runner:
    path = FIXTURES / name / "model.onnx"
    return NativeRunner(load_graph(path), CpuBackend()) if engine == "native" else OrtRunner(path)


def _kv(runner: Runner) -> list[bytes]:
    return [np.ascontiguousarray(rows).tobytes() for rows in runner.kv_rows(0, runner.length)]


def _prompt(length: int) -> tuple[int, ...]:
    return tuple((5 * index + 3) % 17 for index in range(length))


def _run(runner: Runner, prompt: tuple[int, ...], kv: PagedKv | None = None, new: int = 3) -> Generated:
    return generate(runner, prompt, GREEDY, Limits(new, None, True), kv=kv, num_logprobs=1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["kv-f32", "kv-f16", "kv-attention", "kv-window"])
def test_a_second_session_sees_nothing_of_the_first(name: str, engine: str) -> None:
    """The first leaves nine tokens in every buffer; the second, of three, equals one in a fresh process."""
    used, fresh = _open(name, engine), _open(name, engine)
    first = _run(used, NINE)
    theirs = {bytes(row) for rows in used.kv_rows(3, 9) for row in np.ascontiguousarray(rows.swapaxes(0, 1))}
    second, alone = _run(used, (1, 8, 14)), _run(fresh, (1, 8, 14))
    assert (second.token_ids, second.logprobs) == (alone.token_ids, alone.logprobs)
    assert first.logprobs != second.logprobs
    assert _kv(used) == _kv(fresh)
    assert used.length == 5
    seen = {bytes(row) for rows in used.kv_rows(0, 5) for row in np.ascontiguousarray(rows.swapaxes(0, 1))}
    assert not seen & theirs


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("keep", [0, 1, PAGE - 1, PAGE, PAGE + 1, 8, 9])
def test_a_rewound_runner_goes_on_like_a_fresh_one(keep: int, engine: str) -> None:
    used, fresh = _open("kv-f32", engine), _open("kv-f32", engine)
    used.step(np.array(NINE))
    used.rewind(keep)
    suffix = np.array([11, 6])
    if keep:
        fresh.step(np.array(NINE[:keep]))
    assert used.step(suffix).tobytes() == fresh.step(suffix).tobytes()
    assert _kv(used) == _kv(fresh)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rewind_beyond_the_end_is_refused_and_changes_nothing(engine: str) -> None:
    runner = _open("kv-f32", engine)
    runner.step(np.array(NINE))
    before = _kv(runner)
    for wrong in (10, -1):
        with pytest.raises(GenaiError, match="rewind"):
            runner.rewind(wrong)
    assert (runner.length, _kv(runner)) == (9, before)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])
def test_the_same_prompt_twice_gives_the_same_answer(length: int, engine: str) -> None:
    """A cache that holds the whole prompt must still run its last token: once, not on top of itself."""
    runner = _open("kv-f16", engine)
    kv = PagedKv(runner.kv_layout, PAGE, 64)
    prompt = _prompt(length)
    first = _run(runner, prompt, kv)
    held = _kv(runner)
    second = _run(runner, prompt, kv)
    assert second.num_cached_tokens == length - 1
    assert (second.token_ids, second.logprobs) == (first.token_ids, first.logprobs)
    assert runner.length == length + 2
    assert _kv(runner) == held


@pytest.mark.parametrize("dirt", [np.nan, 1e4, 0.0])
def test_what_lies_behind_the_valid_tokens_is_never_read(dirt: float) -> None:
    """Masked weights of 0 times NaN are NaN: rows that are not held must not even be multiplied."""
    clean, dirty = _open("kv-f32", "native"), _open("kv-f32", "native")
    assert isinstance(dirty, NativeRunner)
    for runner in (clean, dirty):
        runner.step(np.array(NINE))
    for slot in dirty.engine.slots:
        slot.buffer[:, 9:] = dirt  # type: ignore[attr-defined]
    for token in (1, 2, 3):
        assert clean.step(np.array([token])).tobytes() == dirty.step(np.array([token])).tobytes()


@pytest.mark.parametrize("engine", ENGINES)
def test_pages_return_after_many_requests_and_many_failures(engine: str) -> None:
    """Through the real runner: native ends 2,000 requests and breaks off 500, ORT 80 and 20; only what is cached is held,
    and evicting frees it."""
    runner = _open("kv-f32", engine)
    kv = PagedKv(runner.kv_layout, PAGE, 48)

    def interrupt(token: int) -> bool:
        raise KeyboardInterrupt

    for number in range(2500 if engine == "native" else 100):
        prompt = tuple((number * 7 + 3 * index) % 17 for index in range(1 + number % 13))
        if number % 5 == 2:
            with pytest.raises(KeyboardInterrupt):
                generate(runner, prompt, GREEDY, Limits(4, None, True), kv=kv, on_token=interrupt)
        else:
            _run(runner, prompt, kv)
        assert kv.pool.pages_used <= 48
    kv.cache.evict(48)
    assert kv.pool.pages_used == 0


def test_both_engines_reuse_the_same_number_of_tokens() -> None:
    """One policy in one place: a table of prompts, in order, gives the same counts; switched off, both give 0."""
    prompts = [NINE, NINE, NINE[:4], (*NINE, 1, 2), (0, *NINE), (*NINE[:5], 1, 1, 1), (7,), NINE[:8]]
    counts = {}
    for engine in ENGINES:
        runner = _open("kv-f32", engine)
        kv = PagedKv(runner.kv_layout, PAGE, 64)
        counts[engine] = [_run(runner, prompt, kv).num_cached_tokens for prompt in prompts]
        off = PagedKv(runner.kv_layout, PAGE, 64, reuse=False)
        assert [_run(runner, prompt, off).num_cached_tokens for prompt in prompts] == [0] * len(prompts)
    assert counts["native"] == counts["ort"]
    assert counts["native"][:4] == [0, 8, 3, 9]
    assert max(counts["native"]) > 4


@pytest.mark.parametrize("engine", ENGINES)
def test_recurrent_state_goes_with_the_prefix(engine: str) -> None:
    """KV restored beside a state that starts from zero gives a wrong next token: warm must equal cold, and must be warm.

    The second prompt finds the first's pages without a state where they part, computes and keeps it; the third starts
    there. The first one, asked again, starts at its last page border."""
    folder = FIXTURES / "packages" / "qwen3_5_text-portable"
    warm = open_model(folder, OpenOptions(backend=engine, page_size=PAGE))  # type: ignore[arg-type]
    cold = open_model(folder, OpenOptions(backend=engine, prefix_cache=False))  # type: ignore[arg-type]
    shared = tuple(range(20, 32))  # three pages
    prompts = [(*shared, 40 + number, 50, 60 + number, 70, 71) for number in range(3)]
    counts = []
    for prompt in [*prompts, prompts[0]]:
        ask = Ask(prompt_ids=prompt, limits=Limits(4, None, True))
        made, fresh = warm.ask(ask).generated, cold.ask(ask).generated
        counts.append(made.num_cached_tokens)
        assert made.token_ids == fresh.token_ids, prompt
    assert counts == [0, 0, 12, 16]


def test_two_models_with_one_name_share_nothing(tmp_path: Path) -> None:
    """Prefixes belong to the opened weights, not to a name or a path: other bytes at the same place reuse nothing."""
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "kv-f32", folder)
    options = OpenOptions(page_size=PAGE)
    first = open_model(folder / "model.onnx", options)
    made = first.ask(Ask(prompt_ids=NINE, limits=Limits(3, None, True))).generated
    shutil.rmtree(folder)
    shutil.copytree(FIXTURES / "kv-window", folder)
    second = open_model(folder / "model.onnx", options)
    other = second.ask(Ask(prompt_ids=NINE, limits=Limits(3, None, True))).generated
    assert other.num_cached_tokens == 0
    alone = open_model(FIXTURES / "kv-window" / "model.onnx", options)
    assert other.token_ids == alone.ask(Ask(prompt_ids=NINE, limits=Limits(3, None, True))).generated.token_ids
    assert len(made.token_ids) == len(other.token_ids) == 3
