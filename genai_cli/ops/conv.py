"""Convolution and pooling in any number of spatial dimensions."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from genai_cli.errors import GenaiError
from genai_cli.ops.dtypes import is_float
from genai_cli.ops.infer import Attrs, Inputs, dtype, shape
from genai_cli.ops.registry import Spec, op

Array = np.ndarray[Any, Any]
Window = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _pads(
    dims: tuple[int, ...],
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    pads: list[int] | None,
    auto_pad: str,
) -> tuple[int, ...]:
    """All beginnings, then all ends; SAME puts the odd one at the end (UPPER) or the beginning (LOWER)."""
    if auto_pad in ("NOTSET", ""):
        return tuple(pads or [0] * (2 * len(kernel)))
    if auto_pad == "VALID":
        return (0,) * (2 * len(kernel))
    totals = [
        max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
        for n, k, s, d in zip(dims, kernel, strides, dilations, strict=True)
    ]
    small, large = [t // 2 for t in totals], [t - t // 2 for t in totals]
    return tuple(small + large if auto_pad == "SAME_UPPER" else large + small)


def _out_dims(
    dims: tuple[int, ...], kernel: tuple[int, ...], strides: tuple[int, ...], pads: tuple[int, ...],
    dilations: tuple[int, ...], ceil_mode: int = 0,
) -> tuple[int, ...]:  # fmt: skip
    half = len(kernel)
    sizes = []
    for i, (n, k, s, d) in enumerate(zip(dims, kernel, strides, dilations, strict=True)):
        span = n + pads[i] + pads[i + half] - ((k - 1) * d + 1)
        count = (-(-span // s) if ceil_mode else span // s) + 1
        if ceil_mode and (count - 1) * s >= n + pads[i]:  # a window must not start in the padding at the end
            count -= 1
        sizes.append(max(count, 0))
    return tuple(sizes)


def _window(
    dims: tuple[int, ...], kernel: tuple[int, ...], strides: list[int] | None, dilations: list[int] | None,
    pads: list[int] | None, auto_pad: str,
) -> Window:  # fmt: skip
    ones = [1] * len(kernel)
    stride, dilation = tuple(strides or ones), tuple(dilations or ones)
    return kernel, stride, dilation, _pads(dims, kernel, stride, dilation, pads, auto_pad)


def _patches(x: Array, window: Window, out: tuple[int, ...], fill: Any) -> Array:
    """[B, C, *kernel, *out]: the elements under the window at every output position."""
    kernel, strides, dilations, pads = window
    half = len(kernel)
    need = [(o - 1) * s + (k - 1) * d + 1 for o, s, k, d in zip(out, strides, kernel, dilations, strict=True)]
    ends = [max(n - x.shape[2 + i] - pads[i], 0) for i, n in enumerate(need)]
    full = np.pad(x, [(0, 0), (0, 0), *zip(pads[:half], ends, strict=True)], constant_values=fill)
    patches: Array = np.empty((*x.shape[:2], *kernel, *out), x.dtype)
    for offset in product(*map(range, kernel)):
        cut = tuple(
            slice(o * d, o * d + (n - 1) * s + 1, s) for o, d, n, s in zip(offset, dilations, out, strides, strict=True)
        )
        where: tuple[Any, ...] = (slice(None), slice(None), *offset)
        patches[where] = full[(slice(None), slice(None), *cut)]
    return patches


def _conv_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    x, w = shape(inputs[0]), shape(inputs[1])
    window = _window(
        x[2:], w[2:], attrs.get("strides"), attrs.get("dilations"), attrs.get("pads"), attrs.get("auto_pad", "NOTSET")
    )
    kernel, strides, dilations, pads = window
    return [((x[0], w[0], *_out_dims(x[2:], kernel, strides, pads, dilations)), dtype(inputs[0]))]


@op(infer=_conv_infer)
def Conv(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Array:
    """x [B, C, ...], w [M, C / group, ...]."""
    if x.shape[1] != w.shape[1] * group:
        raise GenaiError(f"`Conv` of {x.shape[1]} channels with a weight of {w.shape[1]} in {group} groups")
    window = _window(x.shape[2:], w.shape[2:], strides, dilations, pads, auto_pad)
    out = _out_dims(x.shape[2:], window[0], window[1], window[3], window[2])
    patches = _patches(x, window, out, 0).reshape(x.shape[0], group, w.shape[1] * int(np.prod(w.shape[2:])), -1)
    weights = w.reshape(group, w.shape[0] // group, -1)
    y = np.matmul(weights[None], patches).reshape(x.shape[0], w.shape[0], *out)
    return y if b is None else y + b.reshape(-1, *(1 for _ in out))


def _pool_infer(inputs: Inputs, attrs: Attrs) -> list[Spec]:
    x = shape(inputs[0])
    window = _window(
        x[2:], tuple(attrs["kernel_shape"]), attrs.get("strides"), attrs.get("dilations"), attrs.get("pads"),
        attrs.get("auto_pad", "NOTSET"),
    )  # fmt: skip
    dims = _out_dims(x[2:], window[0], window[1], window[3], window[2], attrs.get("ceil_mode", 0))
    first = ((*x[:2], *dims), dtype(inputs[0]))
    return [first]


@op(infer=_pool_infer)
def AveragePool(
    x: Array,
    *,
    kernel_shape: list[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Array:
    """Mean over the window; padding counts only if asked, and what ceil_mode adds beyond the padding never."""
    window = _window(x.shape[2:], tuple(kernel_shape), strides, dilations, pads, auto_pad)
    out = _out_dims(x.shape[2:], window[0], window[1], window[3], window[2], ceil_mode)
    over = tuple(range(2, 2 + len(kernel_shape)))
    half = len(kernel_shape)
    ones = np.ones((1, 1, *x.shape[2:]), x.dtype)
    if count_include_pad:
        ones = np.pad(ones, [(0, 0), (0, 0), *zip(window[3][:half], window[3][half:], strict=True)], constant_values=1)
        window_of_ones: Window = (*window[:3], (0,) * (2 * half))
    else:
        window_of_ones = window
    total = _patches(x, window, out, 0).sum(axis=over)
    return total / _patches(ones, window_of_ones, out, 0).sum(axis=over)


@op(like=(0, None))
def MaxPool(
    x: Array,
    *,
    kernel_shape: list[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: list[int] | None = None,
    pads: list[int] | None = None,
    storage_order: int = 0,
    strides: list[int] | None = None,
) -> tuple[Array, Array]:
    """Maximum over the window, and its index in the flattened input (column-major space with storage_order 1)."""
    window = _window(x.shape[2:], tuple(kernel_shape), strides, dilations, pads, auto_pad)
    out = _out_dims(x.shape[2:], window[0], window[1], window[3], window[2], ceil_mode)
    lowest = -np.inf if is_float(x.dtype) else np.iinfo(x.dtype).min
    order = "F" if storage_order else "C"
    plane = np.arange(int(np.prod(x.shape[2:]))).reshape(x.shape[2:], order=order)  # type: ignore[call-overload]
    base = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *(1 for _ in out)) * plane.size
    flat = (*x.shape[:2], -1, *out)
    patches = _patches(x, window, out, lowest).reshape(flat)
    places = _patches(plane[None, None], window, out, 0).reshape(1, 1, -1, *out)
    best = patches.argmax(axis=2, keepdims=True)
    found = np.take_along_axis(np.broadcast_to(places, patches.shape), best, 2)[:, :, 0]
    return np.take_along_axis(patches, best, 2)[:, :, 0], (found + base).astype(np.int64)


@op(infer=lambda inputs, attrs: [_global(inputs)])
def GlobalAveragePool(x: Array) -> Array:
    return x.mean(axis=tuple(range(2, x.ndim)), keepdims=True)


@op(infer=lambda inputs, attrs: [_global(inputs)])
def GlobalMaxPool(x: Array) -> Array:
    return x.max(axis=tuple(range(2, x.ndim)), keepdims=True)


def _global(inputs: Inputs) -> Spec:
    dims = shape(inputs[0])
    return ((*dims[:2], *(1 for _ in dims[2:])), dtype(inputs[0]))
