"""Prove what attention rewrites assume, by evaluating the replaced inputs at several (T, past_len).

`seqlens_k`, totals, write positions and masks are functions of (T, past_len) alone. Whatever subgraph computes them, if it
gives the expected value at every probed point the internal op's own bookkeeping is the same computation. A mask that is
neither empty nor causal nor a window stays an input (correct, but recorded anew each step).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from genai_cli.engine.values import Static, Value
from genai_cli.errors import GenaiError
from genai_cli.graph.attention import ASSUMES, INTERNAL_DOMAIN, MASK_INPUT
from genai_cli.graph.ir import Node

Evaluate = Callable[[list[str], int, int], dict[str, Value]]
POINTS = ((3, 0), (1, 6), (4, 5), (2, 61), (1, 66), (2, 510), (1, 1022), (3, 4094))  # (T, past_len)
_EXPECTED = {
    "last_position": lambda new, past: past + new - 1,
    "total_len": lambda new, past: past + new,
    "past_len": lambda new, past: past,
    "past_len_of_value": lambda new, past: past,
}


@dataclass(frozen=True)
class Mask:
    """What a mask was at one point: a window of `window` tokens (None: any length), causal or not."""

    causal: bool
    window: int | None


def settle(nodes: list[Node], evaluate: Evaluate, context_len: int | None) -> None:
    """Check every internal attention's assumptions and settle its mask, in place. GenaiError when one does not hold."""
    internal = [node for node in nodes if node.domain == INTERNAL_DOMAIN and node.attrs.get(ASSUMES)]
    names = sorted({name for node in internal for name in node.attrs[ASSUMES].values()})
    if not names:
        return
    points = [(new, past) for new, past in POINTS if context_len is None or past + new <= context_len]
    if not points:
        points = [(1, 0)]
    found = {point: evaluate(names, *point) for point in points}
    for node in internal:
        assumes = node.attrs.pop(ASSUMES)
        for what, name in assumes.items():
            if what == "mask":
                _settle_mask(node, name, {point: values[name] for point, values in found.items()})
            else:
                _check_length(node, what, name, {point: values[name] for point, values in found.items()})


def _check_length(node: Node, what: str, name: str, values: dict[tuple[int, int], Value]) -> None:
    for (new, past), value in values.items():
        wanted = _EXPECTED[what](new, past)
        if not isinstance(value, Static):
            raise GenaiError(
                f"node `{node.name}`: `{name}` ({what}) depends on data; wanted lengths from shapes and mask"
            )
        if not (value.array == wanted).all():
            raise GenaiError(
                f"node `{node.name}`: `{name}` ({what}) is {value.array.reshape(-1)[:4].tolist()} for {new} new tokens"
                f" after {past}; wanted {wanted}",
                hint="the export feeds attention a wrong length; export it again",
            )


def _settle_mask(node: Node, name: str, values: dict[tuple[int, int], Value]) -> None:
    causal = bool(node.attrs.get("is_causal", 0))
    settled = _agree([(sum(point), _classify(value, point, causal)) for point, value in values.items()])
    if settled is None:
        node.inputs += [""] * (MASK_INPUT + 1 - len(node.inputs))
        node.inputs[MASK_INPUT] = name
        return
    node.attrs["is_causal"] = int(settled.causal)
    if settled.window is not None:
        node.attrs["local_window_size"] = settled.window


def _agree(points: list[tuple[int, list[Mask]]]) -> Mask | None:
    """One description that fits every (total length, masks). One new token cannot tell causal from not; a window shows
    where the whole is longer, and there it must show."""
    for causal in (False, True):
        fitting = [(total, [mask for mask in masks if mask.causal == causal]) for total, masks in points]
        windows = {mask.window for _, masks in fitting for mask in masks if mask.window is not None}
        window = windows.pop() if len(windows) == 1 else None
        shown = Mask(causal, window)
        if not windows and all(
            (shown if window and total > window else Mask(causal, None)) in masks for total, masks in fitting
        ):
            return shown
    return None


def _classify(value: Value, point: tuple[int, int], causal: bool) -> list[Mask]:
    """Every description that fits the mask at one point."""
    if not isinstance(value, Static):
        return []
    seen = _visible(value.array)
    new, past = point
    if seen is None or seen.ndim < 2 or seen.shape[-1] < past + new or seen.shape[-2] not in (1, new):
        return []
    seen = np.broadcast_to(seen, (*seen.shape[:-2], new, seen.shape[-1])).reshape(-1, new, seen.shape[-1])
    key = np.arange(seen.shape[-1])
    behind = past + np.arange(new)[:, None] - key
    real = key < past + new  # a static cache's mask is as wide as its capacity
    seen = seen & real & ((behind >= 0) | (not causal))
    return [
        mask for mask in _candidates(behind, seen, past + new, causal) if (seen == (real & _allows(mask, behind))).all()
    ]


def _allows(mask: Mask, behind: np.ndarray) -> np.ndarray:
    inside = behind >= 0 if mask.causal else np.ones_like(behind, bool)
    return inside if mask.window is None else inside & (behind < mask.window)


def _candidates(behind: np.ndarray, seen: np.ndarray, total: int, causal: bool) -> list[Mask]:
    widest = int(np.where(seen, behind, -1).max()) + 1
    whole = [Mask(True, None)] if causal else [Mask(False, None), Mask(True, None)]
    return whole if widest >= total else [Mask(True, widest)]


def _visible(mask: np.ndarray) -> np.ndarray | None:
    """True where a key may be attended to. An additive mask hides with values that no score can outweigh."""
    if mask.dtype == np.bool_:
        return mask
    if np.issubdtype(mask.dtype, np.integer):
        return None
    values = mask.astype(np.float32)
    hidden = values <= -1e4
    return ~hidden if (hidden | (values == 0)).all() else None
