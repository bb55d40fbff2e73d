"""Optimum / Hugging Face folders (config.json beside .onnx files), and bare .onnx files."""

from __future__ import annotations

from pathlib import Path

from genai_cli.errors import GenaiError
from genai_cli.package.document import Document
from genai_cli.package.genai_config import optional_id
from genai_cli.package.model import Component, ModelPackage

CONFIG = "config.json"
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length")


def from_hugging_face(folder: Path, config: Document, model: Path) -> ModelPackage:
    """The package of one .onnx file and its config.json; multimodal configs keep the decoder's part in text_config."""
    inner = ("text_config",) if config.mapping("text_config") else ()

    def whole(*names: str) -> int | None:
        found = (config.whole(*inner, name, at_least=1) for name in names)
        return next((value for value in found if value is not None), None)

    return ModelPackage(
        path=folder,
        kind="optimum",
        model_type=config.text("model_type") or "",
        components=(Component("decoder", model),),
        context_len=whole(*_CONTEXT_KEYS),
        vocab_size=whole("vocab_size"),
        head_size=whole("head_dim")
        or _head_size(whole("hidden_size", "n_embd"), whole("num_attention_heads", "n_head")),
        num_layers=whole("num_hidden_layers", "n_layer"),
        bos_token_id=_id(config, inner, "bos_token_id"),
        eos_token_ids=config.ids(*inner, "eos_token_id") or config.ids("eos_token_id"),
        pad_token_id=_id(config, inner, "pad_token_id"),
        warnings=config.warnings,
    )


def _id(config: Document, inner: tuple[str, ...], key: str) -> int | None:
    value = optional_id(config, *inner, key)
    return value if value is not None else optional_id(config, key)


def _head_size(hidden: int | None, heads: int | None) -> int | None:
    return hidden // heads if hidden and heads and hidden % heads == 0 else None


def bare(model: Path) -> ModelPackage:
    """A file alone: everything else must come from the graph or the command line."""
    return ModelPackage(path=model, kind="onnx", model_type="", components=(Component("decoder", model),))


def find_model(folder: Path) -> Path | None:
    """The .onnx file of a folder: model.onnx, onnx/model.onnx, or the only *.onnx; None when there is none.

    Several and none of these names: GenaiError that lists them, because they are different precisions of one model.
    """
    for name in ("model.onnx", "onnx/model.onnx"):
        if (folder / name).is_file():
            return folder / name
    found = sorted([*folder.glob("*.onnx"), *folder.glob("onnx/*.onnx")])
    if len(found) > 1:
        names = ", ".join(f"`{path.relative_to(folder)}`" for path in found)
        raise GenaiError(f"`{folder}` holds {len(found)} models: {names}", hint=f"name one: `{found[0]}`")
    return found[0] if found else None
