"""What a model folder declares, as plain data. Token ids, names, limits and defaults; shapes come from the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from genai_cli.errors import GenaiError

Kind = Literal["onnxruntime-genai", "mobius", "optimum", "onnx"]


@dataclass(frozen=True)
class Component:
    """One ONNX file. `inputs` and `outputs` map a role to the name the graph uses, as far as the package says;
    names with `%d` are templates over layers."""

    role: str  # "decoder", "embedding", "vision", "speech", "encoder", or "decoder/<stage>" of a split decoder
    path: Path
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SlidingWindow:
    """The config's idea of windows; the graph decides what really happens."""

    window_size: int
    layers: tuple[int, ...] | None  # None = all
    slides_cache: bool  # the old NPU meaning: the runtime itself drops old KV


@dataclass(frozen=True)
class SearchDefaults:
    """The package's `search` section; None = not given."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    min_length: int | None = None
    max_length: int | None = None  # prompt and output together
    num_beams: int | None = None
    random_seed: int | None = None


@dataclass(frozen=True)
class ModelPackage:
    """A model folder (or bare file) whose declarations were read and checked."""

    path: Path  # the folder; for a bare file, the file
    kind: Kind
    model_type: str
    components: tuple[Component, ...]
    context_len: int | None = None  # as declared; the graph may hold less (`LoadedDecoder.context_len`)
    vocab_size: int | None = None
    head_size: int | None = None
    num_layers: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # sorted; stop on any
    pad_token_id: int | None = None
    image_token_id: int | None = None
    search: SearchDefaults = SearchDefaults()
    sliding_window: SlidingWindow | None = None
    kv_pairs: Mapping[str, str] = field(default_factory=dict)  # past -> present, where declared one by one
    tokenizer: Path | None = None  # tokenizer.json
    chat_template: str | None = None  # Jinja2 source
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # "bos_token" -> "<s>", for the template
    processor_config: Path | None = None
    warnings: tuple[str, ...] = ()

    def component(self, role: str) -> Component | None:
        """The component with this role."""
        return next((part for part in self.components if part.role == role), None)

    @property
    def decoder(self) -> Component:
        """The decoder; GenaiError when there is none, or when it is split over several files."""
        part = self.component("decoder")
        if part is None:
            roles = ", ".join(f"`{part.role}`" for part in self.components)
            raise GenaiError(
                f"`{self.path}` has no decoder in one file; found {roles}",
                hint="export the decoder as one ONNX file",
            )
        return part
