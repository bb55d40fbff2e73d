"""Ten lines for a pull request."""

from __future__ import annotations

from genai_cli.report.parity import ParityReport
from genai_cli.report.text import headline, number

MAX_ROWS = 6


def markdown(report: ParityReport) -> str:
    """A verdict, a table of the checks that decide, and the next command."""
    shown = [
        c for c in report.checks if c.verdict != "info" and c.level != "preflight" and c.verdict != "not applicable"
    ]
    shown.sort(key=lambda check: check.verdict == "pass")
    rows = [
        f"| {c.id} | {c.verdict} | {c.compared} | {number(c.value)} | {number(c.limit)} |" for c in shown[:MAX_ROWS]
    ]
    head = ["**" + headline(report).replace("|", "\\|") + "**", "", "| check | verdict | of | value | limit |"]
    return "\n".join([*head, "|---|---|---|---|---|", *rows, f"`{report.next_command}`"]) + "\n"
