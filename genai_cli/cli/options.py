"""Options that commands share, spelled once, and what is made of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from genai_cli.cli.app import State
from genai_cli.console import Console
from genai_cli.errors import GenaiError

if TYPE_CHECKING:
    from genai_cli.backends.cuda_device import CodeType, CudaOptions
    from genai_cli.checks.target import Place

ModelArg = Annotated[Path, typer.Argument(help="A model folder, or an .onnx file.", show_default=False)]
ThreadsOpt = Annotated[
    int | None, typer.Option(min=1, max=1024, help="Threads; default: all cores.", show_default=False)
]
DeviceOpt = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
JsonOpt = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
QuietOpt = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, tables or warnings on stderr.")]
PromptOpt = Annotated[str | None, typer.Option("--prompt", help="The prompt.", show_default=False)]
IdsOpt = Annotated[str | None, typer.Option("--prompt-ids", help="Token ids, 1,2,3.", show_default=False)]
PageOpt = Annotated[int, typer.Option(min=1, help="Tokens of a KV page.")]
JunitOpt = Annotated[Path | None, typer.Option(help="Write JUnit XML here.", show_default=False)]
MarkdownOpt = Annotated[Path | None, typer.Option("--md", help="Write Markdown here.", show_default=False)]


def console_of(quiet: bool) -> Console:
    return Console(quiet=quiet, color="NO_COLOR" not in os.environ)


def wanted_isa() -> str | None:
    return os.environ.get("GENAI_ISA") or None


def cuda_options(device: str) -> CudaOptions | None:
    """Compiled kernels are kept in the cache directory; --debug waits after each launch, so that a fault has a name."""
    if device == "cpu":
        return None
    from genai_cli.backends.cuda_device import CudaOptions

    code = os.environ.get("GENAI_CUDA_CODE") or "cubin"
    if code not in ("cubin", "ptx"):
        raise GenaiError(f"GENAI_CUDA_CODE is `{code}`; wanted cubin or ptx", hint="unset GENAI_CUDA_CODE")
    kind: CodeType = "ptx" if code == "ptx" else "cubin"
    return CudaOptions(kind, cache_dir() / "cuda", wait_after_launch=State.debug)


def place_of(device: str, threads: int | None) -> Place:
    from genai_cli.backends.open import open_backend
    from genai_cli.checks.target import Place

    isa, cuda = wanted_isa(), cuda_options(device)
    probe = open_backend(device, threads=threads, isa=isa, cuda=cuda)
    return Place(
        getattr(probe, "threads", threads or 1),
        lambda: open_backend(device, threads=threads, isa=isa, cuda=cuda),
        probe.description,
    )


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "genai"


def write_whole(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise GenaiError(f"cannot write `{path}`: {error.strerror}") from None
