"""Two rotary tables, chosen by an If on the total length, as exporters write long-context scaling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from genai_cli.backends.cpu import CpuBackend
from genai_cli.engine.rows import mixing
from genai_cli.graph.loader import load_graph
from genai_cli.runners.native import NativeRunner
from genai_cli.runners.ort import OrtRunner

PACKAGE = Path(__file__).parents[2] / "fixtures" / "packages" / "llama-fp32-cpu"
SWITCH = 16  # tokens; beyond it the long table
LIMIT = 1e-9  # NMSE: f32 logits of two orders of sums differ by about 1e-12, another table by more than 1e-3


def _branch(name: str, tables: dict[str, np.ndarray]) -> onnx.GraphProto:
    """A branch that gives both tables."""
    nodes, outputs = [], []
    for kind, table in tables.items():
        made = f"{name}_{kind}"
        nodes.append(helper.make_node("Constant", [], [made], value=numpy_helper.from_array(table, made)))
        outputs.append(helper.make_tensor_value_info(made, TensorProto.FLOAT, table.shape))
    return helper.make_graph(nodes, name, [], outputs)


@pytest.fixture(scope="module")
def switching(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's graph, whose attention takes its tables from an If on Shape(attention_mask)[1] > 16."""
    model = onnx.load(PACKAGE / "model.onnx")
    graph = model.graph
    attention = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    names = attention[0].input[7:9]
    short = {
        kind: numpy_helper.to_array(next(w for w in graph.initializer if w.name == name))
        for kind, name in zip(("cos", "sin"), names, strict=True)
    }
    angles = 0.25 * np.arange(len(short["cos"]))[:, None] / 10.0 ** np.arange(short["cos"].shape[1])
    long = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    head = [
        helper.make_node("Shape", ["attention_mask"], ["mask_shape"]),
        helper.make_node("Constant", [], ["one"], value=numpy_helper.from_array(np.array(1))),
        helper.make_node("Constant", [], ["switch"], value=numpy_helper.from_array(np.array(SWITCH))),
        helper.make_node("Gather", ["mask_shape", "one"], ["total"]),
        helper.make_node("Greater", ["total", "switch"], ["is_long"]),
        helper.make_node(
            "If", ["is_long"], ["cos_table", "sin_table"], then_branch=_branch("long", long),
            else_branch=_branch("short", short),
        ),
    ]  # fmt: skip
    for node in attention:
        node.input[7], node.input[8] = "cos_table", "sin_table"
    for place, node in enumerate(head):
        graph.node.insert(place, node)
    path = tmp_path_factory.mktemp("switching") / "model.onnx"
    onnx.save(model, path)
    return path


def _nmse(found: np.ndarray, wanted: np.ndarray) -> float:
    assert np.isfinite(wanted).all()
    return float(np.square(found - wanted).sum() / np.square(wanted).sum())


@pytest.mark.parametrize("length", [14, 15, 16, 17, 18])
def test_native_switches_where_onnx_runtime_switches(switching: Path, length: int) -> None:
    """Prefill on either side, then a decode that crosses: keys from before keep the table they were written with."""
    native, ort = NativeRunner(load_graph(switching), CpuBackend()), OrtRunner(switching)
    ids = np.arange(length) * 7 % 200 + 3
    made = native.step(ids)
    short_only = OrtRunner(PACKAGE / "model.onnx").step(ids)
    assert (_nmse(short_only, made) > 1e3 * LIMIT) == (length > SWITCH)  # the tables matter, and the right one is read
    worst = _nmse(made, ort.step(ids))
    for token in range(5, 9):
        fed = np.array([token])
        worst = max(worst, _nmse(native.step(fed), ort.step(fed)))
    assert worst < LIMIT


def test_a_recording_serves_one_side_of_the_switch(switching: Path) -> None:
    """The condition is asked before every replay; a step for several sequences would need one answer for all."""
    runner = NativeRunner(load_graph(switching), CpuBackend())
    runner.step(np.arange(14) + 3)
    for token in range(6):
        runner.step(np.array([token + 5]))
    counters = runner.engine.counters
    assert (counters.recorded, counters.replayed) == (3, 4)  # the prompt, a short step, a long step; the rest replayed
    assert "branches depend on the length" in mixing(runner.engine.plan)
