"""Every planted defect of the mirror is killed by the check that should kill it; the controls stay green."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from genai_cli.checks.forensics import compare_rows
from genai_cli.checks.mirror_checks import lossless
from genai_cli.checks.mirror_mutants import MUTANTS, Mutant, checker_mutants, controls, judge
from genai_cli.checks.mirror_scene import ClosedFormDecoder, prime_layout

F32 = np.dtype(np.float32)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_killed_for_the_right_reason(mutant: Mutant) -> None:
    judged = judge(mutant)
    assert judged.state == "killed", f"{judged.state} by {judged.failed}: {judged.detail}"


def test_controls_stay_green() -> None:
    assert [judged.detail for judged in controls() if judged.state != "survived"] == []


def test_checker_mutants_are_seen() -> None:
    assert [judged.id for judged in checker_mutants() if judged.state != "killed"] == []


def test_the_battery_names_what_the_design_lists() -> None:
    """35 defects of pages and policy; removing one must be noticed."""
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS) == 35


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.int8, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
)
def test_every_pattern_survives_the_page_path(dtype: type) -> None:
    outcome = lossless(np.dtype(dtype))
    assert outcome.ok
    patterns = 256 if np.dtype(dtype).itemsize == 1 else 65536
    assert outcome.compared_bytes == 2 * patterns * np.dtype(dtype).itemsize


CAUSES = [
    ("off by 1", lambda a: np.roll(a, 1, 1)),
    ("reversed", lambda a: a[:, ::-1]),
    ("heads are exchanged", lambda a: np.roll(a, 1, 0)),
    ("transposed", lambda a: a.transpose(1, 0, 2).reshape(a.shape)),
    ("all zero", np.zeros_like),
    ("bit 3 of one element", lambda a: _flip(a, 3)),
]


def _flip(array: np.ndarray, bit: int) -> np.ndarray:
    changed = array.copy()
    changed.reshape(-1).view(np.uint32)[41] ^= np.uint32(1 << bit)
    return changed


@pytest.mark.parametrize(("words", "change"), CAUSES, ids=[words for words, _ in CAUSES])
def test_forensics_name_the_cause(words: str, change) -> None:  # type: ignore[no-untyped-def]
    decoder = ClosedFormDecoder(prime_layout(F32), 20)
    decoder.step(np.arange(13))
    wanted = [np.array(array) for array in decoder.kv_rows(0, 13)]
    found = [wanted[0], np.ascontiguousarray(change(wanted[1])), *wanted[2:]]
    compared, cause = compare_rows(found, wanted, decoder.kv_layout)
    assert compared > 0
    assert cause is not None
    assert words in cause.sentence
    assert (cause.layer, cause.kind) == (2, "value")
