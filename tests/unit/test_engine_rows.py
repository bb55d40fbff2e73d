"""One step for several sequences: every row has the bits of its solo run, and graphs whose tokens meet are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from genai_cli.backends.cpu import CpuBackend
from genai_cli.engine.engine import Engine
from genai_cli.engine.rows import mixing
from genai_cli.graph.ir import Node
from genai_cli.package.decoder import load_decoder
from genai_cli.package.open import open_package
from genai_cli.runners.native import NativeRunner

PACKAGES = Path(__file__).parents[2] / "fixtures" / "packages"
TOGETHER = (
    "gemma2-fp32-cpu", "gpt2-optimum", "llama-bf16-cuda", "llama-fp16-cuda", "llama-fp32-cpu", "llama-int4-cpu",
    "llama-optimum", "llama-portable", "llama-static", "mistral-fp32-cpu", "qwen3-int4-cpu",
)  # fmt: skip
LENGTHS = (1, 3, 9, 17, 4)  # of the prompts


def _open(name: str) -> NativeRunner:
    decoder = load_decoder(open_package(PACKAGES / name))
    return NativeRunner(decoder.graph, CpuBackend(), io=decoder.io, context_len=decoder.context_len)


def _bytes(arrays: list[np.ndarray]) -> list[bytes]:
    return [np.ascontiguousarray(array).tobytes() for array in arrays]


def _held(engine: Engine) -> list[bytes]:
    return _bytes(engine.kv_rows(0, engine.length))


@pytest.mark.parametrize("name", TOGETHER)
def test_rows_have_the_bits_of_their_solo_runs(name: str) -> None:
    runner = _open(name)
    assert mixing(runner.engine.plan) == ""
    engine, rng = runner.engine, np.random.default_rng(0)
    prompts = [rng.integers(0, runner.vocab_size, length) for length in LENGTHS]
    fed = rng.integers(0, runner.vocab_size, (4, len(prompts)))
    seats = [engine.seat() for _ in prompts]
    for seat, prompt in zip(seats, prompts, strict=True):
        engine.select(seat)
        runner.step(prompt)
    made = [engine.step_rows(ids, seats) for ids in fed]
    assert engine.counters.replayed == len(fed) - 1
    solo = _open(name)
    for row, prompt in enumerate(prompts):
        solo.reset()
        solo.step(prompt)
        for ids, logits in zip(fed, made, strict=True):
            alone = solo.step(ids[row : row + 1])[0]
            assert np.isfinite(alone).all()
            assert alone.tobytes() == logits[row].astype(np.float32).tobytes(), (row, len(prompt))
        engine.select(seats[row])
        assert engine.length == solo.length == len(prompt) + len(fed)
        assert _held(engine) == _held(solo.engine)


def test_rows_leave_and_join() -> None:
    """Seats of other lengths, in another order and number: still the same bits; a seat that leaves stays as it is."""
    runner, solo = _open("llama-fp32-cpu"), _open("llama-fp32-cpu")
    engine = runner.engine
    seats = [engine.seat() for _ in range(3)]
    for row, seat in enumerate(seats):
        engine.select(seat)
        runner.step(np.arange(1, row + 3))
    engine.step_rows(np.array([5, 6, 7]), seats)
    engine.select(seats[1])
    left = _held(engine)
    logits = engine.step_rows(np.array([8, 9]), [seats[2], seats[0]])
    engine.select(seats[1])
    assert _held(engine) == left
    solo.step(np.arange(1, 5))
    solo.step(np.array([7]))
    assert solo.step(np.array([8]))[0].tobytes() == logits[0].tobytes()


def test_rows_grow_by_themselves() -> None:
    """One sequence passes the first capacity (256 tokens), the others keep theirs."""
    runner, solo = _open("llama-static"), _open("llama-static")
    engine = runner.engine
    context = runner.context_len or 512
    assert context > 4
    long = np.arange(min(255, context - 4)) % runner.vocab_size
    seats = [engine.seat(), engine.seat()]
    for seat, prompt in zip(seats, (long, long[:2]), strict=True):
        engine.select(seat)
        runner.step(prompt)
    solo.step(long)
    for token in (3, 4, 5):
        logits = engine.step_rows(np.array([token, 1]), seats)
        assert solo.step(np.array([token]))[0].tobytes() == logits[0].astype(np.float32).tobytes()


def test_what_cannot_share_a_step_says_why() -> None:
    assert "recurrent state" in mixing(_open("qwen3_5_text-portable").engine.plan)
    plan = _open("llama-fp32-cpu").engine.plan
    assert "recorded anew" in mixing(replace(plan, past_dependent=True))
    assert "branches" in mixing(replace(plan, guards=["a condition"]))


@pytest.mark.parametrize(
    ("op", "attrs", "inputs", "reason"),
    [
        ("CumSum", {}, ["hidden", "axis"], "not known"),
        ("ReduceMean", {"axes": [1], "keepdims": 1}, ["hidden"], "sums over tokens"),
        ("Softmax", {"axis": 1}, ["hidden"], "along the tokens"),
        ("Slice", {}, ["hidden", "zero", "one", "one"], "cuts along"),
        ("Concat", {"axis": 1}, ["hidden", "hidden"], "along the tokens"),
        ("Gather", {"axis": 1}, ["hidden", "zero"], "picks among"),
    ],
)  # fmt: skip
def test_tokens_that_meet_are_found(op: str, attrs: dict, inputs: list[str], reason: str) -> None:
    """A decoder in which a planted op lets tokens of a step meet."""
    plan = _open("llama-fp32-cpu").engine.plan
    hidden = next(node.inputs[0] for node in plan.nodes["all"] if node.op_type == "MatMul")
    names = {"hidden": hidden, "zero": "zero", "one": "one", "axis": "one"}
    constants = [
        Node("Constant", "", [], ["zero"], {"value": np.array([0], np.int64)}, "zero", 13),
        Node("Constant", "", [], ["one"], {"value": np.array([1], np.int64)}, "one", 13),
    ]
    at = next(index for index, node in enumerate(plan.nodes["all"]) if hidden in node.inputs)
    planted = Node(op, "", [names[name] for name in inputs], ["planted"], attrs, "planted", 13)
    nodes = [*plan.nodes["all"][:at], *constants, planted, *plan.nodes["all"][at:]]
    assert reason in mixing(replace(plan, nodes={**plan.nodes, "all": nodes}))


def test_pairs_of_tokens_are_found() -> None:
    plan = _open("llama-fp32-cpu").engine.plan
    hidden = next(node.inputs[0] for node in plan.nodes["all"] if node.op_type == "MatMul")
    at = next(index for index, node in enumerate(plan.nodes["all"]) if hidden in node.inputs)
    turned = Node("Transpose", "", [hidden], ["turned"], {"perm": [0, 2, 1]}, "turned", 13)
    scores = Node("MatMul", "", [hidden, "turned"], ["scores"], {}, "scores", 13)
    nodes = [*plan.nodes["all"][:at], turned, scores, *plan.nodes["all"][at:]]
    assert mixing(replace(plan, nodes={**plan.nodes, "all": nodes})) == "`MatMul` makes pairs of tokens"
