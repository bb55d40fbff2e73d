"""Frozen dataclasses -> JSON. NaN and infinities are strings, because JSON has no such numbers."""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Dataclasses, numpy scalars and enums as plain JSON values; `class_` becomes `class`; `schema` comes first."""
    if is_dataclass(value) and not isinstance(value, type):
        made = {field.name.rstrip("_"): plain(getattr(value, field.name)) for field in fields(value)}
        return {"schema": made.pop("schema"), **made} if "schema" in made else made
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, np.generic):
        return plain(value.item())
    return _number(value) if isinstance(value, float) else value


def _number(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    return ("Infinity" if value > 0 else "-Infinity") if math.isinf(value) else value


def dumps(document: Any) -> str:
    """One JSON document, indented, ending in a newline."""
    return json.dumps(plain(document), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
