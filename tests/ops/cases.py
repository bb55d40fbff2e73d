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


GUARD = 64  # bytes of pattern on each side of an output
PATTERN = 0xA5


def accepted(case: Case, backend: Any) -> bool:
    """Whether the backend has a kernel that takes this case."""
    opdef = case.opdef
    rule = None if opdef is None else opdef.kernels.get(backend.name)
    if rule is None or rule.accepts(_known(case), case.attrs) is not None:
        return False
    return rule.num_outputs is None or not any(case.outputs[rule.num_outputs :])


def _known(case: Case) -> list[Any]:
    """Inputs as the engine tells them: host inputs and constants by value, others by shape and dtype."""
    assert case.opdef is not None
    by_value = {*case.opdef.host_inputs, *case.constants}
    return [a if a is None or i in by_value else (a.shape, a.dtype) for i, a in enumerate(case.inputs)]


def run_kernel(case: Case, backend: Any, times: int = 2) -> list[Array | None]:
    """The kernel's answer, with checks that hold for every op: it writes all of its outputs and nothing beside them,
    leaves its inputs alone, and gives the same bits when it is replayed."""
    opdef = case.opdef
    assert opdef is not None
    assert opdef.infer is not None
    attrs = dict(case.attrs)
    if "num_node_outputs" in opdef.attributes:
        attrs["num_node_outputs"] = len(case.outputs)
    specs = opdef.infer(_known(case), attrs)
    if case.op in ("MatMul", "Gemm"):  # the engine says whether B is a weight
        attrs["constant_b"] = int(1 in case.constants)
    arrays = [None if a is None else np.ascontiguousarray(a).reshape(a.shape) for a in case.inputs]
    inputs = [None if a is None else backend.constant(a) for a in arrays]
    for i, array in enumerate(arrays):
        if array is not None and (i in opdef.host_inputs or i in case.constants):
            inputs[i].host = array
    before = [None if a is None else a.tobytes() for a in arrays]
    guarded = [_guarded(backend, *spec) if wanted else None for spec, wanted in zip(specs, case.outputs, strict=False)]
    outputs = [None if pair is None else pair[1] for pair in guarded]
    recording = backend.record()
    recording.call(opdef.kernels[backend.name].name, inputs, outputs, attrs)
    first = [None if t is None else backend.download(t) for t in outputs]
    for _ in range(times - 1):
        recording.replay()
    again = [None if t is None else backend.download(t) for t in outputs]
    _check_guards(backend, guarded)
    for one, two in zip(first, again, strict=True):
        assert (one is None and two is None) or one.tobytes() == two.tobytes(), "a replay gave other bits"
    for array, old in zip(arrays, before, strict=True):
        assert array is None or array.tobytes() == old, "the kernel wrote to an input"
    return [*first, *[None] * (len(case.outputs) - len(first))]


def _guarded(backend: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    """A buffer of guard bytes, and the output in its middle, filled with the pattern too."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    whole = backend.empty((size + 2 * GUARD,), np.dtype(np.uint8))
    backend.upload(whole, np.full(size + 2 * GUARD, PATTERN, np.uint8))
    return whole, backend.alias(whole, shape, np.dtype(dtype), GUARD)


def _check_guards(backend: Any, guarded: Sequence[tuple[Any, Any] | None]) -> None:
    for pair in guarded:
        if pair is not None:
            content = backend.download(pair[0])
            assert (content[:GUARD] == PATTERN).all(), "the kernel wrote before its output"
            assert (content[-GUARD:] == PATTERN).all(), "the kernel wrote behind its output"
