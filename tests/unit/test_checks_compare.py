"""Metrics: right on hand-made rows, and unable to pass on NaN or on nothing."""

import ml_dtypes
import numpy as np
import pytest

from genai_cli.checks import compare


def test_row_metrics_by_hand():
    want = np.array([[1.0, 3.0, 2.0], [5.0, 5.0, 0.0]], np.float32)
    got = np.array([[1.0, 3.5, 4.0], [5.0, 5.0, 0.0]], np.float32)
    m = compare.row_metrics(got, want)
    assert m.flips.tolist() == [0]
    assert m.max_abs.tolist() == [2.0, 0.0]
    assert m.pair.tolist() == [2.0, 0.0]  # the winner of both sides and the runner-up decide
    assert m.margin.tolist() == [1.0, 0.0]
    assert m.nmse[0] == pytest.approx((0.25 + 4) / 14)


def test_pair_ignores_tokens_that_decide_nothing():
    want = np.array([[9.0, 8.0, -50.0]])
    got = np.array([[9.0, 8.0, -40.0]])
    m = compare.row_metrics(got, want)
    assert (m.pair[0], m.max_abs[0]) == (0.0, 10.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_two_equal_non_finite_sides_are_not_equal(bad):
    rows = np.array([[1.0, bad, 0.0]], np.float32)
    m = compare.row_metrics(rows, rows.copy())
    assert not m.finite[0]
    assert np.isinf([m.max_abs[0], m.pair[0], m.nmse[0]]).all()
    assert compare.nmse(rows, rows) == np.inf
    assert compare.max_abs(rows, rows) == np.inf
    assert compare.kl(rows, rows)[0] == np.inf
    assert compare.ulps(rows, rows).max() == np.iinfo(np.int64).max


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_ulps_count_representable_values(dtype):
    one = np.array([1.0], dtype)
    bits = one.view(f"u{one.itemsize}")
    assert compare.ulps((bits + 3).astype(bits.dtype).view(dtype), one).tolist() == [3]
    zeros = np.array([0.0], dtype)
    assert compare.ulps(zeros, -zeros).tolist() == [0]
    smallest = np.array([1], bits.dtype).view(dtype)
    assert compare.ulps(smallest, (-smallest).astype(dtype)).tolist() == [2]


def test_ties_take_the_first_maximum():
    assert compare.first_max(np.array([[2.0, 7.0, 7.0], [np.nan, 1.0, 3.0]])).tolist() == [1, 2]
    assert compare.second_of(np.array([[2.0, 7.0, 7.0]])).tolist() == [2]


def test_kl_and_nll_by_hand():
    want = np.log(np.array([[0.5, 0.5]]))
    got = np.log(np.array([[0.25, 0.75]]))
    assert compare.kl(got, want)[0] == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))
    assert compare.nll(got, np.array([0]))[0] == pytest.approx(np.log(4))


def test_top_overlap():
    want = np.array([[5.0, 4.0, 3.0, 0.0]])
    got = np.array([[5.0, 0.0, 3.0, 4.0]])
    assert compare.top_overlap(got, want, 2) == 0.5
    assert compare.top_overlap(want, want, 10) == 1.0


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match="cannot be compared"):
        compare.row_metrics(np.zeros((2, 3)), np.zeros((3, 3)))


def test_non_finite_names_the_first():
    rows = np.array([[1.0, 2.0], [np.inf, np.nan]], np.float32)
    found = compare.non_finite(rows)
    assert found is not None
    assert (found.count, found.position, found.kind) == (2, 1, "+inf")
    assert compare.non_finite(rows[:1]) is None
