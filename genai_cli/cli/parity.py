"""`genai parity`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from genai_cli.cli.options import (
    DeviceOpt,
    IdsOpt,
    JsonOpt,
    JunitOpt,
    MarkdownOpt,
    PromptOpt,
    QuietOpt,
    ThreadsOpt,
    cache_dir,
    console_of,
    place_of,
    write_whole,
)
from genai_cli.console import Console
from genai_cli.errors import ExitCode, GenaiError, worst

if TYPE_CHECKING:
    from genai_cli.report.parity import ParityReport


def parity(
    models: Annotated[list[Path], typer.Argument(help="Model folders, .onnx files, or a bundle.", show_default=False)],
    prompt: PromptOpt = None,
    prompt_ids: IdsOpt = None,
    prompts: Annotated[Path | None, typer.Option(help="A JSONL file of prompts.", show_default=False)] = None,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps.")] = 64,
    oracle: Annotated[
        str | None, typer.Option(help="ort, ort-sharp, ort-f32, f64 or golden:FILE.", show_default=False)
    ] = None,
    level: Annotated[str, typer.Option(help="The oracle's graph optimisation: all, basic or off.")] = "all",
    oracle_device: Annotated[str, typer.Option(help="Where the oracle runs: cpu or cuda.")] = "cpu",
    kappa: Annotated[float, typer.Option(help="How many of the oracle's own noise floors are allowed.")] = 4.0,
    prove: Annotated[bool, typer.Option(help="Plant defects; each must be caught.")] = False,
    ops: Annotated[bool, typer.Option(help="Every op of the model alone, on its own inputs.")] = False,
    explain: Annotated[bool, typer.Option(help="Layers and splices even when all agrees.")] = False,
    perf: Annotated[bool, typer.Option(help="Alternating speed ratio, if parity passes.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of everything drawn.")] = 0,
    save_golden: Annotated[Path | None, typer.Option(help="Keep the oracle's logits.", show_default=False)] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="On failure, write a small repro here.", show_default=False)
    ] = None,
    expect_flip: Annotated[
        list[str] | None, typer.Option(help="POS:REASON[:YYYY-MM-DD], a known flip.", show_default=False)
    ] = None,
    allow_skip: Annotated[bool, typer.Option(help="A skipped part is no failure.")] = False,
    floor_cache: Annotated[bool, typer.Option(help="Keep measured noise floors.")] = True,
    json_: JsonOpt = False,
    junit: JunitOpt = None,
    md: MarkdownOpt = None,
    html: Annotated[Path | None, typer.Option(help="Write one HTML page here.", show_default=False)] = None,
    device: DeviceOpt = "cpu",
    threads: ThreadsOpt = None,
    quiet: QuietOpt = False,
) -> None:
    """Say whether native computes what ONNX Runtime computes, on what evidence, and if not, where."""
    from genai_cli.checks.oracles import parse_level
    from genai_cli.checks.parity import Settings
    from genai_cli.checks.session import Request, expected_flips, run
    from genai_cli.model import parse_ids

    console = console_of(quiet)
    if sum(given is not None for given in (prompt, prompts, prompt_ids)) > 1:
        raise GenaiError("--prompt, --prompts and --prompt-ids exclude each other", hint="give one of them")
    if ops and (prove or perf or explain or bundle or save_golden):
        raise GenaiError("--ops is a run of its own", hint="run parity again without --ops for the rest")
    _check_outputs(models, {"--junit": junit, "--md": md, "--html": html, "--save-golden": save_golden})
    expected, overrides = expected_flips(expect_flip or [], kappa)
    settings = Settings(
        steps=steps, oracle=oracle, level=parse_level(level), kappa=kappa, seed=seed, explain=explain, allow_skip=allow_skip,
        cache_dir=cache_dir() if floor_cache else None, save_golden=save_golden,
        expected_flips=expected, overrides=overrides,
    )  # fmt: skip
    texts = texts_of(prompt, prompts)
    request = Request(texts, parse_ids(prompt_ids) if prompt_ids else (), prove, ops, perf, bundle)
    place = replace(place_of(device, threads), oracle_device=oracle_device)
    reports: list[ParityReport] = []
    failed: list[tuple[Path, GenaiError]] = []
    for model in models:
        try:
            with console.progress(f"parity {model.name}") as tick:
                reports.append(run(model, request, settings, place, tick))
        except GenaiError as error:
            if len(models) == 1:
                raise
            failed.append((model, error))  # the others are still asked
            console.error(f"{model}: {error.message}", error.hint)
            continue
        if not json_:
            from genai_cli.report.text import lines

            console.data("\n".join(lines(reports[-1])) + "\n")
    _write_parity(console, reports, failed, json_, junit, md, html)
    codes = [ExitCode(report.exit_code) for report in reports] + [error.exit_code for _, error in failed]
    raise typer.Exit(worst(codes))


def _check_outputs(models: list[Path], files: dict[str, Path | None]) -> None:
    """Minutes of work should not end in a path that cannot be written."""
    for option, path in files.items():
        if path is None:
            continue
        if len(models) > 1:
            raise GenaiError(f"{option} takes one model", hint="run parity once for each")
        if not path.parent.is_dir() or path.is_dir():
            raise GenaiError(f"{option}: cannot write `{path}`", hint="name a file in a folder that exists")


def texts_of(prompt: str | None, prompts: Path | None) -> tuple[str, ...]:
    if prompts is None:
        return () if prompt is None else (prompt,)
    from genai_cli.batch import read_lines

    lines = read_lines(prompts)
    wrong = next((line for line in lines if line.error or "prompt" not in line.fields), None)
    if wrong is not None:
        raise GenaiError(f"`{prompts}`, line {wrong.number}: {wrong.error or 'parity needs a `prompt`'}")
    return tuple(line.fields["prompt"] for line in lines)


def _write_parity(
    console: Console, reports: list[ParityReport], failed: list[tuple[Path, GenaiError]], as_json: bool,
    junit: Path | None, md: Path | None, html: Path | None,
) -> None:  # fmt: skip
    from genai_cli.report import html as html_page
    from genai_cli.report import json as json_text
    from genai_cli.report import junit as junit_xml
    from genai_cli.report import markdown as markdown_text

    if as_json:
        errors = [{"model": str(m), "error": e.message, "exit_code": int(e.exit_code)} for m, e in failed]
        console.data(json_text.dumps([*reports, *errors] if len(reports) + len(errors) > 1 else reports[0]))
    for path, render in ((junit, junit_xml.junit), (md, markdown_text.markdown), (html, html_page.page)):
        if path is not None:
            write_whole(path, render(reports[0]))
            console.talk(f"written: {path}")
