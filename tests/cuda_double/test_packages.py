"""Real exports on the device: every decoder gives the CPU's tokens and KV, without a host step in its graph."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai_cli.backends.cpu import CpuBackend
from genai_cli.graph.loader import load_graph
from genai_cli.runners.native import NativeRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))
from cases import as_float
from tolerance import SOURCES, nmse

Make = Callable[..., Any]
PACKAGES = Path(__file__).resolve().parents[2] / "fixtures" / "packages"
DAILY = {"llama-fp16-cuda", "llama-bf16-cuda", "llama-int4-cpu", "qwen3_5_text-portable", "gemma2-fp32-cpu"}
STEPS = 5
LAYERS_AND_HEAD = 4  # an op's mean square error adds up over layers and head (the packages have two or three layers)


def decoders() -> list[Any]:
    """Package folders with one decoder, as pytest parameters."""
    found = sorted(file.parent.name for file in PACKAGES.glob("*/model.onnx"))
    return [pytest.param(name, marks=[] if name in DAILY else pytest.mark.slow) for name in found]


def run(runner: NativeRunner, prompt: np.ndarray) -> tuple[list[int], np.ndarray]:
    logits = [runner.step(prompt)]
    for _ in range(STEPS):
        logits.append(runner.step(np.array([logits[-1][0].argmax()])))
    return [int(row[0].argmax()) for row in logits], np.concatenate(logits)


@pytest.mark.parametrize("name", decoders())
def test_decoder(name: str, cuda_backend: Make) -> None:
    graph = load_graph(PACKAGES / name / "model.onnx")
    cpu, cuda = NativeRunner(graph, CpuBackend(threads=1)), NativeRunner(graph, cuda_backend())
    expected = json.loads((PACKAGES / name / "expected.json").read_text())
    prompt = np.array(expected["prompt"])
    (wanted, wanted_logits), (found, logits) = run(cpu, prompt), run(cuda, prompt)
    oracle = expected.get("ort_greedy") or expected["hf_greedy"]  # ORT has no bf16 kernels on the CPU
    assert found == wanted == oracle[: STEPS + 1]
    kind = cpu.kv_layout.components[0].dtype
    limit = LAYERS_AND_HEAD * SOURCES[kind.name][2]
    assert nmse(as_float(logits), as_float(wanted_logits)) <= limit
    for a, b in zip(cpu.kv_rows(0, cpu.length), cuda.kv_rows(0, cuda.length), strict=True):
        assert a.dtype == b.dtype
        assert nmse(as_float(b), as_float(a)) <= limit
    if name != "gpt2-optimum":  # shapes in its graph follow the past: recorded anew at every token
        assert cuda._backend.captures.graph_launches == STEPS - 1


def test_all_packages_are_there() -> None:
    assert {parameter.values[0] for parameter in decoders()} > DAILY
