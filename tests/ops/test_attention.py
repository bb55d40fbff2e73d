"""Attention over KV slots: the kernel and its reference against ORT's GroupQueryAttention and ONNX's Attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from cases import Array, Case, node_cases, reference
from contrib import contrib_cases
from oracle import judge
from test_kernels import CONFIGS, backend
from tolerance import difference, of_onnx

from genai_cli.backends.cpu import CpuBackend
from genai_cli.errors import GenaiError
from genai_cli.ops import lookup, run_reference

GQA_ONLY = ("sliding_window_cache", "do_rotary", "causal")
DOMAIN = "genai"


@dataclass(frozen=True)
class Slotted:
    """One call of genai::Attention, and where its expectation comes from."""

    source: Case
    inputs: tuple[Array | None, ...]  # the kernel's ten
    past_key: Array  # [1, H_kv, P, D]
    past_value: Array
    attrs: dict[str, Any]


def from_group_query(case: Case) -> Slotted | None:
    """The slot form of a GroupQueryAttention of one row whose buffer is as long as its past."""
    given = [*case.inputs, *[None] * (16 - len(case.inputs))]
    past_key, past_value, seqlens = given[3], given[4], given[5]
    assert past_key is not None and past_value is not None and seqlens is not None  # noqa: PT018
    new = case.inputs[0].shape[1]  # type: ignore[union-attr]
    if (
        past_key.shape[0] != 1
        or case.attrs.get("sliding_window_cache")
        or int(seqlens[0]) + 1 - new != past_key.shape[2]
    ):
        return None
    attrs = {name: value for name, value in case.attrs.items() if name not in GQA_ONLY}
    attrs["is_causal"] = case.attrs.get("causal", 1)
    inputs = (*given[:3], given[7], given[8], given[9], given[10], given[11], given[14], given[15])
    return Slotted(case, inputs, past_key, past_value, attrs)


def from_onnx(case: Case) -> Slotted | None:
    """The slot form of an ONNX Attention over as many new keys as queries: its first row, with past or without."""
    given = [*case.inputs, *[None] * (7 - len(case.inputs))]
    q, k, v, mask, past_key, past_value = (None if a is None else a[:1] for a in given[:6])
    assert q is not None and k is not None and v is not None  # noqa: PT018
    odd = {"qk_matmul_output_mode", "softmax_precision", "left_window_size", "right_window_size"} & set(case.attrs)
    if odd or given[6] is not None or q.shape[-2] != k.shape[-2]:
        return None
    heads = (case.attrs["q_num_heads"], case.attrs["kv_num_heads"]) if q.ndim == 3 else (q.shape[1], k.shape[1])
    if past_key is None or past_value is None:
        past_key, past_value = (np.zeros((1, heads[1], 0, _head_size(x, heads[1])), x.dtype) for x in (k, v))
    if mask is not None and mask.shape[-1] < past_key.shape[2] + k.shape[-2]:
        return None  # shorter than the keys: the kernel wants it whole
    whole = given[3] if mask is not None and given[3].ndim < 4 else mask
    attrs = {name: case.attrs[name] for name in ("scale", "softcap") if name in case.attrs}
    attrs |= {"num_heads": heads[0], "kv_num_heads": heads[1], "is_causal": case.attrs.get("is_causal", 0)}
    first = [None if a is None else a[:1] for a in [*(case.expected or ()), None, None][:3]]
    source = replace(case, expected=tuple(first))
    return Slotted(source, (q, k, v, None, None, None, whole, None, None, None), past_key, past_value, attrs)


def _head_size(x: Array, heads: int) -> int:
    return int(x.shape[3] if x.ndim == 4 else x.shape[2] // heads)


def slotted() -> dict[str, Slotted]:
    """Everything the op can be asked that has a judge."""
    found: dict[str, Slotted] = {}
    for case in contrib_cases():
        if case.op == "GroupQueryAttention" and (one := from_group_query(case)) is not None:
            found[case.id] = one
    for case in node_cases():
        if case.op == "Attention" and not case.domain and (one := from_onnx(case)) is not None:
            found[case.id] = one
    return found


CASES = slotted()


def expected(one: Slotted) -> list[Array | None]:
    """Output, present key, present value (None where the judge has none)."""
    if one.source.expected is not None:
        return [*one.source.expected, None, None][:3]
    return judge(one.source, reference(one.source))


def misses(one: Slotted, got: list[Array]) -> str | None:
    """Why the outputs miss the judge's, or None."""
    for found, want in zip(got, expected(one), strict=True):
        if want is not None:
            limit = of_onnx(one.source, want) if one.source.expected is not None else None
            if why := difference("Attention", found, want, {}, limit):
                return why
    return None


def run_slots(one: Slotted, on: CpuBackend) -> list[Array]:
    """Seed the slots, run the kernel, read everything back."""
    tensors = [None if a is None else on.constant(a) for a in one.inputs]
    slots = [on.kv_slot(past.shape[1], past.shape[3], past.dtype) for past in (one.past_key, one.past_value)]
    opdef = lookup("Attention", DOMAIN, 1)
    assert opdef is not None
    assert opdef.infer is not None
    specs = opdef.infer([None if a is None else (a.shape, a.dtype) for a in one.inputs], one.attrs)
    length, new = one.past_key.shape[2], _new_tokens(one)
    on.set_past_len(0)
    on.reserve(length + new)
    for slot, past in zip(slots, (one.past_key, one.past_value), strict=True):
        on.kv_write(slot, past[0])
    on.set_past_len(length)
    out = on.empty(*specs[0])
    attrs = one.attrs | {"key_slot": slots[0].index, "value_slot": slots[1].index}
    on.record().call(opdef.kernels[on.name].name, tensors, [out], attrs)
    on.set_past_len(length + new)
    present = [np.asarray(on.kv_view(slot, 0, length + new))[None].copy() for slot in slots]
    return [on.download(out), *present]


def _new_tokens(one: Slotted) -> int:
    q = one.inputs[0]
    assert q is not None
    return int(q.shape[-2])  # [B, H, T, D] or [B, T, H * D]


def test_there_are_cases() -> None:
    assert len([name for name in CASES if name.startswith("Group")]) > 30
    assert len([name for name in CASES if name.startswith("test_attention")]) > 3


@pytest.mark.parametrize("name", CASES)
def test_reference(name: str) -> None:
    one = CASES[name]
    opdef = lookup("Attention", DOMAIN, 1)
    assert opdef is not None
    inputs = [*one.inputs, one.past_key, one.past_value]
    got = run_reference(opdef, inputs, one.attrs)
    assert misses(one, [a for a in got if a is not None]) is None


def test_reference_without_past_refuses() -> None:
    opdef = lookup("Attention", DOMAIN, 1)
    assert opdef is not None
    with pytest.raises(GenaiError, match="KV slots"):
        run_reference(opdef, CASES["GroupQueryAttention:prompt-16"].inputs, {"num_heads": 4, "kv_num_heads": 2})


@pytest.mark.parametrize(("isa", "threads"), CONFIGS)
def test_kernel(isa: str, threads: int) -> None:
    failed = {}
    for name, one in CASES.items():
        on = CpuBackend(isa=isa, threads=threads)
        if why := misses(one, run_slots(one, on)):
            failed[name] = why
    assert not failed
    assert backend(isa, threads).isa == isa
