"""`genai bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genai_cli.cli.options import (
    DeviceOpt,
    JsonOpt,
    ModelArg,
    QuietOpt,
    ThreadsOpt,
    cache_dir,
    console_of,
    cuda_options,
    place_of,
    wanted_isa,
)
from genai_cli.console import Console
from genai_cli.errors import ExitCode, GenaiError

if TYPE_CHECKING:
    from genai_cli.bench.open import BenchOptions
    from genai_cli.bench.report import BenchReport


def bench(
    model: ModelArg,
    vs: Annotated[
        list[str] | None,
        typer.Option(help="Compare with ort or onnxruntime-genai; may be repeated.", show_default=False),
    ] = None,
    prompt_tokens: Annotated[str, typer.Option(help="Prefill lengths, cut to the context.")] = "128,512",
    context_tokens: Annotated[str, typer.Option(help="Contexts to decode behind, cut likewise.")] = "64,1024",
    new_tokens: Annotated[int, typer.Option(min=0, help="Tokens of a decode trial.")] = 32,
    batch: Annotated[int, typer.Option(min=0, help="Prompts of the phase batch (64 to 512 tokens); 0: none.")] = 16,
    batch_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each.")] = 128,
    phases: Annotated[str, typer.Option(help="Which to measure.")] = "load,prefill,decode,batch",
    rounds: Annotated[int, typer.Option(min=1, help="Times native, ort, ort, native.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of the ids.")] = 0,
    parity: Annotated[bool, typer.Option(help="Without it no ratio is shown.")] = True,
    compare: Annotated[
        Path | None, typer.Option(help="A report of --json to compare with.", show_default=False)
    ] = None,
    max_regression: Annotated[str, typer.Option(help="Loss of speed that --compare allows.")] = "15%",
    profile: Annotated[bool, typer.Option("--profile", help="Time per op of native instead, and --trace.")] = False,
    micro: Annotated[
        bool, typer.Option("--micro", help="Kernels, sampling, pages and text one by one instead.")
    ] = False,
    only: Annotated[str, typer.Option(help="Of --micro, names that match: 'MatMul*'.")] = "*",
    trace: Annotated[Path, typer.Option(help="Where --profile writes its trace, for Perfetto.")] = Path("trace.json"),
    json_: JsonOpt = False,
    device: DeviceOpt = "cpu",
    threads: ThreadsOpt = None,
    quiet: QuietOpt = False,
) -> None:
    """Measure load, prefill and decode; a ratio only where parity vouches for it."""
    from genai_cli.bench import table
    from genai_cli.bench.batch import BatchSize
    from genai_cli.bench.compare import parse_percent, read_report
    from genai_cli.bench.open import BenchOptions, num_trials, run
    from genai_cli.report.json import dumps

    console = console_of(quiet)
    allowed, old = parse_percent(max_regression), None if compare is None else read_report(compare)
    options = BenchOptions(
        tuple(vs or ()), lengths_of("--prompt-tokens", prompt_tokens), lengths_of("--context-tokens", context_tokens),
        new_tokens, rounds, _phases(phases), BatchSize(batch, n_new=batch_tokens), seed, parity, cache_dir(),
        device, cuda_options(device),
    )  # fmt: skip
    if device != "cpu" and (profile or micro):
        raise GenaiError(
            f"--profile and --micro look into the CPU's kernels, `{device}` was asked for", hint="--device cpu"
        )
    if profile:
        return _profile(console, model, options, threads, trace, json_)
    if micro:
        return _micro(console, model, options, threads, only, json_)
    with console.progress(f"bench {model.name}", num_trials(options)) as tick:
        report = run(model, options, place_of(device, threads), wanted_isa(), tick)
    if json_:
        console.data(dumps(report))
    console.talk(table.title(report))
    console.table("", table.COLUMNS, table.rows(report))
    if report.processes:
        console.table("", table.PROCESS_COLUMNS, table.process_rows(report))
    for line in table.verdicts(report):
        console.talk(line)
    if old is not None:
        _compared(console, old, report, allowed)


def _profile(
    console: Console, model: Path, options: BenchOptions, threads: int | None, trace: Path, json_: bool
) -> None:
    from genai_cli.bench import table
    from genai_cli.bench.open import run_profile
    from genai_cli.report.json import dumps

    with console.progress(f"profile {model.name}") as tick:
        report = run_profile(model, options, place_of("cpu", threads), wanted_isa(), trace, tick)
    if json_:
        console.data(dumps(report))
    for section in report.sections:
        console.talk(table.profile_title(report, section))
        console.table("", table.PROFILE_COLUMNS, table.profile_rows(section))
    console.talk(f"trace: {trace} (open it at https://ui.perfetto.dev)")


def _micro(console: Console, model: Path, options: BenchOptions, threads: int | None, only: str, json_: bool) -> None:
    from genai_cli.bench import table
    from genai_cli.bench.open import micro
    from genai_cli.report.json import dumps

    with console.progress(f"micro {model.name}") as tick:
        report = micro(model, options, place_of("cpu", threads), wanted_isa(), only, tick)
    if json_:
        console.data(dumps(report))
    console.talk(table.micro_title(report))
    console.table("", table.MICRO_COLUMNS, table.micro_rows(report))


def _phases(text: str) -> tuple[str, ...]:
    from genai_cli.bench.open import PHASES

    found = tuple(part.strip() for part in text.split(","))
    if unknown := [part for part in found if part not in PHASES]:
        raise GenaiError(f"--phases: `{unknown[0]}` is none of {', '.join(PHASES)}", hint="--phases prefill,decode")
    return found


def lengths_of(option: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise GenaiError(f"{option} `{text}`: wanted positive numbers separated by commas", hint=f"{option} 128,512")
    return tuple(int(part) for part in parts)


def _compared(console: Console, old: dict[str, Any], report: BenchReport, allowed: float) -> None:
    from genai_cli.bench import table
    from genai_cli.bench.compare import compare

    found = compare(old, report, allowed)
    for line in table.changes(found):
        console.talk(line)
    if any(change.regressed for change in found):
        raise typer.Exit(ExitCode.DIFFERENT)
