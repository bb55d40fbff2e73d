"""What the engine feeds a decoder graph at (T, past_len): ids and positions as data, masks and lengths as known values."""

from __future__ import annotations

import numpy as np

from genai_cli.backends.base import Backend, Tensor
from genai_cli.engine.values import Cached, Dynamic, Static, Value
from genai_cli.graph.io import DecoderIo, KvBinding
from genai_cli.graph.ir import Graph, ValueInfo


def input_dtype(graph: Graph, name: str) -> np.dtype:
    """Declared dtype of a graph input; int64 where the model does not say."""
    return next((value.dtype for value in graph.inputs if value.name == name), None) or np.dtype(np.int64)


def _info(graph: Graph, name: str) -> ValueInfo:
    return next(value for value in graph.inputs if value.name == name)


def position_shape(graph: Graph, name: str, num_new: int) -> tuple[int, ...]:
    """[1, T], or [3, 1, T] for rotary with several position axes."""
    shape = _info(graph, name).shape or (1, None)
    if len(shape) == 3:
        return (shape[0] if isinstance(shape[0], int) else 3, 1, num_new)
    return (1, num_new) if len(shape) == 2 else (num_new,)


def step_inputs(graph: Graph, io: DecoderIo, backend: Backend, num_new: int, width: int) -> dict[str, Tensor]:
    """Tensors the engine uploads into before each step of T = num_new; `width` is E of inputs_embeds."""
    made: dict[str, Tensor] = {}
    if io.input_ids:
        made[io.input_ids] = backend.empty((1, num_new), input_dtype(graph, io.input_ids))
    if io.inputs_embeds:
        made[io.inputs_embeds] = backend.empty((1, num_new, width), input_dtype(graph, io.inputs_embeds))
    if io.position_ids:
        shape = position_shape(graph, io.position_ids, num_new)
        made[io.position_ids] = backend.empty(shape, input_dtype(graph, io.position_ids))
    if io.cache_position:
        made[io.cache_position] = backend.empty((num_new,), input_dtype(graph, io.cache_position))
    return made


def known_inputs(graph: Graph, io: DecoderIo, num_new: int, past_len: int) -> dict[str, Value]:
    """Inputs whose values follow from (T, past_len); all of them tainted."""
    total = past_len + num_new
    values: dict[str, np.ndarray] = {}
    if io.attention_mask:
        values[io.attention_mask] = np.ones((1, total), input_dtype(graph, io.attention_mask))
    if io.write_indices:
        values[io.write_indices] = np.array([past_len], input_dtype(graph, io.write_indices))
    if io.kv_seq_len:
        values[io.kv_seq_len] = np.array([total], input_dtype(graph, io.kv_seq_len))
    if io.past_seq_len:
        shape = _info(graph, io.past_seq_len).shape or ()
        values[io.past_seq_len] = np.full((1,) * len(shape), past_len, input_dtype(graph, io.past_seq_len))
    return {name: Static(array, tainted=True) for name, array in values.items()}


def cached_shape(binding: KvBinding, length: int) -> tuple[int, ...]:
    """The shape a graph sees of a past (or present) of `length` tokens."""
    if binding.axes == "BSM":
        return (1, binding.capacity or length, binding.num_heads * binding.head_dim)
    return (1, binding.num_heads, length, binding.head_dim)


def cached_inputs(io: DecoderIo, num_new: int, past_len: int) -> dict[str, Value]:
    """Past KV, left in its slots, and the presents that this step will leave there."""
    made: dict[str, Value] = {}
    for index, binding in enumerate(io.kv):
        for name, length, written in ((binding.past, past_len, True), (binding.present, past_len + num_new, False)):
            made[name] = Cached(index, cached_shape(binding, length), binding.dtype, length, written)
    return made


def dynamic(tensors: dict[str, Tensor]) -> dict[str, Value]:
    """Step inputs and states as traced values; they own memory outside the arena."""
    return {name: Dynamic(tensor) for name, tensor in tensors.items()}
