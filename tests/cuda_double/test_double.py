"""The double itself: what PTX computes, when streams run, and what it says about a wrong program."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cuda_double.bench import WARP, Bench

Make = Callable[..., Any]


@pytest.fixture
def bench(cuda_backend: Make) -> Bench:
    return Bench(cuda_backend())


MATH = """
__global__ void math(const float* x, float* y) {
  int i = threadIdx.x;
  float v = x[i];
  float all[12] = {expf(v), logf(v), powf(v, 1.7f), tanhf(v), erff(v), sinf(v * 1000.f), cosf(v), 1.f / sqrtf(v),
                   fmodf(v, .7f), log1pf(v), rintf(v), v / 3.f};
  for (int k = 0; k < 12; ++k) y[i * 12 + k] = all[k];
}
"""


def test_math_is_libm(bench: Bench) -> None:
    from math import erf

    x = np.linspace(0.05, 9, WARP, dtype=np.float32)
    given, out = bench.tensor(x), bench.backend.empty((WARP, 12), np.dtype(np.float32))
    bench.launch(bench.kernel(MATH, "math"), np.uint64(given.address), np.uint64(out.address))
    d = x.astype(np.float64)
    thousandfold = (x * np.float32(1000)).astype(np.float64)
    columns = (
        np.exp(d), np.log(d), d**1.7, np.tanh(d), np.vectorize(erf)(d), np.sin(thousandfold), np.cos(d), d**-0.5,
        np.fmod(x, np.float32(0.7)), np.log1p(d), np.rint(d), d / 3,
    )  # fmt: skip
    # CUDA's own bound for these functions is a few ulp of f32
    np.testing.assert_allclose(bench.backend.download(out), np.stack(columns, 1), rtol=3e-6, atol=2e-6)


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_every_16_bit_pattern_widens_and_comes_back(kind: Any, cuda_backend: Make) -> None:
    """Through the product's Cast: all 65,536 patterns to f32 and back; NaN stays NaN."""
    backend = cuda_backend()
    narrow = np.arange(1 << 16, dtype=np.uint16).view(kind)
    wide = backend.empty(narrow.shape, np.dtype(np.float32))
    again = backend.empty(narrow.shape, narrow.dtype)
    recording = backend.record()
    recording.call("Cast", [backend.constant(narrow)], [wide], {"to": 1})
    recording.call("Cast", [wide], [again], {"to": 10})
    expected = narrow.astype(np.float32)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(backend.download(wide)[~nan], expected[~nan])
    back = backend.download(again)
    np.testing.assert_array_equal(back.view(np.uint16)[~nan], narrow.view(np.uint16)[~nan])
    assert np.isnan(back.astype(np.float32)[nan]).all()


WARPS = """
__global__ void warps(int* y) {
  int i = threadIdx.x, lane = i & 31;
  int up = __shfl_up_sync(~0u, lane, 3), down = __shfl_down_sync(~0u, lane, 5), fly = __shfl_xor_sync(~0u, lane, 9);
  unsigned odd = __ballot_sync(~0u, lane & 1);
  int half = lane < 16 ? __shfl_xor_sync(0xffffu, lane, 4) : -1;
  y[i] = up + 100 * down + 10000 * fly + 1000000 * __popc(odd) + (half == (lane ^ 4) || half == -1 ? 0 : 1 << 30);
  if (__syncthreads_count(i == 7) != 1) y[i] = -1;
}
"""


def test_warp_intrinsics(bench: Bench) -> None:
    out = bench.backend.empty((64,), np.dtype(np.int32))
    bench.launch(bench.kernel(WARPS, "warps"), np.uint64(out.address), block=64)
    lane = np.arange(64) % 32
    up, down = np.where(lane >= 3, lane - 3, lane), np.where(lane < 27, lane + 5, lane)
    expected = up + 100 * down + 10000 * (lane ^ 9) + 1000000 * 16
    np.testing.assert_array_equal(bench.backend.download(out), expected)


FAULTS = """
extern "C" __global__ void past_the_end(float* x, int n) { x[n] = 1.f; }
extern "C" __global__ void misaligned(float* x) { *(float2*)(x + 1) = make_float2(0.f, 0.f); }
extern "C" __global__ void shared_too_small(float* x, int n) { extern __shared__ float s[]; s[threadIdx.x + n] = x[0]; }
extern "C" __global__ void divergent(float* x) {
  if (threadIdx.x < 8) __syncthreads();
  else { x[0] = 1.f; __syncthreads(); }
}
extern "C" __global__ void stuck(float* x) {
  if (threadIdx.x) x[0] = __shfl_xor_sync(~0u, 1.f, 1);
  else __syncthreads();
}
extern "C" __global__ void trapped(float* x) { __trap(); }
"""


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("past_the_end", (np.int32(8),), "3 bytes past the end"),
        ("misaligned", (), "misaligned address"),
        ("shared_too_small", (np.int32(9),), "shared memory accessed past its end"),
        ("divergent", (), "divergent __syncthreads"),
        ("stuck", (), "deadlock"),
        ("trapped", (), "trap"),
    ],
)
def test_a_faulty_kernel_is_named(name: str, args: tuple[Any, ...], said: str, bench: Bench, double: Any) -> None:
    from cuda.core._utils.cuda_utils import CUDAError

    x = bench.tensor(np.zeros(8, np.float32))
    bench.launch(bench.kernel(FAULTS, name), np.uint64(x.address), *args, shared=128)
    with pytest.raises(CUDAError):
        bench.device.stream.sync()
    told = double.reports()
    double.clear_error()
    assert said in told
    assert f"kernel {name} block (0,0,0) thread" in told or name in ("stuck",)


def test_pageable_memory_is_refused(bench: Bench, double: Any) -> None:
    from cuda.bindings import driver

    x, host = bench.tensor(np.zeros(8, np.float32)), np.empty(8, np.float32)
    (status,) = driver.cuMemcpyAsync(host.ctypes.data, x.address, 32, bench.device.stream.handle)
    assert int(status) != 0
    assert "pageable" in double.reports()


def test_leaks_are_counted(double: Any, cuda_backend: Make) -> None:
    backend = cuda_backend()
    backend.synchronize()
    before = double.leaks()[0]
    kept = backend.constant(np.zeros(100, np.uint8))
    count, text = double.leaks()
    assert count == before + 1
    assert "100 bytes" in text
    del kept
    assert double.leaks()[0] == before


@pytest.mark.parametrize(("mode", "seed"), [("lazy", "1"), ("lazy", "2"), ("thread", "1")])
def test_a_step_gives_the_same_in_every_order(mode: str, seed: str, double: Any) -> None:
    """A process of its own: the mode is read once."""
    script = Path(__file__).with_name("small_step.py")
    environment = {**os.environ, **double.environment(), "CUDA_DOUBLE_MODE": mode, "CUDA_DOUBLE_SEED": seed}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "same"
