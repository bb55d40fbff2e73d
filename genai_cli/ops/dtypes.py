"""ONNX tensor types as numpy dtypes. 4-bit types are unpacked, one element a byte (ml_dtypes)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

DType = np.dtype[Any]

BFLOAT16: DType = np.dtype(ml_dtypes.bfloat16)
FLOAT16: DType = np.dtype(np.float16)

# TensorProto.DataType of the ONNX specification; STRING (8) and the complex types are not tensors here.
ONNX_DTYPES: dict[int, DType] = {
    1: np.dtype(np.float32),
    2: np.dtype(np.uint8),
    3: np.dtype(np.int8),
    4: np.dtype(np.uint16),
    5: np.dtype(np.int16),
    6: np.dtype(np.int32),
    7: np.dtype(np.int64),
    9: np.dtype(np.bool_),
    10: FLOAT16,
    11: np.dtype(np.float64),
    12: np.dtype(np.uint32),
    13: np.dtype(np.uint64),
    16: BFLOAT16,
    17: np.dtype(ml_dtypes.float8_e4m3fn),
    18: np.dtype(ml_dtypes.float8_e4m3fnuz),
    19: np.dtype(ml_dtypes.float8_e5m2),
    20: np.dtype(ml_dtypes.float8_e5m2fnuz),
    21: np.dtype(ml_dtypes.uint4),
    22: np.dtype(ml_dtypes.int4),
    23: np.dtype(ml_dtypes.float4_e2m1fn),
    24: np.dtype(ml_dtypes.float8_e8m0fnu),
    25: np.dtype(ml_dtypes.uint2),
    26: np.dtype(ml_dtypes.int2),
}

FLOAT8 = frozenset(ONNX_DTYPES[code] for code in (17, 18, 19, 20))
SMALL_FLOAT = FLOAT8 | {ONNX_DTYPES[23], ONNX_DTYPES[24]}
SMALL_INT = frozenset(ONNX_DTYPES[code] for code in (21, 22, 25, 26))
_16_BIT = frozenset((FLOAT16, BFLOAT16))
_FLOATS = frozenset((np.dtype(np.float32), np.dtype(np.float64))) | _16_BIT | SMALL_FLOAT


def is_16_bit(dtype: DType) -> bool:
    """float16 or bfloat16: stored narrow, computed in f32."""
    return dtype in _16_BIT


def is_float(dtype: DType) -> bool:
    """Any floating type, the ml_dtypes ones included (numpy calls those kind `V`)."""
    return dtype in _FLOATS
