"""The long text: windows that fit a context, NLL that does not depend on how it is fed, a cache that may be damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from genai_cli.backends.cpu import CpuBackend
from genai_cli.checks import likelihood
from genai_cli.checks.compare import nll
from genai_cli.checks.target import Place, open_target

PACKAGE = Path(__file__).resolve().parents[2] / "fixtures" / "packages" / "llama-fp32-cpu"


@pytest.mark.parametrize(
    ("context", "lengths"), [(None, [1025]), (2048, [1025]), (512, [513, 513]), (300, [301] * 3 + [125])]
)
def test_windows_fit_the_context_and_score_every_id_once(context, lengths):
    found = likelihood.windows(np.arange(5000), context)
    assert [len(part) for part in found] == lengths
    assert sum(len(part) - 1 for part in found) == likelihood.SCORED_TOKENS
    assert all(np.array_equal(part, np.arange(part[0], part[0] + len(part))) for part in found)


def test_a_short_text_is_used_whole():
    (only,) = likelihood.windows(np.arange(7), None)
    assert len(only) == 7
    assert likelihood.windows(np.arange(1), None) == ()


def test_the_text_is_long_enough_for_any_tokenizer_of_words():
    assert len(likelihood.text().split()) > 1000


def test_chunks_give_the_nll_of_one_prefill_and_the_cache_gives_it_again(tmp_path):
    runner = open_target(PACKAGE, Place(2, lambda: CpuBackend(threads=2), "cpu")).open_ort(None)
    ids = np.random.default_rng(0).integers(0, 500, 600)
    text = likelihood.Text(ids)
    found = likelihood.oracle_score(runner, text, tmp_path, ["x"])
    runner.reset()
    first = found.windows[0]
    assert found.nll[: len(first) - 1] == pytest.approx(nll(runner.step(first[:-1], logits="all"), first[1:]), abs=1e-5)
    (file,) = tmp_path.glob("nll-*.json")
    assert np.array_equal(likelihood.oracle_score(runner, text, tmp_path, ["x"]).nll, found.nll)
    file.write_text("[1, 2")
    assert np.array_equal(likelihood.oracle_score(runner, text, tmp_path, ["x"]).nll, found.nll)
