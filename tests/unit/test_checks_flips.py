"""Flip classes follow an independent bound, never the size of the delta itself."""

import math

import numpy as np
import pytest

from genai_cli.checks import flips
from genai_cli.checks.limits import Bound, precision_of


def flip(want, got, bound=0.1, ceiling=1.0):
    return flips.flips_of(np.array([got], np.float32), np.array([want], np.float32), bound, ceiling)[0]


def test_exact_tie_with_another_rule_is_a_tie():
    assert flips.classify(0.0, 0.0, 1e-6, 1e-3, same_tie=True) == "TIE"


def test_near_tie_needs_margin_and_delta_inside_the_bound():
    assert flip([1.0, 1.05], [1.06, 1.0]).class_ == "NEAR-TIE"


def test_a_gross_bug_with_a_small_margin_is_no_near_tie():
    """The margin is below the bound, as it always can be; the delta gives the bug away."""
    found = flip([1.0, 1.05], [9.0, 1.0])
    assert found.margin == pytest.approx(0.05)
    assert found.class_ == "DEFECT"
    assert flip([1.0, 1.05], [1.5, 1.0]).class_ == "DRIFT"


def test_non_finite_is_a_defect():
    assert flip([1.0, 2.0], [1.0, math.nan]).class_ == "DEFECT"


def test_every_flip_obeys_the_arithmetic_of_margins():
    rng = np.random.default_rng(0)
    want = rng.normal(size=(500, 20)).astype(np.float32)
    got = want + rng.normal(size=want.shape).astype(np.float32) * 0.3
    found = flips.flips_of(got, want, 0.1, 1.0)
    assert len(found) > 20
    assert all(entry.margin <= 2 * entry.pair_delta + 1e-6 for entry in found)


def test_arbiter_takes_a_side():
    want, got = np.array([[1.0, 2.0, 0.0]]), np.array([[2.0, 1.0, 0.0]])
    side = [
        flips.flips_of(got, want, 1, 1, arbiter=np.array([row]))[0].arbiter for row in ([3, 1, 0], [1, 3, 0], [0, 0, 3])
    ]
    assert side == ["native", "oracle", "neither"]


def test_rule_of_three():
    assert flips.mismatch_bound(600) == 0.005
    assert flips.mismatch_bound(0) == 1.0


def test_bound_is_inconclusive_when_noise_beats_the_ceiling():
    assert Bound(1e-4, 4, 1e-2).value == pytest.approx(16e-4)  # NMSE is a square: 4 amplitudes
    assert not Bound(1e-4, 4, 1e-2).too_noisy
    assert Bound(3.1e-3, 4, 1e-2).too_noisy


def test_precision_is_read_from_the_graph():
    assert precision_of({np.dtype(np.float16)}, {4}, True) == "q_int8"
    assert precision_of({np.dtype(np.float32)}, {0}, True) == "q_f32"
    assert precision_of({np.dtype(np.float16), np.dtype(np.float32)}, set(), False) == "f16"
    assert precision_of({np.dtype(np.float32)}, set(), False) == "f32"
