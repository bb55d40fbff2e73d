"""Random damage to a package's files: it opens, or there is one GenaiError; never another exception."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from genai_cli.errors import GenaiError
from genai_cli.package.decoder import load_decoder
from genai_cli.package.open import open_package

PACKAGES = Path(__file__).parents[2] / "fixtures" / "packages"
FILES = {
    "llama-fp32-cpu": ("genai_config.json", "tokenizer_config.json", "model.onnx"),
    "gemma3-vlm": ("genai_config.json",),
    "qwen3_5_text-portable": ("inference_metadata.yaml", "model.onnx"),
    "llama-static": ("inference_metadata.yaml", "model.onnx"),
    "gpt2-optimum": ("config.json", "generation_config.json", "special_tokens_map.json"),
}
INSERTED = b'{}[],:"0-9eE.\\ntrufalsx\x00\xff'


def damage(content: bytes, rng: random.Random) -> bytes:
    """One to four edits: a changed byte, a hole, foreign bytes, or a piece twice."""
    raw = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(raw))
        match rng.randrange(4):
            case 0:
                raw[at] = rng.randrange(256)
            case 1 if len(raw) > 40:
                del raw[at : at + rng.randint(1, 20)]
            case 2:
                raw[at:at] = bytes(rng.choices(INSERTED, k=rng.randint(1, 6)))
            case _:
                start = rng.randrange(len(raw))
                raw[at:at] = raw[start : start + rng.randint(1, 40)]
    return bytes(raw)


def survive(folder: Path, name: str, seed: int) -> bool:
    """Damage one file of the copy, open it, and put the file back; whether it was refused."""
    original = (PACKAGES / folder.name / name).read_bytes()
    (folder / name).write_bytes(damage(original, random.Random(seed)))
    try:
        load_decoder(open_package(folder))
    except GenaiError:
        return True
    finally:
        (folder / name).write_bytes(original)
    return False


@pytest.mark.parametrize(("package", "name"), [(package, name) for package, names in FILES.items() for name in names])
def test_damaged_files(tmp_path: Path, package: str, name: str) -> None:
    folder = Path(shutil.copytree(PACKAGES / package, tmp_path / package))
    refused = [survive(folder, name, seed) for seed in range(40)]
    assert any(refused)  # the damage is real
    load_decoder(open_package(folder))  # and the copy is whole again


@pytest.mark.slow
@pytest.mark.parametrize(("package", "name"), [(package, name) for package, names in FILES.items() for name in names])
def test_damaged_files_at_length(tmp_path: Path, package: str, name: str) -> None:
    folder = Path(shutil.copytree(PACKAGES / package, tmp_path / package))
    assert sum(survive(folder, name, seed) for seed in range(1000, 1600)) > 0
