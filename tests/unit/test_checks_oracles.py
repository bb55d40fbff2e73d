"""Golden files are verified before they judge, bundles before they are written; the checker's own mutants die."""

from dataclasses import replace

import numpy as np
import pytest

from genai_cli.checks import bundle, checker_mutants, floor, oracles
from genai_cli.checks.paths import Path
from genai_cli.errors import ExitCode, GenaiError
from genai_cli.report.parity import Check, ParityReport

GOLDEN = oracles.Golden(
    np.arange(5),
    3,
    np.eye(5, 7, dtype=np.float32),
    "a" * 64,
    "ort 1.31",
    {"nmse": 1e-12, "max_abs": 1e-6, "kv_nmse": 1e-12},
)


def test_golden_round_trip(tmp_path):
    file = tmp_path / "golden.npz"
    oracles.save_golden(file, GOLDEN)
    again = oracles.load_golden(file, "a" * 64)
    assert (again.ids == GOLDEN.ids).all()
    assert (again.logits == GOLDEN.logits).all()
    assert (again.prompt_len, again.floor, again.origin) == (3, GOLDEN.floor, "ort 1.31")


def test_golden_of_another_artifact_is_refused(tmp_path):
    oracles.save_golden(tmp_path / "g", GOLDEN)
    with pytest.raises(GenaiError, match="was made from the artifact") as error:
        oracles.load_golden(tmp_path / "g", "b" * 64)
    assert error.value.exit_code == ExitCode.NOT_COMPARED


def test_damaged_golden_is_refused(tmp_path):
    file = tmp_path / "g"
    oracles.save_golden(file, GOLDEN)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(GenaiError, match=r"cannot read|damaged"):
        oracles.load_golden(file, "a" * 64)
    with pytest.raises(GenaiError, match="cannot read"):
        oracles.load_golden(tmp_path / "missing", "a" * 64)


@pytest.mark.parametrize("text", ["", "best", "golden", "golden:", "ort:x"])
def test_unknown_oracles_are_refused(text):
    with pytest.raises(GenaiError, match="unknown oracle"):
        oracles.parse_kind(text)


def test_floor_cache_round_trip_and_damage(tmp_path):
    measured = floor.floor_of({"a": floor.Noise(1e-5, 1e-6, 1e-12, 2e-12, 0, 9)}, 4.0, "k")
    floor.save(tmp_path, measured, [], [Path("0", np.arange(3), 2)])
    kept = floor.load(tmp_path, "k", 4.0)
    assert kept.floor.cached
    assert (kept.floor.used, kept.floor.perturbations) == (measured.used, measured.perturbations)
    assert (kept.probes, kept.paths) == ([], [[0, 1, 2]])
    (tmp_path / "floor-k.json").write_text("{")
    assert floor.load(tmp_path, "k", 4.0) is None
    assert floor.load(None, "k", 4.0) is None


def test_checker_mutants_die():
    found = checker_mutants.prove()
    assert len(found) >= 5
    assert {mutant.state for mutant in found} == {"killed"}


def failing(place="layer 1: MatMul"):
    checks = [Check("logits.nmse", "logits", "fail", 5, reason="r")]
    return ParityReport(
        {},
        "",
        "FAIL",
        1,
        "r",
        place,
        "",
        {"sha256": "0" * 64},
        {"oracle": {"kind": "ort"}},
        {},
        0,
        [],
        None,
        [],
        checks,
        [],
    )


def test_bundle_is_written_only_when_it_fails_again(tmp_path):
    report = failing()
    made = bundle.bundle_of(report, tmp_path / "model.onnx", [1, 2], 4, 60)
    bundle.write(tmp_path / "b", made, report, lambda b: report)
    assert bundle.read(tmp_path / "b") == made
    other = failing("layer 2: MatMul")
    passing = replace(report, exit_code=0, verdict="PASS", checks=[])
    for again in (other, passing):
        with pytest.raises(GenaiError, match="nothing was written"):
            bundle.write(tmp_path / "c", made, report, lambda b, again=again: again)
    assert not (tmp_path / "c").exists()


def test_bundle_knows_its_model(tmp_path):
    model = tmp_path / "model.onnx"
    model.write_bytes(b"x")
    with pytest.raises(GenaiError, match="was made from the model"):
        bundle.check_model(bundle.bundle_of(failing(), model, [1], 1, 1), model)
