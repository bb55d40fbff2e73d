"""Many prompts in one step: the same results as one after another, whoever joins and leaves when."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from genai_cli.errors import GenaiError
from genai_cli.generate import Generated, Limits, Request, generate_rows, run
from genai_cli.kv.session import PagedKv
from genai_cli.model import Ask, OpenOptions, open_model
from genai_cli.package.decoder import load_decoder
from genai_cli.package.open import open_package
from genai_cli.runners.native import NativeRunner
from genai_cli.sampling import SamplingOptions

PACKAGES = Path(__file__).parents[2] / "fixtures" / "packages"
PACKAGE = PACKAGES / "llama-fp32-cpu"


@pytest.fixture(scope="module")
def runner() -> NativeRunner:
    model = open_model(PACKAGE)
    assert isinstance(model.runner, NativeRunner)
    return model.runner


def _request(seed: int, **changes: object) -> Request:
    rng = np.random.default_rng(seed)
    prompt = [int(token) for token in rng.integers(3, 200, 2 + 5 * seed % 23)]
    options = SamplingOptions(greedy=seed % 2 == 0, temperature=1.5, seed=seed)
    fields: dict = {"prompt": prompt, "options": options, "limits": Limits(3 + seed % 7), "eos_ids": (2,)} | changes
    return Request(**fields)


def _told(made: Generated) -> tuple:
    return made.token_ids, made.finish_reason, made.logprobs


@pytest.mark.parametrize("max_rows", [1, 2, 5, 16])
def test_rows_give_what_solo_runs_give(runner: NativeRunner, max_rows: int) -> None:
    requests = [_request(seed, num_logprobs=seed % 3) for seed in range(9)]
    requests.append(_request(9, limits=Limits(0)))
    requests.append(_request(10, on_token=lambda token: True))
    made = dict(generate_rows(runner, enumerate(requests), max_rows))
    assert sorted(made) == list(range(len(requests)))
    for number, request in enumerate(requests):
        outcome = made[number]
        assert isinstance(outcome, Generated)
        assert _told(outcome) == _told(run(runner, request)), number
    lengths = {len(made[number].token_ids) for number in range(9)}  # type: ignore[union-attr]
    assert len(lengths) > 3  # rows did leave at different times


def test_rows_share_their_prefix_while_they_run(runner: NativeRunner) -> None:
    system = list(range(10, 50))
    kv = PagedKv(runner.kv_layout, 4, 400)
    requests = [Request([*system, 60 + row, 70 + row], SamplingOptions(), Limits(6)) for row in range(5)]
    made = dict(generate_rows(runner, enumerate(requests), 5, kv))
    assert [made[row].num_cached_tokens for row in range(5)] == [0, 40, 40, 40, 40]  # type: ignore[union-attr]
    for row, request in enumerate(requests):
        assert made[row].token_ids == run(runner, request).token_ids  # type: ignore[union-attr]
    again = run(runner, requests[3], kv)
    assert again.num_cached_tokens == 41  # a full hit, cut by one
    assert again.token_ids == made[3].token_ids  # type: ignore[union-attr]
    kv.cache.evict(400)
    assert kv.pool.pages_used == 0


def test_a_request_that_cannot_run_leaves_the_others_alone(runner: NativeRunner) -> None:
    context = runner.context_len or 0
    requests = [_request(1), _request(2, prompt=[5] * (context + 1)), _request(3, prompt=[]), _request(4)]
    made = dict(generate_rows(runner, enumerate(requests), 2))
    assert isinstance(made[1], GenaiError)
    assert str(context + 1) in made[1].message
    assert isinstance(made[2], GenaiError)
    for row in (0, 3):
        assert made[row].token_ids == run(runner, requests[row]).token_ids  # type: ignore[union-attr]


def test_an_interrupt_leaves_only_what_is_cached(runner: NativeRunner) -> None:
    kv = PagedKv(runner.kv_layout, 4, 400)

    def interrupt(token: int) -> bool:
        raise KeyboardInterrupt

    requests = [_request(1), _request(2), _request(4, on_token=interrupt)]
    with pytest.raises(KeyboardInterrupt):
        list(generate_rows(runner, enumerate(requests), 3, kv))
    kv.cache.evict(400)
    assert kv.pool.pages_used == 0


def test_a_closed_batch_gives_its_pages_back(runner: NativeRunner) -> None:
    kv = PagedKv(runner.kv_layout, 4, 400)
    outcomes = generate_rows(runner, enumerate([_request(seed) for seed in range(6)]), 3, kv)
    next(outcomes)
    outcomes.close()
    kv.cache.evict(400)
    assert kv.pool.pages_used == 0


def test_non_finite_rows_fail_alone(runner: NativeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    real = NativeRunner.step_rows

    def broken(self: NativeRunner, ids: np.ndarray, seats: list) -> np.ndarray:
        logits = real(self, ids, seats)
        logits[0] = np.nan
        return logits

    requests = [_request(seed, limits=Limits(4), eos_ids=()) for seed in (2, 4)]
    alone = run(runner, requests[1]).token_ids
    monkeypatch.setattr(NativeRunner, "step_rows", broken)
    made = dict(generate_rows(runner, enumerate(requests), 2))
    assert isinstance(made[0], GenaiError)
    assert "position" in made[0].message
    # the first row has left, so the second is row 0 of the steps after
    assert isinstance(made[1], GenaiError)
    assert len(alone) == 4


def test_a_model_says_whether_prompts_share_a_step() -> None:
    model = open_model(PACKAGE, OpenOptions(prefix_cache=False))
    assert model.max_rows(None) == 16
    assert model.max_rows(3) == 3
    assert model.max_rows(1) == 1
    with pytest.raises(GenaiError, match="wanted at least 1"):
        model.max_rows(0)
    hybrid = open_model(PACKAGES / "qwen3_5_text-portable")
    assert hybrid.max_rows(None) == 1
    assert "recurrent state" in hybrid.rows(None).reason
    with pytest.raises(GenaiError, match="recurrent state"):
        hybrid.max_rows(2)
    ort = open_model(PACKAGE, OpenOptions(backend="ort"))
    assert ort.max_rows(None) == 1
    with pytest.raises(GenaiError, match="one sequence"):
        ort.max_rows(2)


def test_questions_keep_their_places() -> None:
    """Answers come as they are finished, numbered; one whose making fails is an error of its own."""
    model = open_model(PACKAGE)

    def bad() -> Ask:
        raise GenaiError("a bad line")

    asks = [
        lambda: Ask(prompt_ids=(5, 6, 7), limits=Limits(9, None, True)),
        bad,
        lambda: Ask(prompt_ids=(8,), limits=Limits(2, None, True)),
        lambda: Ask(prompt_ids=(999999,)),
    ]
    made = list(model.ask_all(asks, 4))
    assert sorted(number for number, _ in made) == [0, 1, 2, 3]
    by_number = dict(made)
    assert isinstance(by_number[1], GenaiError)
    assert isinstance(by_number[3], GenaiError)
    one_by_one = dict(model.ask_all(asks, 1))
    for number in (0, 2):
        assert by_number[number].generated.token_ids == one_by_one[number].generated.token_ids  # type: ignore[union-attr]
    order = [number for number, _ in made]
    assert order.index(2) < order.index(0)  # 2 new tokens end before 9


def test_seats_of_other_runners_are_their_own() -> None:
    decoder = load_decoder(open_package(PACKAGE))
    from genai_cli.backends.cpu import CpuBackend

    runner = NativeRunner(decoder.graph, CpuBackend(), io=decoder.io, context_len=decoder.context_len)
    seat, other = runner.seat(), runner.seat()
    seat.step(np.array([5, 6]))
    other.step(np.array([7, 8, 9]))
    runner.step(np.array([4]))
    assert (seat.length, other.length, runner.length) == (2, 3, 1)
    rows = [np.array(array) for array in other.kv_rows(0, 3)]
    seat.seed(rows)
    assert seat.length == 3
    assert all(np.array_equal(a, b) for a, b in zip(seat.kv_rows(0, 3), rows, strict=True))
    other.rewind(1)
    assert (seat.length, other.length) == (3, 1)
