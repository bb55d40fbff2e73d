"""Four kinds of package, read as they lie on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from genai_cli.errors import ExitCode, GenaiError
from genai_cli.package.decoder import load_decoder
from genai_cli.package.open import open_package
from genai_cli.package.prompts import open_chat_template, open_tokenizer
from genai_cli.runners.pipeline import wiring

PACKAGES = Path(__file__).parents[2] / "fixtures" / "packages"
# name: kind, declared context, usable context, KV tensors, states
WANTED = {
    "gemma2-fp32-cpu": ("onnxruntime-genai", 512, 512, 6, 0),
    "gemma3-vlm": ("onnxruntime-genai", 4096, 4096, 4, 0),
    "gpt2-optimum": ("optimum", 512, 512, 6, 0),
    "llama-bf16-cuda": ("onnxruntime-genai", 512, 512, 6, 0),
    "llama-fp16-cuda": ("onnxruntime-genai", 512, 512, 6, 0),
    "llama-fp32-cpu": ("onnxruntime-genai", 512, 512, 6, 0),
    "llama-int4-cpu": ("onnxruntime-genai", 512, 512, 6, 0),
    "llama-optimum": ("optimum", 512, 512, 6, 0),
    "llama-portable": ("mobius", 512, 512, 6, 0),
    "llama-static": ("mobius", 512, 128, 6, 0),
    "mistral-fp32-cpu": ("onnxruntime-genai", 512, 512, 6, 0),
    "qwen3-int4-cpu": ("onnxruntime-genai", 512, 512, 6, 0),
    "qwen3_5_text-portable": ("mobius", 512, 512, 2, 6),
}


def test_every_fixture_is_in_the_table() -> None:
    assert set(WANTED) == {path.name for path in PACKAGES.iterdir() if path.is_dir()}


@pytest.mark.parametrize("name", WANTED)
def test_real_packages(name: str) -> None:
    package = open_package(PACKAGES / name)
    loaded = load_decoder(package)
    found = (package.kind, package.context_len, loaded.context_len, len(loaded.io.kv), len(loaded.io.states))
    assert found == WANTED[name]
    assert package.eos_token_ids == (2,)  # mobius: from the tokenizer, as its metadata has no ids
    assert package.warnings == ()
    assert open_tokenizer(package).vocab_size <= 512
    template = open_chat_template(package)
    assert template is not None
    assert "hello" in template.render([{"role": "user", "content": "hello"}])


def test_kv_is_bound_from_the_graph() -> None:
    loaded = load_decoder(open_package(PACKAGES / "gemma2-fp32-cpu"))
    assert [(b.layer, b.kind, b.window) for b in loaded.io.kv] == [
        (layer, kind, 64 if layer in (0, 2) else None) for layer in range(3) for kind in ("key", "value")
    ]
    assert {(b.num_heads, b.head_dim, str(b.dtype)) for b in loaded.io.kv} == {(2, 16, "float32")}


def test_components_of_a_pipeline() -> None:
    package = open_package(PACKAGES / "gemma3-vlm")
    assert [part.role for part in package.components] == ["decoder", "embedding", "vision"]
    assert all(part.path.is_file() for part in package.components)
    assert package.image_token_id == 5
    assert package.processor_config is not None
    embedding = package.component("embedding")
    assert embedding is not None
    assert embedding.inputs == {"input_ids": "input_ids", "image_features": "image_features"}
    assert load_decoder(package).io.inputs_embeds == "inputs_embeds"


def test_the_graph_wins_over_the_config_and_says_so() -> None:
    loaded = load_decoder(open_package(PACKAGES / "mistral-fp32-cpu"))
    assert [binding.window for binding in loaded.io.kv] == [None] * 6
    assert loaded.warnings == (
        "the config declares a sliding window of 64, the graph has none: every token is attended to",
    )
    static = load_decoder(open_package(PACKAGES / "llama-static"))
    assert static.warnings == ("the static KV buffers hold 128 tokens, the declared context is 512",)


def test_sliding_window_layers() -> None:
    gemma = open_package(PACKAGES / "gemma2-fp32-cpu").sliding_window
    mistral = open_package(PACKAGES / "mistral-fp32-cpu").sliding_window
    assert gemma is not None
    assert (gemma.window_size, gemma.layers, gemma.slides_cache) == (64, (0, 2), False)
    assert mistral is not None
    assert mistral.layers is None  # an empty list means all layers


def test_search_defaults_are_the_packages() -> None:
    search = open_package(PACKAGES / "gemma3-vlm").search
    assert (search.do_sample, search.top_k, search.max_length) == (True, 1, 4096)
    assert open_package(PACKAGES / "llama-optimum").search.do_sample is None


def test_eos_is_the_union_of_config_and_generation_config(tmp_path: Path) -> None:
    folder = copy(PACKAGES / "llama-fp32-cpu", tmp_path / "m")
    edit(folder / "genai_config.json", eos_token_id=[2, 7])
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert open_package(folder).eos_token_ids == (2, 7, 9)


@pytest.mark.parametrize("name", ["with space", "ünïcödé 模型", "a.onnx.d", "-dash", "per%cent"])
def test_odd_folder_names(tmp_path: Path, name: str) -> None:
    folder = copy(PACKAGES / "llama-fp32-cpu", tmp_path / name)
    link = tmp_path / "link"
    link.symlink_to(folder, target_is_directory=True)
    for path in (f"{folder}/", folder, link, f"{link}/"):
        assert load_decoder(open_package(path)).context_len == 512


def test_bare_files_and_one_of_several_precisions(tmp_path: Path) -> None:
    source = PACKAGES / "llama-optimum"
    shutil.copy(source / "model.onnx", tmp_path / "alone.onnx")
    bare = open_package(tmp_path / "alone.onnx")
    assert (bare.kind, bare.context_len, bare.chat_template, bare.eos_token_ids) == ("onnx", None, None, ())
    assert len(load_decoder(bare).io.kv) == 6
    assert open_package(tmp_path).kind == "onnx"  # a folder with that one file

    folder = copy(source, tmp_path / "several")
    (folder / "onnx").mkdir()
    (folder / "model.onnx").rename(folder / "onnx" / "model_q4.onnx")
    shutil.copy(source / "model.onnx", folder / "onnx" / "model_fp16.onnx")
    with pytest.raises(GenaiError, match=r"holds 2 models: `onnx/model_fp16.onnx`, `onnx/model_q4.onnx`"):
        open_package(folder)
    chosen = open_package(folder / "onnx" / "model_q4.onnx")
    assert (chosen.kind, chosen.context_len, chosen.eos_token_ids) == ("optimum", 512, (2,))


def test_kv_names_by_template(tmp_path: Path) -> None:
    """A config may name KV in its own way; layer numbers may be sparse."""
    import onnx

    folder = copy(PACKAGES / "llama-fp32-cpu", tmp_path / "m")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    renames = {f"{side}.{layer}.{part}": f"{short}_{part}_at_{layer * 4}"
               for side, short in (("past_key_values", "old"), ("present", "new"))
               for layer in range(3) for part in ("key", "value")}  # fmt: skip
    for node in model.graph.node:
        node.input[:] = [renames.get(name, name) for name in node.input]
        node.output[:] = [renames.get(name, name) for name in node.output]
    for value in [*model.graph.input, *model.graph.output]:
        value.name = renames.get(value.name, value.name)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(GenaiError, match="inputs with no known role"):
        load_decoder(open_package(folder))
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["decoder"]["inputs"] |= {"past_key_names": "old_key_at_%d", "past_value_names": "old_value_at_%d"}
    config["model"]["decoder"]["outputs"] |= {
        "present_key_names": "new_key_at_%d",
        "present_value_names": "new_value_at_%d",
    }
    (folder / "genai_config.json").write_text(json.dumps(config))
    assert [(b.layer, b.kind) for b in load_decoder(open_package(folder)).io.kv] == [
        (layer, kind) for layer in (0, 4, 8) for kind in ("key", "value")
    ]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "is not a model package: .*it holds nothing"),
        ({"notes.txt": "x"}, r"it holds `notes.txt`"),
        ({"inference_metadata.yaml": "model: {architecture: x}"}, "but no `model.onnx`"),
        ({"genai_config.json": "{}"}, "has no `model`"),
        ({"config.json": "{}"}, "no genai_config.json, no .onnx file"),
    ],
)
def test_folders_without_a_model(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(GenaiError, match=message) as caught:
        open_package(tmp_path)
    assert caught.value.exit_code == ExitCode.CANNOT


def test_paths_that_are_no_package(tmp_path: Path) -> None:
    with pytest.raises(GenaiError, match="does not exist"):
        open_package(tmp_path / "nowhere")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(GenaiError, match=r"not an \.onnx file"):
        open_package(tmp_path / "model.gguf")


def copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def edit(path: Path, **model: object) -> None:
    config = json.loads(path.read_text())
    config["model"].update(model)
    path.write_text(json.dumps(config, indent=2))


PIPELINE = """\
pipeline:
  models:
    eyes: {filename: vision_encoder/model.onnx, type: vision_encoder}
    fuse: {filename: embedding/model.onnx, type: encoder}
    text:
      filename: decoder/model.onnx
      type: decoder
      io:
        inputs_embeds_input: inputs_embeds
        attention_mask_input: attention_mask
        position_ids_input: position_ids
        logits_output: logits
        kv_inputs: [past_key_values.0.key, past_key_values.0.value, past_key_values.1.key, past_key_values.1.value]
        kv_outputs: [present.0.key, present.0.value, present.1.key, present.1.value]
  dataflow:
    - {from: eyes.image_features, to: fuse.image_features}
    - {from: fuse.inputs_embeds, to: text.inputs_embeds}
  vision: {image_token_id: 5}
package:
  tokenizer:
    special_tokens: {bos: {id: 1, content: <s>}, eos: {id: 2, content: </s>}}
"""


def test_a_pipeline_in_inference_metadata_is_the_same_package(tmp_path: Path) -> None:
    folder = copy(PACKAGES / "gemma3-vlm", tmp_path / "m")
    genai = open_package(folder)
    (folder / "genai_config.json").unlink()
    (folder / "inference_metadata.yaml").write_text(PIPELINE)
    mobius = open_package(folder)
    assert (mobius.kind, mobius.warnings) == ("mobius", ())
    assert (mobius.image_token_id, mobius.bos_token_id, mobius.eos_token_ids) == (5, 1, (2,))
    assert {part.role: part.path for part in mobius.components} == {part.role: part.path for part in genai.components}
    assert load_decoder(mobius).io == load_decoder(genai).io
    assert wiring(mobius) == wiring(genai)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("type: decoder", "type: encoder", "wanted one model of type `decoder` (found 0)"),
        ("decoder/model.onnx", "../model.onnx", "line 6: `pipeline.models.text.filename`"),
        ("embedding/model.onnx", "gone.onnx", "the file `gone.onnx` does not exist"),
        ("from: eyes.image_features", "from: eyes", "wanted `from` and `to`, each as `model.port`"),
        ("{image_token_id: 5}", "{image_token_id: x}", "line 18: `pipeline.vision.image_token_id` is `\"x\"`"),
    ],
)  # fmt: skip
def test_a_pipeline_that_is_wrong(tmp_path: Path, old: str, new: str, message: str) -> None:
    folder = copy(PACKAGES / "gemma3-vlm", tmp_path / "m")
    (folder / "genai_config.json").unlink()
    (folder / "inference_metadata.yaml").write_text(PIPELINE.replace(old, new))
    with pytest.raises(GenaiError) as caught:
        open_package(folder)
    assert message in caught.value.message
