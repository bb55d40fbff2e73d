"""One decode step of a tiny layer, driven token by token."""

from __future__ import annotations

from typing import Any

import numpy as np

F32 = np.dtype(np.float32)


class Step:
    """One decode step of a tiny layer over two slots, driven token by token."""

    heads, dim = 2, 8

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.slots = [backend.kv_slot(self.heads, self.dim, F32) for _ in range(2)]
        width = self.heads * self.dim
        self.x, self.normed, self.y = (backend.empty((1, 1, width), F32) for _ in range(3))
        self.gamma = backend.constant(np.ones(width, np.float32))
        self.recording: Any = None

    def token(self, position: int) -> bytes:
        """Feed one token at a position; the step's output, bit by bit."""
        backend, width = self.backend, self.heads * self.dim
        backend.reserve(position + 1)
        backend.set_past_len(position)
        value = np.random.default_rng(position).standard_normal((1, 1, width)).astype(np.float32)
        backend.upload(self.x, value)
        if self.recording is None:
            self._record()
        else:
            self.recording.replay()
        return bytes(backend.download(self.y))

    def _record(self) -> None:
        attrs = {"num_heads": self.heads, "kv_num_heads": self.heads, "key_slot": 0, "value_slot": 1}
        self.recording = self.backend.record()
        self.recording.call("RMSNormalization", [self.x, self.gamma], [self.normed], {})
        self.recording.call("genai.Attention", [self.normed, self.normed, self.x], [self.y], attrs)

    def present(self, length: int) -> bytes:
        return b"".join(bytes(np.ascontiguousarray(self.backend.kv_view(slot, 0, length))) for slot in self.slots)


def fill_to(step: Step, position: int) -> None:
    """Seed the slots with fixed rows up to a position, growing on the way."""
    step.backend.reserve(position)
    held = step.backend.past_len
    if position <= held:
        return
    for slot in step.slots:
        rows = np.random.default_rng(slot.index).standard_normal((step.heads, position, step.dim)).astype(np.float32)
        step.backend.kv_write(slot, rows[:, held:position], start=held)
    step.backend.set_past_len(position)
