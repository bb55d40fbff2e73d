"""The application that commands register with, and the options before them."""

from __future__ import annotations

from typing import Annotated

import typer

from genai_cli import __version__
from genai_cli.console import Console

app = typer.Typer(
    name="genai",
    help="Run ONNX language models offline, and prove that a native engine computes what ONNX Runtime computes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class State:
    """Set once by the callback, read by main()."""

    debug = False


def _version(value: bool) -> None:
    if value:
        Console().data(f"genai {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option(help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    State.debug = debug
