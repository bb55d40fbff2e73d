"""Failures other people met, as parity must see them: reuse, non-finite values, levels, windows, masks, rotary tables."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from genai_cli.backends.cpu import CpuBackend
from genai_cli.checks import session
from genai_cli.checks.mutants import weight_of
from genai_cli.checks.op_battery import compare_op
from genai_cli.checks.parity import Settings
from genai_cli.checks.session import Request
from genai_cli.checks.target import Place, open_target, run_one
from genai_cli.errors import ExitCode, GenaiError
from genai_cli.graph.external import ExternalFiles
from genai_cli.graph.ir import Graph, Node
from genai_cli.graph.loader import initializer
from genai_cli.report.text import find, headline
from genai_cli.runners.ort import OrtRunner

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
PACKAGES = FIXTURES / "packages"
PLACE = Place(2, lambda: CpuBackend(threads=2), "cpu")
PAGE = 16
IDS = (3, 7, 0, 5, 7, 16, 4, 9, 11, 2, 13, 1)  # of the closed-form packages, whose vocabulary is 17


def run(folder, ids=IDS, steps=8, **changes):
    return session.run(folder, Request(ids=tuple(ids)), Settings(steps=steps, **changes), PLACE, lambda _: None)


def edited(source: Path, folder: Path, edit) -> Path:
    """A copy of a package whose graph was changed; weights stay in their file."""
    shutil.copytree(source, folder)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    edit(model.graph)
    onnx.save(model, folder / "model.onnx")
    return folder


def set_attr(node: onnx.NodeProto, name: str, value: object) -> None:
    kept = [attr for attr in node.attribute if attr.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


# -- a cache that covers the whole prompt ------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])
def test_the_same_prompt_again_from_its_own_kv_gives_the_same_last_row_and_kv(length):
    """At least one token runs again; on top of the others' KV, not of its own."""
    native = open_target(PACKAGES / "llama-fp32-cpu", PLACE).open_native(exact=False)
    ids = np.arange(30, 30 + length)
    first = native.step(ids)
    kept = [np.array(rows) for rows in native.kv_rows(0, length)]
    native.reset()
    if length > 1:
        native.seed([rows[:, :-1] for rows in kept])
    again = native.step(ids[-1:])
    assert native.length == length
    assert np.array_equal(again, first)
    assert all(np.array_equal(a, b) for a, b in zip(native.kv_rows(0, length), kept, strict=True))


@pytest.mark.parametrize("side", ["native", "oracle"])
def test_a_prefix_of_a_recurrent_decoder_needs_its_state(side):
    target = open_target(PACKAGES / "qwen3_5_text-portable", PLACE)
    runner = target.open_native(exact=False) if side == "native" else target.open_ort(None)
    ids, cut = np.arange(30, 50), 12
    runner.step(ids[:cut])
    rows, state = [np.array(a) for a in runner.kv_rows(0, cut)], runner.snapshot_state()
    fresh = runner.step(ids[cut:])
    runner.reset()
    with pytest.raises(GenaiError, match="recurrent state"):
        runner.seed(rows)
    runner.seed(rows, state)
    assert np.array_equal(runner.step(ids[cut:]), fresh)
    runner.seed(rows, [np.zeros_like(a) for a in state])  # what a restart at zero would give
    assert np.abs(runner.step(ids[cut:]) - fresh).max() > 1e-2


# -- values that are not finite ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 9))
def test_an_overflow_names_its_layer_and_position(length):
    """Two sides that both give NaN would agree by any tolerance; argmax of NaN is token 0."""
    report = run(FIXTURES / "kv-overflow", IDS[:length], steps=4)
    assert report.exit_code == ExitCode.DIFFERENT
    assert headline(report).startswith("FAIL")
    assert "1: " in headline(report)
    assert "at position " in headline(report)


def test_zeros_of_both_signs_are_equal_numbers_of_different_bytes():
    a, b = np.zeros(1, np.float32), np.array([-0.0], np.float32)
    assert np.array_equal(a, b)
    assert a.tobytes() != b.tobytes()
    node = Node("Neg", "", [], ["y"], {}, "zero", 21)
    assert compare_op(CpuBackend(threads=1), run_one, node, [a], frozenset(), "").ok


# -- accuracy levels ---------------------------------------------------------------------------------------------------


def at_level(level: int):
    def edit(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            if node.op_type == "MatMulNBits":
                set_attr(node, "accuracy_level", level)

    return edit


def as_level_4(graph: Graph) -> Graph:
    nodes = [
        replace(n, attrs={**n.attrs, "accuracy_level": 4}) if n.op_type == "MatMulNBits" else n for n in graph.nodes
    ]
    return replace(graph, nodes=nodes)


def test_level_0_is_held_to_f32_and_int8_activations_there_are_a_defect(tmp_path):
    folder = edited(PACKAGES / "llama-int4-cpu", tmp_path / "level0", at_level(0))
    clean = run(folder, range(30, 50))
    assert clean.exit_code == ExitCode.OK
    assert (clean.artifact["precision"], list(clean.artifact["accuracy_levels"])) == ("q_f32", [0])
    assert clean.sides["oracle"]["kind"] == "ort"
    assert find(clean, "logits.nmse").limit <= 1e-6
    coarse = run(folder, range(30, 50), transform=as_level_4)
    assert coarse.exit_code == ExitCode.DIFFERENT
    assert "MatMulNBits" in headline(coarse)


def test_level_4_with_an_outlier_channel_passes_and_flips_are_told_with_their_margins(tmp_path):
    def outlier(graph: onnx.GraphProto) -> None:
        at_level(4)(graph)
        norm = next(n for n in graph.node if n.op_type.endswith("LayerNormalization"))
        weight = next(t for t in graph.initializer if t.name == norm.input[-1])
        values = initializer(weight, ExternalFiles(PACKAGES / "llama-int4-cpu")).array().copy()
        values[3] *= 40
        weight.CopyFrom(numpy_helper.from_array(values, weight.name))

    report = run(edited(PACKAGES / "llama-int4-cpu", tmp_path / "outlier", outlier), range(30, 60))
    assert report.exit_code == ExitCode.OK, headline(report)
    assert list(report.artifact["accuracy_levels"]) == [4]
    plain = find(report, "user_mode.plain")
    assert set(plain.extra["arbiter"]) == {"native", "oracle", "neither"}


# -- ties ---------------------------------------------------------------------------------------------------------------


def tied_on_top(graph: onnx.GraphProto) -> None:
    """The two tied tokens win often: their rows of lm_head are larger than any other."""
    head = next(t for t in graph.initializer if t.name == "logits.weight")
    values = numpy_helper.to_array(head).copy()
    values[:, 4] = values[:, 9] = 3 * values[:, 6]
    head.CopyFrom(numpy_helper.from_array(values, head.name))


def one_ulp_up(graph: Graph) -> Graph:
    """Row 9 of native's lm_head, away from zero: its logit is no longer equal to that of row 4."""
    values = graph.initializers["logits.weight"].array().copy()
    values[:, 9] = np.nextafter(values[:, 9], np.where(values[:, 9] > 0, np.float32(np.inf), np.float32(-np.inf)))
    return replace(graph, initializers={**graph.initializers, "logits.weight": weight_of("logits.weight", values)})


def test_equal_rows_one_ulp_apart_are_near_ties_and_native_s_own_path_is_judged_too(tmp_path):
    folder = edited(FIXTURES / "kv-tie", tmp_path / "tie", tied_on_top)
    clean = run(folder)
    assert clean.verdict == "PASS"
    assert find(clean, "tokens").decisive < find(clean, "tokens").compared  # a match on a tie is luck
    report = run(folder, transform=one_ulp_up)
    assert (report.verdict, report.exit_code) == ("PASS with near-ties", ExitCode.OK)
    assert {(flip.native, flip.oracle, flip.class_) for flip in report.flips} == {(9, 4, "NEAR-TIE")}
    assert headline(report).startswith(f"PASS with {len(report.flips)} near-tie")
    own = find(report, "own_path")
    assert (own.verdict, own.compared) == ("pass", len(IDS) + 8)


# -- windows and masks -------------------------------------------------------------------------------------------------


def windowed(window: int):
    def edit(graph: onnx.GraphProto) -> None:
        set_attr(next(n for n in graph.node if n.op_type == "GroupQueryAttention"), "local_window_size", window)

    return edit


def one_less(graph: Graph) -> Graph:
    node = next(n for n in graph.nodes if n.attrs.get("local_window_size", -1) > 0)
    size = node.attrs["local_window_size"]
    attrs = {**node.attrs, "local_window_size": size - 1 if size > 1 else 2}
    return replace(graph, nodes=[replace(n, attrs=attrs) if n is node else n for n in graph.nodes])


@pytest.mark.parametrize("window", [1, 2, 3, len(IDS) + 8, len(IDS) + 9])
def test_windows_count_the_current_token(window, tmp_path):
    folder = edited(FIXTURES / "kv-window", tmp_path / "w", windowed(window))
    assert run(folder).exit_code == ExitCode.OK
    off = run(folder, transform=one_less)
    seen = window <= len(IDS) + 8  # one below a window as long as the whole sequence hides its first token
    assert off.exit_code == (ExitCode.DIFFERENT if seen else ExitCode.OK)
    assert not seen or "layers 0-1: GroupQueryAttention `n12." in headline(
        off
    )  # K and V of layer 1 read ids: one block


def test_one_query_over_five_keys_without_a_past_follows_onnx_runtime():
    """Upper-left: the only query is position 0, and sees key 0 alone."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, n, 8)).astype(np.float32) for n in (1, 5, 5))
    node = Node("Attention", "", [], ["y"], {"is_causal": 1}, "upper-left", 23)
    result = compare_op(CpuBackend(threads=1), run_one, node, [q, k, v], frozenset(), "")
    assert (result.where, result.ok) == ("kernel", True)


def test_a_mask_that_is_one_too_short_is_no_pass(monkeypatch):
    """ONNX Runtime accepts some wrong lengths silently; whichever side is fed wrongly, the two must not agree."""
    feeds = OrtRunner._feeds

    def short(self, ids, embeds, num_new):
        made = feeds(self, ids, embeds, num_new)
        name = self._io.attention_mask
        mask = np.array(made[name].numpy())
        if mask.shape[1] > 1:
            mask[0, -1] = 0
        return {**made, name: type(made[name]).ortvalue_from_numpy(mask)}

    monkeypatch.setattr(OrtRunner, "_feeds", short)
    report = run(PACKAGES / "llama-fp32-cpu", range(30, 42))
    assert report.exit_code not in (ExitCode.OK, ExitCode.INTERNAL), headline(report)


@pytest.mark.parametrize("name", ["llama-fp32-cpu", "llama-int4-cpu"])
@pytest.mark.parametrize("shared", [True, False])
def test_shared_buffers_or_not_the_tokens_are_the_same(name, shared, tmp_path):
    shutil.copytree(PACKAGES / name, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "genai_config.json").read_text())
    config["search"]["past_present_share_buffer"] = shared
    (tmp_path / "m" / "genai_config.json").write_text(json.dumps(config))
    assert run(tmp_path / "m", range(30, 42)).exit_code == ExitCode.OK


# -- rotary tables that are switched by length -----------------------------------------------------------------------

SWITCH = 16  # tokens, the past included


def two_tables(graph: onnx.GraphProto) -> None:
    """cos and sin by an If on the length: beyond SWITCH the angles are a quarter."""
    cos, sin = next(n for n in graph.node if n.op_type == "GroupQueryAttention").input[7:9]
    files = ExternalFiles(PACKAGES / "llama-fp32-cpu")
    tables = {t.name: initializer(t, files).array() for t in graph.initializer if t.name in (cos, sin)}
    angles = np.arange(len(tables[cos]))[:, None] * np.arctan2(tables[sin][1], tables[cos][1])[None]

    def branch(name: str, scale: float) -> onnx.GraphProto:
        made = {f"{name}/cos": np.cos(angles * scale), f"{name}/sin": np.sin(angles * scale)}
        weights = [numpy_helper.from_array(a.astype(np.float32), f"{n}/table") for n, a in made.items()]
        outputs = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, a.shape) for n, a in made.items()]
        nodes = [helper.make_node("Identity", [f"{n}/table"], [n]) for n in made]
        return helper.make_graph(nodes, name, [], outputs, weights)

    numbers = {"axis": np.array(1), "switch": np.array(SWITCH)}
    graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in numbers.items())
    first = [
        helper.make_node("Shape", ["attention_mask"], ["mask/shape"]),
        helper.make_node("Gather", ["mask/shape", "axis"], ["mask/len"]),
        helper.make_node("Greater", ["mask/len", "switch"], ["is_long"]),
        helper.make_node(
            "If", ["is_long"], ["cos", "sin"], then_branch=branch("long", 0.25), else_branch=branch("short", 1.0)
        ),
    ]
    nodes = [*first, *graph.node]
    for node in nodes:
        if node.op_type == "GroupQueryAttention":
            node.input[7], node.input[8] = "cos", "sin"
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)


@pytest.fixture(scope="module")
def switching(tmp_path_factory):
    return edited(PACKAGES / "llama-fp32-cpu", tmp_path_factory.mktemp("tables") / "m", two_tables)


@pytest.mark.parametrize("length", range(SWITCH - 2, SWITCH + 3))
def test_both_sides_of_a_switch_of_rotary_tables_and_a_run_that_crosses_it(length, switching):
    """A prefill and a decode compute different things here by right: the oracle takes the steps that native takes."""
    assert run(switching, range(30, 30 + length)).verdict == "PASS"


def test_a_table_that_is_never_switched_is_a_difference(switching):
    def never(graph: Graph) -> Graph:
        return replace(graph, initializers={**graph.initializers, "switch": weight_of("switch", np.array(1 << 20))})

    report = run(switching, range(30, 30 + SWITCH - 2), transform=never)
    assert report.exit_code == ExitCode.DIFFERENT
    assert "layer 0" in headline(report)


# -- providers that are not there --------------------------------------------------------------------------------------


def test_an_oracle_on_a_device_that_is_not_there_is_an_error_not_a_cpu_run():
    cuda = replace(PLACE, oracle_device="cuda")
    with pytest.raises(GenaiError, match=r"`cuda` was asked for, ONNX Runtime .* runs on \['CPUExecutionProvider'\]"):
        session.run(PACKAGES / "llama-fp32-cpu", Request(ids=IDS), Settings(steps=2), cuda, lambda _: None)
