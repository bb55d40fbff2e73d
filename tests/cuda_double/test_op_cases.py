"""The CUDA kernels on the op cases of every backend: the same inputs, judges and limits as the CPU's."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))

import test_attention as slotted
from cases import Case, accepted, node_cases, reference, run_kernel, specified
from contrib import contrib_cases
from exclusions import KERNELS
from internal_cases import internal_cases
from oracle import judge
from standard import standard_cases
from tolerance import difference, of_onnx

from genai_cli.backends import cuda as _  # noqa: F401  (fills the table)
from genai_cli.backends.cuda_launch import TABLE
from genai_cli.backends.cuda_step import STEP_KERNELS
from genai_cli.ops import table

Make = Callable[..., Any]
CUDA = SimpleNamespace(name="cuda")
# Each dtype is a kernel of its own to compile. What an op computes is shown by f32, and by all three floats where it
# sums; the other dtypes differ in loads and stores only, and run with the slow tests.
EVERYDAY = {np.dtype(kind) for kind in (np.float32, np.int64, np.bool_)}
THREE_FLOATS = {"Add", "Mul", "Gather", "MatMul", "Gemm", "Softmax", "SiluMul", "RotaryEmbedding"}
THREE_FLOATS |= {"RMSNormalization", "SkipSimplifiedLayerNormalization", "LinearAttention", "CausalConvWithState"}

PACKED = {"MatMulNBits", "GatherBlockQuantized", "QMoE"}  # weights are bytes


@cache
def cases_of_kernels() -> dict[str, list[Case]]:
    """Ops with a CUDA kernel, and the cases the rule accepts."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in (*node_cases(), *contrib_cases(), *standard_cases(), *internal_cases()):
        if case.id not in KERNELS and accepted(case, CUDA):
            assert case.opdef is not None
            groups[case.opdef.key].append(case)
    return dict(sorted(groups.items()))


def everyday(case: Case) -> bool:
    """Whether a case runs with the fast tests."""
    if case.op == "MatMulNBits" and case.attrs["block_size"] == 16:  # half a load: kernels of its own
        return False
    kinds = {array.dtype for array in case.inputs if array is not None}
    if case.op in THREE_FLOATS:
        return not any(kind.kind in "iu" and kind not in EVERYDAY for kind in kinds)
    return kinds <= (EVERYDAY | {np.dtype(np.uint8)} if case.op in PACKED else EVERYDAY)


def failure(case: Case, on: Any) -> str | None:
    """Why the kernel misses the judge's answer, or None."""
    wanted = list(case.expected) if case.expected is not None else judge(case, reference(case))
    got, want = specified(case, run_kernel(case, on)), specified(case, wanted)
    for a, b in zip(got, want, strict=True):
        limit = of_onnx(case, b) if b is not None and case.expected is not None else None
        if b is not None and (why := difference(case.op, a, b, case.attrs, limit)):
            return why
    return None


@pytest.mark.parametrize("key", cases_of_kernels())
def test_kernel(key: str, cuda_backend: Make) -> None:
    on = cuda_backend()
    cases = [case for case in cases_of_kernels()[key] if everyday(case)]
    assert cases, "no case of this op runs every day"
    assert not {case.id: why for case in cases if (why := failure(case, on))}


@pytest.mark.slow
@pytest.mark.parametrize("key", cases_of_kernels())
def test_kernel_in_other_dtypes(key: str, cuda_backend: Make) -> None:
    on = cuda_backend()
    failed = {case.id: why for case in cases_of_kernels()[key] if not everyday(case) and (why := failure(case, on))}
    assert not failed


def test_attention_over_slots(cuda_backend: Make) -> None:
    failed = {}
    for name, one in slotted.CASES.items():
        if why := slotted.misses(one, slotted.run_slots(one, cuda_backend())):
            failed[name] = why
    assert not failed


def test_rules_and_kernels_agree() -> None:
    """No rule without a kernel, no kernel without a rule, those apart that no node asks for."""
    assert {entry.kernels["cuda"].name for entry in table() if "cuda" in entry.kernels} == set(TABLE) - STEP_KERNELS


def test_every_kernel_has_cases() -> None:
    elsewhere = {"genai::Attention", "com.microsoft::SimplifiedLayerNormalization"}  # slots above; as ai.onnx's
    ruled = {entry.key for entry in table() if "cuda" in entry.kernels}
    assert ruled - elsewhere == set(cases_of_kernels())
