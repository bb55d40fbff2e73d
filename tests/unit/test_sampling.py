"""Every option changes the token, in the documented order; greedy has three spellings and one answer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genai_cli import sampling
from genai_cli.errors import GenaiError
from genai_cli.sampling import SamplingOptions, adjusted, candidates, logprobs, sample

ROW = np.array([0.0, 2.0, 1.5, -1.0, 1.9], np.float32)


def draw(count: int = 300, **options: object) -> set[int]:
    """Tokens that come up over many positions."""
    chosen = SamplingOptions(greedy=False, **options)  # type: ignore[arg-type]
    return {sample(ROW, chosen, [0] * position, 0) for position in range(1, count)}


@pytest.mark.parametrize(
    "options", [{"greedy": True}, {"greedy": False, "temperature": 0.0}, {"greedy": False, "top_k": 1}]
)
def test_greedy_in_three_spellings_takes_the_lowest_id_of_a_tie(options: dict) -> None:
    row = np.array([1.0, 7.0, 7.0, 3.0], np.float32)
    assert sample(row, SamplingOptions(**options), [5], 0) == 1


def test_without_limits_everything_can_be_drawn() -> None:
    assert draw() == {0, 1, 2, 3, 4}


def test_top_k_keeps_the_largest() -> None:
    assert draw(top_k=2) == {1, 4}


def test_top_p_keeps_the_smallest_set_of_that_mass() -> None:
    probabilities = np.exp(ROW) / np.exp(ROW).sum()
    assert probabilities[1] < 0.5 < probabilities[1] + probabilities[4]
    assert draw(top_p=0.5) == {1, 4}


def test_top_p_works_inside_top_k() -> None:
    """0.6 of the mass of {1, 4} needs both; 0.5 of it only the first (renormalised: 0.525)."""
    assert draw(top_k=2, top_p=0.6) == {1, 4}
    assert draw(top_k=2, top_p=0.5) == {1}


def test_min_p_is_relative_to_the_best() -> None:
    assert draw(min_p=0.85) == {1, 4}  # e^-0.1 = 0.905, e^-0.5 = 0.607


def test_temperature_sharpens() -> None:
    assert draw(temperature=0.01) == {1}


def test_the_seed_decides_the_draw() -> None:
    first, second = (
        [sample(ROW, SamplingOptions(greedy=False, seed=seed), [0] * p, 0) for p in range(1, 40)] for seed in (1, 2)
    )
    assert first != second
    assert first == [sample(ROW, SamplingOptions(greedy=False, seed=1), [0] * p, 0) for p in range(1, 40)]


def test_repetition_penalty_counts_each_token_once_in_both_signs() -> None:
    """Positive logits are divided, negative multiplied, prompt included, however often a token came."""
    row = adjusted(np.array([4.0, -4.0, 1.0], np.float32), SamplingOptions(repetition_penalty=2.0), [0, 1, 0, 1], 0, [])
    assert row.tolist() == [2.0, -8.0, 1.0]
    assert sample(np.array([4.0, 3.0], np.float32), SamplingOptions(repetition_penalty=2.0), [0], 0) == 1


def test_no_repeat_ngram_bans_what_would_complete_one() -> None:
    history = [1, 2, 4, 1, 2]
    row = np.array([0.0, 0.0, 0.0, 1.0, 5.0], np.float32)
    assert sample(row, SamplingOptions(), history, 0) == 4
    assert sample(row, SamplingOptions(no_repeat_ngram=3), history, 0) == 3


def test_min_new_tokens_holds_back_every_end_token() -> None:
    row = np.array([0.0, 9.0, 8.0, 1.0], np.float32)
    options = SamplingOptions(min_new_tokens=2)
    assert [sample(row, options, [0], done, (1, 2)) for done in (0, 1, 2)] == [3, 3, 1]


@pytest.mark.parametrize("row", [[np.nan, 1.0], [np.inf, 1.0], [-np.inf, -np.inf]])
def test_logits_that_are_not_finite_stop_with_the_position(row: list[float]) -> None:
    with pytest.raises(GenaiError, match="position 3 are not finite"):
        sample(np.array(row, np.float32), SamplingOptions(), [1, 2, 3], 0)


@pytest.mark.parametrize(
    "options", [{"temperature": -1.0}, {"top_p": 1.5}, {"min_p": -0.1}, {"repetition_penalty": 0.0}, {"top_k": -1}]
)
def test_options_out_of_range_are_refused(options: dict) -> None:
    with pytest.raises(GenaiError, match="wanted"):
        SamplingOptions(**options)


def test_logprobs_are_of_the_raw_logits() -> None:
    chosen, top = logprobs(np.log(np.array([0.1, 0.6, 0.3], np.float32)), 2, 2)
    assert chosen.logprob == pytest.approx(np.log(0.3), abs=1e-6)
    assert [t.id for t in top] == [1, 2]


@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40), st.integers(0, 50), st.floats(0.0, 1.0))
@settings(max_examples=150, deadline=None)
def test_the_best_token_is_always_a_candidate(values: list[float], top_k: int, top_p: float) -> None:
    row = np.array(values, np.float32)
    kept, probabilities = candidates(row, SamplingOptions(greedy=False, top_k=top_k, top_p=top_p))
    assert int(row.argmax()) in kept.tolist()
    assert len(kept) == len(probabilities) > 0
    assert not top_k or len(kept) <= top_k


@pytest.mark.parametrize("spread", [0.1, 3.0, 8.0])
@pytest.mark.parametrize(
    "wanted",
    [{}, {"top_p": 0.9}, {"top_p": 0.0}, {"min_p": 0.05}, {"min_p": 0.5, "top_p": 0.95}, {"temperature": 0.3}],
    ids=str,
)
def test_sorting_only_the_head_draws_what_sorting_all_draws(spread: float, wanted: dict[str, float]) -> None:
    """The head decides most draws; flat logits and ties need the whole order. Every draw is the same."""
    rng, used = np.random.default_rng(0), 0
    for seed in range(12):
        logits = (rng.standard_normal(6000) * spread).astype(np.float32)
        logits = np.round(logits * 4) / 4 if seed % 3 == 0 else logits
        options = SamplingOptions(greedy=False, seed=seed, **wanted)  # type: ignore[arg-type]
        used += sampling._head(logits, options, 5) is not None
        everything = sampling._drawn(*candidates(logits, options), options, 5)
        assert sample(logits, options, [0] * 5, 0) == everything
    assert used > 0 or spread < 1
