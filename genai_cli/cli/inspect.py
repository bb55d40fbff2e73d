"""`genai inspect`."""

from __future__ import annotations

from genai_cli.cli.options import JsonOpt, ModelArg
from genai_cli.console import Console


def inspect(model: ModelArg, json_: JsonOpt = False) -> None:
    """Show what a package is, what native covers and why not, and what would be gated."""
    from genai_cli.checks.inspect import inspect_model
    from genai_cli.report.inspect_text import lines
    from genai_cli.report.json import dumps

    found = inspect_model(model)
    Console().data(dumps(found) if json_ else "\n".join(lines(found)) + "\n")
