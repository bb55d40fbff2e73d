"""Checks and flips in; one verdict, one reason, one place, one exit code out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from genai_cli.checks.flips import PASSING
from genai_cli.errors import ExitCode, worst
from genai_cli.report.parity import Check, Flip, Verdict

GATING = ("preflight", "liveness", "logits", "tokens", "kv", "ops", "statistics", "proof")
_CODES: dict[str, ExitCode] = {
    "fail": ExitCode.DIFFERENT,
    "unproven": ExitCode.UNPROVEN,
    "inconclusive": ExitCode.INCONCLUSIVE,
    "skipped": ExitCode.NOT_COMPARED,
    "pass": ExitCode.OK,
}
_NAMES: dict[ExitCode, Verdict] = {
    ExitCode.OK: "PASS",
    ExitCode.DIFFERENT: "FAIL",
    ExitCode.INCONCLUSIVE: "INCONCLUSIVE",
    ExitCode.UNPROVEN: "UNPROVEN",
    ExitCode.NOT_COMPARED: "NOT COMPARED",
}


@dataclass(frozen=True)
class Judgement:
    """The first line of every report."""

    verdict: Verdict
    exit_code: ExitCode
    reason: str


def code_of(check: Check) -> ExitCode | None:
    """A preflight failure means nothing was compared; a pass over nothing is no pass; info has no say."""
    if check.verdict in ("info", "not applicable"):
        return None
    if check.verdict == "fail" and check.level == "preflight":
        return ExitCode.NOT_COMPARED
    if check.verdict == "pass" and not check.compared:
        return ExitCode.NOT_COMPARED
    return _CODES[check.verdict]


def judge(checks: Sequence[Check], flips: Sequence[Flip], allow_skip: bool = False) -> Judgement:
    """The worst of all, by `errors.PRECEDENCE`. One comparison of values at least must have passed."""
    codes = [(code_of(check), check) for check in checks if not (allow_skip and check.verdict == "skipped")]
    said = [(code, check) for code, check in codes if code is not None]
    compared = any(check.level in ("logits", "tokens", "kv", "ops") and check.compared for _, check in said)
    code = worst(code for code, _ in said)
    if code == ExitCode.OK and not compared:
        code = ExitCode.NOT_COMPARED
    if code == ExitCode.OK:
        return Judgement(_pass_name(flips), code, "")
    reason = next((check.reason or check.id for found, check in said if found == code), "nothing was compared")
    return Judgement(_NAMES[code], code, reason)


def _pass_name(flips: Sequence[Flip]) -> Verdict:
    return "PASS with near-ties" if any(flip.class_ in PASSING for flip in flips) else "PASS"
