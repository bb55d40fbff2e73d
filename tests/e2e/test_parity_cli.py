"""`genai parity` as a process: every exit code, every output, and stdout that is data only."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from genai_cli.checks.oracles import load_golden, save_golden
from genai_cli.checks.preflight import artifact
from genai_cli.graph.loader import load_graph

PACKAGES = Path(__file__).resolve().parents[2] / "fixtures" / "packages"
LLAMA = PACKAGES / "llama-fp32-cpu"
QUICK = ("--steps", "6", "--prompt-ids", ",".join(map(str, range(30, 46))))
CALL = "import sys; from genai_cli.cli import main; sys.argv[0] = 'genai'; main()"


def genai(*args, code=CALL, **changes):
    command = [sys.executable, "-c", code, "parity", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env(), **changes)


def env():
    return {**os.environ, "XDG_CACHE_HOME": str(Path(__file__).resolve().parents[2] / "build" / "test-cache")}


def test_0_agreed_with_every_report(tmp_path):
    files = {kind: tmp_path / f"r.{kind}" for kind in ("junit", "md", "html")}
    flags = [flag for kind, path in files.items() for flag in (f"--{kind}", path)]
    done = genai(LLAMA, *QUICK, "--json", *flags)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)  # one document, nothing else
    assert (report["schema"], report["verdict"], report["exit_code"]) == ("genai.parity/1", "PASS", 0)
    assert report["sides"]["native"]["nodes_fallback"] == 0
    assert report["sides"]["oracle"]["ep"] == ["CPUExecutionProvider"]
    assert all(check["compared"] for check in report["checks"] if check["verdict"] == "pass")
    assert ET.parse(files["junit"]).getroot().find("testsuite").get("failures") == "0"
    assert files["md"].read_text().startswith("**PASS")
    assert "<svg" in files["html"].read_text()


def test_the_first_line_is_the_verdict_and_the_last_the_next_command():
    done = genai(LLAMA, *QUICK)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("PASS  llama-fp32-cpu (f32)  native = ORT")
    assert "22/22 tokens" in lines[0]
    assert "genai mirror-check" in lines[-1]


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    file = tmp_path_factory.mktemp("golden") / "g.npz"
    assert genai(LLAMA, *QUICK, "--save-golden", file).returncode == 0
    return file


def test_1_different(golden, tmp_path):
    """An oracle that says something else: one deciding logit of the golden file is changed."""
    model = LLAMA / "model.onnx"
    saved = load_golden(golden, artifact(model, load_graph(model), None).identity)
    logits = saved.logits.copy()
    logits[9, logits[9].argmax()] -= 1.0
    save_golden(tmp_path / "other.npz", replace(saved, logits=logits))
    done = genai(LLAMA, "--oracle", f"golden:{tmp_path / 'other.npz'}", "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert "position 9" in report["reason"]
    same = genai(LLAMA, "--oracle", f"golden:{golden}")
    assert same.returncode == 0


@pytest.mark.parametrize(
    "args",
    [
        ("no-such-folder",),
        (LLAMA, "--oracle", "best"),
        (LLAMA, "--no-such-option"),
        (LLAMA, "--oracle", "golden:no-such-file"),
        (LLAMA, "--expect-flip", "nonsense"),
        (LLAMA, "--expect-flip", "3:known:2001-01-01"),
        (),
    ],
    ids=str,
)
def test_2_could_not(args):
    done = genai(*args)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_3_nothing_was_compared(golden, tmp_path):
    other = genai(PACKAGES / "gemma2-fp32-cpu", "--oracle", f"golden:{golden}")
    assert other.returncode == 3
    assert "was made from the artifact" in other.stderr
    (tmp_path / "empty.jsonl").write_text('{"prompt": ""}\n')
    assert genai(LLAMA, "--prompts", tmp_path / "empty.jsonl").returncode in (2, 3)


def test_4_inconclusive_names_the_sharper_oracle():
    done = genai(LLAMA, *QUICK, "--kappa", "1e6")
    assert done.returncode == 4
    assert done.stdout.startswith("INCONCLUSIVE")
    assert "--oracle" in done.stdout
    assert "override: kappa = 1e+06" in done.stdout


def test_5_unproven_on_a_blind_fixture():
    done = genai(LLAMA, "--prompt-ids", "30", "--steps", "1")
    assert done.returncode == 5, done.stdout
    assert "UNPROVEN" in done.stdout


NOT_EVEN_STARTED = [
    ("--kappa", "0"),
    ("--kappa", "nan"),
    ("--seed", "-1"),
    ("--level", "most"),
    ("--prompt-ids", "1,99999999"),
    ("--prompt", "a", "--prompt-ids", "1"),
    ("--ops", "--prove"),
    ("--save-golden", "no/such/folder/g.npz"),
    ("--html", "no/such/folder/r.html"),
    ("--oracle-device", "cuda:7"),
]


@pytest.mark.parametrize("args", NOT_EVEN_STARTED, ids=" ".join)
def test_2_wrong_options_are_said_before_the_work(args):
    done = genai(LLAMA, *args)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("level", ["basic", "off"])
def test_the_oracle_at_another_optimisation_level(level):
    report = json.loads(genai(LLAMA, *QUICK, "--level", level, "--json").stdout)
    assert report["exit_code"] == 0
    assert report["sides"]["oracle"]["options"]["optimization"] == level
    other = "all" if level == "off" else "off"
    assert f"graph optimisation {other}" in [p["name"] for p in report["floor"]["perturbations"]]


def test_one_model_that_is_not_there_does_not_end_the_others(tmp_path):
    done = genai(tmp_path / "nowhere", LLAMA, *QUICK, "--json")
    assert done.returncode == 2
    report, error = json.loads(done.stdout)
    assert (report["verdict"], error["exit_code"]) == ("PASS", 2)
    assert "does not exist" in error["error"]
    assert "nowhere" in done.stderr
    assert genai(LLAMA, LLAMA, *QUICK, "--html", tmp_path / "r.html").returncode == 2


def test_a_folder_whose_name_has_a_space_gives_a_command_that_can_be_pasted(tmp_path):
    folder = tmp_path / "my model"
    shutil.copytree(LLAMA, folder)
    done = genai(folder, *QUICK)
    assert f"genai mirror-check '{folder}'" in done.stdout.splitlines()[-1]


def test_several_models_give_the_worst_code():
    done = genai(LLAMA, PACKAGES / "mistral-fp32-cpu", *QUICK, "--json")
    assert done.returncode == 0
    assert [report["artifact"]["name"] for report in json.loads(done.stdout)] == ["llama-fp32-cpu", "mistral-fp32-cpu"]


def test_70_internal_errors_are_no_difference():
    broken = "import genai_cli.checks.session as s; s.run = lambda *a: 1 / 0; " + CALL
    done = genai(LLAMA, code=broken)
    assert done.returncode == 70
    assert "internal error: ZeroDivisionError" in done.stderr


def test_130_interrupted():
    waiting = (
        "import time, genai_cli.checks.session as s; s.run = lambda *a: (print('up', flush=True), time.sleep(60)); "
    )
    process = subprocess.Popen(
        [sys.executable, "-c", waiting + CALL, "parity", str(LLAMA)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )
    assert process.stdout.readline() == b"up\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130


def test_a_closed_pipe_is_quiet():
    command = [sys.executable, "-c", CALL, "parity", str(LLAMA), *QUICK]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env())
    process.stdout.close()
    error = process.stderr.read().decode()
    process.wait(timeout=60)
    assert process.returncode != 1  # not "a difference was found"
    assert "Traceback" not in error


def test_ops_and_proof(tmp_path):
    ops = genai(PACKAGES / "llama-int4-cpu", "--ops", "--json")
    assert ops.returncode == 0, ops.stderr
    assert any(check["id"].startswith("ops.com.microsoft::MatMulNBits") for check in json.loads(ops.stdout)["checks"])
    proof = genai(LLAMA, *QUICK, "--prove", "--json")
    report = json.loads(proof.stdout)
    assert proof.returncode == 0, report["reason"]
    assert report["proof"]["killed"] == report["proof"]["applicable"] > 40
    assert {mutant["target"].split(",")[0] for mutant in report["proof"]["mutants"]} == {"engine", "pages", "checker"}
