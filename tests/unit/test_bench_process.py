"""Processes of their own: what is read of the system's figures, and a real start."""

from __future__ import annotations

from pathlib import Path

import pytest

from genai_cli.bench.process import Memory, Start, mapped_bytes, memory_of, start
from genai_cli.bench.report import process_figures
from genai_cli.errors import GenaiError

LLAMA = Path(__file__).resolve().parents[2] / "fixtures" / "packages" / "llama-fp32-cpu"

SMAPS = """\
7f00-7f01 r--s 00000000 fe:00 42       {folder}/model.onnx.data
Size:                400 kB
Rss:                 300 kB
VmFlags: rd mr
7f02-7f03 r--s 00000000 fe:00 43       {folder}-other/model.onnx.data
Rss:                  50 kB
7f04-7f05 rw-p 00000000 00:00 0
Rss:                  70 kB
7f06-7f07 r--s 00000000 fe:00 44       {folder}/model.onnx
Rss:                   4 kB
"""


def test_mapped_pages_are_those_of_the_models_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    maps = tmp_path / "smaps"
    maps.write_text(SMAPS.format(folder=folder))
    assert mapped_bytes(folder, maps) == 304 * 1024
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t    900 kB\nRssAnon:\t     500 kB\n")
    assert memory_of(folder, 100 * 1024, status, maps) == Memory(900 * 1024, 304 * 1024, 400 * 1024)
    assert memory_of(folder, None, status, maps) is None
    assert memory_of(folder, 1, tmp_path / "missing", maps) is None


@pytest.fixture(scope="module")
def trial():
    return start(Start("native", LLAMA, 1, None, (3, 4, 5)))


def test_a_real_start(trial):
    assert 0 < trial.first_token_s < 120
    assert trial.memory.peak_rss > trial.memory.mapped > 0
    data = (LLAMA / "model.onnx.data").stat().st_size
    assert trial.memory.mapped <= data + (LLAMA / "model.onnx").stat().st_size + 8192  # whole pages
    figures = process_figures([trial, trial])
    assert (figures.first_token_s.n, figures.peak_rss_bytes) == (2, trial.memory.peak_rss)


def test_a_child_tells_why_it_could_not():
    with pytest.raises(GenaiError, match="no-such-folder"):
        start(Start("native", LLAMA.parent / "no-such-folder", 1, None, (3,)))
