"""The only writer to stdout and stderr. stdout is data, as UTF-8 whatever the locale; stderr is talk."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from genai_cli.errors import GenaiError

if TYPE_CHECKING:
    from rich.progress import Progress


class ClosedPipe(Exception):
    """Whoever read our stdout has gone: stop quietly."""


class Console:
    """Data out, talk beside it. Model text never passes through markup."""

    def __init__(self, *, quiet: bool = False, color: bool = True) -> None:
        self.quiet, self.color = quiet, color

    def data(self, text: str) -> None:
        """To stdout, at once: the same bytes on a terminal, in a pipe and in a file."""
        try:
            sys.stdout.buffer.write(text.encode("utf-8", "replace"))
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            sever_stdout()
            raise ClosedPipe from None
        except OSError as error:
            sever_stdout()
            raise GenaiError(
                f"cannot write to stdout: {error.strerror}", hint="make room, or choose another file"
            ) from None

    def talk(self, text: str) -> None:
        """A line to stderr."""
        if not self.quiet:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def error(self, message: str, hint: str | None = None) -> None:
        """What went wrong and the next command; shown however quiet."""
        sys.stderr.write(_printable(f"error: {message}\n" + (f"  try: {hint}\n" if hint else "")))
        sys.stderr.flush()

    def table(self, title: str, columns: list[str], rows: list[list[Any]]) -> None:
        """A Rich table on stderr."""
        if self.quiet:
            return
        from rich.console import Console as RichConsole
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
        for column in columns:
            table.add_column(column, no_wrap=True)
        for row in rows:
            table.add_row(*(escape(str(cell)) for cell in row))
        width = None if sys.stderr.isatty() else 160
        RichConsole(stderr=True, no_color=not self.color, width=width).print(table)

    @contextmanager
    def progress(self, title: str, total: int | None = None) -> Iterator[Any]:
        """A callable that advances (`tick()`) or describes (`tick("text")`); drawn only on a terminal."""
        if self.quiet or not sys.stderr.isatty():
            yield lambda text=None: None
            return
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        shape = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
        shape += [BarColumn(), MofNCompleteColumn()] if total is not None else []
        console = RichConsole(stderr=True, no_color=not self.color)
        with Progress(*shape, TimeElapsedColumn(), console=console, transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda text=None: _tick(bar, task, text)


def _tick(bar: Progress, task: Any, text: str | None) -> None:
    if text is None:
        bar.advance(task)
    else:
        bar.update(task, description=text)


def _printable(text: str) -> str:
    """Text that stderr's encoding can show."""
    encoding = sys.stderr.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def sever_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
