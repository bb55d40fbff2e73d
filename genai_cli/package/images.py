"""A picture -> the tensor a vision encoder takes, by the steps that processor_config.json declares.

The steps, their defaults and their order of arithmetic are onnxruntime-extensions' (image_transforms.hpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from genai_cli.errors import GenaiError
from genai_cli.package.document import Document, read_json

Keys = tuple[str | int, ...]
Step = Callable[[np.ndarray, Document, Keys], np.ndarray]
_FILTERS = {
    "NEAREST": Image.Resampling.NEAREST,
    "LINEAR": Image.Resampling.BILINEAR,
    "CUBIC": Image.Resampling.BICUBIC,
    "LANCZOS": Image.Resampling.LANCZOS,
}


def read_image(config: Path, picture: Path) -> np.ndarray:
    """f32 [1, ...] of one picture, usually [1, 3, H, W]. GenaiError: no picture, or a step that is not known."""
    document = read_json(config)
    pixels = _decode(picture)
    for index in range(len(_steps(document))):
        keys = ("processor", "transforms", index, "operation")
        kind = document.text(*keys, "type") or ""
        if kind not in _STEPS:
            known = ", ".join(f"`{name}`" for name in _STEPS)
            raise GenaiError(f"{document.where(*keys, 'type')}: picture step `{kind}` is not supported; wanted {known}")
        pixels = _STEPS[kind](pixels, document, (*keys, "attrs"))
    return pixels.astype(np.float32, copy=False)[None]


def _steps(document: Document) -> list[object]:
    steps = document.get("processor", "transforms")
    if not isinstance(steps, list) or not steps:
        document.fail(("processor", "transforms") if document.mapping("processor") else (), "a list of `transforms`")
    return steps


def _decode(picture: Path) -> np.ndarray:
    """uint8 [H, W, 3], RGB; transparency is dropped, as is the camera's orientation mark."""
    try:
        with Image.open(picture) as image:
            return np.asarray(image.convert("RGB"))
    except FileNotFoundError:
        raise GenaiError(f"the picture `{picture}` does not exist") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = type(error).__name__ if isinstance(error, UnidentifiedImageError) else str(error)
        raise GenaiError(f"`{picture}` is not a picture: {reason}", hint="give a PNG or JPEG file") from None


def _as_it_is(pixels: np.ndarray, document: Document, keys: Keys) -> np.ndarray:
    """DecodeImage, ConvertRGB: already done. Only RGB is decoded."""
    space = document.text(*keys, "color_space") or "RGB"
    if space.upper() != "RGB":
        document.fail((*keys, "color_space"), '"RGB"')
    return pixels


def _resize(pixels: np.ndarray, document: Document, keys: Keys) -> np.ndarray:
    """To height x width; by default the smallest size of the same aspect that covers it."""
    if document.whole(*keys, "smart_resize"):
        document.fail((*keys, "smart_resize"), "0: sizes that depend on the picture are not supported")
    name = document.text(*keys, "interpolation") or "CUBIC"
    if name not in _FILTERS:
        document.fail((*keys, "interpolation"), " or ".join(_FILTERS))
    height, width = _size(document, keys, 256)
    keep = document.whole(*keys, "keep_aspect_ratio")
    if keep is None or keep:
        scale = max(width / pixels.shape[1], height / pixels.shape[0])
        height, width = int(pixels.shape[0] * scale), int(pixels.shape[1] * scale)
    return np.asarray(Image.fromarray(pixels).resize((width, height), _FILTERS[name]))


def _size(document: Document, keys: Keys, default: int) -> tuple[int, int]:
    height = document.whole(*keys, "height", at_least=1) or default
    return height, document.whole(*keys, "width", at_least=1) or default


def _center_crop(pixels: np.ndarray, document: Document, keys: Keys) -> np.ndarray:
    height, width = _size(document, keys, 224)
    if pixels.shape[0] < height or pixels.shape[1] < width:
        raise GenaiError(
            f"{document.where(*keys)}: a crop of {height} x {width} from {pixels.shape[0]} x {pixels.shape[1]}"
        )
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return pixels[top : top + height, left : left + width]


def _rescale(pixels: np.ndarray, document: Document, keys: Keys) -> np.ndarray:
    factor = document.number(*keys, "rescale_factor")
    return pixels.astype(np.float32) * np.float32(1 / 255 if factor is None else factor)


def _normalize(pixels: np.ndarray, document: Document, keys: Keys) -> np.ndarray:
    mean = _three(document, (*keys, "mean"), (0.48145466, 0.4578275, 0.40821073))  # CLIP's, the library's default
    std = _three(document, (*keys, "std"), (0.26862954, 0.26130258, 0.27577711))
    return np.asarray((pixels.astype(np.float32) - mean) / std)


def _three(document: Document, keys: Keys, default: tuple[float, float, float]) -> np.ndarray:
    values = document.get(*keys)
    if values is None:
        return np.array(default, np.float32)
    if not isinstance(values, list) or len(values) != 3:
        document.fail(keys, "three numbers")
    return np.array([document.number(*keys, index) for index in range(3)], np.float32)


def _permute(pixels: np.ndarray, document: Document, keys: Keys) -> np.ndarray:
    dims = document.get(*keys, "dims") or [2, 0, 1]
    if not isinstance(dims, list) or sorted(dims, key=str) != [0, 1, 2]:
        document.fail((*keys, "dims"), "an order of 0, 1 and 2")
    return np.ascontiguousarray(pixels.transpose(dims))


_STEPS: Mapping[str, Step] = {
    "DecodeImage": _as_it_is,
    "ConvertRGB": _as_it_is,
    "Resize": _resize,
    "CenterCrop": _center_crop,
    "Rescale": _rescale,
    "Normalize": _normalize,
    "Permute3D": _permute,
}
