"""External weight files that are missing, short, elsewhere, or not weights at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from genai_cli.errors import ExitCode, GenaiError
from genai_cli.package.decoder import load_decoder
from genai_cli.package.open import open_package

SOURCE = Path(__file__).parents[2] / "fixtures" / "packages" / "llama-fp32-cpu"
DATA = "model.onnx.data"
SIZE = (SOURCE / DATA).stat().st_size


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SOURCE, tmp_path / "m"))


def refused(folder: Path) -> str:
    with pytest.raises(GenaiError) as caught:
        load_decoder(open_package(folder))
    assert caught.value.exit_code == ExitCode.CANNOT
    return caught.value.message


def redeclare(folder: Path, **entries: str) -> None:
    """Change the external_data entries of the first weight (f32 [512, 64], 131072 bytes at 0)."""
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        entry.value = entries.get(entry.key, entry.value)
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def test_missing(folder: Path) -> None:
    (folder / DATA).unlink()
    message = refused(folder)
    assert f"`{DATA}`" in message
    assert "missing" in message


@pytest.mark.parametrize("size", [0, 1, SIZE // 2, SIZE - 1])
def test_short(folder: Path, size: int) -> None:
    os.truncate(folder / DATA, size)
    message = refused(folder)
    assert f"`{DATA}`, which has only {size}" in message  # the wanted bytes are named before it


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"offset": "-4"}, "external offset `-4`; wanted a whole number >= 0"),
        ({"offset": "1e3"}, "external offset `1e3`"),
        ({"offset": str(SIZE)}, f"wants bytes {SIZE}..{SIZE + 131072}"),
        ({"offset": str(1 << 70)}, "which has only"),
        ({"length": "131068"}, "declares 131068 bytes in `model.onnx.data`, but its shape and type need 131072"),
        ({"length": "-1"}, "external length `-1`"),
        ({"location": "../m/model.onnx.data"}, "wanted a path inside the model's folder"),
        ({"location": "/etc/passwd"}, "wanted a path inside the model's folder"),
        ({"location": "C:\\weights"}, "wanted a path inside the model's folder"),
        ({"location": ""}, "wanted a path inside the model's folder"),
        ({"location": "gone.bin"}, "`gone.bin`"),
        ({"location": "."}, "wanted a path inside the model's folder"),
        ({"location": "a\0b"}, "wanted a path inside the model's folder"),
        ({"location": "sub"}, "`sub`"),
    ],
)
def test_misplaced(folder: Path, entries: dict[str, str], message: str) -> None:
    redeclare(folder, **entries)
    assert message in refused(folder)


def _link_out(folder: Path) -> None:
    shutil.move(folder / DATA, folder.parent / "elsewhere")
    (folder / DATA).symlink_to(folder.parent / "elsewhere")


def _link_folder_out(folder: Path) -> None:
    (folder.parent / "out").mkdir()
    shutil.move(folder / DATA, folder.parent / "out" / DATA)
    (folder / "sub").symlink_to(folder.parent / "out")
    redeclare(folder, location=f"sub/{DATA}")


def _hard_link(folder: Path) -> None:
    os.link(folder / DATA, folder.parent / "second name")


@pytest.mark.parametrize(
    ("escape", "message"),
    [
        (_link_out, "leaves the model's folder"),
        (_link_folder_out, "leaves the model's folder"),
        (_hard_link, "2 hard links"),
    ],
)
def test_escaping(folder: Path, escape: Callable[[Path], None], message: str) -> None:
    escape(folder)
    assert message in refused(folder)


def test_a_link_inside_the_folder_is_fine(folder: Path) -> None:
    (folder / DATA).rename(folder / "weights.bin")
    (folder / DATA).symlink_to("weights.bin")
    assert load_decoder(open_package(folder)).context_len == 512


@pytest.mark.parametrize("name", [DATA, "model.onnx"])
def test_git_lfs_pointers_are_not_weights(folder: Path, name: str) -> None:
    """A pointer padded to the weights' size would load as garbage without a word."""
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 739072\n"
    (folder / name).write_bytes(pointer.ljust(SIZE, b"\n"))
    message = refused(folder)
    assert f"{name}` is a Git-LFS pointer" in message


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x0a" * 50, b"<html>404</html>"])
def test_files_that_are_no_model(folder: Path, content: bytes) -> None:
    (folder / "model.onnx").write_bytes(content)
    assert "model.onnx`" in refused(folder)


def test_a_model_cut_short(folder: Path) -> None:
    size = (folder / "model.onnx").stat().st_size
    os.truncate(folder / "model.onnx", size // 2)
    assert "model.onnx`" in refused(folder)


@pytest.mark.parametrize("old", [b"logits", b"MatMul", b"model.onnx.data"])
def test_names_that_are_not_utf8(folder: Path, old: bytes) -> None:
    raw = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(raw.replace(old, b"\xff" * len(old), 1))
    refused(folder)


def test_an_unknown_weight_type(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    model.graph.initializer[0].data_type = 99
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    assert "has the type number 99, which is not supported" in refused(folder)
