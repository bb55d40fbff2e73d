"""What a kernel call costs by its shapes, and a profile of spans of known length."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from genai_cli.backends.base import Tensor
from genai_cli.backends.cpu import Span, Step
from genai_cli.bench import table
from genai_cli.bench.profile import OUTSIDE, ProfileReport, Section, TimedStep, rows_of, trace_document
from genai_cli.bench.work import Work, shape_of, work

F32 = np.dtype(np.float32)
ADDRESSES = iter(range(1, 1000))


def tensor(*shape, dtype=F32):
    return Tensor(next(ADDRESSES), shape, np.dtype(dtype))


def test_a_product_reads_both_sides_once_and_multiplies_every_pair():
    step = Step("MatMul", (tensor(1, 3, 8), tensor(8, 5)), (tensor(1, 3, 5),))
    assert work(step, [], 0) == Work(4 * (24 + 40 + 15), 2 * 3 * 8 * 5)
    assert shape_of(step) == "3×8 → 5"
    x = tensor(4)
    assert work(Step("Mul", (x, x), (tensor(4),)), [], 0) == Work(32, 0)  # one memory twice is one read


def test_packed_weights_count_as_they_are_stored():
    packed, scales = tensor(64, 2, 16, dtype=np.uint8), tensor(128)
    step = Step("MatMulNBits", (tensor(1, 1, 64), packed, scales, None), (tensor(1, 1, 64),), {"K": 64, "N": 64})
    assert work(step, [], 0) == Work(64 * 4 + 2048 + 512 + 64 * 4, 2 * 64 * 64)


def test_of_a_table_the_rows_named_are_read():
    step = Step("Gather", (tensor(100, 8), tensor(1, 3, dtype=np.int64)), (tensor(1, 3, 8),), {"axis": 0})
    assert work(step, [], 0) == Work(24 + 3 * 8 * 4 + 3 * 8 * 4, 0)


@pytest.mark.parametrize(("num_new", "held", "window", "pairs", "seen"), [
    (1, 10, -1, 10, 10),
    (4, 10, -1, 7 + 8 + 9 + 10, 10),
    (1, 10, 6, 6, 6),
])  # fmt: skip
def test_attention_reads_the_kv_it_may_see(num_new, held, window, pairs, seen):
    slots = [SimpleNamespace(num_heads=2, head_dim=16, dtype=F32)] * 2
    query = tensor(1, num_new, 64)
    attrs = {"key_slot": 0, "value_slot": 1, "num_heads": 4, "local_window_size": window}
    done = work(
        Step("genai.Attention", (query, None, None, tensor(8192, 8)), (tensor(1, num_new, 64),), attrs), slots, held
    )
    assert done.num_bytes == 2 * seen * 2 * 16 * 4 + 2 * num_new * 64 * 4
    assert done.num_ops == 2 * 4 * pairs * (16 + 16)


def test_sequences_that_share_a_step_read_their_kv_each():
    slots = [SimpleNamespace(num_heads=2, head_dim=16, dtype=F32)] * 2
    attrs = {"key_slot": 0, "value_slot": 1, "num_heads": 4}
    step = Step("genai.Attention", (tensor(1, 3, 64),), (tensor(1, 3, 64),), attrs)
    done = work(step, slots, 5 + 6 + 7, num_rows=3)
    assert done.num_bytes == 2 * 18 * 2 * 16 * 4 + 2 * 3 * 64 * 4
    assert done.num_ops == 2 * 4 * 18 * (16 + 16)


def timed():
    matmul = Step("MatMul", (tensor(1, 1, 8), tensor(8, 5)), (tensor(1, 1, 5),))
    add = Step("Add", (tensor(5), tensor(5)), (tensor(5),))
    spans = [Span(matmul, 100, 400), Span(add, 400, 500), Span(add, 700, 800)]
    return TimedStep("decode behind 9", 10, 0, 1000, spans)


def test_rows_are_of_a_mean_step_and_nothing_is_lost():
    rows = {row.op: row for row in rows_of([], [timed(), timed()])}
    assert (rows["MatMul"].calls, rows["Add"].calls) == (1, 2)
    assert rows["Add"].ms == pytest.approx(200e-6)
    assert rows[OUTSIDE].ms == pytest.approx(500e-6)
    assert sum(row.share for row in rows.values()) == pytest.approx(1)
    assert rows["MatMul"].gflop_s == pytest.approx(80 / 300)
    assert rows["MatMul"].gb_s == pytest.approx(4 * (8 + 40 + 5) / 300)
    assert rows["Add"].gflop_s is None


def test_the_table_shows_an_op_with_its_shapes_below():
    wide = Step("Add", (tensor(9), tensor(9)), (tensor(9),))
    step = timed()
    step.spans.append(Span(wide, 800, 900))
    section = Section("decode", 0, 9, 1, 1, 1e-3, 0.01, rows_of([], [step]))
    lines = table.profile_rows(section)
    assert [line[:3] for line in lines] == [
        [OUTSIDE, "", "1"], ["Add", "", "3"], ["", "5", "2"], ["", "9", "1"], ["MatMul", "1×8 → 5", "1"],
    ]  # fmt: skip
    title = table.profile_title(ProfileReport("m", 2, "cpu:fake", [section]), section)
    assert "decode behind 9" in title
    assert "timing it costs +1.0%" in title


def test_the_trace_is_in_the_trace_event_format():
    made = trace_document([timed()], [], 0)["traceEvents"]
    assert [event["ph"] for event in made] == ["M", "M", "X", "X", "X", "X"]
    assert (made[3]["name"], made[3]["ts"], made[3]["dur"]) == ("MatMul", 0.1, 0.3)  # microseconds
