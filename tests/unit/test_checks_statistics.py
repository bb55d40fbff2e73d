"""Equivalence is tested, not assumed from a missing significance; sampling compares under the same noise."""

import numpy as np
import pytest

from genai_cli.checks import statistics


def test_tost_wants_the_mean_inside_the_margin():
    rng = np.random.default_rng(0)
    near = statistics.paired(rng.normal(0.0, 0.05, 2000))
    far = statistics.paired(rng.normal(0.02, 0.05, 2000))
    vague = statistics.paired(rng.normal(0.0, 5.0, 2000))
    assert statistics.tost(near) < 0.05
    assert statistics.tost(far) > 0.05
    assert statistics.tost(vague) > 0.05  # no significance, and no equivalence either


def test_few_tokens_decide_nothing():
    assert statistics.nll_check(np.zeros(999), "x").verdict == "info"
    assert statistics.nll_check(np.zeros(1000), "x").verdict == "pass"
    assert statistics.nll_check(np.full(1000, 0.02), "x").verdict == "fail"
    assert statistics.nll_check(np.tile([-1.0, 1.0], 600), "x").verdict == "inconclusive"  # neither inside nor outside


@pytest.mark.parametrize(("wins", "losses", "p"), [(9, 9, 1.0), (0, 0, 1.0), (10, 0, 2 / 1024)])
def test_sign_test(wins, losses, p):
    assert statistics.sign_test(wins, losses) == pytest.approx(p)


def test_sampled_tokens_agree_under_shared_noise_and_differ_with_a_defect():
    rng = np.random.default_rng(1)
    want = rng.normal(size=(200, 30)).astype(np.float32) * 3
    noise = rng.normal(size=want.shape).astype(np.float32) * 1e-6
    assert statistics.sampled_check(want + noise, want, 1e-5, 0.8, seed=3).verdict == "pass"
    assert statistics.sampled_check(want[:, ::-1], want, 1e-5, 0.8, seed=3).verdict == "fail"
    tokens = statistics.shared_noise_tokens(want, 0.8, seed=3)
    assert (tokens == statistics.shared_noise_tokens(want, 0.8, seed=3)).all()
    assert (tokens != want.argmax(1)).any()
