"""The op batteries: a wrong op is named with its repro, ops that cannot be compared are named, ties round as ORT rounds."""

from __future__ import annotations

import numpy as np
import pytest

from genai_cli.backends.cpu import CpuBackend
from genai_cli.checks import op_random
from genai_cli.checks.op_battery import compare_op, ops_check
from genai_cli.checks.ops_run import random_check
from genai_cli.checks.target import run_one
from genai_cli.graph.ir import Node
from genai_cli.ops.registry import table


@pytest.fixture(scope="module")
def backend():
    return CpuBackend(threads=2)


def drawn(backend, run=run_one, seed=0):
    return op_random.random_ops(backend, run, seed, lambda _: None)


def test_random_calls_of_the_registry_agree(backend):
    check = random_check(drawn(backend, seed=1), "M")
    assert check.verdict == "pass", check.reason
    assert check.compared > 2500
    assert check.extra["host"] < check.compared / 2  # most are compiled kernels
    assert len(check.extra["worst_by_op"]) > 110
    assert "GroupQueryAttention" in " ".join(check.extra["not_compared"])  # named, not counted


def test_the_kernels_without_random_calls_are_these():
    newest = {opdef.key: opdef for opdef in table()}
    left = {key for key, opdef in newest.items() if "cpu" in opdef.kernels and op_random.maker_of(opdef) is None}
    others = {key for key in left if not key.startswith("genai::")}
    assert others <= {
        "CausalConvWithState", "com.microsoft::CausalConvWithState", "LinearAttention", "com.microsoft::LinearAttention",
        "com.microsoft::SimplifiedLayerNormalization",  # ONNX Runtime has it under ai.onnx only
        "com.microsoft::MoE", "com.microsoft::QMoE",
    }  # fmt: skip


@pytest.mark.parametrize("op", ["Softmax", "MatMul", "Transpose"])
def test_one_wrong_op_is_named_with_its_repro(backend, op):
    def wrong(model, feeds):
        made = run_one(model, feeds)
        return [a * np.float32(1.01) if a.dtype == np.float32 else a for a in made] if op.encode() in model else made

    check = random_check([r for r in drawn(backend, wrong) if r.op in (op, "Add", "Concat")], "M")
    assert check.verdict == "fail"
    assert check.worst["op"] == op
    assert op in check.reason
    assert check.extra["repro"].startswith("genai parity --ops M --seed 0  # " + op)


def test_nothing_compared_is_no_pass():
    assert ops_check([]).verdict == "not applicable"


def test_rows_that_tie_round_as_onnx_runtime_rounds(backend):
    """x * 127/max and x * (1 / (max / 127)) differ in a few of eight million values: those are asked for."""
    values = np.random.default_rng(0).standard_normal((1 << 18, 32)).astype(np.float32)
    top = np.abs(values).max(axis=1, keepdims=True)
    one, other = np.rint(values * (np.float32(127) / top)), np.rint(values * (np.float32(1) / (top / np.float32(127))))
    rows = values[(one != other).any(axis=1)]
    assert len(rows) > 3
    weights = np.random.default_rng(1).integers(0, 256, (9, 1, 16)).astype(np.uint8)
    inputs = [rows[None], weights, np.full((9, 1), 0.1, np.float32)]
    attrs = {"K": 32, "N": 9, "bits": 4, "block_size": 32, "accuracy_level": 4}
    node = Node("MatMulNBits", "com.microsoft", [], ["y"], attrs, "ties", 1)
    result = compare_op(backend, run_one, node, inputs, frozenset({1, 2}), "")
    assert (result.where, result.ok) == ("kernel", True), result.nmse
