"""What the op cases cannot show: accuracy, every 16-bit pattern, sizes around the vector width, invariance."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from cpu import FLOATS, ISAS, Array, Guarded, call, compute, same_bits

from genai_cli.backends.cpu import CpuBackend
from genai_cli.errors import GenaiError

F32 = np.dtype(np.float32)
SIZES = [0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 511, 513]

# Largest error in units of the last place, against f64: 0.5 is the nearest float; sigmoid rounds twice after e^x.
ACCURACY: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "Exp": (np.exp, 1.2),
    "Sigmoid": (lambda x: 1 / (1 + np.exp(-x)), 2.5),
    "Tanh": (np.tanh, 0.51),
    "Erf": (np.vectorize(math.erf), 0.51),
    "Sin": (np.sin, 0.51),
    "Softplus": (lambda x: np.logaddexp(0, x), 0.51),
    "Sqrt": (lambda x: np.sqrt(np.abs(x)), 0.5001),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", ACCURACY)
def test_accuracy(kernel: str, isa: str) -> None:
    truth, limit = ACCURACY[kernel]
    rng = np.random.default_rng(3)
    x = np.concatenate([rng.uniform(-85, 88, 40001), rng.normal(size=20000), rng.uniform(-1e-3, 1e-3, 999)]).astype(F32)
    x = np.abs(x) if kernel == "Sqrt" else x
    got, want = compute(CpuBackend(isa=isa, threads=1), kernel, [x], (x.shape, F32)), truth(x.astype(np.float64))
    assert (np.abs(got - want) / np.spacing(np.abs(want).astype(F32))).max() <= limit


@pytest.mark.parametrize("isa", ISAS)
def test_special_values(isa: str) -> None:
    on = CpuBackend(isa=isa, threads=1)
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 89.0, -105.0], F32)
    want = {
        "Exp": [np.nan, np.inf, 0, 1, 1, np.inf, 0],
        "Sigmoid": [np.nan, 1, 0, 0.5, 0.5, 1, 0],
        "Tanh": [np.nan, 1, -1, 0.0, -0.0, 1, -1],
        "Relu": [np.nan, np.inf, 0, 0, -0.0, 89, 0],
        "Softplus": [np.nan, np.inf, 0, math.log(2), math.log(2), 89, 0],
    }
    for kernel, values in want.items():
        got = compute(on, kernel, [x], (x.shape, F32))
        np.testing.assert_allclose(got, np.array(values, F32), rtol=1e-6, atol=1e-44, err_msg=kernel)
        assert np.array_equal(np.signbit(got[3:5]), np.signbit(np.array(values[3:5]))), kernel


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_every_16_bit_pattern(dtype: np.dtype, isa: str) -> None:
    """Widening is exact and narrowing back gives the same bits; NaNs stay NaNs."""
    on = CpuBackend(isa=isa, threads=1)
    patterns = np.arange(65536, dtype=np.uint16).view(dtype)
    wide = compute(on, "Cast", [patterns], (patterns.shape, F32))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(wide, patterns.astype(F32))
    back = compute(on, "Cast", [wide], (patterns.shape, dtype))
    finite = ~np.isnan(wide)
    assert finite.sum() == {"float16": 63490, "bfloat16": 65282}[dtype.name]
    assert same_bits(back[finite], patterns[finite])
    assert np.isnan(back[~finite].astype(F32)).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_narrowing_rounds_to_even(dtype: np.dtype, isa: str) -> None:
    on = CpuBackend(isa=isa, threads=1)
    base = np.arange(65536, dtype=np.uint32) << 16
    random = np.random.default_rng(5).integers(0, 2**32, 100_000, dtype=np.uint32)
    x = np.concatenate([base | 0x8000, base | 0x7FFF, base | 0x1000, base | 0x3000, random]).view(F32)
    got = compute(on, "Cast", [x], (x.shape, dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        want = x.astype(dtype)
    assert same_bits(got[~np.isnan(x)], want[~np.isnan(x)])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", SIZES)
def test_sizes_around_the_vector_width(n: int, isa: str) -> None:
    """An element's value does not depend on whether it lies in a full vector or in the rest."""
    on = CpuBackend(isa=isa, threads=1)
    rng = np.random.default_rng(n)
    for dtype in FLOATS:
        x, y = (rng.normal(size=n).astype(dtype) for _ in range(2))
        assert same_bits(compute(on, "Mul", [x, y], (x.shape, dtype)), x * y)
        for kernel in ("Exp", "Tanh", "Sigmoid", "Gelu"):
            whole = compute(on, kernel, [x], (x.shape, dtype))
            single = [compute(on, kernel, [x[i : i + 1]], ((1,), dtype)) for i in range(n if n < 65 else 9)]
            assert same_bits(whole[: len(single)], np.concatenate([*single, x[:0]]))


@pytest.mark.parametrize("isa", ISAS)
def test_rows_and_threads_do_not_matter(isa: str) -> None:
    """Norms, softmax, reductions: many rows on three threads, and each row alone on one."""
    many, one = CpuBackend(isa=isa, threads=3), CpuBackend(isa=isa, threads=1)
    rng = np.random.default_rng(11)
    for dtype in FLOATS:
        x, scale = rng.normal(size=(300, 257)).astype(dtype), rng.normal(size=257).astype(dtype)
        for kernel, more in (
            ("SimplifiedLayerNormalization", [scale]),
            ("LayerNormalization", [scale]),
            ("Softmax", []),
        ):
            whole = compute(many, kernel, [x, *more], (x.shape, dtype), axis=-1)
            rows = [compute(one, kernel, [x[i : i + 1], *more], ((1, 257), dtype), axis=-1) for i in range(0, 300, 37)]
            assert same_bits(whole[::37], np.concatenate(rows)), kernel


@pytest.mark.parametrize("isa", ISAS)
def test_recurrent_layers_do_not_depend_on_chunks(isa: str) -> None:
    """All tokens at once, and one by one with the state updated in place: the same bits (f32 state)."""
    rng, tokens, heads, d_k, d_v = np.random.default_rng(4), 5, 3, 20, 70
    on = CpuBackend(isa=isa, threads=3)
    x, weight = rng.normal(size=(1, 9, tokens)).astype(F32), rng.normal(size=(9, 1, 4)).astype(F32)
    q, k = (rng.normal(size=(1, tokens, heads * d_k)).astype(F32) for _ in range(2))
    v, decay = rng.normal(size=(1, tokens, heads * d_v)).astype(F32), rng.normal(size=(1, tokens, heads)).astype(F32)
    beta, linear = rng.random((1, tokens, heads)).astype(F32), {"q_num_heads": heads, "kv_num_heads": heads}

    def conv(begin: int, end: int, state: Guarded) -> Array:
        out = Guarded((1, 9, end - begin), F32)
        inputs = [np.ascontiguousarray(x[:, :, begin:end]), weight, None, state.value]
        call(on, "CausalConvWithState", inputs, [out, state], {"activation": "silu"})
        return out.value

    def attention(begin: int, end: int, state: Guarded) -> Array:
        out = Guarded((1, end - begin, heads * d_v), F32)
        rows = [a[:, begin:end] for a in (q, k, v)]
        call(on, "LinearAttention", [*rows, state.value, decay[:, begin:end], beta[:, begin:end]], [out, state], linear)
        return out.value

    for run, shape, axis in ((conv, (1, 9, 3), 2), (attention, (1, heads, d_k, d_v), 1)):
        states = [Guarded(shape, F32) for _ in range(2)]
        for state in states:
            state.value[...] = 0
        whole = run(0, tokens, states[0])
        assert same_bits(whole, np.concatenate([run(t, t + 1, states[1]) for t in range(tokens)], axis))
        assert same_bits(states[0].value, states[1].value)
        assert np.abs(states[0].value).min() > 0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_silu_mul_rounds_like_the_ops_it_replaces(dtype: np.dtype) -> None:
    on, rng = CpuBackend(threads=2), np.random.default_rng(2)
    gate, up = ((4 * rng.normal(size=(3, 1001))).astype(dtype) for _ in range(2))
    spec = (gate.shape, dtype)
    turned = compute(on, "Sigmoid", [gate], spec)
    want = compute(on, "Mul", [compute(on, "Mul", [gate, turned], spec), up], spec)
    assert same_bits(compute(on, "genai.SiluMul", [gate, up], spec), want)


def test_gather_refuses_indices_outside() -> None:
    on, table = CpuBackend(threads=2), np.arange(12, dtype=F32).reshape(4, 3)
    got = compute(on, "Gather", [table, np.array([3, -4], np.int64)], ((2, 3), F32), axis=0)
    np.testing.assert_array_equal(got, table[[3, 0]])
    for index in (4, -5):
        with pytest.raises(GenaiError, match=f"index {index} is outside a dimension of 4"):
            compute(on, "Gather", [table, np.array([index], np.int64)], ((1, 3), F32), axis=0)


@pytest.mark.parametrize(
    ("kernel", "shapes", "out", "attrs", "message"),
    [
        ("Add", [(2, 3), (4,)], (2, 3), {}, r"\[4\] does not broadcast to \[2, 3\]"),
        ("Gather", [(4, 3), (2,)], (2, 3), {}, "`indices` is float32"),
        ("Softmax", [(2, 3)], (2, 4), {}, "wanted shape"),
        ("Softmax", [(2, 3)], (2, 3), {"axis": 2}, "axis 2 is outside rank 2"),
        ("Concat", [(2, 3), (2, 2)], (2, 6), {"axis": 1}, "add up to 5"),
        ("Transpose", [(2, 3)], (3, 2), {"perm": [0, 0]}, "does not permute"),
        ("SimplifiedLayerNormalization", [(2, 3), (4,)], (2, 3), {}, "wanted 3 elements"),
        ("genai.Attention", [(1, 2, 9)], (1, 2, 3), {"num_heads": 3, "kv_num_heads": 2}, "wanted a multiple"),
        ("NoSuchOp", [(1,)], (1,), {}, "no such kernel"),
        ("Softmax", [(2, 3)], (2, 3), {"axis": "x"}, "attribute `axis` must be an integer"),
    ],
)
def test_refusals_say_what_and_why(kernel: str, shapes: list, out: tuple, attrs: dict, message: str) -> None:
    with pytest.raises(GenaiError, match=message):
        call(CpuBackend(threads=1), kernel, [np.zeros(s, F32) for s in shapes], [Guarded(out, F32)], attrs)
