"""A new report against an old one: regressions beyond a limit and beyond the noise."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genai_cli.bench.report import SCHEMA, BenchReport, Result
from genai_cli.errors import ExitCode, GenaiError


@dataclass(frozen=True)
class Change:
    """Seconds new over old, of one phase of native; `regressed` when beyond the limit and the noise floor."""

    phase: str
    n_prompt: int
    n_context: int
    factor: float
    noise: float
    regressed: bool


def parse_percent(text: str) -> float:
    """`15%` or `0.15` as 0.15."""
    number = text.strip()
    try:
        value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise GenaiError(f"--max-regression `{text}`: wanted a share such as 15%")
    return value


def read_report(path: Path) -> dict[str, Any]:
    """A report written by `--json`."""
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GenaiError(f"cannot read `{path}` as a report: {error}") from None
    if not isinstance(made, dict) or made.get("schema") != SCHEMA:
        raise GenaiError(f"`{path}` is no `{SCHEMA}` document", hint="genai bench MODEL --json > OLD.json")
    return made


def compare(old: dict[str, Any], new: BenchReport, max_regression: float) -> list[Change]:
    """Native's phases that both reports hold. GenaiError (3) when settings differ or nothing is common."""
    _same_settings(old, new)
    before = {_key(made): made for made in old["results"] if made["engine"] == "native"}
    floors = [{(n.phase, n.n_prompt, n.n_context): n.floor for n in new.noise}, _old_floors(old)]
    changes = [
        _change(made, before[key], max(floor.get(key[:3], 0.0) for floor in floors), max_regression)
        for made in new.results
        if made.engine == "native"
        and made.n_prompt + made.n_new
        and (key := (made.phase, made.n_prompt, made.n_context, made.n_new)) in before
    ]
    if not changes:
        raise GenaiError("the two reports have no phase in common", exit_code=ExitCode.NOT_COMPARED)
    return changes


def _same_settings(old: dict[str, Any], new: BenchReport) -> None:
    before = {"model": Path(old["model"]).name, "threads": old["threads"], "isa": old["isa"]}
    now = {"model": Path(new.model).name, "threads": new.threads, "isa": new.isa}
    for name, value in now.items():
        if before[name] != value:
            raise GenaiError(
                f"the old report has {name} `{before[name]}`, this run `{value}`: not comparable",
                exit_code=ExitCode.NOT_COMPARED,
            )


def _key(made: dict[str, Any]) -> tuple[str, int, int, int]:
    return made["phase"], made["n_prompt"], made["n_context"], made["n_new"]


def _old_floors(old: dict[str, Any]) -> dict[tuple[str, int, int], float]:
    return {(n["phase"], n["n_prompt"], n["n_context"]): n["floor"] for n in old["noise"]}


def _change(new: Result, old: dict[str, Any], noise: float, max_regression: float) -> Change:
    factor = new.seconds.median / old["seconds"]["median"]
    # a loss of speed: 15 % fewer tokens a second is a factor of 1 / 0.85 in time
    regressed = 1 - 1 / factor > max_regression and factor - 1 > noise
    return Change(new.phase, new.n_prompt, new.n_context, factor, noise, regressed)
