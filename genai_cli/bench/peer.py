"""onnxruntime-genai as an engine under test: the same folder, the same ids, logits on the host after every step."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from genai_cli.errors import GenaiError

NAME = "onnxruntime-genai"


@dataclass(frozen=True)
class PeerInfo:
    """What really runs."""

    version: str
    threads: int


def library() -> Any:
    """The optional package. GenaiError with the way to install it beside the ONNX Runtime that is already there."""
    try:
        found = importlib.import_module("onnxruntime_genai")
    except ImportError as error:
        raise GenaiError(
            f"--vs {NAME}: the package cannot be imported ({error})", hint=f"pip install --no-deps {NAME}"
        ) from None
    found.disable_telemetry_events()
    return found


def open_peer_model(folder: Path, threads: int) -> Any:
    """A CPU model on that many threads. GenaiError with the library's first line when it refuses the folder."""
    library_ = library()
    session = {"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}
    try:
        config = library_.Config(str(folder))
        config.clear_providers()
        config.overlay(json.dumps(session))
        return library_.Model(config)
    except RuntimeError as error:
        raise GenaiError(f"{NAME} cannot open `{folder.name}`: {_first_line(error)}") from None


class PeerRunner:
    """One sequence of `capacity` tokens at most; what trials ask of an engine."""

    def __init__(self, folder: Path, threads: int, capacity: int) -> None:
        self._library = library()
        self._model = open_peer_model(folder, threads)
        params = self._library.GeneratorParams(self._model)
        params.set_search_options(max_length=capacity, do_sample=False)
        self._generator = self._library.Generator(self._model, params)
        self.info = PeerInfo(str(self._library.__version__), threads)

    @property
    def length(self) -> int:
        """Tokens held, as the library counts them."""
        return int(self._generator.token_count())

    def reset(self) -> None:
        """Length 0; buffers are kept."""
        self._generator.rewind_to(0)

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens."""
        try:
            self._generator.rewind_to(length)
        except RuntimeError as error:
            raise GenaiError(f"{NAME}: {_first_line(error)}") from None

    def step(self, ids: np.ndarray) -> np.ndarray:
        """Feed ids [T]; f32 logits [1, V] of the last."""
        try:
            self._generator.append_tokens(ids.astype(np.int32)[None])
            logits = np.asarray(self._generator.get_logits(), np.float32)
        except RuntimeError as error:
            raise GenaiError(f"{NAME}: {_first_line(error)}") from None
        return logits.reshape(-1, logits.shape[-1])[-1:]

    def close(self) -> None:
        """Free the generator before its model."""
        del self._generator, self._model


class PeerBatch:
    """All prompts in one generator, padded on the right, where the library tells padding by its id."""

    def __init__(self, folder: Path, threads: int, pad_token_id: int | None) -> None:
        if pad_token_id is None:
            raise GenaiError(f"{NAME} pads a batch, and the package names no pad token")
        self._pad = pad_token_id
        self._library, self._model, self.threads = library(), open_peer_model(folder, threads), threads

    def answer(self, prompts: list[list[int]], n_new: int) -> list[list[int]]:
        """Greedy, `n_new` tokens for each."""
        longest = max(map(len, prompts))
        params = self._library.GeneratorParams(self._model)
        total = longest + n_new
        params.set_search_options(
            max_length=total, min_length=total, batch_size=len(prompts), do_sample=False
        )  # fmt: skip
        padded = np.array([ids + [self._pad] * (longest - len(ids)) for ids in prompts], np.int32)
        try:
            generator = self._library.Generator(self._model, params)
            generator.append_tokens(padded)
            answers = []
            for _ in range(n_new):
                generator.generate_next_token()
                answers.append(np.array(generator.get_next_tokens()))
        except RuntimeError as error:
            raise GenaiError(f"{NAME}: {_first_line(error)}") from None
        return [[int(token) for token in row] for row in np.array(answers).T]

    def close(self) -> None:
        """Free the model."""
        del self._model


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200]
