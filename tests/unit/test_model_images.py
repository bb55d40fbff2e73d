"""A picture file and a prompt through the whole package: the ids recorded for these pixels."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from genai_cli.errors import GenaiError
from genai_cli.generate import Limits
from genai_cli.model import Ask, BackendName, OpenOptions, open_model

PACKAGES = Path(__file__).parents[2] / "fixtures" / "packages"
EXPECTED = json.loads((PACKAGES / "gemma3-vlm" / "expected.json").read_text())


def picture(folder: Path, seed: int) -> Path:
    """The recorded pixel_values as a PNG: ((i * seed) % 255) / 255 * 2 - 1 is what scaling and normalizing make of it."""
    values = (np.arange(3 * 28 * 28) * seed % 255).astype(np.uint8).reshape(3, 28, 28)
    path = folder / f"{seed}.png"
    Image.fromarray(values.transpose(1, 2, 0)).save(path)
    return path


def ask(images: list[Path], ids: list[int] | None = None) -> Ask:
    return Ask(prompt_ids=tuple(ids or EXPECTED["prompt"]), images=tuple(images), limits=Limits(max_new_tokens=12))


@pytest.mark.parametrize("backend", ["native", "ort"])
def test_two_pictures_two_answers_and_reuse_only_of_the_same(tmp_path: Path, backend: BackendName) -> None:
    model = open_model(PACKAGES / "gemma3-vlm", OpenOptions(backend, threads=1, page_size=2))
    first, second = EXPECTED["runs"]
    cached = []
    for run in (first, second, first):
        answer = model.ask(ask([picture(tmp_path, run["seed"])]))
        assert answer.generated.token_ids == run["ort_greedy"]
        cached.append(answer.generated.num_cached_tokens)
    assert cached[:2] == [0, 0]  # another picture shares nothing, though the ids are the same
    assert cached[2] > 0


def test_one_image_token_stands_for_a_picture(tmp_path: Path) -> None:
    model = open_model(PACKAGES / "gemma3-vlm", OpenOptions(threads=1))
    run = EXPECTED["runs"][0]
    answer = model.ask(ask([picture(tmp_path, run["seed"])], [1, 20, 6, 5, 7, 100, 33, 210]))
    assert answer.generated.prompt_token_ids == EXPECTED["prompt"]
    assert answer.generated.token_ids == run["ort_greedy"]


def test_pictures_where_there_is_no_eye(tmp_path: Path) -> None:
    model = open_model(PACKAGES / "llama-fp32-cpu", OpenOptions(threads=1))
    with pytest.raises(GenaiError, match="takes no pictures"):
        model.ask(ask([picture(tmp_path, 3)], [1, 2]))


@pytest.mark.parametrize("backend", ["native", "ort"])
def test_a_picture_whose_shape_does_not_fit(tmp_path: Path, backend: BackendName) -> None:
    """The declared resize keeps the aspect, the encoder wants a square."""
    Image.fromarray(np.zeros((28, 56, 3), np.uint8)).save(tmp_path / "wide.png")
    model = open_model(PACKAGES / "gemma3-vlm", OpenOptions(backend, threads=1))
    with pytest.raises(GenaiError, match="pixel_values"):
        model.ask(ask([tmp_path / "wide.png"]))
