"""A package's decoder, loaded: graph, bound inputs and outputs, the usable context, and what the config got wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from genai_cli.graph.io import DecoderIo, decoder_io
from genai_cli.graph.ir import Graph
from genai_cli.graph.loader import load_graph
from genai_cli.package.model import ModelPackage


@dataclass(frozen=True)
class LoadedDecoder:
    """What a runner is made from. `context_len` is the smallest of config, metadata and buffer capacity."""

    path: Path
    graph: Graph
    io: DecoderIo
    context_len: int | None
    warnings: tuple[str, ...]


def load_decoder(package: ModelPackage) -> LoadedDecoder:
    """Load and bind the decoder; external data is checked and mapped. The graph wins over the config, with a warning.

    GenaiError when a file is missing, short or elsewhere, or when an input has no known role.
    """
    part = package.decoder
    graph = load_graph(part.path)
    inputs = {value.name for value in graph.inputs}
    names = {role: name for role, name in {**part.inputs, **part.outputs}.items() if "%d" not in name}
    missing = sorted(name for role, name in part.inputs.items() if role in names and name and name not in inputs)
    io = decoder_io(graph, names, package.head_size, _declared_pairs(package, graph))
    capacities = [binding.capacity for binding in io.kv if binding.capacity]
    context = min([*capacities, *([package.context_len] if package.context_len else [])], default=None)
    warnings = [f"the config names the input `{name}`, which the graph has not" for name in missing]
    return LoadedDecoder(part.path, graph, io, context, (*warnings, *_contradictions(package, graph, io)))


def _declared_pairs(package: ModelPackage, graph: Graph) -> dict[str, str]:
    """past -> present by declared pairs and by templates with `%d`, as far as the graph has both ends."""
    inputs, outputs = {value.name for value in graph.inputs}, {value.name for value in graph.outputs}
    pairs = dict(package.kv_pairs)
    part = package.decoder
    for role, template in part.inputs.items():
        present = part.outputs.get(role.replace("past", "present", 1), "")
        if template.count("%d") == 1 and present.count("%d") == 1:
            pairs |= _expand(template, present, inputs)
    return {past: present for past, present in pairs.items() if past in inputs and present in outputs}


def _expand(past: str, present: str, inputs: set[str]) -> dict[str, str]:
    """Every layer number (they may be sparse) that the template finds among the inputs."""
    before, after = past.split("%d")
    found = {}
    for name in inputs:
        number = name[len(before) : len(name) - len(after)]
        if name.startswith(before) and name.endswith(after) and number.isdecimal():
            found[name] = present.replace("%d", number)
    return found


def _contradictions(package: ModelPackage, graph: Graph, io: DecoderIo) -> Iterator[str]:
    windows = sorted({binding.window for binding in io.kv if binding.window})
    declared = package.sliding_window
    if declared and not windows:
        yield (
            f"the config declares a sliding window of {declared.window_size}, the graph has none: "
            "every token is attended to"
        )
    elif declared and windows != [declared.window_size]:
        yield f"the config declares a sliding window of {declared.window_size}, the graph has {windows}"
    capacities = sorted({binding.capacity for binding in io.kv if binding.capacity})
    if capacities and package.context_len and capacities[0] < package.context_len:
        yield f"the static KV buffers hold {capacities[0]} tokens, the declared context is {package.context_len}"
    yield from _sizes(package, graph, io)


def _sizes(package: ModelPackage, graph: Graph, io: DecoderIo) -> Iterator[str]:
    dims = {binding.head_dim for binding in io.kv}
    if package.head_size and dims and dims != {package.head_size}:
        yield f"the config declares a head size of {package.head_size}, the graph has {sorted(dims)}"
    logits = next(value for value in graph.outputs if value.name == io.logits)
    vocab = logits.shape[-1] if logits.shape else None
    if package.vocab_size and isinstance(vocab, int) and vocab != package.vocab_size:
        yield f"the config declares a vocabulary of {package.vocab_size}, the graph's logits have {vocab}"
