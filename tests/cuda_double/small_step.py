"""A small recorded step, eager and as a graph, on whatever driver is loaded: prints `same` when nothing moved."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from genai_cli.backends.cuda import CudaBackend, CudaOptions

HEADS, DIM, STEPS = 2, 16, 5


def run(capture: bool) -> np.ndarray:
    """Five tokens through a norm and attention over slots."""
    cache = Path(os.environ["CUDA_DOUBLE_CACHE"]) / "kernels"
    backend = CudaBackend(0, CudaOptions(code_type="ptx", cache_dir=cache, capture=capture))
    slots = [backend.kv_slot(HEADS, DIM, np.dtype(np.float16)) for _ in range(2)]
    random = np.random.default_rng(7)
    tokens = random.standard_normal((STEPS, 1, 1, HEADS * DIM)).astype(np.float16)
    gamma = backend.constant(np.ones(HEADS * DIM, np.float16))
    x, normed, y = (backend.empty((1, 1, HEADS * DIM), np.dtype(np.float16)) for _ in range(3))
    recording, seen = backend.record(), []
    attrs = {"num_heads": HEADS, "kv_num_heads": HEADS, "key_slot": slots[0].index, "value_slot": slots[1].index}
    backend.reserve(STEPS)
    for step in range(STEPS):
        backend.set_past_len(step)
        backend.upload(x, tokens[step])
        if step:
            recording.replay()
        else:
            recording.call("RMSNormalization", [x, gamma], [normed], {"epsilon": 1e-5})
            recording.call("genai.Attention", [normed, normed, x], [y], attrs)
        seen.append(backend.download(y))
    seen.append(np.asarray(backend.kv_view(slots[0], 0, STEPS)).reshape(-1))
    assert (backend.captures.captures > 0) == capture
    return np.concatenate([np.asarray(part).reshape(-1) for part in seen])


if __name__ == "__main__":
    eager, captured = run(False), run(True)
    print("same" if np.isfinite(eager).all() and eager.tobytes() == captured.tobytes() else "different")
