"""What a GGUF file says: metadata, weights as float32, and its vocabulary as a Hugging Face tokenizer.json."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np

CONTROL, USER_DEFINED = 3, 4  # gguf.TokenType


class Source:
    """The GGUF file: metadata, and weights as float32 in Hugging Face's row order."""

    def __init__(self, path: Path) -> None:
        self._reader = gguf.GGUFReader(str(path))
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; `{arch}` in the key is the architecture."""
        field = self._reader.get_field(key.format(arch=self.arch) if "{" in key else key)
        if field is None and default is None:
            raise SystemExit(f"make_demo_model: the GGUF file has no `{key}`")
        return default if field is None else field.contents()

    @cached_property
    def arch(self) -> str:
        """`llama`: the only layer layout this script writes."""
        arch = str(self._reader.get_field("general.architecture").contents())
        if arch != "llama":
            raise SystemExit(f"make_demo_model: architecture `{arch}` found, `llama` wanted")
        return arch

    def weight(self, name: str) -> np.ndarray:
        """f32 [N, K] (or [E])."""
        tensor = self._tensors[name]
        return np.ascontiguousarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)

    def has(self, name: str) -> bool:
        """Whether there is such a weight."""
        return name in self._tensors


def tokenizer_json(source: Source) -> dict[str, Any]:
    """Hugging Face's tokenizer.json: byte-level BPE. Pre-tokenizer `smollm` = single digits, then GPT-2."""
    model, pre = source.get("tokenizer.ggml.model"), source.get("tokenizer.ggml.pre")
    if (model, pre) != ("gpt2", "smollm"):
        raise SystemExit(
            f"make_demo_model: tokenizer `{model}` with pre-tokenizer `{pre}`: only gpt2 / smollm is known"
        )
    tokens, types = source.get("tokenizer.ggml.tokens"), source.get("tokenizer.ggml.token_type")
    byte_level = {"add_prefix_space": bool(source.get("tokenizer.ggml.add_space_prefix", False)), "trim_offsets": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": index, "content": token, **flags, "special": kind == CONTROL}
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    bpe = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": [merge.split(" ") for merge in source.get("tokenizer.ggml.merges")],
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", **byte_level, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": bpe,
    }  # fmt: skip


def special_ids(source: Source) -> dict[str, int]:
    """bos, eos and pad ids."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{short}_token_id": int(source.get(f"tokenizer.ggml.{long}_token_id")) for short, long in names.items()}


def tokenizer_config(source: Source, context_len: int) -> dict[str, Any]:
    """What Hugging Face's loader reads beside tokenizer.json."""
    tokens = source.get("tokenizer.ggml.tokens")
    named = {key.removesuffix("_id"): tokens[value] for key, value in special_ids(source).items()}
    unk = tokens[int(source.get("tokenizer.ggml.unknown_token_id"))]
    return {
        "add_prefix_space": bool(source.get("tokenizer.ggml.add_space_prefix", False)),
        "add_bos_token": bool(source.get("tokenizer.ggml.add_bos_token", False)),
        **named,
        "unk_token": unk,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_len,
        "tokenizer_class": "GPT2Tokenizer",
    }
