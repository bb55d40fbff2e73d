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


def test_bench(environment: dict[str, str]) -> None:
    """Prefill and decode on the device, measured against a copy inside it; what only a CPU has is left out."""
    words = ("bench", str(PACKAGES / "llama-fp32-cpu"), "--prompt-tokens", "4", "--context-tokens", "4")
    few = ("--new-tokens", "2", "--rounds", "1", "--no-parity", "--json", "--device", "cuda")
    code, out, err = genai(*words, *few, environment=environment)
    assert code == ExitCode.OK, err
    report = json.loads(out)
    assert report["isa"].startswith("cuda:0 ")
    assert report["bandwidth_gb_s"] > 0
    assert report["ceilings"]["float_gop_s"] == "NaN"  # not measured, and not a number made up
    assert {result["phase"].split()[0] for result in report["results"] if not result.get("error")} >= {
        "prefill",
        "decode",
    }


@pytest.mark.parametrize("inside", ["--profile", "--micro"])
def test_bench_looks_inside_the_cpu_only(inside: str, environment: dict[str, str]) -> None:
    words = ("bench", str(PACKAGES / "llama-fp32-cpu"), inside, "--device", "cuda")
    code, out, err = genai(*words, environment=environment)
    assert (code, out) == (ExitCode.CANNOT, "")
    assert "`cuda` was asked for" in err


def test_two_processes_share_a_device_and_the_kernels_on_disk(environment: dict[str, str], tmp_path: Path) -> None:
    """Both compile and keep the same kernels at the same time, from nothing."""
    words = [
        sys.executable,
        "-m",
        "genai_cli.cli",
        "generate",
        str(PACKAGES / "llama-fp32-cpu"),
        "--prompt-ids",
        PROMPT,
    ]
    words += ["--max-new-tokens", "3", "--json", "--device", "cuda"]
    own = {**environment, "XDG_CACHE_HOME": str(tmp_path)}
    both = [subprocess.Popen(words, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    said = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    tokens = [json.loads(out)["token_ids"] for out, _ in said]
    assert tokens[0] == tokens[1] == generated("llama-fp32-cpu", "cpu", environment)["token_ids"][:3]
    kept = [file.suffix for file in (tmp_path / "genai" / "cuda").iterdir()]
    assert set(kept) == {f".{environment['GENAI_CUDA_CODE']}"}  # no half-written file is left


@pytest.mark.parametrize("command", ["generate", "parity", "mirror-check", "bench"])
def test_without_a_driver(command: str, double: Any) -> None:
    words = [command, str(PACKAGES / "llama-fp32-cpu"), "--device", "cuda"]
    words += ["--prompt-ids", PROMPT] if command in ("generate", "parity") else []
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
