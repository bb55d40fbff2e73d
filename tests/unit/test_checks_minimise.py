"""ddmin keeps what fails, drops the rest, and counts only the same failure."""

import pytest

from genai_cli.checks.minimise import minimise


def test_two_tokens_far_apart_are_all_that_is_left():
    found = minimise(range(64), lambda ids: 13 in ids and 50 in ids)
    assert found.ids == [13, 50]
    assert found.complete
    assert found.before == 64


def test_order_is_kept_and_length_can_be_the_cause():
    assert minimise(list(range(40)), lambda ids: len(ids) >= 17).ids == sorted(
        minimise(list(range(40)), lambda ids: len(ids) >= 17).ids
    )
    assert len(minimise(list(range(40)), lambda ids: len(ids) >= 17).ids) == 17


def test_the_budget_ends_with_the_best_so_far():
    found = minimise(range(1000), lambda ids: {7, 500, 999} <= set(ids), max_runs=10)
    assert not found.complete
    assert found.runs == 10
    assert {7, 500, 999} <= set(found.ids)


def test_an_input_that_does_not_fail_is_refused():
    with pytest.raises(ValueError, match="does not show"):
        minimise([1, 2], lambda ids: False)
