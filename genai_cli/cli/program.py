"""Every way out of the program has its exit code."""

from __future__ import annotations

import sys
import traceback

import typer

from genai_cli.cli.app import State, app
from genai_cli.cli.bench import bench
from genai_cli.cli.generate import generate
from genai_cli.cli.inspect import inspect
from genai_cli.cli.mirror_check import mirror_check
from genai_cli.cli.parity import parity
from genai_cli.console import ClosedPipe, Console, sever_stdout
from genai_cli.errors import ExitCode, GenaiError

for _name, _command in (
    ("generate", generate), ("inspect", inspect), ("parity", parity), ("mirror-check", mirror_check), ("bench", bench),
):  # fmt: skip
    app.command(_name)(_command)


def main() -> None:
    """The `genai` program: every way out has its exit code."""
    sys.exit(_run())


def _run() -> int:
    console = Console()
    try:
        code = app(standalone_mode=False)
        return int(code or 0)
    except typer.Exit as ended:
        return int(ended.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        console.error("interrupted")
        return ExitCode.INTERRUPTED
    except ClosedPipe:
        return ExitCode.OK
    except GenaiError as error:
        _trace()
        console.error(error.message, error.hint)
        return error.exit_code
    except Exception as error:
        return _unexpected(console, error)


def _unexpected(console: Console, error: Exception) -> int:
    """Usage errors come from the command line library; everything else is ours to mend."""
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        console.error(error.format_message(), "genai --help")
        return ExitCode.CANNOT
    if isinstance(error, BrokenPipeError):
        sever_stdout()
        return ExitCode.OK
    if isinstance(error, MemoryError):
        console.error("out of memory", "use a shorter prompt, fewer --kv-pages or a smaller model")
        return ExitCode.CANNOT
    _trace()
    console.error(
        f"internal error: {type(error).__name__}: {error}", "run again with `genai --debug ...` and report it"
    )
    return ExitCode.INTERNAL


def _trace() -> None:
    if State.debug:
        traceback.print_exc()
