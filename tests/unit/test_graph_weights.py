"""Weights are read from the file as ONNX means them: every dtype, raw bytes or typed fields, packed four-bit integers."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from genai_cli.errors import GenaiError
from genai_cli.graph.loader import graph_from_bytes


def _graph(tensor: TensorProto):  # type: ignore[no-untyped-def]
    node = helper.make_node("Identity", [tensor.name], ["y"])
    output = helper.make_tensor_value_info("y", tensor.data_type, list(tensor.dims))
    graph = helper.make_graph([node], "g", [], [output], [tensor])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    return graph_from_bytes(model.SerializeToString(), Path())


def _read(tensor: TensorProto) -> np.ndarray:
    return _graph(tensor).initializers[tensor.name].array()


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, np.float64, np.int8, np.uint8, np.int32, np.int64, np.bool_, ml_dtypes.bfloat16]
)
@pytest.mark.parametrize("raw", [True, False])
def test_every_dtype_as_raw_bytes_and_as_fields(dtype: type, raw: bool) -> None:
    """bf16 in raw bytes was ignored by one reader; typed fields hold 16-bit floats as integers."""
    values = np.array([[1.5, -2.25, 0.0], [100.0, -0.5, 3.0]]).astype(dtype)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    data = values.tobytes() if raw else values.astype(np.float64).reshape(-1).tolist()
    tensor = helper.make_tensor("w", kind, values.shape, data, raw=raw)
    found = _read(tensor)
    assert found.dtype == np.dtype(dtype)
    assert found.tobytes() == values.tobytes() == numpy_helper.to_array(tensor).astype(dtype).tobytes()


@pytest.mark.parametrize(("kind", "low", "high"), [(TensorProto.INT4, -8, 7), (TensorProto.UINT4, 0, 15)])
@pytest.mark.parametrize("count", [1, 2, 7, 8, 15])
def test_four_bit_integers_of_odd_counts(kind: int, low: int, high: int, count: int) -> None:
    """Two to a byte, the first in the low half; negative values keep their sign, the last half byte is no value."""
    values = np.resize(np.arange(low, high + 1), count)
    tensor = helper.make_tensor("w", kind, (count,), values.tolist())
    assert len(tensor.raw_data or tensor.int32_data) >= 1
    assert _read(tensor).astype(int).tolist() == values.tolist()


def test_bytes_that_do_not_fit_the_shape_are_refused() -> None:
    tensor = TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[2, 3], raw_data=b"\0" * 20)
    with pytest.raises(GenaiError, match=r"`w`.*20|24"):
        _read(tensor)
