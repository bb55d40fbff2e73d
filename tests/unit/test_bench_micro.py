"""Micro-benchmarks on a clock of their own; and kernels of a real step beside ONNX Runtime's nodes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from genai_cli.bench import table
from genai_cli.bench.machine import Ceilings
from genai_cli.bench.micro import SETTLE_S, Case, MicroReport, chosen, measure
from genai_cli.bench.micro_host import page_cases, sampling_cases, text_cases
from genai_cli.bench.micro_run import run_micro
from genai_cli.errors import GenaiError
from genai_cli.model import OpenOptions, open_model

PACKAGES = Path(__file__).resolve().parents[2] / "fixtures" / "packages"


class World:
    """Calls cost what is written here; nothing else takes time."""

    def __init__(self):
        self.now, self.order, self.slept = 0.0, [], []

    def clock(self):
        return self.now

    def costs(self, name, seconds):
        def call():
            self.order.append(name)
            self.now += seconds

        return call


def test_rates_are_of_one_copy_and_the_ratio_is_paired():
    world = World()
    case = Case(
        "k", "s", world.costs("native", 2e-3), copies=4, num_bytes=1000, num_ops=5000, num_items=2, items="rows",
        peer=world.costs("ort", 6e-3),
    )  # fmt: skip
    found = measure(case, world.clock, world.slept.append)
    assert found.native_s.median == pytest.approx(5e-4)
    assert (found.gb_s, found.gop_s, found.items_s) == pytest.approx((2e-3, 1e-2, 4000))
    assert found.ort_s.median == pytest.approx(15e-4)
    assert found.ratio.median == pytest.approx(3)
    assert set(world.slept) == {SETTLE_S}


def test_native_and_ort_take_turns_each_behind_an_untimed_call():
    world = World()
    measure(Case("k", "s", world.costs("a", 1e-2), peer=world.costs("b", 1e-2)), world.clock, world.slept.append)
    assert "".join(world.order).startswith("aabb" + "aabb" + "bbaa")  # warm-up, then a b, b a: each twice
    assert world.order.count("a") == world.order.count("b") == len(world.slept) + 2


def test_short_calls_are_repeated_inside_a_trial():
    world = World()
    found = measure(Case("k", "s", world.costs("a", 1e-6)), world.clock, world.slept.append)
    assert found.native_s.median == pytest.approx(1e-6)
    assert len(world.order) > 9 * 900
    assert (found.ort_s, found.ratio, found.gb_s) == (None, None, None)


def test_a_pattern_chooses_and_one_that_names_nothing_is_refused():
    made = {name: partial(Case, name, "", lambda: None) for name in ("a.x", "a.y", "b")}
    assert [case.name for case in chosen(made.values(), made, "a.*")] == ["a.x", "a.y"]
    with pytest.raises(GenaiError, match=r"--only `c\*` names no micro-benchmark; there are a\.x, a\.y, b"):
        chosen(made.values(), made, "c*")


@pytest.fixture(scope="module")
def opened():
    return open_model(PACKAGES / "llama-int4-cpu", OpenOptions(threads=1, prefix_cache=False))


def test_what_lies_between_kernels_runs(opened):
    makers = sampling_cases(500) | page_cases(opened.runner.kv_layout) | text_cases(opened.tokenizer)
    assert {name.partition(".")[0] for name in makers} == {"sample", "logits", "pages", "tokenizer"}
    for name, make in makers.items():
        case = make()
        assert case.name == name
        case.native()
        case.native()
        assert case.num_bytes or case.num_items


@pytest.fixture(scope="module")
def report():
    options = OpenOptions(threads=1, prefix_cache=False)
    return run_micro(PACKAGES / "llama-int4-cpu", options, (6, 9), "[!splt]*", 0, lambda text: None)


def test_every_kernel_of_a_step_and_of_a_prefill_stands_beside_its_node(report):
    names = {(found.name, found.shape) for found in report.results}
    assert ("genai.Attention", "1×1×64 behind 10 float32") in names
    assert ("genai.Attention", "1×6×64 behind 6 float32") in names
    products = [found for found in report.results if found.name == "MatMulNBits"]
    assert {shape.shape.partition("×")[0] for shape in products} == {"1", "6"}
    assert all(found.gop_s and found.gb_s for found in products)
    without = {found.name: found.ort_reason for found in report.results if not found.ratio}
    assert all(reason for reason in without.values())
    assert not {"MatMulNBits", "genai.Attention", "SkipSimplifiedLayerNormalization"} & set(without)


def test_the_table(report):
    lines = table.micro_rows(report)
    assert len(lines) == len(report.results)
    assert all(len(line) == len(table.MICRO_COLUMNS) for line in lines)
    assert "int8 7 Gop/s" in table.micro_title(MicroReport("m", 1, "cpu:fake", Ceilings(1, 2, 7), []))
