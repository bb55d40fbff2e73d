"""Every kernel on every case: inputs at odd addresses, guard bytes around the outputs, and the same bits as without."""

from __future__ import annotations

import numpy as np
import pytest
from cpu import ISAS, Guarded, call, misplaced, same_bits
from test_kernels import backend, cases_of_kernels

from genai_cli.ops import lookup

EMPTY = np.float32


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("key", cases_of_kernels())
def test_outputs_and_nothing_else(key: str, isa: str) -> None:
    on, checked = backend(isa, 2), 0
    for case in cases_of_kernels()[key][:12]:
        opdef = lookup(case.op, case.domain, case.opset)
        assert opdef is not None
        assert opdef.infer is not None
        specs = opdef.infer([None if a is None else a for a in case.inputs], dict(case.attrs))
        wanted = [spec if there else None for spec, there in zip(specs, case.outputs, strict=False)]
        results = []
        for place in (np.ascontiguousarray, misplaced):
            inputs = [None if a is None else place(a).reshape(a.shape) for a in case.inputs]
            outputs = [None if spec is None else Guarded(*spec) for spec in wanted]
            call(on, opdef.kernels["cpu"].name, inputs, outputs, dict(case.attrs))
            results.append([o.value for o in outputs if o is not None])
        assert all(same_bits(a, b) for a, b in zip(*results, strict=True)), case.id
        checked += 1
    assert checked
