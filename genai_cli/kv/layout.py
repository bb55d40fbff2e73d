"""Geometry of a decoder's KV: which (layer, K or V) components there are, and what one token of each weighs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

KvKind = Literal["key", "value"]


@dataclass(frozen=True)
class KvComponent:
    """K or V of one layer. One token of it is ``num_heads`` rows of ``head_dim`` scalars of ``dtype``."""

    layer: int  # the number in the graph's names; sparse numbering is legal in hybrids
    kind: KvKind
    num_heads: int  # H_kv
    head_dim: int  # D
    dtype: np.dtype
    window: int | None = None  # tokens this layer still attends to, itself included; None = all

    @property
    def row_bytes(self) -> int:
        """Bytes of one (head, position) row."""
        return self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        return self.num_heads * self.row_bytes


@dataclass(frozen=True)
class KvLayout:
    """All components in page order: layer by layer, K before V; component c = 2 * layer_index + (kind is value)."""

    components: tuple[KvComponent, ...]

    @property
    def bytes_per_token(self) -> int:
        return sum(component.bytes_per_token for component in self.components)

    @property
    def num_layers(self) -> int:
        return len({component.layer for component in self.components})


KvRows = list[np.ndarray]
"""One array [H_kv, n, D] per component, in layout order, in the component's dtype. May be a strided view
(head stride = capacity * D): its *strides* are the physical layout, its *shape* the logical length."""
