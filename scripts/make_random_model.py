"""Decoders of real sizes with random weights, as .onnx files: what a machine without a network measures speed on.

    python scripts/make_random_model.py --size 1.5b --precision int4 FOLDER

The graph is the demo model's, as the exporter writes it. Random weights say nothing, but take their time.
"""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path

import numpy as np
from onnx import TensorProto

try:
    import gguf  # noqa: F401
except ImportError:  # only the demo model's graph is wanted here, not the reader of its weights
    sys.modules["gguf"] = types.ModuleType("gguf")

sys.path.insert(0, str(Path(__file__).resolve().parent))
from make_demo_model import BLOCK, FLOATS, PRECISIONS, DataFile, Decoder, Geometry

SIZES = {
    "0.1b": Geometry(30, 9, 3, 64, 576, 1536, 49152, 2048, 1e4, 1e-5),
    "1.5b": Geometry(28, 12, 2, 128, 1536, 8960, 151936, 2048, 1e6, 1e-6),
}
LEVELS_STD = {4: 4.61, 8: 73.9}  # of a uniform level: its range / sqrt(12)
SAMPLE = 1 << 20  # distinct random numbers; larger weights repeat them


class RandomSource:
    """Weights by name, as the reader of the demo model gives them: f32 [N, K], rows of about unit length."""

    def __init__(self, geo: Geometry, *, packed: bool) -> None:
        self._geo, self._packed = geo, packed
        self._sample = np.random.default_rng(0).standard_normal(SAMPLE).astype(np.float32)

    def weight(self, name: str) -> np.ndarray:
        """Ones for norms. When the decoder packs weights by itself, their shapes are all that counts."""
        shape = self._shape(name.split(".")[-2])
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        if self._packed:
            return np.broadcast_to(np.zeros((), np.float32), shape)
        return np.resize(self._sample, shape) * np.float32(shape[1] ** -0.5)

    def _shape(self, part: str) -> tuple[int, ...]:
        geo = self._geo
        heads, kv_heads = geo.num_heads * geo.head_dim, geo.num_kv_heads * geo.head_dim
        return {
            "token_embd": (geo.vocab, geo.hidden), "attn_q": (heads, geo.hidden), "attn_k": (kv_heads, geo.hidden),
            "attn_v": (kv_heads, geo.hidden), "attn_output": (geo.hidden, heads),
            "ffn_gate": (geo.intermediate, geo.hidden), "ffn_up": (geo.intermediate, geo.hidden),
            "ffn_down": (geo.hidden, geo.intermediate),
        }.get(part, (geo.hidden,))  # fmt: skip


class RandomDecoder(Decoder):
    """Packed weights are random bytes at once, not quantized floats."""

    def packed(self, name: str, weight: np.ndarray) -> None:
        """Levels of all values, and one scale that gives rows of about unit length."""
        rows, width = weight.shape
        shape = (rows, width // BLOCK, BLOCK * self.bits // 8)
        levels = np.resize(np.random.default_rng(1).integers(0, 256, SAMPLE, np.uint8), shape)
        scale = np.float32(width**-0.5 / LEVELS_STD[self.bits])
        self.data.add(f"{name}.weight_Q{self.bits}", TensorProto.UINT8, levels)
        self.data.add(f"{name}.weight_scales", TensorProto.FLOAT, np.full(shape[:2], scale, np.float32))


def make(size: str, precision: str, folder: Path) -> Path:
    """The .onnx file, written to `folder` with its data beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    geo = SIZES[size]
    data = DataFile(folder / "model.onnx.data")
    source = RandomSource(geo, packed=precision not in FLOATS)
    model = RandomDecoder(source, geo, precision, data).build()  # type: ignore[arg-type]  # reads like the GGUF source
    data.close()
    file = folder / "model.onnx"
    file.write_bytes(model.SerializeToString(deterministic=True))
    return file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=sorted(SIZES), default="0.1b")
    parser.add_argument("--precision", choices=PRECISIONS, default="int4")
    given = parser.parse_args()
    print(make(given.size, given.precision, given.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
