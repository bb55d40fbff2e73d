"""`genai generate`: one prompt, or a file of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genai_cli.cli.options import (
    DeviceOpt,
    IdsOpt,
    JsonOpt,
    ModelArg,
    PageOpt,
    PromptOpt,
    QuietOpt,
    ThreadsOpt,
    console_of,
    cuda_options,
    wanted_isa,
)
from genai_cli.console import Console
from genai_cli.errors import ExitCode, GenaiError

if TYPE_CHECKING:
    from genai_cli.batch import BatchResult
    from genai_cli.model import Ask, BackendName, Model


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
    batch_size: Annotated[
        int | None,
        typer.Option(help="Prompts of a batch that share a step; default: by memory, up to 16.", show_default=False),
    ] = None,
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

    console = console_of(quiet)
    if backend not in ("native", "ort"):
        raise GenaiError(f"--backend `{backend}`: wanted native or ort")
    given = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "no_repeat_ngram": no_repeat_ngram, "min_new_tokens": min_new_tokens,
        "seed": seed,
    }  # fmt: skip
    spoken = None if prompts is not None else _prompt(text, prompt, prompt_file, prompt_ids)
    if prompts is None and (out is not None or resume or batch_size is not None):
        raise GenaiError("--out, --resume and --batch-size belong to a batch", hint="add --prompts FILE.jsonl")
    engine: BackendName = "ort" if backend == "ort" else "native"
    options = OpenOptions(
        engine, device, threads, exact, wanted_isa(), page_size, kv_pages, prefix_cache, cuda_options(device)
    )
    opened = open_model(model, options)
    for warning in opened.warnings:
        console.talk(f"warning: {warning}")
    ask = Ask(
        prompt=spoken, prompt_ids=None if prompt_ids is None else parse_ids(prompt_ids), system=system, raw=raw,
        stops=tuple(stop or ()), options=sampling_of(opened.package, given, greedy=greedy),
        limits=Limits(max_new_tokens, max_length, ignore_eos), num_logprobs=logprobs, images=tuple(image or ()),
    )  # fmt: skip
    if prompts is not None:
        return _batch(console, opened, ask, prompts, out, resume, given, greedy, batch_size)
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
    batch_size: int | None,
) -> None:
    from genai_cli.batch import PartialFile, ask_of, read_lines, run_batch

    if resume and out is None:
        raise GenaiError("--resume needs --out: stdout cannot be continued", hint="add --out FILE.jsonl")
    lines = read_lines(file)
    if not lines:
        raise GenaiError(f"`{file}` holds no prompts", exit_code=ExitCode.NOT_COMPARED)
    rows = model.max_rows(batch_size)
    partial = PartialFile(out, resume=resume) if out is not None else None
    try:
        with console.progress("prompts", len(lines)) as tick:
            write: Callable[[str], None] = partial.write if partial else console.data
            done = partial.done if partial else set()
            result = run_batch(
                model, lines, lambda line: ask_of(line, base, model, given, greedy), write, tick, done, rows
            )
    except BaseException:
        if partial:
            partial.close()
        raise
    if partial:
        partial.finish()
    _batch_end(console, result, rows)


def _batch_end(console: Console, result: BatchResult, rows: int) -> None:
    skipped = f", {result.skipped} already there" if result.skipped else ""
    rate = result.new_tokens / result.seconds if result.new_tokens else 0.0
    speed = f", {result.new_tokens} new tokens ({rate:.0f} tok/s), {rows} at a time" if result.new_tokens else ""
    console.talk(f"{result.done} prompts answered{skipped}, {len(result.errors)} with errors{speed}")
    for error in result.errors:
        console.error(error)
    if result.errors:
        raise typer.Exit(ExitCode.CANNOT)
