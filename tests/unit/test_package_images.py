"""Pictures as the package's processor_config.json wants them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from genai_cli.errors import GenaiError
from genai_cli.package.images import read_image

GEMMA = Path(__file__).parents[2] / "fixtures" / "packages" / "gemma3-vlm" / "processor_config.json"


def saved(folder: Path, pixels: np.ndarray) -> Path:
    Image.fromarray(pixels).save(folder / "p.png")
    return folder / "p.png"


def steps(folder: Path, *operations: dict[str, Any]) -> Path:
    document = {"processor": {"name": "p", "transforms": [{"operation": operation} for operation in operations]}}
    (folder / "processor_config.json").write_text(json.dumps(document, indent=1))
    return folder / "processor_config.json"


def test_a_picture_of_the_right_size_is_only_scaled_and_turned(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (28, 28, 3), np.uint8)
    made = read_image(GEMMA, saved(tmp_path, pixels))
    assert (made.shape, made.dtype) == ((1, 3, 28, 28), np.float32)
    wanted = pixels.transpose(2, 0, 1) / 127.5 - 1  # (x / 255 - 0.5) / 0.5
    np.testing.assert_allclose(made[0], wanted, atol=1e-6)  # a few roundings of f32 at magnitude 1


def test_channels_keep_their_order(tmp_path: Path) -> None:
    red = np.zeros((28, 28, 3), np.uint8)
    red[..., 0] = 255
    made = read_image(GEMMA, saved(tmp_path, red))
    assert [made[0, channel].mean() for channel in range(3)] == [1, -1, -1]


def test_resize_covers_the_size_and_keeps_the_aspect_by_default(tmp_path: Path) -> None:
    picture = saved(tmp_path, np.zeros((40, 100, 3), np.uint8))
    resize = {"type": "Resize", "attrs": {"height": 20, "width": 30}}
    assert read_image(steps(tmp_path, resize), picture).shape == (1, 20, 50, 3)
    resize["attrs"] |= {"keep_aspect_ratio": 0}  # type: ignore[operator]
    assert read_image(steps(tmp_path, resize), picture).shape == (1, 20, 30, 3)


def test_center_crop_and_permute(tmp_path: Path) -> None:
    pixels = np.arange(5 * 6 * 3, dtype=np.uint8).reshape(5, 6, 3)
    config = steps(
        tmp_path,
        {"type": "CenterCrop", "attrs": {"height": 2, "width": 3}},
        {"type": "Permute3D", "attrs": {"dims": [2, 0, 1]}},
    )
    assert (read_image(config, saved(tmp_path, pixels))[0] == pixels[1:3, 1:4].transpose(2, 0, 1)).all()


def test_transparency_and_grey_become_rgb(tmp_path: Path) -> None:
    config = steps(tmp_path, {"type": "DecodeImage", "attrs": {"color_space": "RGB"}})
    grey = read_image(config, saved(tmp_path, np.full((2, 2), 7, np.uint8)))
    assert grey.shape == (1, 2, 2, 3)
    assert (grey == 7).all()
    assert read_image(config, saved(tmp_path, np.full((2, 2, 4), 9, np.uint8))).shape == (1, 2, 2, 3)


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        ({"type": "PatchImage"}, "line 7: picture step `PatchImage` is not supported; wanted `DecodeImage`"),
        ({"type": "Resize", "attrs": {"smart_resize": 1}}, "`processor.transforms.0.operation.attrs.smart_resize` is `1`"),
        ({"type": "Resize", "attrs": {"height": "x"}}, "attrs.height` is `\"x\"`; wanted a whole number"),
        ({"type": "Resize", "attrs": {"interpolation": "MAGIC"}}, "wanted NEAREST or LINEAR"),
        ({"type": "DecodeImage", "attrs": {"color_space": "BGR"}}, "color_space` is `\"BGR\"`"),
        ({"type": "Normalize", "attrs": {"mean": [1]}}, "attrs.mean` is `[1]`; wanted three numbers"),
        ({"type": "Permute3D", "attrs": {"dims": [0, 0, 1]}}, "wanted an order of 0, 1 and 2"),
        ({"type": "CenterCrop", "attrs": {"height": 99}}, "a crop of 99 x 224 from 4 x 4"),
    ],
)  # fmt: skip
def test_steps_that_cannot_be_taken(tmp_path: Path, operation: dict[str, Any], message: str) -> None:
    picture = saved(tmp_path, np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(GenaiError) as caught:
        read_image(steps(tmp_path, operation), picture)
    assert message in caught.value.message


@pytest.mark.parametrize("content", [b"", b"not a picture", b"\x89PNG\r\n\x1a\n" + b"\0" * 40])
def test_files_that_are_no_picture(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p.png").write_bytes(content)
    with pytest.raises(GenaiError, match="is not a picture"):
        read_image(GEMMA, tmp_path / "p.png")


def test_a_picture_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(GenaiError, match="does not exist"):
        read_image(GEMMA, tmp_path / "none.png")
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(GenaiError, match="wanted a list of `transforms`"):
        read_image(tmp_path / "c.json", saved(tmp_path, np.zeros((2, 2, 3), np.uint8)))
