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
    "inputs_embeds": "inputs_embeds_input",
    "attention_mask": "attention_mask_input",
    "position_ids": "position_ids_input",
}  # our role -> the key that names it
_STATIC = {"write_indices": "write_indices_input", "kv_seq_len": "kv_sequence_length_input"}
_MODELS = ("pipeline", "models")
Keys = tuple[str, ...]


def from_metadata(folder: Path, metadata: Document) -> ModelPackage:
    """The package as its metadata declares it: one decoder (`model`), or several files joined by `pipeline.dataflow`."""
    models = metadata.mapping(*_MODELS)
    if not models and not metadata.mapping("model"):
        raise GenaiError(f"`{METADATA}` has no `model` and no `pipeline`", hint="export the model again")
    decoder = _decoder_name(metadata) if models else ""
    io: Keys = (*_MODELS, decoder, "io") if models else ("model", "io")
    tokens: Keys = ("package", "tokenizer", "special_tokens")
    eos = metadata.whole(*tokens, "eos", "id")
    return ModelPackage(
        path=folder,
        kind="mobius",
        model_type=metadata.text("model", "architecture") or "",
        components=_pipeline(folder, metadata, decoder, io) if models else (_single(folder, metadata, io),),
        context_len=metadata.whole("model", "max_sequence_length", at_least=1),
        head_size=metadata.whole("model", "attention", "head_dim", at_least=1),
        bos_token_id=metadata.whole(*tokens, "bos", "id"),
        eos_token_ids=() if eos is None else (eos,),
        pad_token_id=metadata.whole(*tokens, "pad", "id"),
        image_token_id=metadata.whole("pipeline", "vision", "image_token_id"),
        kv_pairs=_pairs(metadata, io),
        warnings=metadata.warnings,
    )


def _decoder_name(metadata: Document) -> str:
    names = [name for name in metadata.mapping(*_MODELS) if metadata.text(*_MODELS, name, "type") == "decoder"]
    if len(names) != 1:
        metadata.fail(_MODELS, f"one model of type `decoder` (found {len(names)})")
    return names[0]


def _single(folder: Path, metadata: Document, io: Keys) -> Component:
    for name in ("model.onnx", "decoder/model.onnx"):
        if (folder / name).is_file():
            return Component("decoder", folder / name, *_decoder_names(metadata, io))
    raise GenaiError(
        f"`{folder}` has `{METADATA}` but no `model.onnx`", hint="download or export the whole folder again"
    )


def _decoder_names(metadata: Document, io: Keys) -> tuple[dict[str, str], dict[str, str]]:
    """Names of a decoder's inputs and outputs by role."""
    inputs = {role: name for role, key in _ROLES.items() if (name := metadata.text(*io, key))}
    inputs |= {role: name for role, key in _STATIC.items() if (name := metadata.text(*io, "static_cache", key))}
    logits = metadata.text(*io, "logits_output")
    return inputs, {"logits": logits} if logits else {}


def _pipeline(folder: Path, metadata: Document, decoder: str, io: Keys) -> tuple[Component, ...]:
    """Roles follow the data: what feeds the decoder's embeddings is the embedding, what feeds that is the vision part."""
    inputs, outputs = _decoder_names(metadata, io)
    edges = _dataflow(metadata)
    embeds = next((edge for edge in edges if edge[2:] == (decoder, inputs.get("inputs_embeds", ""))), None)
    features = next((edge for edge in edges if embeds and edge[2] == embeds[0]), None)
    parts = []
    for name in metadata.mapping(*_MODELS):
        keys = (*_MODELS, name, "filename")
        path = inside(folder, metadata.text(*keys) or "", metadata, *keys)
        if name == decoder:
            parts.append(Component("decoder", path, inputs, outputs))
        elif embeds and name == embeds[0]:
            takes = {"image_features": features[3]} if features else {}
            parts.append(Component("embedding", path, takes, {"inputs_embeds": embeds[1]}))
        elif features and name == features[0]:
            parts.append(Component("vision", path, {}, {"image_features": features[1]}))
        else:
            parts.append(Component(name, path))
    return tuple(parts)


def _dataflow(metadata: Document) -> list[tuple[str, str, str, str]]:
    """(model, output, model, input) of every edge, written `model.port`."""
    edges = metadata.get("pipeline", "dataflow") or []
    if not isinstance(edges, list):
        metadata.fail(("pipeline", "dataflow"), "a list of `from` and `to`")
    found = []
    for index in range(len(edges)):
        ends = [metadata.text("pipeline", "dataflow", index, key) or "" for key in ("from", "to")]
        if not all("." in end for end in ends):
            metadata.fail(("pipeline", "dataflow", index), "`from` and `to`, each as `model.port`")
        (source, output), (target, port) = (end.split(".", 1) for end in ends)
        found.append((source, output, target, port))
    return found


def _pairs(metadata: Document, io: Keys) -> dict[str, str]:
    """past -> present of KV, static caches and states."""
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
