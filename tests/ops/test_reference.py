"""The numpy reference of every registered op against ONNX's own cases and ONNX Runtime; `infer` against both."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from cases import Array, Case, node_cases, reference, specified
from contrib import contrib_cases
from contrib_quantized import gather_outside
from exclusions import REFERENCE
from internal_cases import internal_cases
from oracle import judge
from standard import standard_cases
from tolerance import difference, of_onnx

from genai_cli.errors import GenaiError
from genai_cli.ops import lookup, run_reference, table
from genai_cli.ops.dtypes import SMALL_INT
from genai_cli.ops.quant import unpack_bits
from genai_cli.ops.registry import OpDef, unknown_attributes


def by_op(cases: tuple[Case, ...]) -> dict[str, list[Case]]:
    """Registered ops with their cases."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        if case.opdef is not None:
            groups[case.opdef.key].append(case)
    return dict(sorted(groups.items()))


def defined(case: Case, got: Array | None, want: Array | None) -> tuple[Array | None, Array | None]:
    """Float to a 2- or 4-bit integer is defined inside its range only: outside, the library that computes ONNX's own
    expectations changed its answer (ml_dtypes 0.6 kept the low bits, as ORT does; 0.7 gives 0)."""
    x = case.inputs[0] if case.inputs else None
    if case.op not in ("Cast", "CastLike") or got is None or want is None or want.dtype not in SMALL_INT or x is None:
        return got, want
    bits = int(want.dtype.name[-1])
    low, high = (0, 2**bits) if want.dtype.name.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    wide = x.astype(np.float64)
    inside = (wide > low - 1) & (wide < high)
    assert inside.any()
    return got[inside], want[inside]


def onnx_failure(case: Case) -> str | None:
    """Why the reference misses the outputs that came with the case, or None."""
    assert case.expected is not None
    try:
        outputs = reference(case)
    except GenaiError as error:
        return error.message
    for got, want in zip(outputs, case.expected, strict=True):
        got, want = defined(case, got, want)
        if want is not None and (reason := difference(case.op, got, want, case.attrs, of_onnx(case, want))):
            return reason
    return None


def infer_failure(case: Case, opdef: OpDef, outputs: list[Array | None]) -> str | None:
    """Why `infer` misses the real outputs, or None."""
    assert opdef.infer is not None
    known = [a if a is None or i in opdef.host_inputs else (a.shape, a.dtype) for i, a in enumerate(case.inputs)]
    attrs = dict(case.attrs)
    if "num_node_outputs" in opdef.attributes:
        attrs["num_node_outputs"] = len(case.outputs)
    specs = opdef.infer(known, attrs)
    wanted = [(a.shape, a.dtype) if a is not None else None for a in outputs]
    if len(specs) < len(wanted):
        return f"{len(specs)} outputs, the node has {len(wanted)}"
    wrong = [(s, w) for s, w in zip(specs, wanted, strict=False) if w is not None and s != w]
    return f"inferred {wrong[0][0]}, found {wrong[0][1]}" if wrong else None


ONNX = by_op((*node_cases(), *internal_cases()))
CONTRIB = by_op((*contrib_cases(), *standard_cases()))


@pytest.mark.parametrize("key", ONNX)
def test_expected_cases(key: str) -> None:
    failed = {case.id: why for case in ONNX[key] if case.id not in REFERENCE and (why := onnx_failure(case))}
    assert not failed


@pytest.mark.parametrize("key", CONTRIB)
def test_judged_cases(key: str) -> None:
    failed = {}
    for case in CONTRIB[key]:
        outputs = reference(case)
        got, want = specified(case, outputs), specified(case, judge(case, outputs))
        reasons = [
            why
            for a, b in zip(got, want, strict=True)
            if b is not None and (why := difference(case.op, a, b, case.attrs))
        ]
        if reasons:
            failed[case.id] = reasons[0]
    assert not failed


WITH_INFER = sorted({entry.key for entry in table() if entry.infer is not None} & (ONNX.keys() | CONTRIB.keys()))


@pytest.mark.parametrize("key", WITH_INFER)
def test_infer(key: str) -> None:
    failed, checked = {}, 0
    for case in [*ONNX.get(key, []), *CONTRIB.get(key, [])]:
        opdef = case.opdef
        if opdef is None or opdef.infer is None or case.id in REFERENCE:
            continue
        checked += 1
        if why := infer_failure(case, opdef, reference(case)):
            failed[case.id] = why
    assert not failed
    assert checked


@pytest.mark.parametrize("name", REFERENCE)
def test_exclusions_still_fail(name: str) -> None:
    (case,) = [case for case in node_cases() if case.id == name]
    assert onnx_failure(case), f"{name} passes now: take it off the list"


def test_every_kernel_has_a_shape_rule() -> None:
    assert not [entry.key for entry in table() if entry.kernels and entry.infer is None]


# Ops without a case here, and who judges them instead.
WITHOUT_CASES = {
    "com.microsoft::SimplifiedLayerNormalization": "ORT has it in ai.onnx only; one function serves both domains",
    "genai::Attention": "test_attention.py",
}


def test_every_op_has_cases() -> None:
    missing = {entry.key for entry in table()} - set(ONNX) - set(CONTRIB)
    assert missing == set(WITHOUT_CASES)


def test_wrong_calls_are_refused() -> None:
    x = np.ones((2, 2), np.float32)
    for name, inputs, attrs, reason in (
        ("Add", [x], {}, "`1` inputs, wanted 2"),
        ("Add", [x, x, x], {}, "`3` inputs, wanted 2"),
        ("Concat", [x, x], {}, "attribute `axis` is missing"),
        ("Reshape", [x, np.array([3, 2])], {}, "4 elements do not fit"),
        ("Gather", [x, np.array([2])], {}, "index `2` is outside"),
        ("Cast", [x], {"to": 8}, "tensor type `8`"),
    ):
        opdef = lookup(name, "", 18)
        assert opdef is not None
        with pytest.raises(GenaiError, match=reason):
            run_reference(opdef, inputs, attrs)


def test_unknown_attribute_is_refused() -> None:
    opdef = lookup("Add", "", 14)
    assert opdef is not None
    assert unknown_attributes(opdef, {"axis": 1}) == ["axis"]
    with pytest.raises(GenaiError, match="`axis`"):
        run_reference(opdef, [np.ones(1), np.ones(1)], {"axis": 1})


def test_gather_outside_gives_zeros() -> None:
    case = gather_outside()
    (got,), (want,) = reference(case), judge(case, reference(case))
    np.testing.assert_array_equal(got, want)
    assert not got[0, 1:3].any()


@pytest.mark.parametrize("bits", range(2, 9))
def test_bits_of_every_width(bits: int) -> None:
    """Low bits first, one after the other, also where they cross bytes."""
    levels = np.random.default_rng(bits).integers(0, 1 << bits, (3, 16))
    stream = (levels[..., None] >> np.arange(bits)) & 1
    packed = np.packbits(stream.reshape(3, -1).astype(np.uint8), axis=-1, bitorder="little")
    np.testing.assert_array_equal(unpack_bits(packed, bits, 16), levels)
    np.testing.assert_array_equal(unpack_bits(packed, bits, 5), levels[:, :5])


def test_versions() -> None:
    """Softmax over a flattened tail before opset 13; axes as an attribute, then as an input."""
    x = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    assert run_reference(lookup("Softmax", "", 11), [x], {"axis": 1})[0].sum() == pytest.approx(1)
    assert run_reference(lookup("Softmax", "", 13), [x], {"axis": 1})[0].sum() == pytest.approx(3)
    for opset, arguments in ((11, ([x], {"axes": [2]})), (13, ([x, np.array([2])], {}))):
        (total,) = run_reference(lookup("ReduceSum", "", opset), *arguments)
        np.testing.assert_array_equal(total, [[[3], [12]]])
    for opset, arguments in ((13, ([x], {"axes": [2]})), (18, ([x, np.array([2])], {}))):
        (largest,) = run_reference(lookup("ReduceMax", "", opset), *arguments)
        np.testing.assert_array_equal(largest, [[[2], [5]]])
    assert lookup("Add", "", 6) is None
