"""`--device cuda` as a user types it, each command in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from genai_cli.errors import ExitCode

PACKAGES = Path(__file__).resolve().parents[2] / "fixtures" / "packages"
PROMPT = "5,9,3,77,12"


@pytest.fixture
def environment(cuda_driver: Any) -> dict[str, str]:
    """A device's own, or the double's."""
    found = {**os.environ, "GENAI_CUDA_CODE": cuda_driver.code_type}
    if cuda_driver.kind == "double":
        import cuda_double

        found |= cuda_double.environment()
    return found


def genai(*words: str, environment: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    command = [sys.executable, "-m", "genai_cli.cli", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def generated(package: str, device: str, environment: dict[str, str]) -> Any:
    words = ("generate", str(PACKAGES / package), "--prompt-ids", PROMPT, "--max-new-tokens", "6", "--json")
    code, out, err = genai(*words, "--device", device, environment=environment)
    assert code == ExitCode.OK, err
    return json.loads(out)


def test_generate(environment: dict[str, str]) -> None:
    cpu, cuda = (generated("llama-fp32-cpu", device, environment) for device in ("cpu", "cuda:0"))
    assert cuda["token_ids"] == cpu["token_ids"]
    assert cuda["versions"]["providers"][0].startswith("cuda:0 ")  # read back from the backend that ran


@pytest.mark.parametrize("package", ["llama-fp16-cuda", "llama-int4-cpu"])
def test_parity(package: str, environment: dict[str, str]) -> None:
    words = ("parity", str(PACKAGES / package), "--prompt-ids", PROMPT, "--steps", "4", "--json")
    code, out, err = genai(*words, "--device", "cuda", environment=environment)
    assert code == ExitCode.OK, err
    assert json.loads(out)["environment"]["features"].startswith("cuda:0 ")


def test_mirror_check_with_its_proof(environment: dict[str, str]) -> None:
    """Pages by dtoh, seeds by htod: warm equals cold, and every planted mutant is caught on the device too."""
    words = ("mirror-check", str(PACKAGES / "llama-fp32-cpu"), "--prove", "--device", "cuda")
    code, out, err = genai(*words, environment=environment)
    assert code == ExitCode.OK, out + err
    assert "mutants killed for the right reason" in out


@pytest.mark.parametrize("command", ["generate", "parity", "mirror-check"])
def test_without_a_driver(command: str, double: Any) -> None:
    words = [command, str(PACKAGES / "llama-fp32-cpu"), "--device", "cuda"]
    words += ["--prompt-ids", PROMPT] if command != "mirror-check" else []
    code, out, err = genai(*words, environment={**os.environ, "LD_LIBRARY_PATH": ""})
    assert code == ExitCode.CANNOT
    assert out == ""
    first, *rest = err.strip().splitlines()
    assert "no CUDA driver" in first
    assert "CUDA 13 is needed" in first
    assert all(line.strip().startswith("try:") for line in rest)


def test_a_code_type_that_does_not_exist(environment: dict[str, str]) -> None:
    words = ("generate", str(PACKAGES / "llama-fp32-cpu"), "--prompt-ids", PROMPT, "--device", "cuda")
    code, _, err = genai(*words, environment={**environment, "GENAI_CUDA_CODE": "sass"})
    assert code == ExitCode.CANNOT
    assert "wanted cubin or ptx" in err
