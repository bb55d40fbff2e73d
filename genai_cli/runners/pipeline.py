"""Packages of several components as one runner of token ids: vision -> embedding -> decoder."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from genai_cli.errors import GenaiError
from genai_cli.kv.layout import KvLayout, KvRows
from genai_cli.package.model import Component as PackagePart
from genai_cli.package.model import ModelPackage
from genai_cli.runners.base import Gate, LogitsMode, Runner, RunnerInfo, StateSnapshot

KEPT_PICTURES = 8  # encoded pictures that are remembered


class Component(Protocol):
    """A graph without a past: `engine.component.NativeComponent` or `runners.ort.OrtComponent`."""

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All outputs by name."""
        ...


OpenComponent = Callable[[PackagePart], Component]


@dataclass(frozen=True)
class Wiring:
    """Names by which the components are joined, and the token that stands for one feature row."""

    ids: str
    embeds: str
    features: str | None = None  # the embedding's input for feature rows
    pixels: str | None = None
    encoded: str | None = None  # the vision encoder's output
    image_token_id: int | None = None


def wiring(package: ModelPackage) -> Wiring:
    """From the config. GenaiError when the package has no embedding component."""
    embedding, vision = package.component("embedding"), package.component("vision")
    if embedding is None:
        raise GenaiError(
            f"`{package.path}`: the decoder reads embeddings, and no component makes them",
            hint="export the package with its embedding component",
        )
    return Wiring(
        ids=embedding.inputs.get("input_ids") or "input_ids",
        embeds=embedding.outputs.get("inputs_embeds") or "inputs_embeds",
        features=(embedding.inputs.get("image_features") or "image_features") if vision else None,
        pixels=(vision.inputs.get("pixel_values") or "pixel_values") if vision else None,
        encoded=(vision.outputs.get("image_features") or "image_features") if vision else None,
        image_token_id=package.image_token_id,
    )


def over_components(
    package: ModelPackage, decoder: Runner, feature_width: int, open_component: OpenComponent
) -> PipelineRunner:
    """A runner of token ids over `decoder`; `open_component` opens the other parts on an engine of one's choice."""
    names = wiring(package)
    parts = {role: package.component(role) for role in ("embedding", "vision")}
    opened = {role: open_component(part) for role, part in parts.items() if part is not None}
    return PipelineRunner(decoder, opened["embedding"], opened.get("vision"), names, feature_width)


class PipelineRunner:
    """Implements `runners.base.Runner` for token ids over a decoder that reads embeddings.

    `prepare` says which pictures the image tokens of the next prompt stand for; without it prompts are text only.
    """

    def __init__(
        self, decoder: Runner, embedding: Component, vision: Component | None, names: Wiring, feature_width: int = 0
    ) -> None:
        self.decoder, self._embedding, self._vision, self._names = decoder, embedding, vision, names
        self.kv_layout: KvLayout = decoder.kv_layout
        self.context_len: int | None = decoder.context_len
        self.vocab_size: int = decoder.vocab_size
        self._width = feature_width  # E of feature rows, for steps without any
        self._encoded: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._features = np.empty((0, feature_width), np.float32)
        self._before = np.zeros(1, np.int64)  # [n]: image tokens among the first n of the prompt
        self.pictures_encoded = 0

    # -- pictures ----------------------------------------------------------------------------------------------------

    def prepare(self, ids: Sequence[int], pictures: Sequence[np.ndarray] = ()) -> tuple[list[int], bytes]:
        """Encode `pictures` (f32 [1, 3, H, W] each) for the next prompt. A single image token for a picture is widened
        to one for each of its feature rows. Returns the prompt's ids, and the identity of everything beside them (for
        prefix reuse; empty without pictures). GenaiError when tokens and pictures do not fit together."""
        rows = [self._encode(picture) for picture in pictures]
        made = self._widen([int(token) for token in ids], [len(row) for row in rows])
        marks = np.array([token == self._names.image_token_id for token in made], np.int64)
        self._before = np.concatenate([[0], np.cumsum(marks)])
        total = sum(len(row) for row in rows)
        if int(self._before[-1]) != total:
            raise GenaiError(
                f"the prompt holds {self._before[-1]} image tokens (id {self._names.image_token_id}), "
                f"{len(rows)} pictures give {total} feature rows",
                hint="put one image token into the prompt for each picture",
            )
        self._features = np.concatenate(rows) if rows else np.empty((0, self._width), np.float32)
        return made, b"".join(_digest(picture) for picture in pictures)

    def _widen(self, ids: list[int], lengths: list[int]) -> list[int]:
        token = self._names.image_token_id
        if not lengths or ids.count(token or 0) != len(lengths) or token is None:
            return ids
        left = iter(lengths)
        return [made for old in ids for made in ([old] * next(left) if old == token else [old])]

    def _encode(self, picture: np.ndarray) -> np.ndarray:
        """Feature rows [n, E]; the same picture is encoded once."""
        if self._vision is None or self._names.pixels is None or self._names.encoded is None:
            raise GenaiError("a picture was given, the package has no vision encoder", hint="ask without pictures")
        key = _digest(picture)
        if key not in self._encoded:
            made = self._vision.run({self._names.pixels: picture})[self._names.encoded]
            self._encoded[key] = made.reshape(-1, made.shape[-1])
            self.pictures_encoded += 1
        self._encoded.move_to_end(key)
        while len(self._encoded) > KEPT_PICTURES:
            self._encoded.popitem(last=False)
        return self._encoded[key]

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """f32 [T, E] of the next T tokens, image tokens replaced by the feature rows that are theirs."""
        feeds = {self._names.ids: np.asarray(ids, np.int64).reshape(1, -1)}
        if self._names.features is not None:
            feeds[self._names.features] = self._rows(np.asarray(ids))
        made = self._embedding.run(feeds)[self._names.embeds]
        return made.reshape(len(ids), -1)

    def _rows(self, ids: np.ndarray) -> np.ndarray:
        start = int(self._before[min(self.length, len(self._before) - 1)])
        wanted = int((ids == self._names.image_token_id).sum())
        rows = self._features[start : start + wanted]
        if self.length + len(ids) < len(self._before) and len(rows) < wanted:
            raise GenaiError(f"{wanted} image tokens are fed, {len(rows)} feature rows are left for them")
        return rows

    @property
    def image_token(self) -> int | None:
        """The id that stands for a feature row."""
        return self._names.image_token_id

    # -- Runner ------------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens whose KV (and state) is held."""
        return self.decoder.length

    @property
    def info(self) -> RunnerInfo:
        """The decoder's."""
        return self.decoder.info

    def reset(self) -> None:
        """Length 0; prepared pictures stay, they belong to the prompt that comes next."""
        self.decoder.reset()

    def step(self, ids: np.ndarray, *, embeds: np.ndarray | None = None, logits: LogitsMode = "last") -> np.ndarray:
        """Feed T tokens: embedded here, unless `embeds` are given."""
        embeds = self.embed(ids) if embeds is None else embeds
        return self.decoder.step(ids, embeds=embeds, logits=logits)

    def kv_rows(self, start: int, stop: int) -> KvRows:
        """The decoder's."""
        return self.decoder.kv_rows(start, stop)

    def seed(self, rows: KvRows, state: StateSnapshot | None = None) -> None:
        """The decoder's; image tokens of the seeded prefix have their rows behind them."""
        self.decoder.seed(rows, state)

    def rewind(self, length: int) -> None:
        """The decoder's."""
        self.decoder.rewind(length)

    def snapshot_state(self) -> StateSnapshot:
        """The decoder's."""
        return self.decoder.snapshot_state()

    def supports_paged_kv(self) -> Gate:
        """The decoder's: pictures join the identity of a prefix."""
        return self.decoder.supports_paged_kv()

    def close(self) -> None:
        """Forget pictures, close the decoder."""
        self._encoded.clear()
        self.decoder.close()


def _digest(picture: np.ndarray) -> bytes:
    """Identity of a picture: type, shape and bytes, each with its length."""
    picture = np.ascontiguousarray(picture)
    parts = (picture.dtype.str.encode(), str(picture.shape).encode(), picture.tobytes())
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.digest()
