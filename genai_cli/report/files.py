"""Writing a report in the formats asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from genai_cli.errors import GenaiError
from genai_cli.report.html import page
from genai_cli.report.json import dumps
from genai_cli.report.junit import junit
from genai_cli.report.markdown import markdown
from genai_cli.report.parity import ParityReport


@dataclass(frozen=True)
class Outputs:
    """Files to write; None: not asked for."""

    junit: Path | None = None
    md: Path | None = None
    html: Path | None = None
    json: Path | None = None


def write(report: ParityReport, outputs: Outputs) -> list[Path]:
    """Every file asked for. GenaiError names the one that cannot be written."""
    made = [
        (outputs.junit, junit), (outputs.md, markdown), (outputs.html, page), (outputs.json, dumps),
    ]  # fmt: skip
    written = []
    for path, render in made:
        if path is not None:
            _save(path, render(report))
            written.append(path)
    return written


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise GenaiError(
            f"cannot write the report `{path}`: {error.strerror}", hint="give a path that exists"
        ) from None
