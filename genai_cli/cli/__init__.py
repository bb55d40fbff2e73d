"""The command line: one module a command; parse, call, print, exit code."""

from genai_cli.cli.main import main

__all__ = ["main"]
