"""Packages as a user meets them on the command line: what inspect says, how bad ones are refused, pictures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

PACKAGES = Path(__file__).parents[2] / "fixtures" / "packages"


def genai(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "genai_cli.cli", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PACKAGES / "llama-fp32-cpu", tmp_path / "m"))


def test_inspect_as_json_and_as_text() -> None:
    made = genai("inspect", PACKAGES / "qwen3_5_text-portable", "--json")
    found = json.loads(made.stdout)
    assert (made.returncode, made.stderr, found["schema"]) == (0, "", "genai.inspect/1")
    assert found["decoder"]["kv"][0]["layers"] == [3]
    text = genai("inspect", PACKAGES / "mistral-fp32-cpu")
    assert text.returncode == 0
    assert "sliding window of 64, the graph has none" in text.stdout


def _no_data(folder: Path) -> None:
    (folder / "model.onnx.data").unlink()


def _short_data(folder: Path) -> None:
    os.truncate(folder / "model.onnx.data", 1000)


def _pointer(folder: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 739072\n"
    (folder / "model.onnx.data").write_bytes(pointer.ljust(739_072, b"\n"))


def _outside(folder: Path) -> None:
    (folder / "model.onnx.data").rename(folder.parent / "data")
    (folder / "model.onnx.data").symlink_to(folder.parent / "data")


def _bad_eos(folder: Path) -> None:
    path = folder / "genai_config.json"
    path.write_text(path.read_text().replace('"eos_token_id": 2', '"eos_token_id": []'))


def _comma(folder: Path) -> None:
    path = folder / "genai_config.json"
    path.write_text(path.read_text().replace('"top_p": 1.0', '"top_p": 1.0,'))


def _brackets(folder: Path) -> None:
    (folder / "genai_config.json").write_text("[" * 10_000_000)


def _no_model(folder: Path) -> None:
    for name in ("genai_config.json", "model.onnx"):
        (folder / name).unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_no_data, "`model.onnx.data`"),
        (_short_data, "which has only 1000"),
        (_pointer, "`model.onnx.data` is a Git-LFS pointer"),
        (_outside, "leaves the model's folder"),
        (_bad_eos, "`genai_config.json` line 28: `model.eos_token_id` is an empty list; wanted a token id"),
        (_comma, "a comma before `}`"),
        (_brackets, "nested too deep"),
        (_no_model, "is not a model package"),
    ],
)
def test_a_bad_package_is_one_error_and_exit_2(llama: Path, spoil: Callable[[Path], None], words: str) -> None:
    spoil(llama)
    done = genai("generate", llama, "--prompt-ids", "1,2", "--max-new-tokens", 1)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr


def test_an_unknown_key_is_a_warning_on_stderr_only(llama: Path) -> None:
    path = llama / "genai_config.json"
    path.write_text(path.read_text().replace('"eos_token_id": 2', '"eos_token_id": [2], "flavour": "sweet"'))
    done = genai("generate", llama, "--prompt-ids", "1,2", "--max-new-tokens", 1, "--json")
    assert done.returncode == 0
    assert len(json.loads(done.stdout)["token_ids"]) <= 1
    assert "unknown key `model.flavour`, ignored" in done.stderr


@pytest.mark.parametrize("backend", ["native", "ort"])
def test_a_picture_on_the_command_line(tmp_path: Path, backend: str) -> None:
    """The PNG holds the pixels that expected.json describes: ((i * seed) % 255) / 255 * 2 - 1."""
    package = PACKAGES / "gemma3-vlm"
    expected = json.loads((package / "expected.json").read_text())
    run = expected["runs"][1]
    values = (np.arange(3 * 28 * 28) * run["seed"] % 255).astype(np.uint8).reshape(3, 28, 28)
    Image.fromarray(values.transpose(1, 2, 0)).save(tmp_path / "p.png")
    ids = ",".join(map(str, expected["prompt"]))
    common = (
        "generate",
        package,
        "--prompt-ids",
        ids,
        "--greedy",
        "--max-new-tokens",
        6,
        "--backend",
        backend,
        "--json",
    )
    done = genai(*common, "--image", tmp_path / "p.png")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == run["ort_greedy"][:6]
    without = genai(*common)
    assert without.returncode == 2
    assert "holds 4 image tokens (id 5), 0 pictures give 0 feature rows" in without.stderr
