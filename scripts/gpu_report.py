"""Run everything on a real CUDA device and write one table. Fails, never skips, without a device.

    python scripts/gpu_report.py [--markdown docs/gpu.md] [--json FILE] [MODEL ...]

MODEL is a package folder or an .onnx file; by default the fixtures' packages and the demo model, where they are. Needs
no network. Besides the table it records device attributes and the driver's error codes: what calibrates the CPU double.
"""

from __future__ import annotations

import argparse
import json
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
    """Decoders as .onnx files."""
    if given:
        return [decoder(Path(path)) for path in given]
    folders = sorted({path.parent for path in (ROOT / "fixtures").rglob("genai_config.json")})
    folders += sorted({path.parent for path in (ROOT / "models").glob("*/genai_config.json")})
    return [decoder(folder) for folder in folders]


def decoder(path: Path) -> Path:
    """The decoder's file of a package, or the file itself."""
    if path.suffix == ".onnx":
        return path
    config = json.loads((path / "genai_config.json").read_text())
    return path / str(config["model"]["decoder"]["filename"])


def weight_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.parent.glob("*.onnx*"))


def measured(path: Path, code_type: str) -> dict[str, Any]:
    """Native on the device: tokens against the CPU's, speed with and without graphs, launches a token."""
    from genai_cli.backends.cpu import CpuBackend

    cpu = greedy(path, CpuBackend())
    graphs, eager = (greedy(path, open_backend(code_type, capture=on)) for on in (True, False))
    decode_s = graphs["decode_s"]
    return {
        "model": path.parent.name,
        "same_tokens_as_cpu": graphs["tokens"] == cpu["tokens"],
        "same_bits_with_and_without_graphs": graphs["last"] == eager["last"],
        "prefill_tok_s": round(PROMPT_LEN / graphs["prefill_s"], 1),
        "decode_tok_s": round(1 / decode_s, 1),
        "decode_tok_s_eager": round(1 / eager["decode_s"], 1),
        "weights_gb_s": round(weight_bytes(path) / decode_s / 1e9, 1),
        "launches_a_token": eager["launches"],
        "captures": graphs["captures"],
    }


def greedy(path: Path, backend: Any) -> dict[str, Any]:
    """A prompt and DECODE_STEPS greedy tokens; the second run is timed."""
    from genai_cli.graph.loader import load_graph
    from genai_cli.runners.native import NativeRunner

    runner = NativeRunner(load_graph(path), backend)
    steps = min(DECODE_STEPS, (runner.context_len or PROMPT_LEN + DECODE_STEPS) - PROMPT_LEN)
    if steps < 1:
        raise GenaiError(f"`{path}` holds fewer than {PROMPT_LEN + 1} tokens, nothing to measure")
    prompt = np.arange(PROMPT_LEN) % max(runner.vocab_size - 1, 1)
    found: dict[str, Any] = {}
    for _ in range(2):
        runner.reset()
        start = time.perf_counter()
        logits = runner.step(prompt)
        found["prefill_s"] = time.perf_counter() - start
        before = launches(backend)
        start = time.perf_counter()
        tokens = []
        for _ in range(steps):
            tokens.append(int(logits[0].argmax()))
            logits = runner.step(np.array(tokens[-1:]))
        found["decode_s"] = (time.perf_counter() - start) / steps
        found["launches"] = (launches(backend) - before) // steps
        found |= {"tokens": tokens, "last": logits.tobytes()}
    captures = getattr(backend, "captures", None)
    found["captures"] = captures.captures if captures else 0
    return found


def launches(backend: Any) -> int:
    device = getattr(backend, "device", None)
    return int(device.counters.launches) if device else 0


def parity(path: Path) -> str:
    """The verdict of `genai parity` on the device, by its exit code; without a report it did not run."""
    command = [sys.executable, "-m", "genai_cli.cli", "parity", str(path.parent), "--device", "cuda", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    try:
        json.loads(done.stdout)
        return ExitCode(done.returncode).name
    except ValueError:
        return f"not run: {(done.stderr.strip().splitlines() or ['no output'])[-1]}"


def ort_cuda() -> str:
    """What a live ONNX Runtime session says it runs on when it is asked for CUDA."""
    import onnxruntime
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "one", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    asked = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    live = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=asked).get_providers()
    if "CUDAExecutionProvider" in live:
        return f"{live}: compare with `genai bench MODEL --device cuda --vs ort`"
    return f"not run: asked for CUDA, the live session has {live}"


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
        f"| ORT on CUDA | {report['ort_cuda']} |",
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
        "ort_cuda": ort_cuda(),
    }
    say("error codes ...")
    report["error_codes"] = error_codes(code_type)
    say("tests ...")
    report["tests"] = run_tests()
    report["models"] = []
    for path in models(given):
        say(f"{path.parent.name} ...")
        report["models"].append({**measured(path, code_type), "parity": parity(path)})
    return report


def failed(report: dict[str, Any]) -> bool:
    tests = report["tests"]
    broken = "error" in tests or tests["failures"] or tests["errors"]
    agree = all(row["same_tokens_as_cpu"] and row["same_bits_with_and_without_graphs"] for row in report["models"])
    differs = any(row["parity"] == ExitCode.DIFFERENT.name for row in report["models"])
    return bool(broken) or not agree or differs


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
