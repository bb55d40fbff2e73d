"""Packages of onnxruntime-genai's exporter: everything from genai_config.json. Unknown keys warn; wrong ones stop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from genai_cli.errors import GenaiError
from genai_cli.package.document import Document, KeyPath
from genai_cli.package.location import inside
from genai_cli.package.model import Component, ModelPackage, SearchDefaults, SlidingWindow

CONFIG = "genai_config.json"
_PARTS = ("decoder", "embedding", "vision", "speech", "encoder", "encoder_decoder_init", "joiner")
_PART_KEYS = {
    "session_options", "run_options", "filename", "config_filename", "inputs", "outputs", "hidden_size",
    "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "head_size", "sliding_window", "pipeline",
    "adapter_filename", "spatial_merge_size", "tokens_per_second", "patch_size", "window_size",
    "layer_types", "state_update",
}  # fmt: skip
_KNOWN: dict[KeyPath, set[str]] = {
    (): {"model", "search", "engine"},
    ("model",): {
        "type", "vocab_size", "context_length", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id",
        "decoder_start_token_id", "image_token_id", "video_token_id", "audio_token_id", "vision_start_token_id",
        *_PARTS,
    },
    **{("model", part): _PART_KEYS for part in _PARTS},
    ("model", "decoder", "sliding_window"): {
        "window_size", "pad_value", "alignment", "slide_key_value_cache", "slide_inputs", "layers", "cache_slack",
    },
    ("search",): {
        "do_sample", "min_length", "max_length", "batch_size", "num_beams", "num_return_sequences",
        "repetition_penalty", "top_k", "top_p", "min_p", "temperature", "early_stopping", "no_repeat_ngram_size",
        "diversity_penalty", "length_penalty", "past_present_share_buffer", "random_seed", "chunk_size",
    },
}  # fmt: skip


def from_genai_config(folder: Path, config: Document) -> ModelPackage:
    """The package as its genai_config.json declares it, without the files beside it (tokenizer, template)."""
    if "model" not in config.data:
        raise GenaiError(f"`{CONFIG}` has no `model`; wanted an object with `decoder`", hint="export the model again")
    vocab = config.whole("model", "vocab_size", at_least=1)
    window = _sliding_window(config)
    processor = config.text("model", "vision", "config_filename")
    return ModelPackage(
        path=folder,
        kind="onnxruntime-genai",
        model_type=config.text("model", "type") or "",
        components=tuple(_components(folder, config)),
        context_len=config.whole("model", "context_length", at_least=1),
        vocab_size=vocab,
        head_size=config.whole("model", "decoder", "head_size", at_least=1),
        num_layers=config.whole("model", "decoder", "num_hidden_layers", at_least=1),
        bos_token_id=optional_id(config, "model", "bos_token_id"),
        eos_token_ids=config.ids("model", "eos_token_id"),
        pad_token_id=optional_id(config, "model", "pad_token_id"),
        image_token_id=optional_id(config, "model", "image_token_id"),
        search=search_defaults(config),
        sliding_window=window,
        processor_config=inside(folder, processor, config, "model", "vision", "config_filename") if processor else None,
        warnings=(*config.warnings, *_unknown_keys(config)),
    )


def optional_id(config: Document, *keys: str) -> int | None:
    """One token id. -1 (or a list, of which the first counts) stands for "none" in some configs."""
    value = config.get(*keys)
    if value == -1 or value is None:
        return None
    return config.ids(*keys)[0]


def search_defaults(config: Document) -> SearchDefaults:
    """The `search` section."""
    return SearchDefaults(
        do_sample=config.flag("search", "do_sample"),
        temperature=config.number("search", "temperature"),
        top_k=config.whole("search", "top_k"),
        top_p=config.number("search", "top_p"),
        min_p=config.number("search", "min_p"),
        repetition_penalty=config.number("search", "repetition_penalty"),
        no_repeat_ngram_size=config.whole("search", "no_repeat_ngram_size"),
        min_length=config.whole("search", "min_length"),
        max_length=config.whole("search", "max_length"),
        num_beams=config.whole("search", "num_beams"),
        random_seed=config.whole("search", "random_seed", at_least=-1),
    )


def _components(folder: Path, config: Document) -> Iterator[Component]:
    for part in _PARTS:
        if config.get("model", part) is None:
            continue
        keys = ("model", part)
        if config.get(*keys, "filename") is not None:
            yield _component(folder, config, part, keys)
        elif config.get(*keys, "pipeline") is not None:
            yield from _stages(folder, config, part)
        else:
            raise GenaiError(f"{config.where(*keys)}: `model.{part}` has no `filename`; wanted a path in the folder")
    if config.get("model", "decoder") is None:
        raise GenaiError(f"{config.where('model')}: `model` has no `decoder`; wanted an object with `filename`")


def _stages(folder: Path, config: Document, part: str) -> Iterator[Component]:
    """A split decoder: a list of objects, each with one stage by name."""
    keys = ("model", part, "pipeline")
    stages = config.get(*keys)
    if not isinstance(stages, list):
        config.fail(keys, "a list of stages")
    for index in range(len(stages)):
        for name in config.mapping(*keys, index):
            yield _component(folder, config, f"{part}/{name}", (*keys, index, name))


def _component(folder: Path, config: Document, role: str, keys: tuple[str | int, ...]) -> Component:
    name = config.text(*keys, "filename")
    if name is None:
        raise GenaiError(f"{config.where(*keys)}: `{'.'.join(map(str, keys))}` has no `filename`")
    return Component(
        role,
        inside(folder, name, config, *keys, "filename"),
        _names(config, *keys, "inputs"),
        _names(config, *keys, "outputs"),
    )


def _names(config: Document, *keys: str | int) -> dict[str, str]:
    """Role -> name. Stages of a split decoder give a plain list of names."""
    section = config.get(*keys)
    if isinstance(section, list):
        return {str(name): str(name) for name in section}
    return {role: config.text(*keys, role) or "" for role in config.mapping(*keys)}


def _sliding_window(config: Document) -> SlidingWindow | None:
    keys = ("model", "decoder", "sliding_window")
    size = config.whole(*keys, "window_size", at_least=1)
    if size is None:
        return None
    layers: Any = config.get(*keys, "layers")
    slides = bool(config.flag(*keys, "slide_key_value_cache")) or bool(config.flag(*keys, "slide_inputs"))
    return SlidingWindow(size, config.ids(*keys, "layers") if layers else None, slides)


def _unknown_keys(config: Document) -> Iterator[str]:
    for path, known in _KNOWN.items():
        section = config.get(*path) if path else config.data
        for key in section if isinstance(section, dict) else ():
            if key not in known:
                yield f"{config.where(*path, key)}: unknown key `{'.'.join(map(str, (*path, key)))}`, ignored"
