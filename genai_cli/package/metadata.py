"""Packages described by inference_metadata.yaml (mobius): names and KV pairs declared one by one."""

from __future__ import annotations

from pathlib import Path

from genai_cli.errors import GenaiError
from genai_cli.package.document import Document
from genai_cli.package.location import inside
from genai_cli.package.model import Component, ModelPackage

METADATA = "inference_metadata.yaml"
_ROLES = {
    "input_ids": "token_input",
    "inputs_embeds": "embedding_input",
    "attention_mask": "attention_mask_input",
    "position_ids": "position_ids_input",
}  # our role -> the key that names it
_STATIC = {"write_indices": "write_indices_input", "kv_seq_len": "kv_sequence_length_input"}


def from_metadata(folder: Path, metadata: Document) -> ModelPackage:
    """The package as its metadata declares it. EOS and other ids are not in it: see the files beside."""
    io = ("model", "io")
    if not metadata.mapping("model"):
        raise GenaiError(f"`{METADATA}` has no `model`; wanted a mapping", hint="export the model again")
    inputs = {role: name for role, key in _ROLES.items() if (name := metadata.text(*io, key))}
    inputs |= {role: name for role, key in _STATIC.items() if (name := metadata.text(*io, "static_cache", key))}
    logits = metadata.text(*io, "logits_output")
    return ModelPackage(
        path=folder,
        kind="mobius",
        model_type=metadata.text("model", "architecture") or "",
        components=_components(folder, metadata, inputs, {"logits": logits} if logits else {}),
        context_len=metadata.whole("model", "max_sequence_length", at_least=1),
        head_size=metadata.whole("model", "attention", "head_dim", at_least=1),
        kv_pairs=_pairs(metadata),
        warnings=metadata.warnings,
    )


def _components(
    folder: Path, metadata: Document, inputs: dict[str, str], outputs: dict[str, str]
) -> tuple[Component, ...]:
    """Declared files when there is a list of them, else the one model.onnx (or decoder/model.onnx)."""
    declared = metadata.mapping("components")
    if declared:
        parts = []
        for role in declared:
            name = metadata.text("components", role, "filename") or metadata.text("components", role, "model") or ""
            path = inside(folder, name, metadata, "components", role)
            parts.append(
                Component(role, path, inputs if role == "decoder" else {}, outputs if role == "decoder" else {})
            )
        return tuple(parts)
    for name in ("model.onnx", "decoder/model.onnx"):
        if (folder / name).is_file():
            beside = (Component(role, path) for role, path in _beside(folder))
            return (Component("decoder", folder / name, inputs, outputs), *beside)
    raise GenaiError(
        f"`{folder}` has `{METADATA}` but no `model.onnx`", hint="download or export the whole folder again"
    )


def _beside(folder: Path) -> list[tuple[str, Path]]:
    found = [
        (role, folder / name / "model.onnx")
        for role, name in (("embedding", "embedding"), ("vision", "vision_encoder"))
    ]
    return [(role, path) for role, path in found if path.is_file()]


def _pairs(metadata: Document) -> dict[str, str]:
    """past -> present of KV, static caches and states."""
    io = ("model", "io")
    pairs: dict[str, str] = {}
    for past, present in (
        (("kv_inputs",), ("kv_outputs",)),
        (("static_cache", "key_cache_inputs"), ("static_cache", "key_cache_outputs")),
        (("static_cache", "value_cache_inputs"), ("static_cache", "value_cache_outputs")),
    ):
        before, after = _names(metadata, *io, *past), _names(metadata, *io, *present)
        if len(before) != len(after):
            metadata.fail((*io, *present), f"{len(before)} names, as many as `{past[-1]}` has")
        pairs |= dict(zip(before, after, strict=True))
    states = metadata.get(*io, "state_pairs") or []
    if not isinstance(states, list):
        metadata.fail((*io, "state_pairs"), "a list of input/output pairs")
    for index in range(len(states)):
        past_name = metadata.text(*io, "state_pairs", index, "input")
        present_name = metadata.text(*io, "state_pairs", index, "output")
        if not past_name or not present_name:
            metadata.fail((*io, "state_pairs", index), "a mapping with `input` and `output`")
        pairs[past_name] = present_name
    return pairs


def _names(metadata: Document, *keys: str) -> list[str]:
    names = metadata.get(*keys)
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        metadata.fail(keys, "a list of names")
    return names
