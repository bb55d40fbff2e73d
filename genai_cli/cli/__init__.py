"""The command line: one module a command; parse, call, print, exit code."""

from genai_cli.cli.program import main

__all__ = ["main"]
