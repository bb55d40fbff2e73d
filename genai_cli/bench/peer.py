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


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200]
