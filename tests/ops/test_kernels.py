"""Every compiled kernel on every instruction set here, with 1 and 2 threads, on every case its rule accepts."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import pytest
from cases import Array, Case, accepted, node_cases, reference, run_kernel, specified
from contrib import contrib_cases
from exclusions import KERNELS
from internal_cases import internal_cases
from oracle import judge
from standard import standard_cases
from tolerance import difference, of_onnx

from genai_cli import _native
from genai_cli.backends.cpu import CpuBackend
from genai_cli.ops import table

CONFIGS = [(isa, threads) for isa in _native.isas() for threads in (1, 2)]


@cache
def backend(isa: str, threads: int) -> CpuBackend:
    return CpuBackend(isa=isa, threads=threads)


@cache
def cases_of_kernels() -> dict[str, list[Case]]:
    """Ops with a CPU kernel, and the cases the rule accepts."""
    first = backend(*CONFIGS[0])
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in (*node_cases(), *contrib_cases(), *standard_cases(), *internal_cases()):
        if case.id not in KERNELS and accepted(case, first):
            assert case.opdef is not None
            groups[case.opdef.key].append(case)
    return dict(sorted(groups.items()))


_JUDGED: dict[tuple[str, str], list[Array | None]] = {}


def judged(case: Case) -> list[Array | None]:
    """ONNX's expectation, or ORT's answer (asked once)."""
    if case.expected is not None:
        return list(case.expected)
    if (case.domain, case.id) not in _JUDGED:
        _JUDGED[case.domain, case.id] = judge(case, reference(case))
    return _JUDGED[case.domain, case.id]


def failure(case: Case, on: CpuBackend) -> str | None:
    """Why the kernel misses the judge's answer, or None."""
    got, want = specified(case, run_kernel(case, on)), specified(case, judged(case))
    for a, b in zip(got, want, strict=True):
        limit = of_onnx(case, b) if b is not None and case.expected is not None else None
        if b is not None and (why := difference(case.op, a, b, case.attrs, limit)):
            return why
    return None


@pytest.mark.parametrize(("isa", "threads"), CONFIGS)
@pytest.mark.parametrize("key", cases_of_kernels())
def test_kernel(key: str, isa: str, threads: int) -> None:
    failed = {case.id: why for case in cases_of_kernels()[key] if (why := failure(case, backend(isa, threads)))}
    assert not failed


def test_rules_and_kernels_agree() -> None:
    """No rule without a compiled kernel, no compiled kernel without a rule."""
    ruled = {entry.kernels["cpu"].name for entry in table() if "cpu" in entry.kernels}
    ceilings = {"bench.FloatPeak", "bench.BytePeak"}  # the benchmark's, of no op
    assert ruled == set(backend(*CONFIGS[-1]).kernels()) - ceilings


def test_every_kernel_has_cases() -> None:
    elsewhere = {"genai::Attention", "com.microsoft::SimplifiedLayerNormalization"}  # test_attention.py; as ai.onnx's
    ruled = {entry.key for entry in table() if "cpu" in entry.kernels}
    assert ruled - elsewhere == set(cases_of_kernels())
