"""Weights in a mapped file may lie at any address: inputs one byte off give the bits that aligned ones give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import run_kernel
from cpu import ISAS, Array, misplaced
from test_kernels import backend, cases_of_kernels

from genai_cli.backends.base import Tensor
from genai_cli.backends.cpu import CpuBackend


class Misplacing(CpuBackend):
    """Holds every constant at an odd address."""

    def constant(self, array: Array) -> Tensor:
        moved = misplaced(np.ascontiguousarray(array)).reshape(array.shape)
        return Tensor(moved.ctypes.data, array.shape, array.dtype, moved)


def _bits(outputs: list[Any]) -> list[bytes | None]:
    return [None if o is None else o.tobytes() for o in outputs]


@pytest.mark.parametrize("isa", sorted({ISAS[0], ISAS[-1]}))
def test_inputs_at_odd_addresses(isa: str) -> None:
    odd, checked = Misplacing(isa=isa, threads=2), 0
    for cases in cases_of_kernels().values():
        for case in cases[:6]:
            assert _bits(run_kernel(case, odd, 1)) == _bits(run_kernel(case, backend(isa, 2), 1)), case.id
            checked += 1
    assert checked > 100
