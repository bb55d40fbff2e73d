"""The loop against a scripted decoder: limits, reasons to stop, reuse, interrupts."""

from __future__ import annotations

import numpy as np
import pytest

from genai_cli.checks.mirror_scene import F32, ClosedFormDecoder, prime_layout
from genai_cli.errors import GenaiError
from genai_cli.generate import Generated, Limits, generate
from genai_cli.kv.session import PagedKv
from genai_cli.runners.base import LogitsMode
from genai_cli.sampling import SamplingOptions


class Scripted(ClosedFormDecoder):
    """Says the script's tokens in turn, one after each position of the output."""

    vocab_size = 300

    def __init__(self, script: list[int], prompt_len: int, capacity: int = 64) -> None:
        self.script, self.prompt_len, self.fed = script, prompt_len, 0
        super().__init__(prime_layout(F32), capacity)

    def step(self, ids: np.ndarray, *, embeds: np.ndarray | None = None, logits: LogitsMode = "last") -> np.ndarray:
        """One-hot logits of the next scripted token."""
        self.fed += len(ids)
        super().step(ids)
        row = np.zeros((1, self.vocab_size), np.float32)
        row[0, self.script[(self.length - self.prompt_len) % len(self.script)]] = 1.0
        return row


def run(script: list[int], limits: Limits, prompt: tuple[int, ...] = (1, 2, 3), **more: object) -> Generated:
    return generate(Scripted(script, len(prompt)), prompt, SamplingOptions(), limits, **more)  # type: ignore[arg-type]


def test_stops_on_any_end_token_and_does_not_keep_it() -> None:
    made = run([10, 11, 9, 12], Limits(8), eos_ids=(2, 7, 9))
    assert (made.token_ids, made.finish_reason) == ([10, 11], "stop")


def test_an_end_token_exactly_at_the_limit_is_still_a_stop() -> None:
    assert run([10, 11, 9], Limits(3), eos_ids=(9,)).finish_reason == "stop"
    assert run([10, 11, 12], Limits(3), eos_ids=(9,)).finish_reason == "length"


def test_ignore_eos_goes_on() -> None:
    made = run([9, 9, 9], Limits(5, ignore_eos=True), eos_ids=(9,))
    assert (made.token_ids, made.finish_reason) == ([9] * 5, "length")


def test_max_length_counts_the_prompt() -> None:
    assert len(run([5], Limits(max_length=7)).token_ids) == 4


def test_an_exactly_full_context_gives_no_token() -> None:
    prompt = tuple(range(64))
    assert run([5], Limits(8), prompt).finish_reason == "length"
    assert run([5], Limits(8), prompt).token_ids == []


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    with pytest.raises(GenaiError, match="65 tokens, the context holds 64"):
        run([5], Limits(8), tuple(range(65)))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(GenaiError, match="empty"):
        run([5], Limits(8), ())


def test_a_completed_stop_sequence_ends_it() -> None:
    made = run([4, 5, 6, 7], Limits(8), on_token=lambda token: token == 6)
    assert (made.token_ids, made.finish_reason) == ([4, 5, 6], "stop_sequence")


def test_the_last_sampled_token_is_neither_fed_nor_published() -> None:
    kv = PagedKv(prime_layout(F32), 2, 64)
    decoder = Scripted([4, 5, 6, 7], 3)
    generate(decoder, (1, 2, 3), SamplingOptions(), Limits(4), kv=kv)
    assert decoder.fed == 3 + 3
    assert kv.lookup([1, 2, 3, 4, 5, 6, 7, 0]).length == 6


def test_a_second_turn_reuses_the_first() -> None:
    kv = PagedKv(prime_layout(F32), 2, 64)
    decoder = Scripted([4, 5], 3)
    first = generate(decoder, (1, 2, 3), SamplingOptions(), Limits(2), kv=kv)
    decoder.prompt_len, decoder.fed = 7, 0
    second = generate(decoder, (1, 2, 3, 4, 5, 8, 9), SamplingOptions(), Limits(1), kv=kv)
    assert (first.num_cached_tokens, second.num_cached_tokens, decoder.fed) == (0, 4, 3)
    cold = generate(Scripted([4, 5], 7), (1, 2, 3, 4, 5, 8, 9), SamplingOptions(), Limits(1))
    assert cold.token_ids == second.token_ids


@pytest.mark.parametrize("at", range(6))
def test_an_interrupt_gives_every_page_back(at: int) -> None:
    kv = PagedKv(prime_layout(F32), 2, 64)
    count = iter(range(100))

    def interrupt(token: int) -> bool:
        if next(count) == at:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        generate(Scripted([4, 5, 6], 3), (1, 2, 3), SamplingOptions(), Limits(9), kv=kv, on_token=interrupt)
    assert kv.pool.pages_used == 0


def test_logits_that_are_not_finite_stop_the_loop() -> None:
    class Broken(Scripted):
        def step(self, ids: np.ndarray, **more: object) -> np.ndarray:  # type: ignore[override]
            return np.where(self.length >= 4, np.nan, super().step(ids)).astype(np.float32)

    with pytest.raises(GenaiError, match="position 5"):
        generate(Broken([4, 5, 6], 3), (1, 2, 3), SamplingOptions(), Limits(9))


def test_timings_without_decode_steps_say_so() -> None:
    made = run([5], Limits(1))
    assert made.timings.decode_tok_s is None
    assert (made.timings.ttft_s or 0) > 0
