"""`genai mirror-check`."""

from __future__ import annotations

from typing import Annotated

import typer

from genai_cli.cli.options import (
    DeviceOpt,
    IdsOpt,
    JsonOpt,
    JunitOpt,
    MarkdownOpt,
    ModelArg,
    PageOpt,
    PromptOpt,
    QuietOpt,
    ThreadsOpt,
    console_of,
    place_of,
    write_whole,
)


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

    console = console_of(quiet)
    target = open_target(model, place_of(device, threads), isolated=True)
    request = Request(() if prompt is None else (prompt,), parse_ids(prompt_ids) if prompt_ids else ())
    ids = prompts_of(model, target, request, seed)[0][0].ids.tolist()
    with console.progress(f"mirror-check {model.name}") as tick:
        report = check(target, ids, MirrorSettings(page_size, prove, copy_table), tick)
    console.data(dumps(report) if json_ else mirror_render.text(report))
    for path, render in ((junit, mirror_render.junit), (md, mirror_render.markdown)):
        if path is not None:
            write_whole(path, render(report))
    raise typer.Exit(report.exit_code)
