"""Parity on a model people know: passes, and a defect in the middle of thirty layers is named."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from genai_cli.backends.cpu import CpuBackend
from genai_cli.checks import mutants, session
from genai_cli.checks.parity import Settings
from genai_cli.checks.target import Place
from genai_cli.errors import ExitCode
from genai_cli.report.text import find, headline

pytestmark = pytest.mark.demo
ROOT = Path(__file__).resolve().parents[2]
PLACE = Place(2, lambda: CpuBackend(threads=2), "cpu")


def made(kind: str) -> Path:
    """A model where `make demo` puts it; built when missing."""
    sys.path.insert(0, str(ROOT / "scripts"))
    maker = importlib.import_module("make_demo_model")
    return Path(maker.make(kind, ROOT / "models", maker.weights_file())[0])


@pytest.fixture(scope="module")
def demo() -> Path:
    return made("int4")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("floors")


def run(demo, cache, **changes):
    settings = Settings(**{"steps": 16, "cache_dir": cache, **changes})
    return session.run(demo, session.Request(), settings, PLACE, lambda _: None)


def test_the_demo_model_passes_on_the_sharp_oracle(demo, cache):
    report = run(demo, cache)
    assert report.exit_code == ExitCode.OK, report.reason
    tokens = find(report, "tokens")
    assert (tokens.compared, tokens.decisive) == (80, 80)
    assert find(report, "ops.quantized").extra["host"] == 0
    assert run(demo, cache, user_mode=False).floor.cached


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16", "int8"])
def test_every_precision_of_the_demo_model_passes(kind, cache):
    report = run(made(kind), cache)
    assert report.exit_code == ExitCode.OK, report.reason
    said = find(report, "statistics.nll")
    assert said is None if kind == "fp32" else (said.verdict, said.compared) == ("pass", 1024)


def test_one_wrong_zero_point_in_the_middle_is_named(demo, cache):
    report = run(demo, cache, user_mode=False, transform=lambda graph: mutants.zero_point(graph, 15))
    assert report.exit_code == ExitCode.DIFFERENT
    assert "layer 15: MatMulNBits" in headline(report)
    assert report.layers[14].accumulated <= report.layers[14].limit
    assert report.layers[15].accumulated > report.layers[15].limit
