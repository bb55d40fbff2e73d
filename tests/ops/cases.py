"""One table of cases: inputs and attributes of one op, for every backend and every question (right, guarded, fast).

`node_cases()` are ONNX's own; contrib.py makes those of the ops ONNX does not have. Expected outputs come with the case
(ONNX) or from ORT (oracle.py), never from the code under test.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import AttributeProto, helper, numpy_helper

from genai_cli.ops import lookup, run_reference
from genai_cli.ops.registry import OpDef

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """One call of one op."""

    op: str
    domain: str
    opset: int
    inputs: tuple[Array | None, ...]  # None: a missing optional input
    attrs: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[bool, ...] = (True,)  # which outputs the node has
    expected: tuple[Array | None, ...] | None = None  # the judge's answer, when it is known without running anything
    id: str = ""
    constants: tuple[int, ...] = ()  # inputs that are weights: initializers for the judge, so that they are prepacked
    judged_as: Case | None = None  # an equal case the judge can run, where it cannot run this one
    unspecified: tuple[tuple[int, Any], ...] = ()  # (output, index): elements that may hold anything
    rtol: float = 1e-3  # of ONNX's own cases
    atol: float = 1e-7

    @property
    def opdef(self) -> OpDef | None:
        return lookup(self.op, self.domain, self.opset)


def reference(case: Case) -> list[Array | None]:
    """The numpy answer, one entry an output the node has (None where it has none)."""
    assert case.opdef is not None
    made = run_reference(case.opdef, case.inputs, case.attrs, len(case.outputs))
    padded = [*made, *[None] * len(case.outputs)]
    return [array if wanted else None for array, wanted in zip(padded, case.outputs, strict=False)]


def specified(case: Case, outputs: Sequence[Array | None]) -> list[Array | None]:
    """The outputs with every unspecified element set to 0."""
    made = [None if a is None else a.copy() for a in outputs]
    for output, index in case.unspecified:
        if (array := made[output]) is not None:
            array[index] = 0
    return made


def _attribute(proto: AttributeProto) -> Any:
    value = helper.get_attribute_value(proto)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return list(value) if proto.type in (AttributeProto.INTS, AttributeProto.FLOATS) else value


def _array(value: Any) -> Array:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def _from_model(test: Any, inputs: list[Any], outputs: list[Any], number: int) -> Case:
    graph = test.model.graph
    (node,) = graph.node
    given = dict(zip((i.name for i in graph.input), map(_array, inputs), strict=False))
    wanted = dict(zip((o.name for o in graph.output), map(_array, outputs), strict=True))
    opset = {o.domain: o.version for o in test.model.opset_import}[node.domain]
    return Case(
        node.op_type,
        node.domain,
        opset,
        tuple(given[name] if name else None for name in node.input),
        {a.name: _attribute(a) for a in node.attribute},
        tuple(bool(name) for name in node.output),
        tuple(wanted.get(name) for name in node.output),
        test.name + (f"[{number}]" if number else ""),
        rtol=test.rtol,
        atol=test.atol,
    )


def _is_tensor(value: Any) -> bool:
    """Not a sequence, an optional or a string."""
    return (
        not isinstance(value, list | tuple | dict | str) and value is not None and _array(value).dtype.kind not in "OUS"
    )


@cache
def node_cases() -> tuple[Case, ...]:
    """ONNX's single-node cases over tensors. Built once a session: about 8 s."""
    from onnx.backend.test.case.node import collect_testcases

    cases = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ONNX computes its own special values with numpy warnings on
        collected = collect_testcases(None)
    for test in collected:
        if len(test.model.graph.node) != 1 or test.model.functions:
            continue
        if any(a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for a in test.model.graph.node[0].attribute):
            continue
        for number, (inputs, outputs) in enumerate(test.data_sets):
            if all(map(_is_tensor, (*inputs, *outputs))):
                cases.append(_from_model(test, inputs, outputs, number))
    return tuple(cases)


def as_float(array: Array) -> Array:
    """Any numeric array as f64, for comparison."""
    if array.dtype.kind == "V" or array.dtype.name in vars(ml_dtypes):
        return array.astype(np.float32).astype(np.float64)
    return array.astype(np.float64)
