"""Bugs put in on purpose: each must be seen, by the double or by the comparison that stands guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cuda_double.bench import Bench
from genai_cli.errors import ExitCode, GenaiError

Make = Callable[..., Any]
F32 = np.dtype(np.float32)
HEADS, ROWS, DIM = 3, 5, 7  # pairwise distinct, more than one head: strides cannot be taken for each other


def rows_of(dtype: Any = np.float32) -> np.ndarray:
    """[H, n, D], every element distinct."""
    return np.arange(HEADS * ROWS * DIM).reshape(HEADS, ROWS, DIM).astype(dtype)


@pytest.fixture
def seeded(cuda_backend: Make) -> Any:
    """A backend with one slot that holds rows_of()."""
    backend = cuda_backend()
    slot = backend.kv_slot(HEADS, DIM, F32)
    backend.reserve(ROWS)
    backend.kv_write(slot, rows_of())
    backend.set_past_len(ROWS)
    return backend


def by_length(move: Callable[..., None]) -> Callable[..., None]:
    """The classic: heads are taken to lie `count` rows apart, where they lie `capacity` rows apart."""

    def moved(slot: Any, to: int, to_stride: int, source: int, source_stride: int, count: int) -> None:
        move(slot, to, count, source, count, count)

    return moved


def test_the_honest_way_round(seeded: Any) -> None:
    np.testing.assert_array_equal(seeded.kv_view(seeded._slots[0], 0, ROWS), rows_of())
    np.testing.assert_array_equal(seeded.kv_view(seeded._slots[0], 1, 3), rows_of()[:, 1:3])


def test_read_by_length(seeded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeded, "_move_rows", by_length(seeded._move_rows))
    assert not np.array_equal(seeded.kv_view(seeded._slots[0], 0, ROWS), rows_of())


def test_seed_by_length(cuda_backend: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = cuda_backend()
    slot = backend.kv_slot(HEADS, DIM, F32)
    backend.reserve(ROWS)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_move_rows", by_length(backend._move_rows))
        backend.kv_write(slot, rows_of())
    assert not np.array_equal(backend.kv_view(slot, 0, ROWS), rows_of())


def test_read_before_the_wait(seeded: Any, double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory is poisoned when a copy into it is queued: the host sees NaN, not the last step's bytes."""
    monkeypatch.setattr(seeded.device, "wait", lambda: None)
    assert np.isnan(seeded.kv_view(seeded._slots[0], 0, ROWS)).all()


def test_row_beyond_the_buffer(seeded: Any, double: Any) -> None:
    slot = seeded._slots[0]
    end = slot.address + slot.nbytes(slot.capacity)
    seeded._move_rows(slot, slot.address, slot.capacity, end - slot.row_bytes, 2, 2)
    with pytest.raises(GenaiError) as caught:
        seeded.synchronize()
    assert "past the end" in double.reports()
    double.clear_error()
    assert caught.value.exit_code is ExitCode.INTERNAL
    assert "`move_rows`" in caught.value.message


def test_use_after_free(seeded: Any, double: Any) -> None:
    slot, gone = seeded._slots[0], seeded.constant(rows_of())
    address = gone.address
    del gone
    seeded._move_rows(slot, slot.address, slot.capacity, address, ROWS, ROWS)
    with pytest.raises(GenaiError):
        seeded.synchronize()
    assert "use after free" in double.reports()
    double.clear_error()


def test_fresh_memory_is_not_zero(cuda_backend: Make, double: Any) -> None:
    backend = cuda_backend()
    assert np.isnan(backend.download(backend.empty((4,), F32))).all()


SUM = """
template <bool WAIT> __global__ void block_sum(const float* x, float* y) {
  __shared__ float s[128];
  s[threadIdx.x] = x[threadIdx.x];
  for (int step = 64; step; step >>= 1) {
    if (WAIT) __syncthreads();
    if (threadIdx.x < step) s[threadIdx.x] += s[threadIdx.x + step];
  }
  if (threadIdx.x == 0) y[0] = s[0];
}
"""


@pytest.mark.parametrize("wait", [True, False])
def test_missing_syncthreads(wait: bool, cuda_backend: Make, double: Any) -> None:
    bench = Bench(cuda_backend())
    x, y = bench.tensor(np.ones(128, np.float32)), bench.backend.empty((1,), F32)
    kernel = bench.kernel(SUM, f"block_sum<{'true' if wait else 'false'}>")
    bench.launch(kernel, np.uint64(x.address), np.uint64(y.address), block=128)
    assert (bench.backend.download(y)[0] == 128) == wait


@pytest.mark.parametrize("wait", [True, False])
def test_missing_wait_between_streams(wait: bool, cuda_backend: Make, double: Any) -> None:
    bench = Bench(cuda_backend())
    other = bench.device.core.create_stream()
    kernel = bench.kernel('extern "C" __global__ void add(float* x, float* y) { y[0] = x[0] + 1.f; }', "add")
    a, b, c = (bench.tensor(np.zeros(1, np.float32)) for _ in range(3))
    bench.backend.synchronize()
    bench.launch(kernel, np.uint64(a.address), np.uint64(b.address))
    if wait:
        other.wait(bench.device.stream)
    bench.launch(kernel, np.uint64(b.address), np.uint64(c.address), stream=other)
    other.sync()
    assert (bench.backend.download(c)[0] == 2) == wait


def test_f16_bits_read_as_numbers(cuda_backend: Make) -> None:
    """1.0 is 0x3C00: taken for an integer it is 15360. The op cases' comparison must not let that pass."""
    backend = cuda_backend()
    x = np.array([1.0, -2.0], np.float16)
    wide = backend.empty((2,), F32)
    backend.record().call("Cast", [backend.constant(x.view(np.uint16))], [wide], {"to": 1})
    np.testing.assert_array_equal(backend.download(wide), [0x3C00, 0xC000])
    backend.record().call("Cast", [backend.constant(x)], [wide], {"to": 1})
    np.testing.assert_array_equal(backend.download(wide), [1.0, -2.0])


def test_staging_reused_too_early(cuda_backend: Make, double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without reservation every upload goes through the same bytes: the first copy carries the second's."""
    backend = cuda_backend()
    backend.synchronize()
    monkeypatch.setattr(backend.device, "_reserve", lambda nbytes: 0)
    first, second = (backend.constant(np.full(4, value, np.float32)) for value in (1, 2))
    monkeypatch.undo()
    assert backend.download(first)[0] == backend.download(second)[0] == 2
