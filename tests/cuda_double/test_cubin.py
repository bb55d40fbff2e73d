"""ptxas sees what the double cannot (registers, shared memory, instructions an architecture lacks): cubins for all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cuda_double.test_op_cases import cases_of_kernels, slotted
from genai_cli.backends.base import Tensor
from genai_cli.backends.cuda_device import kernel_source, program_options
from genai_cli.backends.cuda_launch import TABLE, Call, Launch
from genai_cli.ops import lookup
from genai_cli.ops.registry import Spec

SOURCES = sorted(file.stem for file in (Path(__file__).parents[2] / "native" / "cuda").glob("*.cu"))
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
KV = [np.dtype(np.float32)]  # what the slots hold in the case being planned
SLOTS = SimpleNamespace(
    state_address=4096, num_sms=132, tensor_cores=True, capacity_of=lambda slot: 512, dtype_of=lambda slot: KV[0]
)


def tensors(arrays: Any) -> list[Tensor | None]:
    """Tensors at addresses of their own, values known: plans look at nothing else."""
    addresses = count(1 << 20, 1 << 20)
    return [None if a is None else Tensor(next(addresses), a.shape, a.dtype, host=a) for a in arrays]


def planned(kernel: str, inputs: Any, specs: list[Spec], attrs: dict[str, Any]) -> list[Launch]:
    outputs = tensors([np.broadcast_to(np.zeros((), dtype), shape) for shape, dtype in specs])
    return TABLE[kernel](Call(kernel, tensors(inputs), outputs, attrs, SLOTS, lambda nbytes: 4096, 4096))


def all_launches() -> Iterator[Launch]:
    """What the op cases launch, and attention over slots."""
    for cases in cases_of_kernels().values():
        for case in cases:
            assert case.opdef is not None
            assert case.opdef.infer is not None
            attrs = dict(case.attrs)
            if "num_node_outputs" in case.opdef.attributes:
                attrs["num_node_outputs"] = len(case.outputs)
            inputs = [None if a is None else np.asarray(a) for a in case.inputs]
            specs = case.opdef.infer(inputs, attrs)
            yield from planned(case.opdef.kernels["cuda"].name, inputs, specs, case.attrs)
    opdef = lookup("Attention", "genai", 1)
    assert opdef is not None
    assert opdef.infer is not None
    for one in slotted.CASES.values():
        specs = opdef.infer([None if a is None else (a.shape, a.dtype) for a in one.inputs], one.attrs)
        KV[0] = one.past_key.dtype
        yield from planned("genai.Attention", one.inputs, specs, one.attrs | {"key_slot": 0, "value_slot": 1})
    for unit in (16, 8, 4, 2, 1):
        yield Launch("kv", f"move_rows<{unit}>", (1, 1, 1), 32, ())
    yield from beside_the_cases()


def beside_the_cases() -> Iterator[Launch]:
    """Kernels no node asks for, and the products of large models and prompts: with those the registers run out first."""
    kinds = [np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16)]
    for kind in kinds:
        logits, count = [np.zeros(5000, kind)], {"count": 5}
        yield from planned("genai.Top", logits, [((60,), np.dtype(np.uint8))], count)
        yield from planned("genai.Carry", logits, [((5000,), kind)], {})
    yield from planned("genai.Advance", [np.zeros(60, np.uint8)], [((1, 1), np.dtype(np.int64))] * 2, {})
    for kind in kinds:
        weight = np.broadcast_to(np.zeros((), kind), (4096, 1 << 15))
        for tokens in (1, 4, 20, 500):
            rows = np.zeros((tokens, 4096), kind)
            yield from planned("MatMul", [rows, weight], [((tokens, 1 << 15), kind)], {})
            yield from planned("Gemm", [rows, weight.T], [((tokens, 1 << 15), kind)], {"transB": 1})


@cache
def instantiations() -> dict[str, list[str]]:
    """Source -> every template instantiation the cases need."""
    found: dict[str, set[str]] = defaultdict(set)
    for launch in all_launches():
        found[launch.source].add(launch.function)
    return {source: sorted(functions) for source, functions in sorted(found.items())}


def one_of_each(functions: list[str]) -> list[str]:
    """Of every template one instantiation, with 16-bit floats where it has some."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for function in functions:
        by_name[function.split("<")[0]].append(function)
    return [max(group, key=lambda f: f.count("__nv_bfloat16") + f.count("__half")) for group in by_name.values()]


def compiles(source: str, functions: list[str], arch: str) -> int:
    """Bytes of the cubin that holds them all."""
    from cuda.core import Program

    options = program_options(source, arch, ["GENAI_F16", "GENAI_BF16"])
    made = Program(kernel_source(source), "c++", options).compile("cubin", name_expressions=tuple(functions))
    return len(made.code)


@pytest.mark.parametrize("source", SOURCES)
def test_one_of_each_template_on_every_architecture(source: str, cuda_driver: Any) -> None:
    for arch in ARCHITECTURES:
        assert compiles(source, one_of_each(instantiations()[source]), arch) > 0, arch


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES)
def test_every_instantiation(source: str, arch: str, cuda_driver: Any) -> None:
    assert compiles(source, instantiations()[source], arch) > 0
