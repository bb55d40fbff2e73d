"""What the plan proves, refuses and settles, on small graphs of plain data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from genai_cli.backends.cpu import CpuBackend
from genai_cli.engine.plan import make_plan, unsupported
from genai_cli.engine.probe import settle
from genai_cli.engine.values import Static, Value
from genai_cli.errors import GenaiError
from genai_cli.graph.attention import ASSUMES, INTERNAL_DOMAIN, MASK_INPUT
from genai_cli.graph.io import decoder_io
from genai_cli.graph.ir import Graph, Node
from genai_cli.graph.loader import load_graph
from genai_cli.package.decoder import load_decoder
from genai_cli.package.open import open_package
from genai_cli.runners.native import NativeRunner

PACKAGES = Path(__file__).parents[2] / "fixtures" / "packages"


def graph(name: str) -> Graph:
    return load_graph(PACKAGES / name / "model.onnx")


def settled(make, causal: int = 0, context: int | None = None) -> Node:  # type: ignore[no-untyped-def]
    """An internal attention after its mask, `make(T, past_len)`, was probed."""
    node = Node("Attention", INTERNAL_DOMAIN, ["q"], ["y"], {"is_causal": causal, ASSUMES: {"mask": "m"}}, "a", 1)

    def evaluate(names: list[str], new: int, past: int) -> dict[str, Value]:
        return {"m": Static(make(new, past), tainted=True)}

    settle([node], evaluate, context)
    return node


def behind(new: int, past: int) -> np.ndarray:
    return past + np.arange(new)[:, None] - np.arange(past + new)[None, :]


def test_a_bool_causal_mask_becomes_a_flag() -> None:
    node = settled(lambda new, past: (behind(new, past) >= 0)[None, None])
    assert (node.attrs["is_causal"], node.inputs) == (1, ["q"])


def test_an_additive_causal_mask_becomes_a_flag() -> None:
    low = np.finfo(np.float32).min
    node = settled(lambda new, past: np.where(behind(new, past) >= 0, 0, low).astype(np.float32)[None, None])
    assert node.attrs["is_causal"] == 1


def test_a_window_is_recognised() -> None:
    node = settled(lambda new, past: (behind(new, past) >= 0) & (behind(new, past) < 7))
    assert (node.attrs["is_causal"], node.attrs["local_window_size"]) == (1, 7)


def test_an_empty_mask_on_a_causal_op_is_dropped() -> None:
    node = settled(lambda new, past: np.ones((1, 1, new, past + new), bool), causal=1)
    assert (node.attrs["is_causal"], node.inputs) == (1, ["q"])


@pytest.mark.parametrize(
    "make",
    [
        lambda new, past: behind(new, past) >= 1,  # off by one
        lambda new, past: (behind(new, past) >= 0) & (behind(new, past) % 3 != 2),  # strided
        lambda new, past: np.where(behind(new, past) >= 0, -0.1 * behind(new, past), -1e9).astype(np.float32),  # ALiBi
        lambda new, past: (
            (behind(new, past) >= 0) if past < 100 else (behind(new, past) >= 0) & (behind(new, past) < 9)
        ),
    ],
)
def test_any_other_mask_stays_an_input(make) -> None:  # type: ignore[no-untyped-def]
    node = settled(make)
    assert node.inputs[MASK_INPUT:] == ["m"]


def test_a_wrong_length_is_refused_with_what_was_wanted() -> None:
    broken = graph("llama-fp32-cpu")
    for node in broken.nodes:
        if node.op_type == "Sub":
            node.op_type = "Add"  # seqlens_k two too long
    with pytest.raises(GenaiError, match=r"last_position.*wanted"):
        make_plan(broken, decoder_io(broken), 128)


def test_every_unsupported_node_is_listed_at_load() -> None:
    strange = graph("llama-fp32-cpu")
    changed = [node for node in strange.nodes if node.op_type in ("Sigmoid", "SimplifiedLayerNormalization")]
    for node in changed:
        node.op_type += "OfTomorrow"
    assert len(unsupported(strange)) == len(changed) == 4
    with pytest.raises(
        GenaiError, match=r"4 nodes.*SigmoidOfTomorrow` x 3.*SimplifiedLayerNormalizationOfTomorrow` x 1"
    ):
        make_plan(strange, decoder_io(strange), 128)


def test_an_unknown_attribute_is_refused_not_ignored() -> None:
    strange = graph("llama-fp32-cpu")
    next(node for node in strange.nodes if node.op_type == "Sigmoid").attrs["steepness"] = 2
    with pytest.raises(GenaiError, match="attribute steepness"):
        make_plan(strange, decoder_io(strange), 128)


@pytest.mark.parametrize(
    "name", ["llama-fp32-cpu", "llama-portable", "llama-optimum", "llama-static", "gemma2-fp32-cpu"]
)
def test_every_spelling_of_attention_becomes_the_internal_op(name: str) -> None:
    plan = make_plan(graph(name), decoder_io(graph(name)), 128)
    attention = [node for node in plan.graph.nodes if node.domain == INTERNAL_DOMAIN]
    assert len(attention) == 3
    assert all(node.attrs["is_causal"] == 1 and ASSUMES not in node.attrs for node in attention)
    assert not plan.past_dependent
    assert plan.host_steps == []


def test_the_last_row_alone_gives_the_same_logits() -> None:
    runner = NativeRunner(graph("gemma2-fp32-cpu"), CpuBackend(threads=1), context_len=128)
    ids = np.arange(9)
    whole = runner.step(ids, logits="all")
    runner.reset()
    assert runner.step(ids, logits="last").tobytes() == whole[-1:].tobytes()
    runner.reset()
    assert runner.step(ids, logits="none").shape == (0, 512)
    assert runner.length == 9


def test_a_failed_step_leaves_the_length() -> None:
    runner = NativeRunner(graph("llama-fp32-cpu"), CpuBackend(threads=1), context_len=16)
    runner.step(np.arange(10))
    before = [array.copy() for array in runner.kv_rows(0, 10)]
    with pytest.raises(GenaiError, match=r"10 \+ 7 tokens do not fit into the context of 16"):
        runner.step(np.arange(7))
    with pytest.raises(GenaiError, match="Gather"):
        runner.step(np.array([512]))  # outside the vocabulary
    assert runner.length == 10
    assert all(a.tobytes() == b.tobytes() for a, b in zip(before, runner.kv_rows(0, 10), strict=True))


def test_a_tapped_run_shows_intermediate_values() -> None:
    model = graph("llama-fp32-cpu")
    name = next(node.outputs[0] for node in model.nodes if node.op_type == "SkipSimplifiedLayerNormalization")
    runner = NativeRunner(model, CpuBackend(threads=1), context_len=128)
    plain = runner.step(np.arange(5), logits="all")
    runner.reset()
    tapped = runner.tap([name], np.arange(5))
    assert tapped[name].shape == (1, 5, 64)
    assert tapped["logits"].reshape(5, -1).tobytes() == plain.tobytes()


@pytest.mark.parametrize("name", sorted(path.name for path in PACKAGES.iterdir() if path.is_dir()))
def test_every_package_is_recorded_once_and_runs_on_kernels_alone(name: str) -> None:
    """No step in numpy, none recorded anew: also where scales are computed from shapes, layer after layer."""
    decoder = load_decoder(open_package(PACKAGES / name))
    plan = NativeRunner(decoder.graph, CpuBackend(), io=decoder.io, context_len=decoder.context_len).engine.plan
    assert [step.node.op_type for step in plan.host_steps] == []
    assert not plan.past_dependent
