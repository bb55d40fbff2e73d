"""ONNX Runtime on the CPU as the judge of ops ONNX does not specify: one-node models."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from cases import Array, Case
from onnx import helper, numpy_helper

from genai_cli.ops.dtypes import BFLOAT16, ONNX_DTYPES, is_16_bit

CODES = {kind: code for code, kind in ONNX_DTYPES.items()}
AI_ONNX = 21  # what the contrib ops are given beside them; any ORT of the last two years runs it


def model_of(case: Case, output_kinds: list[int]) -> onnx.ModelProto:
    """A model of one node; weights are initializers."""
    names = [f"x{i}" if array is not None else "" for i, array in enumerate(case.inputs)]
    outs = [f"y{i}" if wanted else "" for i, wanted in enumerate(case.outputs)]
    attrs = {name: value for name, value in case.attrs.items() if value is not None}
    node = helper.make_node(case.op, names, outs, domain=case.domain, **attrs)
    graph = helper.make_graph(
        [node],
        "one_node",
        [
            helper.make_tensor_value_info(names[i], CODES[array.dtype], array.shape)
            for i, array in enumerate(case.inputs)
            if array is not None and i not in case.constants
        ],
        [helper.make_tensor_value_info(n, kind, None) for n, kind in zip(outs, output_kinds, strict=True) if n],
        [numpy_helper.from_array(case.inputs[i], names[i]) for i in case.constants if case.inputs[i] is not None],
    )
    opsets = [helper.make_opsetid("", case.opset if not case.domain else AI_ONNX)]
    if case.domain:
        opsets.append(helper.make_opsetid(case.domain, 1))
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@cache
def options() -> ort.SessionOptions:
    """One thread, as written: no optimisation may replace the op under test."""
    made = ort.SessionOptions()
    made.intra_op_num_threads = 1
    made.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    made.log_severity_level = 4
    return made


def run_ort(case: Case, output_dtypes: list[Any]) -> list[Array | None]:
    """ORT's outputs, in the node's order."""
    kinds = [CODES[np.dtype(kind)] for kind in output_dtypes]
    model = model_of(case, kinds)
    session = ort.InferenceSession(model.SerializeToString(), options(), providers=["CPUExecutionProvider"])
    feeds = {
        f"x{i}": np.ascontiguousarray(a) for i, a in enumerate(case.inputs) if a is not None and i not in case.constants
    }
    found = iter(session.run(None, feeds))
    return [next(found) if wanted else None for wanted in case.outputs]


def widened(case: Case) -> Case:
    """The same case in f32: what judges 16-bit cases (ORT has no bf16 kernels and rounds f16 differently)."""
    inputs = tuple(a.astype(np.float32) if a is not None and is_16_bit(a.dtype) else a for a in case.inputs)
    return replace(case, inputs=inputs)


def judge(case: Case, outputs: list[Array | None]) -> list[Array | None]:
    """ORT's answer in the dtypes of `outputs` (the code under test's): copies as they are, the rest in f32."""
    opdef = case.opdef
    if opdef is not None and opdef.raw and not case.domain:
        kinds = [np.float32 if o is None else _copied(o).dtype for o in outputs]
        found = run_ort(replace(case, inputs=tuple(None if a is None else _copied(a) for a in case.inputs)), kinds)
        return [a if a is None or o is None else a.view(o.dtype) for a, o in zip(found, outputs, strict=True)]
    wide = widened(case.judged_as or case)
    kinds = [np.float32 if o is None or is_16_bit(o.dtype) else o.dtype for o in outputs]
    return [
        None if a is None or o is None else a.astype(o.dtype) if is_16_bit(o.dtype) else a
        for a, o in zip(run_ort(wide, kinds), outputs, strict=True)
    ]


def _copied(array: Array) -> Array:
    """bf16 as f16 of the same bits: ORT copies few tensors of the former."""
    return array.view(np.float16) if array.dtype == BFLOAT16 else array
