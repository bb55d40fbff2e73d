"""Attention's headline: the bits of a row do not depend on how the tokens were fed, on threads, or on unused memory."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from cpu import FLOATS, ISAS, Decoder, same_bits

from genai_cli.backends.cpu import CpuBackend
from genai_cli.errors import GenaiError

HEADS = [(9, 3, 64), (4, 2, 24), (40, 1, 16), (3, 3, 7)]  # 40 heads on one K: a group larger than a tile
LENGTH = 1100  # crosses two splits of 512 keys
FEEDINGS = [  # (threads, tokens a step)
    (1, [1100]),
    (2, [1100]),
    (1, [700, 1, 1, 1, 1, 196, 200]),
    (3, [3, 509, 1, 1, 1, 500, 85]),
    (5, [1000, *[1] * 40, 60]),
]


def tokens(heads: tuple[int, int, int], dtype: np.dtype, length: int = LENGTH) -> np.ndarray:
    num_heads, kv_num_heads, head_dim = heads
    shape = (1, length, (num_heads + 2 * kv_num_heads) * head_dim)
    return np.random.default_rng(7).normal(size=shape).astype(dtype)


def fed(isa: str, threads: int, heads: tuple[int, int, int], qkv: np.ndarray, steps: list[int], **attrs) -> np.ndarray:
    decoder = Decoder(CpuBackend(isa=isa, threads=threads), *heads, qkv.dtype, qkv.shape[1])
    borders = np.cumsum([0, *steps])
    return np.concatenate([decoder.feed(qkv[:, a:b], **attrs) for a, b in pairwise(borders)], 1)


@pytest.mark.parametrize("attrs", [{}, {"local_window_size": 100}, {"softcap": 3.0, "smooth_softmax": 1}], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_feeding_does_not_matter(isa: str, heads: tuple[int, int, int], attrs: dict) -> None:
    for dtype in FLOATS if isa == ISAS[-1] else FLOATS[:1]:
        qkv = tokens(heads, dtype)
        first, *others = [fed(isa, threads, heads, qkv, steps, **attrs) for threads, steps in FEEDINGS]
        assert np.isfinite(first.astype(np.float32)).all()
        assert all(same_bits(first, other) for other in others)


@pytest.mark.parametrize("isa", ISAS)
def test_against_plain_softmax(isa: str) -> None:
    heads, length = (6, 2, 20), 600
    qkv = tokens(heads, np.dtype(np.float32), length)
    got = fed(isa, 2, heads, qkv, [599, 1]).reshape(length, 6, 20)
    rows = qkv.astype(np.float64).reshape(length, 10, 20)
    for head in range(6):
        q, k, v = rows[:, head], rows[:, 6 + head // 3], rows[:, 8 + head // 3]
        scores = np.where(np.tri(length, dtype=bool), q @ k.T / np.sqrt(20), -np.inf)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        want = weights / weights.sum(1, keepdims=True) @ v
        # f32 sums of up to 600 terms of size <= 4: at worst 600 * 4 * eps/2 = 1.4e-4, typically its root.
        assert np.abs(got[:, head] - want).max() < 5e-6


@pytest.mark.parametrize("poison", [np.nan, 1e4, 0.0])
def test_unused_rows_are_never_read(poison: float) -> None:
    results = []
    for filling in (poison, 0.5):
        decoder = Decoder(CpuBackend(threads=2), 4, 2, 16, np.dtype(np.float32), 300, poison=filling)
        qkv = tokens((4, 2, 16), np.dtype(np.float32), 40)
        results.append(np.concatenate([decoder.feed(qkv[:, :33]), decoder.feed(qkv[:, 33:])], 1))
        assert np.array_equal(decoder.slots[0].buffer[:, 40:], np.full((2, 512 - 40, 16), filling, np.float32), True)
    assert same_bits(*results)


def test_recording_survives_growth_and_positions() -> None:
    """One recorded decode step, replayed over 256 -> 512, gives what fresh calls give."""
    heads, start, steps = (4, 2, 16), 250, 12
    qkv = tokens(heads, np.dtype(np.float32), start + steps)
    want = fed("portable", 1, heads, qkv, [start, *[1] * steps])[:, start:]
    on = CpuBackend(isa="portable", threads=1)
    decoder = Decoder(on, *heads, np.dtype(np.float32), start)
    decoder.feed(qkv[:, :start])
    token, out = on.empty((1, 1, 128), np.dtype(np.float32)), on.empty((1, 1, 64), np.dtype(np.float32))
    on.upload(token, qkv[:, start : start + 1])
    recording = on.record()
    attrs = {"num_heads": 4, "kv_num_heads": 2, "key_slot": 0, "value_slot": 1}
    recording.call("genai.Attention", [token], [out], attrs)
    got = [on.download(out)]
    for at in range(start + 1, start + steps):
        on.set_past_len(at)
        on.reserve(at + 1)
        on.upload(token, qkv[:, at : at + 1])
        recording.replay()
        got.append(on.download(out))
    assert on.capacity == 512
    assert same_bits(np.concatenate(got, 1), want)


def test_no_room_and_no_position_are_errors() -> None:
    decoder = Decoder(CpuBackend(threads=1), 2, 2, 8, np.dtype(np.float32), 256)
    decoder.feed(tokens((2, 2, 8), np.dtype(np.float32), 250))
    with pytest.raises(GenaiError, match=r"KV slot 0 is \[2, 256, 8\], wanted \[2, 257, 8\]"):
        decoder.feed(tokens((2, 2, 8), np.dtype(np.float32), 7))
    angles = np.zeros((251, 4), np.float32)
    with pytest.raises(GenaiError, match="position 251 is outside a rotary cache of 251"):
        decoder.feed(tokens((2, 2, 8), np.dtype(np.float32), 2), cos=angles, sin=angles)
