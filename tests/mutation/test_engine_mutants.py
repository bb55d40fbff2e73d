"""What every limit rests on: clean engines pass, also with one ulp changed; each planted defect fails at its layer."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from genai_cli.backends.cpu import CpuBackend
from genai_cli.checks import mutants, preflight
from genai_cli.checks.parity import Oracles, Prompt, Settings, Target, consult, parity
from genai_cli.checks.target import Place, open_target
from genai_cli.errors import ExitCode
from genai_cli.graph.twins import Twin
from genai_cli.report.text import headline

PACKAGES = Path(__file__).resolve().parents[2] / "fixtures" / "packages"
NAMES = sorted(p.name for p in PACKAGES.iterdir() if p.is_dir())
IMAGE_TOKEN = 5  # of gemma3-vlm
QUICK = ("llama-fp32-cpu", "llama-int4-cpu", "llama-bf16-cuda", "llama-portable")
SETTINGS = Settings(steps=24, user_mode=False)
PLACE = Place(2, lambda: CpuBackend(threads=2), "cpu")


@cache
def target(name: str) -> Target:
    return open_target(PACKAGES / name, PLACE)


def prompts(name: str) -> list[Prompt]:
    ids = json.loads((PACKAGES / name / "expected.json").read_text())["prompt"]
    text_only = [token for token in ids if token != IMAGE_TOKEN]  # no pictures here
    return [Prompt("0", np.array(text_only, np.int64))]


@cache
def oracles(name: str) -> Oracles:
    made = target(name)
    artifact = preflight.artifact(made.model_path, made.graph, made.tokenizer_path)
    return consult(made, artifact, prompts(name), SETTINGS, lambda _: None)


def run(name: str, **changes):
    settings = Settings(**{"steps": SETTINGS.steps, "user_mode": False, **changes})
    return parity(target(name), prompts(name), settings, lambda _: None, oracles(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_clean_engine_passes_every_time(name):
    reports = [run(name) for _ in range(3)]
    assert {report.verdict for report in reports} == {"PASS"}
    values = [[check.value for check in report.checks] for report in reports]
    assert values[0] == values[1] == values[2]  # deterministic


def nudged(name: str, seed: int):
    report = run(name, transform=lambda graph: mutants.nudged(graph, seed), locate=False)
    assert report.exit_code == ExitCode.OK, headline(report)


@pytest.mark.parametrize("name", NAMES)
def test_engines_one_ulp_away_pass(name):
    for seed in range(1, 6):
        nudged(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_twenty_engines_one_ulp_away_pass(name):
    for seed in range(1, 21):
        nudged(name, seed)


def planted(name: str, layers: list[int]):
    """Every mutant; those the graph has no place for are named, not hidden."""

    def one(mutant, plant, layer):
        changes = {"transform": plant} | ({"pick": mutant.pick} if mutant.pick else {})
        report = run(name, **changes)
        if report.exit_code == ExitCode.DIFFERENT and layer is not None:
            assert f"layer {layer}" in headline(report), headline(report)
        return report

    found = mutants.prove(target(name).graph, one, layers)
    left = [(m.id, m.target, m.state, m.note) for m in found if m.state not in ("killed", "not-applicable")]
    assert not left
    return {m.id for m in found if m.state == "killed"}


@pytest.mark.parametrize("name", QUICK)
def test_each_planted_defect_fails_at_its_layer(name):
    killed = planted(name, [1])
    assert {"attention-scale", "rotary-interleave", "epsilon", "exponent-bit", "nan-in-layer", "tie-break"} <= killed


def test_a_missing_bias_fails_at_its_layer(tmp_path):
    """The test exports' biases are zero, which nobody can miss: give one of them values."""
    folder = tmp_path / "biased"
    shutil.copytree(PACKAGES / "gpt2-optimum", folder)
    twin = Twin(folder / "model.onnx")
    rng = np.random.default_rng(0)
    for name in [n for n in twin.nudgeable() if n.endswith(".bias") and not twin.weight(n).any()]:
        twin.replace(name, rng.normal(0, 0.1, twin.weight(name).shape).astype(np.float32))
    (folder / "model.onnx").write_bytes(twin.serialize())
    made = open_target(folder, PLACE)
    clean = parity(made, prompts("gpt2-optimum"), SETTINGS, lambda _: None)
    assert clean.verdict == "PASS"
    planted = Settings(steps=SETTINGS.steps, transform=lambda graph: mutants.missing_bias(graph, 0))
    report = parity(made, prompts("gpt2-optimum"), planted, lambda _: None)
    assert report.exit_code == ExitCode.DIFFERENT
    assert "layer 0" in headline(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_planted_defect_fails_at_every_layer(name):
    layers = list(range(mutants.num_layers(target(name).graph)))
    assert {"exponent-bit", "nan-in-layer", "tie-break"} <= planted(name, layers)
