"""What a traced name can hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from genai_cli.backends.base import Tensor


@dataclass
class Static:
    """Known while recording. `constant`: the same for every step; `tainted`: depends on the past length."""

    array: np.ndarray
    constant: bool = False
    tainted: bool = False


@dataclass
class Storage:
    """Arena memory shared by a value and its views; given back when the last of `names` has been read."""

    tensor: Tensor
    names: int = 0


@dataclass
class Dynamic:
    """Computed by every step. `tainted`: its shape depends on the past length."""

    tensor: Tensor
    tainted: bool = False
    storage: Storage | None = None


@dataclass
class Cached:
    """KV in a slot, in the axes of the graph's input; `shape` is what the graph would see, `length` its valid tokens.
    A present not yet `written` may be asked for its shape (masks are), never for its values."""

    slot: int
    shape: tuple[int, ...]
    dtype: np.dtype
    length: int
    written: bool = True


Value = Static | Dynamic | Cached
