"""Run everything on a real CUDA device and write one table. Fails, never skips, without a device.

    python scripts/gpu_report.py [--markdown docs/gpu.md] [--json FILE] [MODEL ...]

MODEL is a package folder or an .onnx file; by default the fixtures' packages and the demo model, where they are. Needs
no network. Besides the table it records device attributes and the driver's error codes: what calibrates the CPU double.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from genai_cli.errors import ExitCode, GenaiError

ROOT = Path(__file__).resolve().parent.parent
PROMPT_LEN, DECODE_STEPS = 64, 64
COPY_BYTES, COPIES = 256 << 20, 20
ATTRIBUTES = (
    "COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT", "MAX_THREADS_PER_BLOCK",
    "WARP_SIZE", "MAX_SHARED_MEMORY_PER_BLOCK", "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", "L2_CACHE_SIZE",
    "GLOBAL_MEMORY_BUS_WIDTH", "MEMORY_CLOCK_RATE", "CLOCK_RATE", "MEMORY_POOLS_SUPPORTED",
    "UNIFIED_ADDRESSING", "MAX_GRID_DIM_X", "MAX_GRID_DIM_Y",
)  # fmt: skip

# Each in a process of its own, because a fault is sticky. `probe(driver, backend)` returns what the driver said.
MISTAKES = {
    "launch with 2048 threads a block": "launch(kernel('extern \"C\" __global__ void f() {}', 'f'), block=2048)",
    "launch with 100 KiB of shared memory unasked":
        "launch(kernel('extern \"C\" __global__ void f() {}', 'f'), shared=100 << 10)",
    "read of address 64": "launch(kernel('extern \"C\" __global__ void f() { *(int*)64 = 1; }', 'f')), wait()",
    "misaligned store":
        "launch(kernel('extern \"C\" __global__ void f(char* x) { *(int*)(x + 1) = 1; }', 'f'), memory()), wait()",
    "trap": "launch(kernel('extern \"C\" __global__ void f() { __trap(); }', 'f')), wait()",
    "wait inside a capture": "capture(wait)",
    "allocation of 1 PiB": "backend.empty((1 << 50,), np.dtype(np.uint8))",
    "a second free": "free_twice()",
}  # fmt: skip
PROBE = """
import sys
import numpy as np
from genai_cli.backends.cuda import CudaBackend, CudaOptions
backend = CudaBackend(0, CudaOptions(code_type=sys.argv[1]))
device = backend.device

def kernel(source, name):
    from cuda.core import Program, ProgramOptions
    made = Program(source, "c++", ProgramOptions(std="c++17", arch=device.arch)).compile(sys.argv[1])
    return made.get_kernel(name)

def launch(kernel, *args, block=32, shared=0):
    from cuda.core import LaunchConfig, launch as queue
    queue(device.stream, LaunchConfig(grid=1, block=block, shmem_size=shared), kernel, *args)

def wait():
    device.stream.sync()

def memory():
    global kept
    kept = backend.empty((64,), np.dtype(np.uint8))
    return np.uint64(kept.address)

def capture(inside):
    builder = device.stream.create_graph_builder()
    builder.begin_building()
    inside()

def free_twice():
    from cuda.bindings import driver
    status, address = driver.cuMemAlloc(256)
    driver.cuMemFree(address)
    (status,) = driver.cuMemFree(address)
    print(status.name)

try:
    eval(sys.argv[2])
except BaseException as error:
    print(str(error).splitlines()[0].split(":")[0])
sys.stdout.flush()
import os
os._exit(0)  # after a fault even destructors fail
"""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def device_facts(code_type: str) -> dict[str, Any]:
    """Name, driver, attributes, and a measured device-to-device copy in GB/s."""
    from cuda.bindings import __version__, driver

    backend = open_backend(code_type)
    attributes = {}
    for name in ATTRIBUTES:
        which = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        attributes[name.lower()] = int(driver.cuDeviceGetAttribute(which, 0)[1])
    return {
        "name": backend.device.name,
        "arch": backend.device.arch,
        "driver": int(driver.cuDriverGetVersion()[1]),
        "cuda_python": str(__version__),
        "copy_gb_s": round(copy_speed(backend), 1),
        "attributes": attributes,
    }


def open_backend(code_type: str, **options: Any) -> Any:
    from genai_cli.backends.cuda import CudaBackend, CudaOptions

    return CudaBackend(0, CudaOptions(code_type=code_type, **options))


def copy_speed(backend: Any) -> float:
    """Bytes read and written per second, in GB/s, of the driver's own copy."""
    from cuda.bindings import driver

    kind = np.dtype(np.uint8)
    a, b = backend.empty((COPY_BYTES,), kind), backend.empty((COPY_BYTES,), kind)
    stream = backend.device.stream

    def copies(count: int) -> float:
        backend.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            driver.cuMemcpyAsync(b.address, a.address, COPY_BYTES, stream.handle)
        backend.synchronize()
        return time.perf_counter() - start

    copies(2)
    return 2 * COPY_BYTES * COPIES / copies(COPIES) / 1e9


def error_codes(code_type: str) -> dict[str, str]:
    """What the driver says to each mistake."""
    found = {}
    for name, mistake in MISTAKES.items():
        command = [sys.executable, "-c", PROBE, code_type, mistake]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        lines = done.stdout.strip().splitlines()
        found[name] = lines[-1] if lines else f"exit {done.returncode}"
    return found


def run_tests() -> dict[str, Any]:
    """The suite of the double, on the device: passed, failed, skipped (what only the double can see)."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests" / "cuda_double"), f"--junitxml={report}"]
        done = subprocess.run([*command, "-m", "not slow"], cwd=ROOT, capture_output=True, text=True)
        if not report.exists():
            return {"error": (done.stdout + done.stderr)[-2000:]}
        suite = ElementTree.parse(report).getroot().find("testsuite")
        assert suite is not None
        counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
        failed = [f"{case.get('name')}" for case in suite.iter("testcase") if case.find("failure") is not None]
        return {**counts, "failed": failed}


def models(given: list[str]) -> list[Path]:
    """Package folders (or .onnx files)."""
    if given:
        return [Path(path) for path in given]
    decoders = sorted((ROOT / "fixtures" / "packages").glob("*/model.onnx"))
    demo = sorted((ROOT / "models").glob("*/genai_config.json"))
    return [file.parent for file in (*decoders, *demo)]


def weight_bytes(path: Path) -> int:
    folder = path if path.is_dir() else path.parent
    return sum(file.stat().st_size for file in folder.glob("*.onnx*"))


def measured(path: Path, code_type: str) -> dict[str, Any]:
    """Native on the device against the CPU and ORT: tokens, speed with and without graphs, launches a token."""
    from genai_cli.backends.cpu import CpuBackend
    from genai_cli.package.decoder import load_decoder
    from genai_cli.package.open import open_package
    from genai_cli.runners.native import NativeRunner

    loaded = load_decoder(open_package(path))

    def native(backend: Any) -> dict[str, Any]:
        runner = NativeRunner(loaded.graph, backend, io=loaded.io, context_len=loaded.context_len)
        return greedy(runner, backend)

    cpu, graphs = native(CpuBackend()), native(open_backend(code_type))
    eager, ort = native(open_backend(code_type, capture=False)), on_ort(loaded)
    return {
        "model": path.name,
        "same tokens as the CPU": graphs["tokens"] == cpu["tokens"],
        "same bits without graphs": graphs["last"] == eager["last"],
        "prefill tok/s": graphs["prefill_tok_s"],
        "decode tok/s": graphs["decode_tok_s"],
        "without graphs": eager["decode_tok_s"],
        "ORT-CUDA prefill tok/s": ort["prefill_tok_s"],
        "ORT-CUDA decode tok/s": ort["decode_tok_s"],
        "weights GB/s": round(weight_bytes(path) * graphs["decode_tok_s"] / 1e9, 1),
        "launches a token": eager["launches"],
    }


def on_ort(loaded: Any) -> dict[str, Any]:
    """The same steps on ORT's CUDA provider, or the reason that it is not there."""
    from genai_cli.runners.ort import OrtRunner

    try:
        return greedy(OrtRunner(loaded.path, io=loaded.io, graph=loaded.graph, device="cuda"), None)
    except GenaiError as error:
        return dict.fromkeys(("prefill_tok_s", "decode_tok_s"), f"not run: {error.message}")


def greedy(runner: Any, backend: Any) -> dict[str, Any]:
    """A prompt and greedy tokens, twice; the second run is timed."""
    steps = min(DECODE_STEPS, (runner.context_len or PROMPT_LEN + DECODE_STEPS) - PROMPT_LEN)
    if steps < 1:
        raise GenaiError(f"a context of `{runner.context_len}` tokens leaves nothing to measure after {PROMPT_LEN}")
    prompt = np.arange(PROMPT_LEN) % max(runner.vocab_size - 1, 1)
    found: dict[str, Any] = {}
    for _ in range(2):
        runner.reset()
        start = time.perf_counter()
        logits = runner.step(prompt)
        found["prefill_tok_s"] = round(PROMPT_LEN / (time.perf_counter() - start), 1)
        before, tokens = launches(backend), []
        start = time.perf_counter()
        for _ in range(steps):
            tokens.append(int(logits[0].argmax()))
            logits = runner.step(np.array(tokens[-1:]))
        found["decode_tok_s"] = round(steps / (time.perf_counter() - start), 1)
        found |= {"launches": (launches(backend) - before) // steps, "tokens": tokens, "last": logits.tobytes()}
    return found


def launches(backend: Any) -> int:
    device = getattr(backend, "device", None)
    return int(device.counters.launches) if device else 0


def verdict(command: str, path: Path, code_type: str) -> str:
    """Of `genai parity` or `mirror-check` on the device, by its exit code; without a report it did not run."""
    words = [sys.executable, "-m", "genai_cli.cli", command, str(path), "--device", "cuda", "--json"]
    environment = {**os.environ, "GENAI_CUDA_CODE": code_type}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    try:
        json.loads(done.stdout)
        return ExitCode(done.returncode).name
    except ValueError:
        return f"not run: {(done.stderr.strip().splitlines() or ['no output'])[0]}"


def markdown(report: dict[str, Any]) -> str:
    """The table for docs/gpu.md."""
    device, tests = report["device"], report["tests"]
    alone = tests.get("skipped", 0)
    passed = tests.get("tests", 0) - sum(tests.get(k, 0) for k in ("failures", "errors", "skipped"))
    lines = [
        "# CUDA on a device",
        "",
        f"Written by `make test-gpu` on {report['date']}.",
        "",
        "| | |",
        "|---|---|",
        f"| device | {device['name']} ({device['arch']}) |",
        f"| driver | {device['driver']} (cuda-python {device['cuda_python']}) |",
        f"| measured copy | {device['copy_gb_s']} GB/s read + written |",
        f"| tests | {passed} passed, {tests.get('failures', 0)} failed, {alone} for the double only |",
        "",
    ]
    if report["models"]:
        columns = list(report["models"][0])
        lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(str(row[name]) for name in columns) + " |" for row in report["models"]]
    lines += ["", "## What the driver says to mistakes", "", "| mistake | answer |", "|---|---|"]
    lines += [f"| {name} | {answer} |" for name, answer in report["error_codes"].items()]
    lines += ["", "## Attributes", "", "| attribute | value |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in device["attributes"].items()]
    return "\n".join(lines) + "\n"


def collect(given: list[str], code_type: str) -> dict[str, Any]:
    say("device ...")
    report: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "host": platform.platform(),
        "device": device_facts(code_type),
    }
    say("error codes ...")
    report["error_codes"] = error_codes(code_type)
    say("tests ...")
    report["tests"] = run_tests()
    report["models"] = []
    for path in models(given):
        say(f"{path.name} ...")
        verdicts = {command: verdict(command, path, code_type) for command in ("parity", "mirror-check")}
        report["models"].append({**measured(path, code_type), **verdicts})
    return report


def failed(report: dict[str, Any]) -> bool:
    """Tests, graphs and verdicts decide; equal tokens are only shown: in 16 bits a near-tie may fall either way."""
    tests, rows = report["tests"], report["models"]
    broken = "error" in tests or tests["failures"] or tests["errors"]
    moved = any(not row["same bits without graphs"] for row in rows)
    differs = any(row[name] == ExitCode.DIFFERENT.name for row in rows for name in ("parity", "mirror-check"))
    return bool(broken) or moved or differs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--code", choices=("cubin", "ptx"), default="cubin", help="what NVRTC makes; ptx for the double"
    )
    given = parser.parse_args()
    try:
        report = collect(given.models, given.code)
    except GenaiError as error:
        say(error.message)
        return int(error.exit_code)
    if given.json:
        given.json.write_text(json.dumps(report, indent=2))
    if given.markdown:
        given.markdown.write_text(markdown(report))
    print(markdown(report))
    return int(ExitCode.DIFFERENT if failed(report) else ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
