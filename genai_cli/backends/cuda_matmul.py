"""Launches of products, dense and block-quantized (matmul.cu, nbits.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from genai_cli.backends.base import Tensor
from genai_cli.backends.cuda_launch import (
    WARP,
    Call,
    Launch,
    address,
    broadcast_strides,
    contiguous_strides,
    ctype,
    flag,
    flat,
    integers,
    plans,
    pointer,
    real,
    size,
)

LOAD_BYTES = 16  # one load of a weight vector
COLUMN_WARPS, ROW_WARPS, NBITS_WARPS = 8, 8, 4  # kWarps in matmul.cu (both kernels) and nbits.cu
TILED_ROWS = 17  # from here on the tiled kernel reads less than `columns` with its 4 rows at once
TILE_ROWS, TILE_COLUMNS, TILE_THREADS = 64, 32, 256  # kTileRows, kTileColumns, kSide * kSide in matmul.cu
FEW_ROWS, MANY_ROWS = 4, 16  # rows that share one read of the weights; which of them changes no bits
PIECE = 8  # weights a lane takes at once in nbits.cu


MMA_TILES = (1, 2, 4, 8)  # of 8 tokens, which share one read of the weights


def _rows_at_once(m: int) -> int:
    return 1 if m == 1 else FEW_ROWS


def _vector(tensor: Tensor, width: int, blocks: int = 0, enough: int = 0) -> int:
    """Elements of one load: as wide as alignment and row width allow, narrower while the grid would be too small."""
    lanes = LOAD_BYTES // tensor.dtype.itemsize
    while lanes > 1 and (width % lanes or tensor.address % (lanes * tensor.dtype.itemsize)):
        lanes //= 2
    while lanes > 1 and blocks and width // (WARP * lanes) * blocks < enough:
        lanes //= 2
    return lanes


def _nbits_rows(m: int) -> int:
    return MANY_ROWS if m > FEW_ROWS else _rows_at_once(m)


def _tiles(call: Call, tensor: Tensor, width: int, row_blocks: int) -> int:
    """Tiles of 16 columns a block of mma.cu takes: its loads aligned, and the grid large enough."""
    tiles = 4
    while tiles > 1 and (
        width % (2 * tiles)
        or tensor.address % (4 * tiles)
        or -(-width // (16 * tiles)) * row_blocks < 2 * call.slots.num_sms
    ):
        tiles //= 2
    return tiles


@dataclass(frozen=True)
class Product:
    """y [batch, M, N] = alpha a b + beta c, by element strides."""

    m: int
    n: int
    k: int
    a_row: int
    a_step: int
    alpha: float = 1.0
    beta: float = 0.0
    c: Tensor | None = None
    c_strides: tuple[int, int] = (0, 0)


def _on_tensor_cores(call: Call, p: Product) -> bool:
    """Whether mma.cu takes it. Never by the number of rows: all rows of a weight must be summed alike."""
    return call.slots.tensor_cores and call.input(0).dtype.itemsize == 2 and p.a_step == 1


def _mma(
    call: Call, p: Product, b: Tensor, batch: tuple[int, int, int], a_at: int, b_at: int, y_at: int, transposed: bool
) -> Launch:
    a = call.input(0)
    tokens = next((tiles for tiles in MMA_TILES if 8 * tiles >= p.m), MMA_TILES[-1])
    row_blocks = -(-p.m // (8 * tokens))
    columns = _tiles(call, b, p.n, row_blocks * batch[0]) if not transposed else 1 if p.m <= 8 else 4
    wide = p.k % 8 == 0 and p.a_row % 8 == 0 and batch[1] % 8 == 0 and a_at % LOAD_BYTES == 0
    args = (
        *(pointer(value) for value in (a_at, b_at)),
        address(p.c),
        pointer(y_at),
        *integers(p.m, p.n, p.k, p.a_row, *p.c_strides, batch[1], batch[2]),
        real(p.alpha),
        real(p.beta),
        flag(wide),
    )
    grid = (-(-p.n // (16 * columns)), row_blocks, batch[0])
    function = f"product<{'true' if transposed else 'false'}, {columns}, {tokens}, {ctype(a)}>"
    return Launch("mma", function, grid, COLUMN_WARPS * WARP, args)


def _columns(call: Call, p: Product, b: Tensor, batch: tuple[int, int, int], a_at: int, b_at: int, y_at: int) -> Launch:
    """b [K, N]. `batch`: (count, a stride, b stride)."""
    a, rows = call.input(0), _rows_at_once(p.m)
    if _on_tensor_cores(call, p) and p.n % 2 == 0 and b_at % 4 == 0:
        return _mma(call, p, b, batch, a_at, b_at, y_at, False)
    row_blocks = -(-p.m // rows)
    lanes = _vector(b, p.n, row_blocks * batch[0], 2 * call.slots.num_sms)
    args = (
        *(pointer(value) for value in (a_at, b_at)),
        address(p.c),
        pointer(y_at),
        *integers(p.m, p.n, p.k, p.a_row, p.a_step, *p.c_strides, batch[1], batch[2]),
        real(p.alpha),
        real(p.beta),
    )
    if p.m >= TILED_ROWS:
        grid = (-(-p.n // TILE_COLUMNS), -(-p.m // TILE_ROWS), batch[0])
        return Launch("matmul", f"tiled<{ctype(a)}>", grid, TILE_THREADS, args)
    grid = (-(-p.n // (WARP * lanes)), row_blocks, batch[0])
    return Launch("matmul", f"columns<{lanes}, {rows}, {ctype(a)}>", grid, COLUMN_WARPS * WARP, args)


def _transposed(
    call: Call, p: Product, b: Tensor, batch: tuple[int, int, int], a_at: int, b_at: int, y_at: int
) -> Launch:
    """b [N, K]."""
    a, rows = call.input(0), _rows_at_once(p.m)
    if _on_tensor_cores(call, p) and p.k % 8 == 0 and b_at % LOAD_BYTES == 0:
        return _mma(call, p, b, batch, a_at, b_at, y_at, True)
    lanes = _vector(b, p.k)
    args = (
        *(pointer(value) for value in (a_at, b_at)),
        address(p.c),
        pointer(y_at),
        *integers(p.m, p.n, p.k, p.a_row, p.a_step, *p.c_strides, batch[1], batch[2]),
        real(p.alpha),
        real(p.beta),
    )
    grid = (-(-p.n // ROW_WARPS), -(-p.m // rows), batch[0])
    return Launch("matmul", f"transposed<{lanes}, {rows}, {ctype(a)}>", grid, ROW_WARPS * WARP, args)


@plans("MatMul", "FusedMatMul")
def _matmul(call: Call) -> list[Launch]:
    """FusedMatMul swaps the last two axes of either side, and scales."""
    a, b, y = call.input(0), call.input(1), call.output()
    flip_a, flip_b = (bool(call.attrs.get(name, 0)) for name in ("transA", "transB"))
    left = (1, *a.shape) if len(a.shape) == 1 else a.shape
    right = (*b.shape, 1) if len(b.shape) == 1 else b.shape
    flip_a, flip_b = flip_a and len(a.shape) > 1, flip_b and len(b.shape) > 1
    if len(right) == 2 and not flip_a:  # one weight for all rows
        left, lead = (size(left[:-1]), left[-1]), ()
    else:
        lead = tuple(np.broadcast_shapes(left[:-2], right[:-2]))
    m, k = (left[-1], left[-2]) if flip_a else (left[-2], left[-1])
    n = right[-2] if flip_b else right[-1]
    product = Product(m, n, k, 1 if flip_a else k, m if flip_a else 1, float(call.attrs.get("alpha", 1.0)))
    if size(y.shape) == 0:
        return []
    launch = _transposed if flip_b else _columns
    return [
        launch(call, product, b, (count, a_step, b_step), a_at, b_at, y_at)
        for count, a_step, b_step, a_at, b_at, y_at in _batches(a, b, y, left, right, lead, m * n)
    ]


def _batches(
    a: Tensor, b: Tensor, y: Tensor, left: Sequence[int], right: Sequence[int], lead: tuple[int, ...], y_size: int
) -> list[tuple[int, int, int, int, int, int]]:
    """The innermost batch dimension becomes the grid's, one launch for each index of the others."""
    a_strides = [s * size(left[-2:]) for s in broadcast_strides(left[:-2], lead)]
    b_strides = [s * size(right[-2:]) for s in broadcast_strides(right[:-2], lead)]
    y_strides = [s * y_size for s in contiguous_strides(lead)]
    count = lead[-1] if lead else 1
    inner = (a_strides[-1], b_strides[-1]) if lead else (0, 0)
    found = []
    for index in np.ndindex(*lead[:-1]):
        offsets = [
            sum(i * s for i, s in zip(index, strides, strict=False)) for strides in (a_strides, b_strides, y_strides)
        ]
        a_at, b_at, y_at = (t.address + o * t.dtype.itemsize for t, o in zip((a, b, y), offsets, strict=True))
        found.append((count, *inner, a_at, b_at, y_at))
    return found


@plans("Gemm")
def _gemm(call: Call) -> list[Launch]:
    a, b, c, y = call.input(0), call.input(1), call.optional(2), call.output()
    m, n = y.shape
    flip = bool(call.attrs.get("transA", 0))
    k = a.shape[0] if flip else a.shape[1]
    strides = broadcast_strides(c.shape, (m, n)) if c is not None else [0, 0]
    product = Product(
        m,
        n,
        k,
        1 if flip else k,
        m if flip else 1,
        float(call.attrs.get("alpha", 1.0)),
        float(call.attrs.get("beta", 1.0)),
        c,
        (strides[0], strides[1]),
    )
    if size(y.shape) == 0:
        return []
    if call.attrs.get("transB", 0):
        return [_transposed(call, product, b, (1, 0, 0), a.address, b.address, y.address)]
    return [_columns(call, product, b, (1, 0, 0), a.address, b.address, y.address)]


def _shift(call: Call, block: int) -> int:
    if block < 16 or block & (block - 1):
        raise call.refuse(f"blocks of `{block}`", "a power of two from 16 on")
    return block.bit_length() - 1


@plans("MatMulNBits")
def _nbits(call: Call) -> list[Launch]:
    a, y = call.input(0), call.output()
    n, k = int(call.attrs["N"]), int(call.attrs["K"])
    m = size(a.shape) // k if k else 0
    if m == 0:
        return []
    zeros = call.optional(3)
    if call.attrs.get("accuracy_level", 0) == 4 and (zeros is None or zeros.dtype == np.uint8):
        return _nbits_int8(call, m, n, k)  # float zero points keep the activations as they are, as in ORT
    b, scales, zeros, bias = call.input(1), call.input(2), call.optional(3), call.optional(5)
    bits, block, rows = int(call.attrs.get("bits", 4)), int(call.attrs["block_size"]), _nbits_rows(m)
    wide = k % PIECE == 0 and a.address % LOAD_BYTES == 0
    types = f"{bits}, {PIECE}, {rows}, {ctype(a)}, {ctype(scales)}, {ctype(zeros) if zeros else 'unsigned char'}"
    shape = (*integers(m, n, k), flag(_shift(call, block)), *integers(-(-k // block)), flag(wide))
    args = (*map(address, (a, b, scales, zeros, bias, y)), *shape)
    grid = (-(-n // NBITS_WARPS), -(-m // rows), 1)
    return [Launch("nbits", f"nbits<{types}>", grid, NBITS_WARPS * WARP, args)]


def _nbits_int8(call: Call, m: int, n: int, k: int) -> list[Launch]:
    a, y = call.input(0), call.output()
    b, scales, zeros, bias = call.input(1), call.input(2), call.optional(3), call.optional(5)
    bits, block, rows = int(call.attrs.get("bits", 4)), int(call.attrs["block_size"]), _nbits_rows(m)
    num_blocks = -(-k // block)
    levels, a_scales = call.scratch(m * num_blocks * block), call.scratch(m * num_blocks * 4)
    scratch = (pointer(levels), pointer(a_scales))
    quantize = flat(
        "nbits", f"quantize_rows<{ctype(a)}>", m * num_blocks,
        (address(a), *scratch, *integers(m * num_blocks, k, block, num_blocks)), 64,
    )  # fmt: skip
    chunk = min(block, LOAD_BYTES * 8 // bits)
    types = f"{bits}, {chunk}, {rows}, {ctype(a)}, {ctype(scales)}, {ctype(zeros) if zeros else 'unsigned char'}"
    shape = (*integers(m, n), flag(_shift(call, block)), *integers(num_blocks))
    args = (*scratch, *map(address, (b, scales, zeros, bias, y)), *shape)
    grid = (-(-n // NBITS_WARPS), -(-m // rows), 1)
    return [*quantize, Launch("nbits", f"nbits_int8<{types}>", grid, NBITS_WARPS * WARP, args)]


@plans("GatherBlockQuantized")
def _gather_rows(call: Call) -> list[Launch]:
    """Rows of a 2-D table quantized along its width (what the rule lets through)."""
    data, indices, scales, zeros, y = call.input(0), call.input(1), call.input(2), call.optional(3), call.output()
    bits, block, count = int(call.attrs.get("bits", 4)), int(call.attrs.get("block_size", 128)), size(y.shape)
    packed = data.dtype == np.uint8
    width = data.shape[1] * (8 // bits if packed else 1)
    types = f"{bits}, {'true' if packed else 'false'}, {ctype(scales)}, {ctype(indices)}"
    args = (
        *map(address, (data, indices, scales, zeros, y)),
        *integers(count, data.shape[0], width, block, scales.shape[1]),
    )
    return flat("nbits", f"gather_rows<{types}>", count, args)
