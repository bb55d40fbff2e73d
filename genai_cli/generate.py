"""Prompt -> tokens, on any engine: THE loop.

prompt ids → kv.sequence (lookup) → runner.seed (num_cached_tokens) ─┐
 ┌ runner.step(ids[T]) → logits                                     ◀┘
 │ kv.mirror (present → pages, at page borders)
 │ sampling.sample → token → on_token
 └ T = 1 until a stop token, a stop sequence, or the limit
→ kv.publish → Generated
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from genai_cli.errors import GenaiError
from genai_cli.kv.session import KvSequence, PagedKv
from genai_cli.runners.base import Runner
from genai_cli.sampling import Logprob, SamplingOptions, logprobs, sample

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
    """Generate from prompt ids. `kv` reuses and publishes prefixes; `key` is the identity of everything beside the ids.

    GenaiError: empty prompt, prompt longer than the context, non-finite logits (with the position)."""
    result = Generated([int(token) for token in prompt])
    room = room_for(runner, len(prompt), limits)
    if room == 0:
        return result
    runner.reset()
    sequence = kv.sequence(result.prompt_token_ids, key) if kv is not None else None
    try:
        _loop(runner, result, options, limits, room, eos_ids, num_logprobs, on_token, sequence, embeds)
    finally:
        if sequence is not None:
            sequence.close()
    return result


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


def _loop(
    runner: Runner, result: Generated, options: SamplingOptions, limits: Limits, room: int, eos_ids: Sequence[int],
    num_logprobs: int, on_token: OnToken, sequence: KvSequence | None, embeds: np.ndarray | None,
) -> None:  # fmt: skip
    prompt, started = result.prompt_token_ids, time.perf_counter()
    cached = _seed(runner, sequence)
    result.num_cached_tokens = cached
    feed = np.array(prompt[cached:], np.int64)
    logits = runner.step(feed, embeds=None if embeds is None else embeds[cached:])
    first = time.perf_counter()
    result.timings.ttft_s = first - started
    result.timings.prefill_tok_s = len(feed) / max(first - started, 1e-9)
    _remember(runner, sequence, len(prompt))
    while True:
        history = prompt + result.token_ids
        token = sample(logits[-1], options, history, len(result.token_ids), eos_ids)
        if token in eos_ids and not limits.ignore_eos:
            result.finish_reason = "stop"
            break
        result.token_ids.append(token)
        if num_logprobs:
            result.logprobs.append(logprobs(logits[-1], token, num_logprobs))
        if on_token(token):
            result.finish_reason = "stop_sequence"
            break
        if len(result.token_ids) == room:
            break
        logits = runner.step(np.array([token], np.int64))
        _mirror(runner, sequence, only_full=True)
    decoded, spent = len(result.token_ids) - 1, time.perf_counter() - first
    result.timings.decode_tok_s = decoded / spent if decoded > 0 else None
    _publish(runner, sequence, prompt + result.token_ids)


def _seed(runner: Runner, sequence: KvSequence | None) -> int:
    if sequence is None or not sequence.num_cached_tokens:
        return 0
    runner.seed(*sequence.prefix())
    return sequence.num_cached_tokens


def _remember(runner: Runner, sequence: KvSequence | None, length: int) -> None:
    if sequence is not None:
        sequence.remember(length, runner.snapshot_state())
        sequence.mirror(runner.kv_rows, length)


def _mirror(runner: Runner, sequence: KvSequence | None, *, only_full: bool) -> None:
    """Present -> pages. While decoding only whole pages are worth the copies; the rest follows at the end."""
    if sequence is not None and (not only_full or runner.length % sequence.table.pool.page_size == 0):
        sequence.mirror(runner.kv_rows, runner.length)


def _publish(runner: Runner, sequence: KvSequence | None, ids: Sequence[int]) -> None:
    """The last sampled token was never fed: it has no KV and is not published."""
    if sequence is not None:
        _mirror(runner, sequence, only_full=False)
        sequence.remember(runner.length, runner.snapshot_state())
        sequence.publish(ids[: runner.length])
