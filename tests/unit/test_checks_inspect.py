"""`inspect_model` on real exports, against facts computed by hand or by onnx."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from genai_cli.checks import inspect
from genai_cli.checks.inspect import inspect_model
from genai_cli.report.inspect import Inspection, KvGroup
from genai_cli.report.inspect_text import amount, lines, spans
from genai_cli.report.json import dumps

PACKAGES = Path(__file__).parents[2] / "fixtures" / "packages"
NAMES = sorted(path.name for path in PACKAGES.iterdir() if path.is_dir())


def look(name: str) -> Inspection:
    return inspect_model(PACKAGES / name)


@pytest.mark.parametrize("name", NAMES)
def test_every_export_is_covered_and_is_json(name: str) -> None:
    found = look(name)
    document = json.loads(dumps(found))
    assert next(iter(document)) == "schema"
    assert document["schema"] == "genai.inspect/1"
    assert [native["supported"] for native in document["native"]] == [True, True]
    assert all(op["supported"] for part in document["components"] for op in part["ops"])
    for part in found.components:
        model = onnx.load(PACKAGES / name / part.file, load_external_data=False)
        assert [value.name for value in part.inputs] == [value.name for value in model.graph.input]
        assert part.num_nodes >= len(model.graph.node)  # If branches come on top
        assert sum(op.count for op in part.ops) == part.num_nodes


def test_a_dense_decoder_by_hand() -> None:
    """E 64, H 4, H_kv 2, D 16, intermediate 128, vocab 512, 3 layers."""
    found = look("llama-fp32-cpu")
    layer = 64 * (4 + 2 * 2) * 16 + 64 * 64 + 3 * 64 * 128 + 2 * 64
    parameters = 2 * 512 * 64 + 3 * layer + 64
    tables = 2 * 512 * 8  # cos and sin are in the file, but are no parameters
    assert found.components[0].num_parameters == parameters
    assert found.components[0].weight_bytes == (parameters + tables) * 4
    decoder = found.decoder
    assert decoder is not None
    assert (decoder.num_layers, decoder.num_heads, decoder.vocab_size) == (3, (4,), 512)
    assert decoder.takes == ("input_ids", "attention_mask")
    assert decoder.kv == (KvGroup((0, 1, 2), 2, 16, "float32", "BHSD", None, None, 768),)
    assert decoder.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4


def test_int4_counts_the_same_parameters_in_fewer_bytes() -> None:
    wide, packed = look("llama-fp32-cpu").components[0], look("llama-int4-cpu").components[0]
    assert packed.num_parameters == wide.num_parameters
    assert packed.weight_bytes < wide.weight_bytes / 2
    assert {op.op: op.count for op in packed.ops}["com.microsoft::MatMulNBits"] == 3 * 5 + 1


def test_windows_states_and_static_caches() -> None:
    gemma = look("gemma2-fp32-cpu").decoder
    assert gemma is not None
    assert [(group.layers, group.window) for group in gemma.kv] == [((0, 2), 64), ((1,), None)]
    hybrid = look("qwen3_5_text-portable").decoder
    assert hybrid is not None
    assert (hybrid.num_layers, [group.layers for group in hybrid.kv], len(hybrid.states)) == (4, [(3,)], 6)
    assert hybrid.states[0].num_bytes == 128 * 3 * 4
    static = look("llama-static")
    assert static.decoder is not None
    assert (static.decoder.kv[0].axes, static.decoder.kv[0].capacity, static.context_len) == ("BSM", 128, 128)


@pytest.mark.parametrize(
    ("name", "words"),
    [("mistral-fp32-cpu", "sliding window of 64, the graph has none"), ("llama-static", "hold 128 tokens")],
)
def test_what_config_and_graph_disagree_on_is_a_warning(name: str, words: str) -> None:
    assert any(words in warning for warning in look(name).warnings)


PACKAGE_OF_EACH_KIND = ("llama-fp32-cpu", "gemma3-vlm", "qwen3_5_text-portable")


def test_what_would_be_gated() -> None:
    pictures = [gate for gate in look("gemma3-vlm").gates if gate.feature == "prefix reuse"]
    assert [(gate.engine, gate.supported) for gate in pictures] == [("native", True), ("ort", True)]
    assert all("content of the pictures" in gate.reason for gate in pictures)
    bf16 = [gate for gate in look("llama-bf16-cuda").gates if not gate.supported]
    assert [(gate.engine, "bf16" in gate.reason) for gate in bf16] == [("ort", True)]
    hybrid = look("qwen3_5_text-portable").gates
    assert all(gate.supported and "snapshots" in gate.reason for gate in hybrid if gate.feature == "paged KV")
    shared = {name: next(g for g in look(name).gates if g.feature == "shared steps") for name in PACKAGE_OF_EACH_KIND}
    assert {name: (gate.supported, gate.reason) for name, gate in shared.items()} == {
        "llama-fp32-cpu": (True, "tokens of a step meet only in attention"),
        "gemma3-vlm": (False, "the decoder reads embeddings"),
        "qwen3_5_text-portable": (False, "the decoder carries recurrent state"),
    }


def test_an_op_that_nobody_knows_is_a_finding_not_an_error(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(PACKAGES / "llama-fp32-cpu", tmp_path / "m"))
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "Sigmoid":
            node.op_type = "Sigmoidish"
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    found = inspect_model(folder)
    unknown = next(op for op in found.components[0].ops if op.op == "Sigmoidish")
    assert (unknown.count, unknown.supported) == (3, False)
    assert [native.supported for native in found.native] == [False, False]
    assert all("`Sigmoidish` x 3" in native.reason for native in found.native)


def test_a_decoder_that_cannot_be_replayed_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made = inspect.make_plan

    def past_dependent(*arguments: Any) -> Any:
        return replace(made(*arguments), past_dependent=True)

    assert [native.replays for native in look("llama-fp32-cpu").native] == [True, True]
    monkeypatch.setattr(inspect, "make_plan", past_dependent)
    found = look("llama-fp32-cpu")
    assert [native.replays for native in found.native] == [False, False]
    assert "every step is recorded anew" in "\n".join(lines(found))


def test_as_text() -> None:
    text = "\n".join(lines(look("gemma2-fp32-cpu")))
    assert "onnxruntime-genai package, gemma2" in text
    assert "  KV            layers 0, 2: 2 heads x 16, float32 [B, H_kv, S, D], 512 bytes a token, window 64\n" in text
    assert "  KV            layer 1: 2 heads x 16, float32 [B, H_kv, S, D], 256 bytes a token\n" in text
    assert "past_key_values.0.key float32 [batch_size, 2, past_sliding_length, kv_cache_dim] and 5 like it" in text
    assert "and 7 more types" in text
    everything = "\n".join(lines(look("gemma2-fp32-cpu"), all_ops=True))
    assert "more types" not in everything
    assert "Tanh 1" in everything
    assert "  warning       the config declares a sliding window of 64" in "\n".join(lines(look("mistral-fp32-cpu")))


def test_numbers_as_text() -> None:
    assert [amount(number) for number in (0, 999, 1000, 134_515_008, 2_000_000_000)] == [
        "0 ", "999 ", "1 k", "135 M", "2 G"
    ]  # fmt: skip
    assert [spans(layers) for layers in ((), (3,), (0, 1, 2), (0, 2, 3, 7))] == ["", "3", "0-2", "0, 2-3, 7"]
