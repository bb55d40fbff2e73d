"""Commands: parse, call, print, exit code. Heavy libraries are imported where they are used, so that --help is quick."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genai_cli import __version__
from genai_cli.console import ClosedPipe, Console, sever_stdout
from genai_cli.errors import ExitCode, GenaiError, worst

if TYPE_CHECKING:
    from genai_cli.backends.cuda_device import CodeType, CudaOptions
    from genai_cli.batch import BatchResult
    from genai_cli.bench.open import BenchOptions
    from genai_cli.bench.report import BenchReport
    from genai_cli.checks.target import Place
    from genai_cli.model import Ask, BackendName, Model
    from genai_cli.report.parity import ParityReport

app = typer.Typer(
    name="genai",
    help="Run ONNX language models offline, and prove that a native engine computes what ONNX Runtime computes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ModelArg = Annotated[Path, typer.Argument(help="A model folder, or an .onnx file.", show_default=False)]
ThreadsOpt = Annotated[int | None, typer.Option(help="Threads; default: all cores.", show_default=False)]
DeviceOpt = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
JsonOpt = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
QuietOpt = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, tables or warnings on stderr.")]
PromptOpt = Annotated[str | None, typer.Option("--prompt", help="The prompt.", show_default=False)]
IdsOpt = Annotated[str | None, typer.Option("--prompt-ids", help="Token ids, 1,2,3.", show_default=False)]
PageOpt = Annotated[int, typer.Option(help="Tokens of a KV page.")]
JunitOpt = Annotated[Path | None, typer.Option(help="Write JUnit XML here.", show_default=False)]
MarkdownOpt = Annotated[Path | None, typer.Option("--md", help="Write Markdown here.", show_default=False)]


class _State:
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
    _State.debug = debug


def _console(quiet: bool) -> Console:
    return Console(quiet=quiet, color="NO_COLOR" not in os.environ)


def _isa() -> str | None:
    return os.environ.get("GENAI_ISA") or None


def _cuda(device: str) -> CudaOptions | None:
    """Compiled kernels are kept in the cache directory; --debug waits after each launch, so that a fault has a name."""
    if device == "cpu":
        return None
    from genai_cli.backends.cuda_device import CudaOptions

    code = os.environ.get("GENAI_CUDA_CODE") or "cubin"
    if code not in ("cubin", "ptx"):
        raise GenaiError(f"GENAI_CUDA_CODE is `{code}`; wanted cubin or ptx", hint="unset GENAI_CUDA_CODE")
    kind: CodeType = "ptx" if code == "ptx" else "cubin"
    return CudaOptions(kind, _cache_dir() / "cuda", wait_after_launch=_State.debug)


@app.command()
def generate(
    model: ModelArg,
    text: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="The prompt; - reads stdin.", show_default=False)
    ] = None,
    prompt: PromptOpt = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.", show_default=False)] = None,
    prompt_ids: IdsOpt = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="A picture for an image token of the prompt (repeatable).", show_default=False),
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="A JSONL file of prompts.", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(help="Write the batch's results here.", show_default=False)] = None,
    resume: Annotated[bool, typer.Option(help="Continue an interrupted batch.")] = False,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    raw: Annotated[bool, typer.Option(help="No chat template.")] = False,
    max_new_tokens: Annotated[int | None, typer.Option(min=0, help="New tokens at most.", show_default=False)] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Prompt and output at most.", show_default=False)
    ] = None,
    min_new_tokens: Annotated[
        int | None, typer.Option(min=0, help="No end before this many.", show_default=False)
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after an end token.")] = False,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text (repeatable).", show_default=False)] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", show_default=False)] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k largest logits.", show_default=False)] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the smallest set of this mass.", show_default=False)] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Keep this share of the most probable.", show_default=False)
    ] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: repeat less.", show_default=False)] = None,
    no_repeat_ngram: Annotated[int | None, typer.Option(help="Never repeat n tokens.", show_default=False)] = None,
    greedy: Annotated[bool, typer.Option(help="Always the most probable token.")] = False,
    seed: Annotated[int | None, typer.Option(help="Of the one generator.", show_default=False)] = None,
    logprobs: Annotated[int, typer.Option(min=0, help="Log-probabilities of the N best.")] = 0,
    stream: Annotated[bool, typer.Option(help="Print text as it comes.")] = True,
    json_: JsonOpt = False,
    stats: Annotated[bool, typer.Option(help="Timings on stderr.")] = False,
    backend: Annotated[str, typer.Option(help="native or ort.")] = "native",
    device: DeviceOpt = "cpu",
    threads: ThreadsOpt = None,
    exact: Annotated[bool, typer.Option(help="native: f32 activations everywhere.")] = False,
    page_size: PageOpt = 16,
    kv_pages: Annotated[int | None, typer.Option(min=0, help="Pages at most.", show_default=False)] = None,
    prefix_cache: Annotated[bool, typer.Option(help="Reuse KV of prefixes already computed.")] = True,
    quiet: QuietOpt = False,
) -> None:
    """Generate text from a prompt, or from a file of prompts."""
    from genai_cli.generate import Limits
    from genai_cli.model import Ask, OpenOptions, open_model, parse_ids, sampling_of

    console = _console(quiet)
    if backend not in ("native", "ort"):
        raise GenaiError(f"--backend `{backend}`: wanted native or ort")
    given = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "no_repeat_ngram": no_repeat_ngram, "min_new_tokens": min_new_tokens,
        "seed": seed,
    }  # fmt: skip
    spoken = None if prompts is not None else _prompt(text, prompt, prompt_file, prompt_ids)
    if prompts is None and (out is not None or resume):
        raise GenaiError("--out and --resume belong to a batch", hint="add --prompts FILE.jsonl")
    engine: BackendName = "ort" if backend == "ort" else "native"
    options = OpenOptions(engine, device, threads, exact, _isa(), page_size, kv_pages, prefix_cache, _cuda(device))
    opened = open_model(model, options)
    for warning in opened.warnings:
        console.talk(f"warning: {warning}")
    ask = Ask(
        prompt=spoken, prompt_ids=None if prompt_ids is None else parse_ids(prompt_ids), system=system, raw=raw,
        stops=tuple(stop or ()), options=sampling_of(opened.package, given, greedy=greedy),
        limits=Limits(max_new_tokens, max_length, ignore_eos), num_logprobs=logprobs, images=tuple(image or ()),
    )  # fmt: skip
    if prompts is not None:
        return _batch(console, opened, ask, prompts, out, resume, given, greedy)
    return _one(console, opened, ask, json_, stream, stats)


def _prompt(text: str | None, prompt: str | None, file: Path | None, ids: str | None) -> str | None:
    """Exactly one source."""
    sources = [
        name
        for name, value in (("PROMPT", text), ("--prompt", prompt), ("--prompt-file", file), ("--prompt-ids", ids))
        if value is not None
    ]
    if len(sources) != 1:
        found = " and ".join(sources) or "none"
        raise GenaiError(f"one prompt was wanted, found {found}", hint='genai generate MODEL "your prompt"')
    if file is not None:
        return _decoded(_read(file), str(file))
    if text == "-":
        return _decoded(sys.stdin.buffer.read(), "stdin")
    given = text if text is not None else prompt
    # the shell's bytes, whatever the locale made of them
    return None if given is None else _decoded(os.fsencode(given), "the prompt")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise GenaiError(f"cannot read `{path}`: {error.strerror}") from None


def _decoded(raw: bytes, name: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise GenaiError(f"`{name}` is not UTF-8 (byte {error.start})") from None


def _one(console: Console, model: Model, ask: Ask, as_json: bool, stream: bool, stats: bool) -> None:
    from genai_cli.model import document
    from genai_cli.report.json import dumps

    live = stream and not as_json
    answer = model.ask(ask, console.data if live else (lambda text: None))
    made = document(model, answer)
    if as_json:
        console.data(dumps(made))
    elif model.package.tokenizer is None:
        console.data(",".join(map(str, answer.generated.token_ids)) + "\n")
    else:
        console.data("\n" if live else answer.text + "\n")
    if stats:
        _stats(console, made)


def _stats(console: Console, made: dict[str, Any]) -> None:
    timings = made["timings"]

    def shown(value: float | None, form: str) -> str:
        return "n/a" if value is None else form.format(value)

    console.table(
        f"{made['backend']} on {', '.join(made['versions']['providers'])}",
        ["prompt", "cached", "new", "finish", "load", "first token", "prefill", "decode", "peak memory"],
        [[
            len(made["prompt_token_ids"]), made["num_cached_tokens"], len(made["token_ids"]), made["finish_reason"],
            shown(timings["load_s"], "{:.2f} s"), shown(timings["ttft_s"], "{:.3f} s"),
            shown(timings["prefill_tok_s"], "{:.0f} tok/s"), shown(timings["decode_tok_s"], "{:.1f} tok/s"),
            f"{made['peak_rss_bytes'] / 2**20:.0f} MiB",
        ]],
    )  # fmt: skip


def _batch(
    console: Console,
    model: Model,
    base: Ask,
    file: Path,
    out: Path | None,
    resume: bool,
    given: dict[str, Any],
    greedy: bool,
) -> None:
    from genai_cli.batch import PartialFile, ask_of, read_lines, run_batch

    if resume and out is None:
        raise GenaiError("--resume needs --out: stdout cannot be continued", hint="add --out FILE.jsonl")
    lines = read_lines(file)
    if not lines:
        raise GenaiError(f"`{file}` holds no prompts", exit_code=ExitCode.NOT_COMPARED)
    partial = PartialFile(out, resume=resume) if out is not None else None
    try:
        with console.progress("prompts", len(lines)) as tick:
            write: Callable[[str], None] = partial.write if partial else console.data
            done = partial.done if partial else set()
            result = run_batch(model, lines, lambda line: ask_of(line, base, model, given, greedy), write, tick, done)
    except BaseException:
        if partial:
            partial.close()
        raise
    if partial:
        partial.finish()
    _batch_end(console, result)


def _batch_end(console: Console, result: BatchResult) -> None:
    skipped = f", {result.skipped} already there" if result.skipped else ""
    console.talk(f"{result.done} prompts answered{skipped}, {len(result.errors or [])} with errors")
    for error in result.errors or []:
        console.error(error)
    if result.errors:
        raise typer.Exit(ExitCode.CANNOT)


@app.command()
def inspect(model: ModelArg, json_: JsonOpt = False) -> None:
    """Show what a package is, what native covers and why not, and what would be gated."""
    from genai_cli.checks.inspect import inspect_model
    from genai_cli.report.inspect_text import lines
    from genai_cli.report.json import dumps

    found = inspect_model(model)
    Console().data(dumps(found) if json_ else "\n".join(lines(found)) + "\n")


def _place(device: str, threads: int | None) -> Place:
    from genai_cli.backends.open import open_backend
    from genai_cli.checks.target import Place

    isa, cuda = _isa(), _cuda(device)
    probe = open_backend(device, threads=threads, isa=isa, cuda=cuda)
    return Place(
        getattr(probe, "threads", threads or 1),
        lambda: open_backend(device, threads=threads, isa=isa, cuda=cuda),
        probe.description,
    )


@app.command()
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
    seed: Annotated[int, typer.Option(help="Of everything drawn.")] = 0,
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

    console = _console(quiet)
    expected, overrides = expected_flips(expect_flip or [], kappa)
    settings = Settings(
        steps=steps, oracle=oracle, level=parse_level(level), kappa=kappa, seed=seed, explain=explain, allow_skip=allow_skip,
        cache_dir=_cache_dir() if floor_cache else None, save_golden=save_golden,
        expected_flips=expected, overrides=overrides,
    )  # fmt: skip
    texts = _texts(prompt, prompts)
    request = Request(texts, parse_ids(prompt_ids) if prompt_ids else (), prove, ops, perf, bundle)
    place = replace(_place(device, threads), oracle_device=oracle_device)
    reports: list[ParityReport] = []
    for model in models:
        with console.progress(f"parity {model.name}") as tick:
            reports.append(run(model, request, settings, place, tick))
        if not json_:
            from genai_cli.report.text import lines

            console.data("\n".join(lines(reports[-1])) + "\n")
    _write_parity(console, reports, json_, junit, md, html)
    raise typer.Exit(worst(ExitCode(report.exit_code) for report in reports))


def _texts(prompt: str | None, prompts: Path | None) -> tuple[str, ...]:
    if prompts is None:
        return () if prompt is None else (prompt,)
    from genai_cli.batch import read_lines

    lines = read_lines(prompts)
    wrong = next((line for line in lines if line.error or "prompt" not in line.fields), None)
    if wrong is not None:
        raise GenaiError(f"`{prompts}`, line {wrong.number}: {wrong.error or 'parity needs a `prompt`'}")
    return tuple(line.fields["prompt"] for line in lines)


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "genai"


def _write_parity(
    console: Console, reports: list[ParityReport], as_json: bool, junit: Path | None, md: Path | None, html: Path | None
) -> None:
    from genai_cli.report import html as html_page
    from genai_cli.report import json as json_text
    from genai_cli.report import junit as junit_xml
    from genai_cli.report import markdown as markdown_text

    if as_json:
        console.data(json_text.dumps(reports[0] if len(reports) == 1 else reports))
    several = {"--junit": junit, "--md": md, "--html": html}
    if len(reports) > 1 and any(several.values()):
        raise GenaiError("--junit, --md and --html take one model", hint="run parity once for each")
    for path, render in ((junit, junit_xml.junit), (md, markdown_text.markdown), (html, html_page.page)):
        if path is not None:
            _write(path, render(reports[0]))
            console.talk(f"written: {path}")


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise GenaiError(f"cannot write `{path}`: {error.strerror}") from None


@app.command("mirror-check")
def mirror_check(
    model: ModelArg,
    prompt: PromptOpt = None,
    prompt_ids: IdsOpt = None,
    page_size: PageOpt = 16,
    prove: Annotated[bool, typer.Option(help="Plant defects; each must be caught.")] = False,
    seed: Annotated[int, typer.Option(help="Of the ids when there is no prompt and no tokenizer.")] = 0,
    json_: JsonOpt = False,
    junit: JunitOpt = None,
    md: MarkdownOpt = None,
    device: DeviceOpt = "cpu",
    threads: ThreadsOpt = None,
    quiet: QuietOpt = False,
) -> None:
    """Prove that KV pages hold exactly what the decoder computed."""
    from genai_cli.backends.cpu import copy_table
    from genai_cli.checks import mirror_render
    from genai_cli.checks.mirror import MirrorSettings
    from genai_cli.checks.mirror import mirror_check as check
    from genai_cli.checks.session import Request, prompts_of
    from genai_cli.checks.target import open_target
    from genai_cli.model import parse_ids
    from genai_cli.report.json import dumps

    console = _console(quiet)
    target = open_target(model, _place(device, threads))
    request = Request(() if prompt is None else (prompt,), parse_ids(prompt_ids) if prompt_ids else ())
    ids = prompts_of(model, target, request, seed)[0][0].ids.tolist()
    with console.progress(f"mirror-check {model.name}") as tick:
        report = check(target, ids, MirrorSettings(page_size, prove, copy_table), tick)
    console.data(dumps(report) if json_ else mirror_render.text(report))
    for path, render in ((junit, mirror_render.junit), (md, mirror_render.markdown)):
        if path is not None:
            _write(path, render(report))
    raise typer.Exit(report.exit_code)


@app.command()
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
    threads: ThreadsOpt = None,
    quiet: QuietOpt = False,
) -> None:
    """Measure load, prefill and decode; a ratio only where parity vouches for it."""
    from genai_cli.bench import table
    from genai_cli.bench.batch import BatchSize
    from genai_cli.bench.compare import parse_percent, read_report
    from genai_cli.bench.open import BenchOptions, run
    from genai_cli.report.json import dumps

    console = _console(quiet)
    allowed, old = parse_percent(max_regression), None if compare is None else read_report(compare)
    options = BenchOptions(
        tuple(vs or ()), _lengths("--prompt-tokens", prompt_tokens), _lengths("--context-tokens", context_tokens),
        new_tokens, rounds, _phases(phases), BatchSize(batch, n_new=batch_tokens), seed, parity, _cache_dir(),
    )  # fmt: skip
    if profile:
        return _profile(console, model, options, threads, trace, json_)
    if micro:
        return _micro(console, model, options, threads, only, json_)
    with console.progress(f"bench {model.name}") as tick:
        report = run(model, options, _place("cpu", threads), _isa(), tick)
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
        report = run_profile(model, options, _place("cpu", threads), _isa(), trace, tick)
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
        report = micro(model, options, _place("cpu", threads), _isa(), only, tick)
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


def _lengths(option: str, text: str) -> tuple[int, ...]:
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


def main() -> None:
    """The `genai` program: every way out has its exit code."""
    sys.exit(_run())


def _run() -> int:
    console = Console()
    try:
        code = app(standalone_mode=False)
        return int(code or 0)
    except typer.Exit as ended:
        return int(ended.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        console.error("interrupted")
        return ExitCode.INTERRUPTED
    except ClosedPipe:
        return ExitCode.OK
    except GenaiError as error:
        _trace()
        console.error(error.message, error.hint)
        return error.exit_code
    except Exception as error:
        return _unexpected(console, error)


def _unexpected(console: Console, error: Exception) -> int:
    """Usage errors come from the command line library; everything else is ours to mend."""
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        console.error(error.format_message(), "genai --help")
        return ExitCode.CANNOT
    if isinstance(error, BrokenPipeError):
        sever_stdout()
        return ExitCode.OK
    if isinstance(error, MemoryError):
        console.error("out of memory", "use a shorter prompt, fewer --kv-pages or a smaller model")
        return ExitCode.CANNOT
    _trace()
    console.error(
        f"internal error: {type(error).__name__}: {error}", "run again with `genai --debug ...` and report it"
    )
    return ExitCode.INTERNAL


def _trace() -> None:
    if _State.debug:
        traceback.print_exc()


if __name__ == "__main__":
    main()
