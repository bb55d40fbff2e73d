"""Requests on real packages: oracles, golden files, ops, bundles, speed, blind fixtures, sides that are no sides."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from genai_cli.backends.cpu import CpuBackend
from genai_cli.checks import bundle, likelihood, mutants, preflight, session
from genai_cli.checks.parity import Prompt, Settings, parity
from genai_cli.checks.session import Request
from genai_cli.checks.target import Place, open_target
from genai_cli.errors import ExitCode, GenaiError
from genai_cli.graph.twins import Twin
from genai_cli.report.text import find, headline
from genai_cli.runners.base import RunnerInfo
from genai_cli.runners.native import NativeRunner

PACKAGES = Path(__file__).resolve().parents[2] / "fixtures" / "packages"
PLACE = Place(2, lambda: CpuBackend(threads=2), "cpu")
SETTINGS = Settings(steps=8)
IDS = Request(ids=tuple(range(30, 50)))


def run(name, request=IDS, **changes):
    return session.run(PACKAGES / name, request, replace(SETTINGS, **changes), PLACE, lambda _: None)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("floors")


@pytest.mark.parametrize("oracle", [None, "ort", "ort-sharp", "ort-f32", "f64"])
def test_every_oracle_judges_an_f32_package(oracle):
    report = run("llama-fp32-cpu", oracle=oracle)
    assert report.verdict == "PASS", report.reason
    assert report.sides["oracle"]["kind"] == (oracle or "ort")


def test_int8_activations_gate_on_the_sharp_oracle_and_report_beside_the_plain_one():
    report = run("llama-int4-cpu")
    assert report.sides["oracle"]["kind"] == "ort-sharp"
    assert find(report, "user_mode.plain").extra["oracle"] == "ort"
    ops = find(report, "ops.quantized")
    assert (ops.verdict, ops.limit) == ("pass", 1e-12)
    assert ops.extra["host"] == 0  # native's own kernel, not the reference


def test_bf16_gates_on_its_f32_twin():
    report = run("llama-bf16-cuda")
    assert (report.verdict, report.sides["oracle"]["kind"]) == ("PASS", "ort-f32")
    assert "widened" in " ".join(report.sides["oracle"]["rewrites"])


def test_noise_above_the_ceiling_is_inconclusive_and_names_a_sharper_oracle():
    report = run("llama-fp32-cpu", kappa=1e6)
    assert report.exit_code == ExitCode.INCONCLUSIVE
    assert "--oracle" in report.next_command


def test_a_bad_export_passes_with_the_warning_about_its_window():
    report = run("mistral-fp32-cpu")
    assert report.verdict == "PASS"
    assert any("window of 64" in warning for warning in report.warnings)


def test_the_floor_is_cached_with_the_same_verdict(cache):
    first, second = (run("llama-fp32-cpu", cache_dir=cache) for _ in range(2))
    assert (first.floor.cached, second.floor.cached) == (False, True)
    assert first.floor.used == second.floor.used
    assert len(first.floor.perturbations) == 10  # decode, optimisation, eight of one ulp
    assert not run("llama-fp32-cpu", cache_dir=cache, seed=1).floor.cached


def test_a_floor_that_was_interrupted_goes_on_where_it_was(tmp_path):
    seen = []

    def stop(text):
        seen.append(text)
        if sum(t.startswith("floor: ") for t in seen) == 5:
            raise KeyboardInterrupt

    settings = replace(SETTINGS, cache_dir=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        session.run(PACKAGES / "llama-fp32-cpu", IDS, settings, PLACE, stop)
    (part,) = tmp_path.glob("floor-*.part.json")
    assert len(json.loads(part.read_text())) == 4
    kept = json.loads(part.read_text())
    report = run("llama-fp32-cpu", cache_dir=tmp_path)
    measured = {p.name: p.nmse for p in report.floor.perturbations}
    assert all(measured[name] == noise["nmse"] for name, noise in kept.items())
    assert not list(tmp_path.glob("floor-*.part.json"))
    assert report.floor.used == run("llama-fp32-cpu").floor.used


def test_the_mode_you_run_is_judged_on_a_thousand_tokens(cache):
    for name in ("llama-int4-cpu", "llama-bf16-cuda", "llama-fp16-cuda"):
        found = find(run(name, cache_dir=cache), "statistics.nll")
        assert (found.verdict, found.compared) == ("pass", 1024)
        again = find(run(name, cache_dir=cache), "statistics.nll")  # the oracle's side comes from the cache
        assert again.value == found.value
    assert list(cache.glob("nll-*.json"))


def test_a_mode_you_run_that_loses_likelihood_is_a_difference(cache, monkeypatch):
    """Only the rounded mode is damaged: the exact mode that gates end to end cannot see it."""
    real = likelihood.score

    def worse(runner, windows):
        found = real(runner, windows)
        return found + 0.02 if runner.info.name == "native" else found

    monkeypatch.setattr(likelihood, "score", worse)
    report = run("llama-fp16-cuda", cache_dir=cache)
    assert report.exit_code == ExitCode.DIFFERENT
    assert "nat/token is outside the margin" in report.reason


def test_golden_file_stands_in_for_the_oracle(tmp_path):
    file = tmp_path / "g.npz"
    assert run("llama-fp32-cpu", save_golden=file).exit_code == ExitCode.OK
    again = run("llama-fp32-cpu", oracle=f"golden:{file}")
    assert again.verdict == "PASS"
    assert again.sides["oracle"]["kind"] == "golden"
    broken = run("llama-fp32-cpu", oracle=f"golden:{file}", transform=lambda g: mutants.exponent_bit(g, 1))
    assert broken.exit_code == ExitCode.DIFFERENT
    with pytest.raises(GenaiError, match="was made from the artifact"):
        run("gemma2-fp32-cpu", oracle=f"golden:{file}")


@pytest.mark.parametrize("name", ["llama-int4-cpu", "qwen3_5_text-portable"])
def test_every_op_of_an_artifact_alone(name):
    report = run(name, replace(IDS, ops=True))
    assert report.exit_code == ExitCode.OK, report.reason
    check = find(report, "ops")
    assert check.compared > 20
    assert (
        find(report, "ops.MatMul.float32" if "qwen" in name else "ops.com.microsoft::MatMulNBits.float32").verdict
        == "pass"
    )


def test_a_failure_becomes_a_short_bundle_that_fails_again(tmp_path):
    def plant(graph):
        return mutants.causal_off_by_one(graph, 1)  # shows from the ninth token on

    report = run("llama-fp32-cpu", replace(IDS, bundle=tmp_path / "b"), transform=plant)
    assert report.exit_code == ExitCode.DIFFERENT
    assert (report.bundle["tokens"], report.bundle["of"]) == (9, 20)
    made = bundle.read(tmp_path / "b")
    assert made.place.startswith("layer 1")
    settings = replace(SETTINGS, transform=plant)
    again = session.run(tmp_path / "b", Request(), settings, PLACE, lambda _: None)
    assert headline(again).startswith("FAIL")
    clean = session.run(tmp_path / "b", Request(), SETTINGS, PLACE, lambda _: None)
    assert clean.exit_code == ExitCode.OK


SHARES = [  # package, defect, whether the layer's own cached K or V carries some of it
    ("llama-fp32-cpu", mutants.rotary_interleave, True),
    ("llama-int4-cpu", mutants.zero_point, True),
    ("llama-bf16-cuda", mutants.attention_scale, False),
    ("llama-static", mutants.attention_scale, False),
    ("gpt2-optimum", mutants.exponent_bit, False),
    ("gemma3-vlm", mutants.epsilon, True),
]


@pytest.mark.parametrize(("name", "plant", "through_kv"), SHARES)
def test_shares_sum_to_the_observed_difference_in_both_directions(name, plant, through_kv, cache):
    report = run(name, transform=lambda g: plant(g, 1), user_mode=False, cache_dir=cache)
    found = {splice.direction: splice for splice in report.splice}
    assert all(s.sum_check == pytest.approx(0, abs=1e-12 + 1e-6 * abs(s.observed)) for s in report.splice)
    first, second = found["native then oracle"], found["oracle then native"]
    assert first.observed == pytest.approx(second.observed)
    for splice in (first, second):
        made = dict(zip(splice.parts, splice.contributions, strict=True))
        assert made["block 1"] == pytest.approx(splice.observed, rel=0.1)  # whichever side comes first
    assert report.layers[1].share == pytest.approx(1.0, abs=0.1)
    own = found["KV of layer 1"]
    assert own.parts == ["key", "value"]
    for part in ("by head", "by position"):  # the same exchange in other steps
        assert found[f"KV of layer 1 {part}"].observed == pytest.approx(own.observed, abs=1e-4)
    assert (abs(own.observed) > 0.05 * abs(first.observed)) == through_kv


def test_a_spliced_clean_engine_is_the_clean_engine(cache):
    """With nothing planted, exchanging blocks moves nothing beyond the noise."""
    report = run("llama-fp32-cpu", explain=True, cache_dir=cache)
    assert report.exit_code == ExitCode.OK
    bound = find(report, "logits.pair").limit
    assert {splice.direction for splice in report.splice} >= {"native then oracle", "oracle then native"}
    assert all(abs(part) < bound for splice in report.splice for part in splice.contributions)


def test_no_ratio_without_parity():
    request = replace(IDS, perf=True)
    good = run("llama-fp32-cpu", request)
    bad = run("llama-fp32-cpu", request, transform=lambda g: mutants.epsilon(g, 1))
    assert good.perf["ratio"] > 0
    assert bad.perf["ratio"] is None
    assert "FAIL" in bad.perf["why_no_ratio"]


def test_nothing_to_compare_is_no_pass():
    target = open_target(PACKAGES / "llama-fp32-cpu", PLACE)
    for prompts in ([], [Prompt("0", np.zeros(0, np.int64))]):
        with pytest.raises(GenaiError, match="nothing to compare") as error:
            parity(target, prompts, SETTINGS, lambda _: None)
        assert error.value.exit_code == ExitCode.NOT_COMPARED


def test_a_blind_fixture_is_refused():
    """One token and no steps: no KV, no order: nothing a defect could show in."""
    report = run("llama-fp32-cpu", Request(ids=(30,)), steps=0)
    assert report.exit_code in (ExitCode.UNPROVEN, ExitCode.NOT_COMPARED)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"nodes_fallback": 3}, "handed 3"),
        ({"name": "ort", "providers": ("CPUExecutionProvider",)}, "ran on CPUExecutionProvider"),
        ({"nodes": 1}, "planned 1 nodes"),
    ],
)
def test_native_that_is_not_native_is_no_comparison(changes, word):
    native = RunnerInfo("native", "1", "cpu", ("cpu:avx2",), 44, 0, 1)
    oracle = RunnerInfo("ort", "1", "cpu", ("CPUExecutionProvider",), 44, 0, 1)
    assert preflight.sides_check(native, oracle, 44).verdict == "pass"
    check = preflight.sides_check(replace(native, **changes), oracle, 44)
    assert check.verdict == "fail"
    assert word in check.reason
    assert preflight.sides_check(native, replace(oracle, name="native"), 44).verdict == "fail"


def test_default_prompt_is_tokenized_and_the_report_is_strict_json():
    from genai_cli.report.json import dumps

    report = run("llama-fp32-cpu", Request())
    assert report.inputs[0]["n_tokens"] == session.DEFAULT_TOKENS
    data = json.loads(dumps(report))
    assert data["schema"] == "genai.parity/1"
    assert data["artifact"]["external_data_sha256"]


def test_a_short_prompt_beside_a_longer_one_is_not_blind(cache):
    """Two tokens in reverse order, the last one kept, are the same two."""
    target = open_target(PACKAGES / "llama-fp32-cpu", PLACE)
    prompts = [Prompt("short", np.array([30, 31])), Prompt("long", np.arange(30, 50))]
    assert parity(target, prompts, SETTINGS, lambda _: None).verdict == "PASS"


def test_several_prompts_are_one_verdict():
    report = run("llama-fp32-cpu", Request(texts=("Hello there", "A second prompt, a little longer")))
    assert [entry["id"] for entry in report.inputs] == ["0", "1"]
    rows = sum(entry["n_tokens"] + entry["steps"] for entry in report.inputs)
    assert find(report, "logits.nmse").compared == rows


class Forgetful(NativeRunner):
    """Loses layer 1's newest key after every decode step: a prefill shows nothing."""

    def _lose(self, num_new):
        if num_new == 1:
            slot, binding = self.engine.slots[2], self.engine.plan.io.kv[2]
            zeros = np.zeros((binding.num_heads, 1, binding.head_dim), binding.dtype)
            self.engine.backend.kv_write(slot, zeros, self.length - 1)

    def step(self, ids, **options):
        logits = super().step(ids, **options)
        self._lose(len(ids))
        return logits

    def tap(self, names, ids):
        made = super().tap(names, ids)
        self._lose(len(ids))
        return made


def test_a_defect_that_only_decode_shows_is_found_by_tapped_steps(tmp_path):
    target = open_target(PACKAGES / "llama-fp32-cpu", PLACE)

    def open_native(*, exact, transform=None):
        return Forgetful(target.graph, CpuBackend(threads=2), exact=exact, transform=transform)

    broken = replace(target, open_native=open_native)
    report = parity(broken, [Prompt("0", np.arange(30, 50))], SETTINGS, lambda _: None)
    assert report.exit_code == ExitCode.DIFFERENT
    assert report.place == "layer 1: from position 21 on"  # 20 is the first decode step, 21 the first to miss its key
    assert all(s.direction.startswith("KV of") for s in report.splice)  # no prefill shows it: blocks have no shares
    prompt = Prompt("0", np.arange(30, 50))
    bundled = session.bundled(broken, [prompt], SETTINGS, report, tmp_path / "b", lambda _: None)
    assert (bundled.bundle["steps"], bundled.bundle["of_steps"]) == (2, 8)
    assert json.loads((tmp_path / "b" / "bundle.json").read_text())["steps"] == 2


def test_an_artifact_that_gives_nan_on_both_sides_is_a_difference(tmp_path):
    folder = tmp_path / "nan"
    shutil.copytree(PACKAGES / "llama-fp32-cpu", folder)
    twin = Twin(folder / "model.onnx")
    name = next(n for n in twin.nudgeable() if "layers.1" in n and "down_proj" in n)
    values = twin.weight(name).copy()
    values.reshape(-1)[0] = np.nan
    (folder / "model.onnx").write_bytes(twin.replace(name, values).serialize())
    report = session.run(folder, IDS, SETTINGS, PLACE, lambda _: None)
    assert report.exit_code == ExitCode.DIFFERENT
    assert find(report, "logits.finite").verdict == "fail"
    assert "NaN" in report.reason
    assert report.place.startswith("layer 1")
