"""Prompt -> tokens, on any engine: THE loop.

`generate` runs one request; `generate_rows` many, with one step for all of them:

prompt ids → kv.sequence (lookup) → runner.seed (num_cached_tokens) ─┐
 ┌ runner.step(ids[T]) → logits                                     ◀┘
 │ kv.mirror (present → pages, at page borders)
 │ sampling.sample → token → on_token
 └ T = 1 until a stop token, a stop sequence, or the limit
→ kv.publish → Generated
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from genai_cli.errors import GenaiError
from genai_cli.kv.session import KvSequence, PagedKv
from genai_cli.runners.base import RowsRunner, Runner, TopRunner
from genai_cli.sampling import Logprob, SamplingOptions, enough, logprobs, sample, sample_top

FinishReason = Literal["stop", "length", "stop_sequence"]
OnToken = Callable[[int], bool]
"""Called with every token that is kept; True stops (a stop sequence was completed)."""


@dataclass(frozen=True)
class Limits:
    """`max_new_tokens` beats `max_length` (prompt and output); None: up to the context."""

    max_new_tokens: int | None = None
    max_length: int | None = None
    ignore_eos: bool = False


@dataclass
class Timings:
    """Seconds and rates; None where nothing was measured."""

    load_s: float | None = None
    ttft_s: float | None = None
    prefill_tok_s: float | None = None
    decode_tok_s: float | None = None


@dataclass
class Generated:
    """One finished generation."""

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    num_cached_tokens: int = 0
    logprobs: list[tuple[Logprob, list[Logprob]]] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)


@dataclass(frozen=True)
class Request:
    """What one generation is given. `key` is the identity of everything beside the ids."""

    prompt: Sequence[int]
    options: SamplingOptions
    limits: Limits
    eos_ids: Sequence[int] = ()
    num_logprobs: int = 0
    on_token: OnToken = lambda token: False
    key: bytes = b""
    embeds: np.ndarray | None = None


class Generation:
    """One generation, token by token: `begin`, then `choose` and `fed` in turn, then `end`; `close` in any case."""

    def __init__(self, runner: Runner, request: Request, kv: PagedKv | None = None) -> None:
        """GenaiError: empty prompt, prompt longer than the context."""
        self.runner, self.request = runner, request
        self.result = Generated([int(token) for token in request.prompt])
        self._room = room_for(runner, len(request.prompt), request.limits)
        self._kv = kv
        self._sequence: KvSequence | None = None
        self._logits = np.empty((0, 0), np.float32)
        self._top = (np.empty(0, np.int64), np.empty(0, np.float32))
        self._top_runner, self._top_count = _top_runner(runner, request)
        self._first = 0.0

    def begin(self, *, share: bool = False) -> None:
        """Seed what is cached, and feed the rest of the prompt. `share`: others may reuse the prompt's whole pages at
        once, not only when this generation has ended."""
        if self._room == 0:
            return
        result, prompt, started = self.result, self.result.prompt_token_ids, time.perf_counter()
        self.runner.reset()
        if self._kv is not None:
            self._sequence = self._kv.sequence(prompt, self.request.key)
        cached = self._seed()
        result.num_cached_tokens = cached
        start = self._keep_state(cached)
        self._step(np.array(prompt[start:], np.int64), start)
        self._first = time.perf_counter()
        result.timings.ttft_s = self._first - started
        result.timings.prefill_tok_s = (len(prompt) - cached) / max(self._first - started, 1e-9)
        self._remember_prompt(share)

    def choose(self) -> int | None:
        """The next token, which has to be fed; None when the generation is over. GenaiError: non-finite logits (with
        the position)."""
        request, result = self.request, self.result
        if self._room == 0:
            return None
        token = self._sampled()
        if token in request.eos_ids and not request.limits.ignore_eos:
            result.finish_reason = "stop"
            return None
        result.token_ids.append(token)
        if request.num_logprobs:
            result.logprobs.append(logprobs(self._logits[-1], token, request.num_logprobs))
        if request.on_token(token):
            result.finish_reason = "stop_sequence"
            return None
        return token if len(result.token_ids) < self._room else None

    def _sampled(self) -> int:
        request, result = self.request, self.result
        history = result.prompt_token_ids + result.token_ids
        if self._top_runner is not None:
            return sample_top(*self._top, request.options, len(history))
        return sample(self._logits[-1], request.options, history, len(result.token_ids), request.eos_ids)

    def _step(self, ids: np.ndarray, first: int = 0) -> None:
        """Feed ids, which begin at position `first` of the prompt's embeddings, if it has any."""
        embeds = self.request.embeds
        if self._top_runner is not None:
            self._top = self._top_runner.step_top(ids, self._top_count)
        elif embeds is None or self.result.token_ids:
            self._logits = self.runner.step(ids)
        else:
            self._logits = self.runner.step(ids, embeds=embeds[first:])

    def feed(self, token: int) -> None:
        """Feed the chosen token alone."""
        self._step(np.array([token], np.int64))
        self._mirror_page()

    def fed(self, logits: np.ndarray) -> None:
        """The chosen token was fed; logits [1, V] of it."""
        self._logits = logits
        self._mirror_page()

    def _mirror_page(self) -> None:
        """While decoding only whole pages are worth the copies."""
        if self._sequence is not None and self.runner.length % self._sequence.table.pool.page_size == 0:
            self._sequence.mirror(self.runner.kv_rows, self.runner.length)

    def end(self) -> Generated:
        """Timings, and the KV for those who come after. The last sampled token was never fed: it has no KV."""
        result = self.result
        decoded, spent = len(result.token_ids) - 1, time.perf_counter() - self._first
        result.timings.decode_tok_s = decoded / spent if decoded > 0 else None
        if self._sequence is not None:
            self._sequence.mirror(self.runner.kv_rows, self.runner.length)
            self._sequence.remember(self.runner.length, self.runner.snapshot_state())
            self._sequence.publish((result.prompt_token_ids + result.token_ids)[: self.runner.length])
        return result

    def close(self) -> None:
        """Give the pages back; what was published stays."""
        if self._sequence is not None:
            self._sequence.close()

    def _keep_state(self, start: int) -> int:
        """Recurrent decoders: feed up to where the state is worth keeping; returns how much of the prompt is fed."""
        stop = self._sequence.state_stop(len(self.result.prompt_token_ids)) if self._sequence is not None else None
        if stop is None or self._sequence is None:
            return start
        embeds = self.request.embeds
        ids = np.array(self.result.prompt_token_ids[start:stop], np.int64)
        self.runner.step(ids, embeds=None if embeds is None else embeds[start:stop], logits="none")
        self._sequence.remember(stop, self.runner.snapshot_state())
        return stop

    def _seed(self) -> int:
        if self._sequence is None or not self._sequence.num_cached_tokens:
            return 0
        self.runner.seed(*self._sequence.prefix())
        return self._sequence.num_cached_tokens

    def _remember_prompt(self, share: bool) -> None:
        if self._sequence is None:
            return
        prompt, size = self.result.prompt_token_ids, self._sequence.table.pool.page_size
        self._sequence.remember(len(prompt), self.runner.snapshot_state())
        self._sequence.mirror(self.runner.kv_rows, len(prompt))
        if share:
            self._sequence.publish(prompt[: len(prompt) // size * size])


def generate(
    runner: Runner,
    prompt: Sequence[int],
    options: SamplingOptions,
    limits: Limits,
    *,
    eos_ids: Sequence[int] = (),
    num_logprobs: int = 0,
    on_token: OnToken = lambda token: False,
    kv: PagedKv | None = None,
    key: bytes = b"",
    embeds: np.ndarray | None = None,
) -> Generated:
    """Generate from prompt ids. `kv` reuses and publishes prefixes.

    GenaiError: empty prompt, prompt longer than the context, non-finite logits (with the position)."""
    return run(runner, Request(prompt, options, limits, eos_ids, num_logprobs, on_token, key, embeds), kv)


def run(runner: Runner, request: Request, kv: PagedKv | None = None) -> Generated:
    """`generate` for a request."""
    with closing(Generation(runner, request, kv)) as row:
        row.begin()
        while (token := row.choose()) is not None:
            row.feed(token)
        return row.end()


def _top_runner(runner: Runner, request: Request) -> tuple[TopRunner | None, int]:
    """The runner, when it can choose the logits that decide, and how many; nobody asks for the others."""
    count = enough(request.options)
    if request.num_logprobs or request.embeds is not None or not count or not isinstance(runner, TopRunner):
        return None, 0
    return (runner, count) if runner.supports_top(count).supported else (None, 0)


Outcome = Generated | GenaiError


def generate_rows(
    runner: RowsRunner, requests: Iterable[tuple[int, Request]], max_rows: int, kv: PagedKv | None = None
) -> Iterator[tuple[int, Outcome]]:
    """Generate for many numbered requests, up to `max_rows` of them in one step: a row joins when another has left.

    Yields (number of the request, result or what was wrong with it) as they are finished. Each result is the one that
    `generate` gives for its request alone."""
    waiting = iter(requests)
    seats = [runner.seat() for _ in range(max_rows)]
    rows: dict[int, Generation] = {}
    try:
        while True:
            yield from _join(waiting, seats, rows, kv)
            if not rows:
                return
            chosen: dict[int, int] = {}
            for index, row in list(rows.items()):
                token, outcome = _outcome(row)
                if token is not None:
                    chosen[index] = token
                    continue
                row.close()
                seats.append(rows.pop(index).runner)
                yield index, outcome
            if rows:
                active = list(rows.values())
                logits = runner.step_rows(np.array(list(chosen.values()), np.int64), [row.runner for row in active])
                for number, row in enumerate(active):
                    row.fed(logits[number : number + 1])
    finally:
        for row in rows.values():
            row.close()


def _join(
    waiting: Iterator[tuple[int, Request]], seats: list[Runner], rows: dict[int, Generation], kv: PagedKv | None
) -> Iterator[tuple[int, Outcome]]:
    """Requests take the free seats; one that cannot begin is told so."""
    while seats and (entry := next(waiting, None)) is not None:
        index, request = entry
        try:
            rows[index] = Generation(seats[-1], request, kv)
            rows[index].begin(share=True)
            seats.pop()
        except GenaiError as error:
            if index in rows:
                rows.pop(index).close()
            yield index, error


def _outcome(row: Generation) -> tuple[int | None, Outcome]:
    try:
        token = row.choose()
        return token, row.end() if token is None else row.result
    except GenaiError as error:
        return None, error


def room_for(runner: Runner, prompt_len: int, limits: Limits) -> int:
    """New tokens that fit. GenaiError when the prompt is empty or alone exceeds the context."""
    context = runner.context_len
    if prompt_len == 0:
        raise GenaiError("the prompt is empty and the model has no BOS token to begin with", hint="give a prompt")
    if context is not None and prompt_len > context:
        raise GenaiError(f"the prompt has {prompt_len} tokens, the context holds {context}", hint="shorten the prompt")
    bounds = [] if context is None else [context - prompt_len]
    if limits.max_new_tokens is not None:
        bounds.append(limits.max_new_tokens)
    elif limits.max_length is not None:
        bounds.append(max(0, limits.max_length - prompt_len))
    if not bounds:
        raise GenaiError("the model declares no context length", hint="give --max-new-tokens")
    return min(bounds)
