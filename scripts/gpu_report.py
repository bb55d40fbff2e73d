"""Run everything on a real CUDA device and write one table. Fails, never skips, without a device.

    python scripts/gpu_report.py [--markdown docs/gpu.md] [--json FILE] [--minutes M] [MODEL ...]

MODEL is a package folder or an .onnx file; by default the fixtures' packages, the demo model where it is, and decoders
of real sizes with random weights, made on the spot. Needs no network. Besides the table it records device attributes
and the driver's error codes: what calibrates the CPU double. What is known is written after every part; what there was
no time for is named.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from gpu_probe import device_facts, error_codes, open_backend

from genai_cli.errors import ExitCode, GenaiError
from genai_cli.runners.base import TopRunner

ROOT = Path(__file__).resolve().parent.parent
PROMPT_LEN, DECODE_STEPS = 64, 64
LONG_PROMPT = 512  # of the decoders of real sizes
PAGE = 16  # tokens of a KV page
TEST_PROCESSES = 8
RANDOM_MODELS = (("0.1b", "int4"), ("1.5b", "int4"), ("1.5b", "fp16"), ("1.5b", "bf16"), ("0.1b", "fp16"))
RESERVE_S = 40  # kept back for one more model, once it is begun


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_tests(seconds: float) -> dict[str, Any]:
    """The suite of the double, on the device: passed, failed, skipped (what only the double can see)."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests" / "cuda_double"), f"--junitxml={report}"]
        if find_spec("xdist"):
            command += ["-n", str(min(TEST_PROCESSES, os.cpu_count() or 1))]
        try:
            done = subprocess.run(
                [*command, "-m", "not slow"], cwd=ROOT, capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not finished after {seconds:.0f} s"}
        if not report.exists():
            return {"error": (done.stdout + done.stderr)[-2000:]}
        said = done.stdout[-6000:]
        suite = ElementTree.parse(report).getroot().find("testsuite")
        assert suite is not None
        counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
        broken = [
            case for case in suite.iter("testcase") for kind in ("failure", "error") if case.find(kind) is not None
        ]
        return {**counts, "failed": [str(case.get("name")) for case in broken], "said": said if broken else ""}


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


def measured(path: Path, code_type: str, copy_gb_s: float, prompt_len: int, against_cpu: bool) -> dict[str, Any]:
    """Native on the device against the CPU and ORT: tokens, speed with and without graphs, launches a token."""
    from genai_cli.backends.cpu import CpuBackend
    from genai_cli.package.decoder import load_decoder
    from genai_cli.package.open import open_package
    from genai_cli.runners.native import NativeRunner

    loaded = load_decoder(open_package(path))

    def native(backend: Any) -> dict[str, Any]:
        runner = NativeRunner(loaded.graph, backend, io=loaded.io, context_len=loaded.context_len)
        return greedy(runner, backend, prompt_len)

    graphs, eager = native(open_backend(code_type)), native(open_backend(code_type, capture=False))
    ort = on_ort(loaded, prompt_len)
    read = weight_bytes(path) * graphs["decode_tok_s"] / 1e9
    return {
        "model": path.name,
        "same tokens as the CPU": graphs["tokens"] == native(CpuBackend())["tokens"] if against_cpu else "-",
        "same tokens and KV without graphs": all(graphs[name] == eager[name] for name in ("tokens", "kv")),
        "captures": graphs["captures"],
        f"prefill tok/s ({prompt_len})": graphs["prefill_tok_s"],
        "decode tok/s": graphs["decode_tok_s"],
        "without graphs": eager["decode_tok_s"],
        "ORT-CUDA prefill tok/s": ort["prefill_tok_s"],
        "ORT-CUDA decode tok/s": ort["decode_tok_s"],
        "weights GB/s": round(read, 1),
        "of the copy": f"{200 * read / copy_gb_s:.0f} %",  # a copy's bytes are counted twice: read and written
        "launches a token": eager["launches"],
        "bytes a token": graphs["bytes_a_token"],
        "mirror": graphs["mirror"],
    }


def on_ort(loaded: Any, prompt_len: int) -> dict[str, Any]:
    """The same steps on ORT's CUDA provider, or the reason that it is not there."""
    from genai_cli.runners.ort import OrtRunner

    if reason := ort_refuses():
        return dict.fromkeys(("prefill_tok_s", "decode_tok_s"), f"not run: {reason}")
    try:
        return greedy(OrtRunner(loaded.path, io=loaded.io, graph=loaded.graph, device="cuda"), None, prompt_len)
    except GenaiError as error:
        return dict.fromkeys(("prefill_tok_s", "decode_tok_s"), f"not run: {error.message}")


@cache
def ort_refuses() -> str:
    """Why ORT has no CUDA provider here, told by a live session of a small model: large ones take long to load."""
    from genai_cli.package.decoder import load_decoder
    from genai_cli.package.open import open_package
    from genai_cli.runners.ort import OrtRunner

    loaded = load_decoder(open_package(ROOT / "fixtures" / "packages" / "llama-fp32-cpu"))
    try:
        OrtRunner(loaded.path, io=loaded.io, graph=loaded.graph, device="cuda").close()
    except GenaiError as error:
        return error.message
    return ""


def best_of(runner: Any) -> Callable[[np.ndarray], int]:
    """ids -> the next token, as the loop chooses it: on the device where that can be done."""
    if isinstance(runner, TopRunner) and runner.supports_top(1).supported:
        return lambda ids: int(runner.step_top(ids, 1)[0][0])
    return lambda ids: int(runner.step(ids)[-1].argmax())


def greedy(runner: Any, backend: Any, prompt_len: int) -> dict[str, Any]:
    """A prompt and greedy tokens, three times: the first records the steps, the second captures them, the last is timed."""
    steps = min(DECODE_STEPS, (runner.context_len or prompt_len + DECODE_STEPS) - prompt_len)
    if steps < 1:
        raise GenaiError(f"a context of `{runner.context_len}` tokens leaves nothing to measure after {prompt_len}")
    prompt, step = np.arange(prompt_len) % max(runner.vocab_size - 1, 1), best_of(runner)
    found: dict[str, Any] = {}
    for _ in range(3):
        runner.reset()
        start = time.perf_counter()
        tokens = [step(prompt)]
        found["prefill_tok_s"] = round(prompt_len / (time.perf_counter() - start), 1)
        before, start = traffic(backend), time.perf_counter()
        for _ in range(steps):
            tokens.append(step(np.array(tokens[-1:])))
        spent = time.perf_counter() - start
        launched, moved = ((b - a) // steps for a, b in zip(before, traffic(backend), strict=True))
        found |= {"decode_tok_s": round(steps / spent, 1), "launches": launched, "bytes_a_token": moved}
    rows, page_s = timed_page(runner)
    digest = hashlib.blake2b(b"".join(np.ascontiguousarray(part).tobytes() for part in rows), digest_size=8)
    found |= {"tokens": tokens, "kv": digest.hexdigest(), "captures": captures(backend)}
    return {**found, "mirror": f"{100 * page_s / PAGE / (spent / steps):.1f} % of a step"}


def timed_page(runner: Any) -> tuple[Any, float]:
    """All KV rows, and the seconds that one page of them takes to come to the host."""
    last = runner.length
    runner.kv_rows(0, min(PAGE, last))
    start = time.perf_counter()
    runner.kv_rows(last - min(PAGE, last), last)
    spent = time.perf_counter() - start
    return runner.kv_rows(0, last), spent


def captures(backend: Any) -> str:
    """Counters, and why a capture was declined."""
    counts = getattr(backend, "captures", None)
    if counts is None:
        return ""
    reasons = "; ".join(f"{declined.first_kernel}: {declined.reason}" for declined in counts.declined)
    return f"{counts.captures} for {counts.graph_launches} launches" + (f", declined: {reasons}" if reasons else "")


def traffic(backend: Any) -> tuple[int, int]:
    """Kernels launched one by one, and bytes between host and device, so far."""
    device = getattr(backend, "device", None)
    if device is None:
        return 0, 0
    return device.counters.launches, device.counters.htod_bytes + device.counters.dtoh_bytes


def verdict(command: str, path: Path, code_type: str, seconds: float) -> str:
    """Of `genai parity` or `mirror-check` on the device, by its exit code; without a report it did not run."""
    words = [sys.executable, "-m", "genai_cli.cli", command, str(path), "--device", "cuda", "--json"]
    environment = {**os.environ, "GENAI_CUDA_CODE": code_type}
    try:
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"not finished after {seconds:.0f} s"
    try:
        json.loads(done.stdout)
        return ExitCode(done.returncode).name
    except ValueError:
        return f"not run: {(done.stderr.strip().splitlines() or ['no output'])[0]}"


def markdown(report: dict[str, Any]) -> str:
    """The table for docs/gpu.md."""
    device, tests = report["device"], report.get("tests", {"error": "not run"})
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
        f"| driver | {device['driver']} (cuda-bindings {device['cuda_bindings']}, cuda-core {device['cuda_core']}, "
        f"NVRTC {device['nvrtc']}) |",
        f"| measured copy | {device['copy_gb_s']} GB/s read + written |",
        f"| tests | {tested(tests, passed, alone)} |",
        f"| took | {report['seconds']:.0f} s |",
        "",
    ]
    for rows in (report["models"], report["sizes"]):
        lines += table(rows)
    lines += [f"Not run: {what}." for what in report["left_out"]]
    lines += ["", "## What the driver says to mistakes", "", "| mistake | answer |", "|---|---|"]
    lines += [f"| {name} | {answer} |" for name, answer in report["error_codes"].items()]
    lines += ["", "## Attributes", "", "| attribute | value |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in device["attributes"].items()]
    return "\n".join(lines) + "\n"


def tested(tests: dict[str, Any], passed: int, alone: int) -> str:
    if "error" in tests:
        return tests["error"].splitlines()[-1]
    broken = [f"`{name}`" for name in tests["failed"]]
    return (
        f"{passed} passed, {len(broken)} failed, {alone} for the double only"
        + (": " if broken else "")
        + ", ".join(broken)
    )


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown, a row a model; a model that failed has its reason in the second column."""
    if not rows:
        return []
    columns = list(max(rows, key=len))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [row["model"], row["failed"]] if "failed" in row else [row.get(name, "") for name in columns]
        lines.append("| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return [*lines, ""]


def attempted(path: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was measured, or what went wrong: one broken model must not lose the others."""
    try:
        return measure()
    except GenaiError as error:
        return {"model": path.name, "failed": error.message}


def collect(given: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    code_type, began = given.code, time.monotonic()

    def left() -> float:
        return 60 * given.minutes - (time.monotonic() - began)

    def saved(what: str) -> None:
        report["seconds"] = time.monotonic() - began
        save(report)
        say(what)

    say("device ...")
    report: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "host": platform.platform(),
        "device": device_facts(code_type),
        "models": [],
        "sizes": [],
        "left_out": [],
    }
    say("error codes ...")
    report["error_codes"] = error_codes(code_type)
    copy = report["device"]["copy_gb_s"]
    saved("decoders of real sizes ...")
    with tempfile.TemporaryDirectory() as folder:
        for size, precision in () if given.models else RANDOM_MODELS:
            name = f"random-{size}-{precision}"
            if left() < 0.6 * 60 * given.minutes:  # the tests and the packages need the rest
                report["left_out"].append(name)
                continue
            path = make_random(size, precision, Path(folder) / name)
            report["sizes"].append(attempted(path, lambda p=path: measured(p, code_type, copy, LONG_PROMPT, False)))
            shutil.rmtree(path)
            saved(f"{name} ...")
    report["tests"] = run_tests(left() - 2 * RESERVE_S)
    saved("packages ...")
    for path in models(given.models):
        if left() < RESERVE_S:
            report["left_out"].append(path.name)
            continue
        row = attempted(path, lambda p=path: measured(p, code_type, copy, PROMPT_LEN, True))
        if "failed" not in row:
            row |= {what: verdict(what, path, code_type, max(left(), 1)) for what in ("parity", "mirror-check")}
        report["models"].append(row)
        saved(f"{path.name} ...")
    return report


def make_random(size: str, precision: str, folder: Path) -> Path:
    """A folder with a decoder of that size."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from make_random_model import make

    return make(size, precision, folder).parent


def failed(report: dict[str, Any]) -> bool:
    """Tests, graphs and verdicts decide; equal tokens are only shown: in 16 bits a near-tie may fall either way."""
    tests, rows = report["tests"], [*report["models"], *report["sizes"]]
    broken = "error" in tests or tests["failures"] or tests["errors"] or any("failed" in row for row in rows)
    moved = any(row.get("same tokens and KV without graphs") is False for row in rows)
    differs = any(row.get(name) == ExitCode.DIFFERENT.name for row in rows for name in ("parity", "mirror-check"))
    return bool(broken or moved or differs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0, help="what is not begun by then is named as not run")
    parser.add_argument(
        "--code", choices=("cubin", "ptx"), default="cubin", help="what NVRTC makes; ptx for the double"
    )
    given = parser.parse_args()

    def save(report: dict[str, Any]) -> None:
        if given.json:
            given.json.write_text(json.dumps(report, indent=2))
        if given.markdown:
            given.markdown.write_text(markdown(report))

    try:
        report = collect(given, save)
    except GenaiError as error:
        say(error.message)
        return int(error.exit_code)
    print(markdown(report))
    print(report["tests"].get("said") or report["tests"].get("error", ""))
    return int(ExitCode.DIFFERENT if failed(report) else ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
