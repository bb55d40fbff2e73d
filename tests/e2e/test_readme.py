"""The README's examples are real: every command runs, and prints what stands there (numbers may differ)."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
EXAMPLES = [
    (command, output)
    for block in BLOCKS
    for command, output in re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
]


def masked(text: str) -> str:
    """Numbers vary with machine and version; words do not."""
    return re.sub(r"\d[\d.,]*(e[+-]?\d+)?", "#", text).strip()


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


@pytest.mark.demo
@pytest.mark.parametrize(("command", "output"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_example(command: str, output: str) -> None:
    name, *args = shlex.split(command)
    assert name == "genai"
    for arg in args:
        if arg.startswith("models/") and not (ROOT / arg).exists():
            precision = arg.rsplit("-", 1)[1]
            subprocess.run(
                [sys.executable, "scripts/make_demo_model.py", "--precision", precision],
                cwd=ROOT,
                check=True,
                timeout=300,
            )
    done = subprocess.run(
        [sys.executable, "-m", "genai_cli.cli", *args], cwd=ROOT, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert masked(done.stdout.decode()) == masked(output)
