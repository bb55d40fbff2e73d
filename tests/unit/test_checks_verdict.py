"""One verdict out of many checks: nothing compared is no pass, and the order of exit codes holds."""

import pytest

from genai_cli.checks.verdict import judge
from genai_cli.errors import ExitCode
from genai_cli.report.parity import Check, Flip

PASS = Check("logits.nmse", "logits", "pass", compared=10)


def flip(kind):
    return Flip("0", 3, 1, 2, 0.1, 0.1, 0.2, 5.0, kind, "none")


def test_a_pass_needs_a_comparison():
    assert judge([PASS], []).exit_code == ExitCode.OK
    assert judge([], []).exit_code == ExitCode.NOT_COMPARED
    assert judge([Check("logits.nmse", "logits", "pass", compared=0)], []).exit_code == ExitCode.NOT_COMPARED
    only_preflight = Check("sides", "preflight", "pass", compared=5)
    assert judge([only_preflight], []).exit_code == ExitCode.NOT_COMPARED


def test_near_ties_are_named_in_the_verdict():
    assert judge([PASS], [flip("NEAR-TIE")]).verdict == "PASS with near-ties"
    assert judge([PASS], []).verdict == "PASS"


@pytest.mark.parametrize(
    ("level", "verdict", "code"),
    [
        ("logits", "fail", ExitCode.DIFFERENT),
        ("preflight", "fail", ExitCode.NOT_COMPARED),
        ("liveness", "unproven", ExitCode.UNPROVEN),
        ("logits", "inconclusive", ExitCode.INCONCLUSIVE),
        ("kv", "skipped", ExitCode.NOT_COMPARED),
        ("kv", "not applicable", ExitCode.OK),
        ("statistics", "info", ExitCode.OK),
    ],
)
def test_codes(level, verdict, code):
    found = judge([PASS, Check("x", level, verdict, compared=1, reason="why")], [])
    assert found.exit_code == code
    assert code == ExitCode.OK or found.reason == "why"


def test_a_difference_outranks_everything_below_it():
    checks = [PASS] + [Check(v, "logits", v, 1) for v in ("inconclusive", "unproven", "skipped", "fail")]
    assert judge(checks, []).exit_code == ExitCode.DIFFERENT


def test_a_skip_passes_only_when_allowed():
    skipped = Check("kv", "kv", "skipped")
    assert judge([PASS, skipped], [], allow_skip=True).exit_code == ExitCode.OK
    assert judge([skipped], [], allow_skip=True).exit_code == ExitCode.NOT_COMPARED
