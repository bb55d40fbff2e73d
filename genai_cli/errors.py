"""The one error type a user sees, and the exit codes a script reads."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """What the process tells its caller. See README, "Exit codes"."""

    OK = 0  # done, and the sides agreed
    DIFFERENT = 1  # a difference was found
    CANNOT = 2  # usage, bad package, unsupported, device missing
    NOT_COMPARED = 3  # nothing was compared, or a side did not really run
    INCONCLUSIVE = 4  # the oracle's own noise is too large
    UNPROVEN = 5  # a mutant survived, or the fixture is blind
    INTERNAL = 70
    INTERRUPTED = 130


PRECEDENCE = (
    ExitCode.INTERRUPTED,
    ExitCode.INTERNAL,
    ExitCode.DIFFERENT,
    ExitCode.CANNOT,
    ExitCode.NOT_COMPARED,
    ExitCode.UNPROVEN,
    ExitCode.INCONCLUSIVE,
    ExitCode.OK,
)


def worst(codes: Iterable[ExitCode]) -> ExitCode:
    """The code of a run with several results. Nothing at all is NOT_COMPARED, never OK."""
    seen = set(codes)
    if not seen:
        return ExitCode.NOT_COMPARED
    return next(code for code in PRECEDENCE if code in seen)


class GenaiError(Exception):
    """Something a user can act on: what was asked, what was found, what was wanted; ``hint`` is the next command."""

    exit_code: ExitCode

    def __init__(self, message: str, *, hint: str | None = None, exit_code: ExitCode = ExitCode.CANNOT) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
