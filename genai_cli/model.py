"""A model folder opened for generation: package, engine, tokenizer, template, prefix cache."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from genai_cli import __version__
from genai_cli.backends.cpu import copy_table
from genai_cli.backends.cuda_device import CudaOptions
from genai_cli.backends.open import open_backend
from genai_cli.engine.component import NativeComponent
from genai_cli.errors import GenaiError
from genai_cli.generate import Generated, Limits, Outcome, Request, generate_rows, run
from genai_cli.graph.loader import load_graph
from genai_cli.kv.pages import DEFAULT_PAGE_SIZE, default_num_pages
from genai_cli.kv.session import PagedKv
from genai_cli.package.decoder import LoadedDecoder, load_decoder
from genai_cli.package.model import ModelPackage
from genai_cli.package.open import open_package
from genai_cli.package.prompts import open_chat_template, open_tokenizer
from genai_cli.runners.base import Gate, RowsRunner, Runner
from genai_cli.runners.native import NativeRunner
from genai_cli.runners.pipeline import OpenComponent, PipelineRunner, over_components
from genai_cli.sampling import SamplingOptions
from genai_cli.text.chat import ChatTemplate
from genai_cli.text.stop import StopMatcher
from genai_cli.text.tokenizer import Tokenizer

BackendName = Literal["native", "ort"]
Message = dict[str, Any]
DEFAULT_ROWS = 16  # prompts of a batch that share a step


@dataclass(frozen=True)
class OpenOptions:
    """How the engine is opened. `page_size` 0 or `num_pages` 0: no paging at all."""

    backend: BackendName = "native"
    device: str = "cpu"
    threads: int | None = None
    exact: bool = False
    isa: str | None = None
    page_size: int = DEFAULT_PAGE_SIZE
    num_pages: int | None = None
    prefix_cache: bool = True
    cuda: CudaOptions | None = None


@dataclass(frozen=True)
class Ask:
    """One prompt in one of its three forms, and what is wanted of it."""

    prompt: str | None = None
    messages: tuple[Message, ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    system: str | None = None
    raw: bool = False
    stops: tuple[str, ...] = ()
    options: SamplingOptions = field(default_factory=SamplingOptions)
    limits: Limits = field(default_factory=Limits)
    num_logprobs: int = 0
    images: tuple[Path, ...] = ()  # one for each image token of the prompt


@dataclass
class Answer:
    """A generation with its text, which ends before any stop sequence."""

    generated: Generated
    text: str


@dataclass
class Model:
    """Opened once, asked many times."""

    path: Path
    package: ModelPackage
    decoder: LoadedDecoder
    runner: Runner
    options: OpenOptions
    load_s: float
    kv: PagedKv | None
    kv_reason: str
    warnings: tuple[str, ...] = ()
    _tokenizer: Tokenizer | None = field(default=None, repr=False)
    _template: ChatTemplate | None = field(default=None, repr=False)

    @property
    def tokenizer(self) -> Tokenizer:
        """Opened when first needed: ids in and ids out need none."""
        if self._tokenizer is None:
            self._tokenizer = open_tokenizer(self.package)
            self._template = open_chat_template(self.package)
        return self._tokenizer

    def encode(self, ask: Ask) -> list[int]:
        """Prompt ids: given, or tokenized; the chat template unless raw or there is none. Special tokens are added only
        to raw text (a template writes its own)."""
        if ask.prompt_ids is not None:
            vocab = self.runner.vocab_size
            bad = [token for token in ask.prompt_ids if token < 0 or (vocab and token >= vocab)]
            if bad:
                raise GenaiError(f"prompt ids {bad[:5]} are outside the vocabulary of {vocab}")
            return list(ask.prompt_ids)
        tokenizer = self.tokenizer
        messages = list(ask.messages) or [{"role": "user", "content": ask.prompt or ""}]
        if ask.system is not None:
            messages.insert(0, {"role": "system", "content": ask.system})
        if ask.raw or self._template is None:
            if ask.messages and not ask.raw:
                raise GenaiError("`messages` need a chat template, the package has none", hint="give `prompt` instead")
            return self._raw_ids(tokenizer, "".join(str(message["content"]) for message in messages))
        return tokenizer.encode(self._template.render(messages), add_special_tokens=False)

    def _raw_ids(self, tokenizer: Tokenizer, text: str) -> list[int]:
        ids = tokenizer.encode(text, add_special_tokens=True)
        if not ids and self.package.bos_token_id is not None:
            return [self.package.bos_token_id]
        return ids

    def _with_images(self, ids: list[int], images: Sequence[Path]) -> tuple[list[int], bytes]:
        """Pictures for the prompt's image tokens; the ids they make of it, and their identity."""
        if isinstance(self.runner, PipelineRunner):
            return self.runner.prepare(ids, [self._picture(path) for path in images])
        if images:
            raise GenaiError(f"`{self.path}` takes no pictures: it has no vision encoder", hint="ask without --image")
        return ids, b""

    def _picture(self, path: Path) -> np.ndarray:
        if self.package.processor_config is None:
            raise GenaiError(f"`{self.path}` has no processor_config.json, which says how pictures are prepared")
        from genai_cli.package.images import read_image  # Pillow, only for pictures

        return read_image(self.package.processor_config, path)

    def ask(self, ask: Ask, on_text: Callable[[str], None] = lambda text: None) -> Answer:
        """Generate; `on_text` gets pieces that are certain, never half a character, never a stop sequence."""
        request, finish = self._begin(ask, on_text)
        return finish(run(self.runner, request, self.kv))

    def ask_all(self, asks: Iterable[Callable[[], Ask]], max_rows: int) -> Iterator[tuple[int, Answer | GenaiError]]:
        """Generate for all, up to `max_rows` in one step (see `rows`). Yields (place among `asks`, answer or what was
        wrong with that one) as they are finished; with `max_rows` 1 in their order."""
        failed: list[tuple[int, GenaiError]] = []
        finish: dict[int, Callable[[Generated], Answer]] = {}

        def requests() -> Iterator[tuple[int, Request]]:
            for number, make in enumerate(asks):
                try:
                    request, finish[number] = self._begin(make(), lambda text: None)
                except GenaiError as error:
                    failed.append((number, error))
                else:
                    yield number, request

        for number, outcome in self._outcomes(requests(), max_rows):
            yield from _drained(failed)
            yield number, outcome if isinstance(outcome, GenaiError) else finish.pop(number)(outcome)
        yield from _drained(failed)

    def _outcomes(self, requests: Iterator[tuple[int, Request]], max_rows: int) -> Iterator[tuple[int, Outcome]]:
        if max_rows > 1 and isinstance(self.runner, RowsRunner):
            yield from generate_rows(self.runner, requests, max_rows, self.kv)
            return
        for number, request in requests:
            try:
                yield number, run(self.runner, request, self.kv)
            except GenaiError as error:
                yield number, error

    def rows(self, wanted: int | None) -> Gate:
        """Whether prompts of a batch may share a step, and why not. GenaiError when it was asked for and cannot be."""
        if wanted is not None and wanted < 1:
            raise GenaiError(f"--batch-size is {wanted}; wanted at least 1")
        if wanted == 1:
            return Gate(False, "one prompt after another was asked for")
        runner = self.runner
        gate = (
            runner.supports_rows() if isinstance(runner, RowsRunner) else Gate(False, "this engine runs one sequence")
        )
        if wanted is not None and not gate.supported:
            raise GenaiError(f"--batch-size {wanted} was asked for: {gate.reason}", hint="leave it out")
        return gate

    def max_rows(self, wanted: int | None) -> int:
        """Prompts of one step: `wanted`, else as many as half the free memory holds at 4096 tokens, at most 16."""
        if not self.rows(wanted).supported:
            return 1
        if wanted is not None:
            return wanted
        row_bytes = self.runner.kv_layout.bytes_per_token * min(self.runner.context_len or 4096, 4096)
        return max(1, min(DEFAULT_ROWS, available_bytes() // 2 // max(1, row_bytes)))

    def _begin(self, ask: Ask, on_text: Callable[[str], None]) -> tuple[Request, Callable[[Generated], Answer]]:
        """The request for the loop, and what makes an answer of its result."""
        ids, key = self._with_images(self.encode(ask), ask.images)
        stops = StopMatcher(ask.stops)
        stream = self.tokenizer.stream() if self.package.tokenizer is not None else None
        pieces: list[str] = []

        def send(text: str) -> None:
            if text:
                pieces.append(text)
                on_text(text)

        def on_token(token: int) -> bool:
            if stream is not None:
                send(stops.push(stream.push(token)))
            return stops.matched is not None

        limits = ask.limits
        if limits.max_new_tokens is None and limits.max_length is None:
            limits = replace(limits, max_length=self.package.search.max_length)

        def finish(generated: Generated) -> Answer:
            if stream is not None:
                send(stops.push(stream.finish()))
                send(stops.finish())
            generated.timings.load_s = self.load_s
            return Answer(generated, "".join(pieces))

        eos = self.package.eos_token_ids
        return Request(ids, ask.options, limits, eos, ask.num_logprobs, on_token, key), finish


def _drained(failed: list[tuple[int, GenaiError]]) -> Iterator[tuple[int, GenaiError]]:
    while failed:
        yield failed.pop(0)


def open_model(path: Path, options: OpenOptions | None = None) -> Model:
    """Open a folder or file on one engine. GenaiError for a bad package, an unsupported graph or a missing device."""
    started, options = time.perf_counter(), options or OpenOptions()
    package = open_package(path)
    decoder = load_decoder(package)
    runner = open_runner(decoder, options, package)
    kv, reason = _paged(runner, options)
    load_s = time.perf_counter() - started
    return Model(path, package, decoder, runner, options, load_s, kv, reason, (*package.warnings, *decoder.warnings))


def open_runner(decoder: LoadedDecoder, options: OpenOptions, package: ModelPackage | None = None) -> Runner:
    """The one factory of runners. A decoder that reads embeddings gets the package's other components before it, on the
    same engine."""
    if not decoder.io.input_ids and package is None:
        raise GenaiError(f"the decoder reads `{decoder.io.inputs_embeds}`, made by other components of its package")
    if options.exact and options.backend == "ort":
        raise GenaiError("--exact is native's f32 mode; ONNX Runtime runs the graph as it is", hint="--backend native")
    runner, open_component = (_native if options.backend == "native" else _ort)(decoder, options)
    if decoder.io.input_ids or package is None:
        return runner
    return over_components(package, runner, _width(decoder), open_component)


def _native(decoder: LoadedDecoder, options: OpenOptions) -> tuple[Runner, OpenComponent]:
    backend = open_backend(options.device, threads=options.threads, isa=options.isa, cuda=options.cuda)
    runner = NativeRunner(
        decoder.graph, backend, io=decoder.io, context_len=decoder.context_len, exact=options.exact
    )  # fmt: skip
    return runner, lambda part: NativeComponent(load_graph(part.path), backend)


def _ort(decoder: LoadedDecoder, options: OpenOptions) -> tuple[Runner, OpenComponent]:
    from genai_cli.runners.ort import OrtComponent, OrtRunner  # the slow import, only where it runs

    runner = OrtRunner(
        decoder.path, io=decoder.io, graph=decoder.graph, context_len=decoder.context_len, device=options.device,
        threads=options.threads,
    )  # fmt: skip
    return runner, lambda part: OrtComponent(part.path, device=options.device, threads=options.threads)


def _width(decoder: LoadedDecoder) -> int:
    """E of the embeddings the decoder reads."""
    info = next(value for value in decoder.graph.inputs if value.name == decoder.io.inputs_embeds)
    width = info.shape[-1] if info.shape else None
    if not isinstance(width, int):
        raise GenaiError(f"`{info.name}` has the shape {info.shape}; wanted a fixed last dimension")
    return width


def _paged(runner: Runner, options: OpenOptions) -> tuple[PagedKv | None, str]:
    gate = runner.supports_paged_kv()
    if not gate.supported:
        return None, gate.reason
    if not options.prefix_cache:
        return None, "switched off"
    if options.page_size < 1:
        raise GenaiError(f"--page-size is {options.page_size}; wanted at least 1")
    pages = options.num_pages
    if pages is None:
        context = min(runner.context_len or 4096, 4096)
        pages = default_num_pages(runner.kv_layout, options.page_size, context, available_bytes())
    needs_state = bool(runner.snapshot_state())
    return PagedKv(runner.kv_layout, options.page_size, pages, needs_state, copy=copy_table), gate.reason


def available_bytes() -> int:
    """Physical memory that is free now, as far as the system tells."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def document(model: Model, answer: Answer) -> dict[str, Any]:
    """The `genai.generate/1` JSON document of one answer."""
    made, timings = answer.generated, answer.generated.timings
    info = model.runner.info
    result: dict[str, Any] = {
        "schema": "genai.generate/1",
        "model": str(model.path),
        "backend": info.name,
        "device": model.options.device,
        "prompt_token_ids": made.prompt_token_ids,
        "token_ids": made.token_ids,
        "text": answer.text,
        "finish_reason": made.finish_reason,
        "num_cached_tokens": made.num_cached_tokens,
        "timings": {
            "load_s": timings.load_s,
            "ttft_s": timings.ttft_s,
            "prefill_tok_s": timings.prefill_tok_s,
            "decode_tok_s": timings.decode_tok_s,
        },
        "peak_rss_bytes": peak_rss_bytes(),
        "versions": {"genai": __version__, info.name: info.version, "providers": list(info.providers)},
    }
    if made.logprobs:
        result["logprobs"] = [
            {"id": chosen.id, "logprob": chosen.logprob, "top": [{"id": t.id, "logprob": t.logprob} for t in top]}
            for chosen, top in made.logprobs
        ]
    return result


def peak_rss_bytes() -> int:
    """Most memory this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def sampling_of(package: ModelPackage, given: dict[str, Any], *, greedy: bool) -> SamplingOptions:
    """Effective options: flags, else the package's search section, else greedy. Any sampling flag means sampling."""
    search = package.search
    defaults: dict[str, Any] = {
        "temperature": search.temperature,
        "top_k": search.top_k,
        "top_p": search.top_p,
        "min_p": search.min_p,
        "repetition_penalty": search.repetition_penalty,
        "no_repeat_ngram": search.no_repeat_ngram_size,
        "min_new_tokens": None,
        "seed": search.random_seed if search.random_seed is not None and search.random_seed >= 0 else None,
    }
    flags = {name: value for name, value in given.items() if value is not None}
    sampling = bool({"temperature", "top_k", "top_p", "min_p", "seed"} & set(flags))
    chosen = {name: value for name, value in defaults.items() if value is not None} | flags
    return SamplingOptions(greedy=greedy or not (sampling or search.do_sample), **chosen)


def parse_ids(text: str) -> tuple[int, ...]:
    """`1,2,3` as ids. GenaiError names what is no number."""
    parts: Sequence[str] = [part.strip() for part in text.split(",") if part.strip()]
    try:
        return tuple(int(part) for part in parts)
    except ValueError:
        raise GenaiError(f"--prompt-ids `{text[:60]}`: wanted whole numbers separated by commas") from None
