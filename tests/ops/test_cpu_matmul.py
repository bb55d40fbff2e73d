"""Matrix products on the CPU: right against f64, and one order of sums: a row's bits depend on nothing but the row."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from genai_cli import _native
from genai_cli.backends.cpu import CpuBackend
from genai_cli.errors import GenaiError
from genai_cli.ops import lookup, run_reference

F32 = np.dtype(np.float32)
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
SHAPES = [
    (1, 1, 1),
    (1, 17, 33),
    (3, 64, 100),
    (5, 65, 31),
    (13, 1030, 70),
    (24, 100, 64),
    (40, 7, 129),
    (0, 8, 8),
    (2, 0, 5),
]


def call(
    isa: str, threads: int, kernel: str, inputs: list[np.ndarray | None], shape: tuple[int, ...], **attrs: Any
) -> np.ndarray:
    """Run a kernel with guard words around its output."""
    backend = CpuBackend(threads=threads, isa=isa)
    size = int(np.prod(shape))
    guarded = backend.empty((size + 32,), F32)
    backend.upload(guarded, np.full(size + 32, 123.25, np.float32))
    out = backend.alias(guarded, shape, F32, 16 * 4)
    tensors = [None if array is None else backend.constant(array) for array in inputs]
    recording = backend.record()
    recording.call(kernel, tensors, [out], attrs)
    first = backend.download(out)
    recording.replay()
    assert backend.download(out).tobytes() == first.tobytes()
    whole = backend.download(guarded)
    assert (whole[:16] == 123.25).all()
    assert (whole[16 + size :] == 123.25).all()
    return first


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_against_f64(isa: str, transposed: int, dtype: type) -> None:
    """f32 sums of K terms of order 1: relative error of about K * 2^-24 of the terms' size (Higham, eq. 3.5)."""
    rng = np.random.default_rng(1)
    for m, k, n in SHAPES:
        a = rng.standard_normal((m, k)).astype(np.float32)
        b = rng.standard_normal((n, k) if transposed else (k, n)).astype(dtype)
        wide = b.astype(np.float64).T if transposed else b.astype(np.float64)
        found = call(isa, 2, "MatMul", [a, b], (m, n), transB=transposed)
        bound = (k + 1) * 2.0**-24 * (np.abs(a.astype(np.float64)) @ np.abs(wide)) + 1e-30
        assert (np.abs(found - a.astype(np.float64) @ wide) <= bound).all()


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("transposed", [0, 1])
def test_a_row_is_the_same_alone_in_a_batch_and_on_any_number_of_threads(isa: str, transposed: int) -> None:
    rng = np.random.default_rng(2)
    for m, k, n in SHAPES:
        a = rng.standard_normal((m, k)).astype(np.float32)
        b = rng.standard_normal((n, k) if transposed else (k, n)).astype(np.float32)
        whole = call(isa, 2, "MatMul", [a, b], (m, n), transB=transposed)
        assert whole.tobytes() == call(isa, 1, "MatMul", [a, b], (m, n), transB=transposed).tobytes()
        for row in range(m):
            alone = call(isa, 1, "MatMul", [a[row : row + 1], b], (1, n), transB=transposed)
            assert alone.tobytes() == whole[row : row + 1].tobytes()


def test_weights_at_odd_addresses() -> None:
    """Mapped files align nothing."""
    rng = np.random.default_rng(3)
    raw = np.empty(4 * 40 * 24 + 3, np.uint8)
    b = raw[3:].view(np.float32).reshape(40, 24)
    b[...] = rng.standard_normal((40, 24))
    a = rng.standard_normal((3, 40)).astype(np.float32)
    for isa in _native.isas():
        plain = call(isa, 1, "MatMul", [a, b.copy()], (3, 24))
        assert call(isa, 1, "MatMul", [a, b], (3, 24)).tobytes() == plain.tobytes()


def quantized(rng: np.random.Generator, n: int, k: int, bits: int, block: int, zeros: bool) -> list[np.ndarray | None]:
    blocks = -(-k // block)
    levels = rng.integers(0, 256, (n, blocks, block * bits // 8), dtype=np.uint8)
    scales = (rng.standard_normal(n * blocks) * 0.1).astype(np.float32)  # negative ones too
    points = rng.integers(0, 256, n * (-(-blocks * bits // 8)), dtype=np.uint8) if zeros else None
    return [levels, scales, points]


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("level", [0, 4])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
def test_nbits_against_its_reference(isa: str, level: int, bits: int, zeros: bool) -> None:
    """With int8 activations both sum the same integers: NMSE 1e-12, the op limit of docs/parity.md; with f32, 1e-6^2."""
    rng = np.random.default_rng(4)
    opdef = lookup("MatMulNBits", "com.microsoft", 1)
    assert opdef is not None
    for m, k, n, block in [(1, 32, 1, 32), (3, 70, 17, 16), (5, 256, 48, 64), (9, 130, 33, 128), (2, 300, 20, 256)]:
        a = rng.standard_normal((m, k)).astype(np.float32)
        a[0, :16] = 0.0
        weights = quantized(rng, n, k, bits, block, zeros)
        attrs = {"K": k, "N": n, "bits": bits, "block_size": block, "accuracy_level": level}
        want = run_reference(opdef, [a, *weights], attrs)[0]
        assert want is not None
        found = call(isa, 2, "MatMulNBits", [a, *weights], (m, n), **attrs)
        error = ((found - want) ** 2).mean() / (want.astype(np.float64) ** 2).mean()
        assert error <= 1e-12
        for row in range(m):
            alone = call(isa, 1, "MatMulNBits", [a[row : row + 1], *weights], (1, n), **attrs)
            assert alone.tobytes() == found[row : row + 1].tobytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_prepacked": 1}, "weight_prepacked"),
        ({"bits": 3}, "bits is 3"),
        ({"N": 5}, "wanted"),
        ({"block_size": 8}, "block_size"),
    ],
)
def test_nbits_refuses_what_it_cannot_decode(change: dict[str, int], words: str) -> None:
    weights = quantized(np.random.default_rng(5), 4, 32, 4, 32, False)
    attrs = {"K": 32, "N": 4, "bits": 4, "block_size": 32} | change
    with pytest.raises(GenaiError, match=words):
        call(_native.isas()[-1], 1, "MatMulNBits", [np.ones((1, 32), np.float32), *weights], (1, 4), **attrs)


def test_two_steps_over_the_same_weights_share_one_packed_copy() -> None:
    """Prefill and decode recordings of one model: memory is taken once (seen by the resident size of many steps)."""
    import resource

    weights = quantized(np.random.default_rng(6), 4096, 1024, 4, 32, False)
    backend = CpuBackend(threads=1)
    tensors = [backend.constant(array) if array is not None else None for array in weights]
    attrs = {"K": 1024, "N": 4096, "bits": 4, "block_size": 32, "accuracy_level": 4}
    recording = backend.record()
    a, out = backend.constant(np.ones((1, 1024), np.float32)), backend.empty((1, 4096), F32)
    recording.call("MatMulNBits", [a, *tensors], [out], attrs)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(40):
        recording.call("MatMulNBits", [a, *tensors], [out], attrs)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 20_000, f"{grown} kB more for 40 steps over 2,600 kB of weights"
