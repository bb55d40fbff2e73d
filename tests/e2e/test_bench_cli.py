"""`genai bench` as a process: the report is right; nothing here depends on how fast anything is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "fixtures" / "packages" / "llama-fp32-cpu"
CALL = "import sys; from genai_cli.cli import main; sys.argv[0] = 'genai'; main()"
QUICK = ("--prompt-tokens", "8,24", "--context-tokens", "16", "--new-tokens", "4", "--rounds", "1", "--threads", "1",
         "--batch", "0")  # fmt: skip


def genai(*args):
    command = [sys.executable, "-c", CALL, "bench", *map(str, args)]
    env = {**os.environ, "XDG_CACHE_HOME": str(ROOT / "build" / "test-cache")}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    done = genai(LLAMA, "--vs", "ort", *QUICK, "--json")
    assert done.returncode == 0, done.stderr
    file = tmp_path_factory.mktemp("bench") / "old.json"
    file.write_text(done.stdout)
    return file, json.loads(done.stdout), done.stderr


def test_the_document(report):
    _, made, talk = report
    assert (made["schema"], made["parity"], made["withheld"], made["threads"]) == ("genai.bench/1", "passed", None, 1)
    assert made["bandwidth_gb_s"] > 0
    assert made["peak_rss_bytes"] > 1 << 20
    seen = [(r["engine"], r["phase"], r["n_prompt"], r["n_context"], r["n_new"]) for r in made["results"]]
    cases = [("load", 1, 0, 0), ("prefill", 8, 0, 0), ("prefill", 24, 0, 0), ("decode", 0, 16, 4)]
    assert seen == [(engine, *case) for case in cases for engine in ("native", "ort")]
    assert all(r["num_cached_tokens"] == 0 and r["batch"] == 1 for r in made["results"])
    assert all((r["tok_s"] is None) == (r["phase"] == "load") for r in made["results"])
    assert [(r["a"], r["b"]) for r in made["ratios"]] == [("native", "ort")] * 4
    assert {r["difference"] for r in made["ratios"]} <= {"none", "faster", "slower"}
    assert [p["engine"] for p in made["processes"]] == ["native", "native exact", "ort"]
    assert all(p["first_token_s"]["median"] > 0 and p["peak_rss_bytes"] > 1 << 20 for p in made["processes"])
    assert made["artifact_bytes"] == sum((LLAMA / name).stat().st_size for name in ("model.onnx", "model.onnx.data"))
    assert "parity passed" in talk
    assert "first token of a cold process" in talk


def test_onnxruntime_genai_is_a_peer():
    pytest.importorskip("onnxruntime_genai")
    done = genai(LLAMA, "--vs", "ort", "--vs", "onnxruntime-genai", *QUICK, "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert (made["withheld"], made["unavailable"]) == (None, [])
    of_peer = [r for r in made["results"] if r["engine"] == "onnxruntime-genai"]
    assert [(r["phase"], r["num_cached_tokens"]) for r in of_peer] == [
        ("load", 0), ("prefill", 0), ("prefill", 0), ("decode", 0),
    ]  # fmt: skip
    assert all(r["tok_s"] for r in of_peer[1:])
    assert sorted({r["b"] for r in made["ratios"]}) == ["onnxruntime-genai", "ort"]


def test_a_folder_that_onnxruntime_genai_cannot_open_is_not_applicable():
    pytest.importorskip("onnxruntime_genai")
    done = genai(ROOT / "fixtures" / "packages" / "llama-optimum", "--vs", "onnxruntime-genai", *QUICK, "--json")
    made = json.loads(done.stdout)
    assert (done.returncode, made["ratios"], made["parity"]) == (0, [], "not run")
    assert made["unavailable"][0]["engine"] == "onnxruntime-genai"
    assert "genai_config.json" in made["unavailable"][0]["reason"]
    assert "onnxruntime-genai: n/a" in done.stderr


def test_a_batch():
    pytest.importorskip("onnxruntime_genai")
    size = ("--batch", "3", "--batch-tokens", "4", "--threads", "1")
    done = genai(LLAMA, "--phases", "batch", *size, "--vs", "onnxruntime-genai", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    rows = [(r["engine"], r["phase"], r["batch"], r["n_new"]) for r in made["results"]]
    assert rows == [
        ("native", "batch", 3, 4), ("native one by one", "batch", 1, 4), ("onnxruntime-genai", "batch", 3, 4),
    ]  # fmt: skip
    assert (made["parity"], made["withheld"], made["unavailable"]) == ("passed", None, [])
    assert [r["b"] for r in made["ratios"]] == ["native one by one", "onnxruntime-genai"]


def test_no_ratio_without_parity():
    done = genai(LLAMA, "--vs", "ort", *QUICK, "--no-parity", "--phases", "prefill", "--json")
    made = json.loads(done.stdout)
    assert (done.returncode, made["ratios"], made["withheld"]) == (0, [], "parity not run")
    assert "ratio withheld: parity not run" in done.stderr


def test_compare(report, tmp_path):
    """The old report is made a thousand times as fast, and a thousand times as slow: no machine is that noisy."""
    file, made, _ = report
    for factor, code in ((1e-3, 1), (1e3, 0)):
        for result in made["results"]:
            result["seconds"]["median"] *= factor
        (tmp_path / "old.json").write_text(json.dumps(made))
        done = genai(
            LLAMA, *QUICK, "--phases", "prefill,decode", "--compare", tmp_path / "old.json", "--max-regression", "15%"
        )
        assert done.returncode == code, done.stderr
        made = json.loads(file.read_text())
    assert "ok: decode" in done.stderr


def test_profile(tmp_path):
    trace = tmp_path / "t.json"
    done = genai(LLAMA, *QUICK, "--batch", "3", "--profile", "--trace", trace, "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["schema"] == "genai.profile/1"
    assert [(s["phase"], s["n_prompt"], s["n_context"], s["num_rows"]) for s in made["sections"]] == [
        ("prefill", 8, 0, 1), ("prefill", 24, 0, 1), ("decode", 0, 16, 1), ("batch", 0, 16, 3),
    ]  # fmt: skip
    for section in made["sections"]:
        assert sum(row["share"] for row in section["rows"]) == pytest.approx(1)
        assert min(row["ms"] for row in section["rows"]) > 0
        assert {"MatMul", "genai.Attention"} <= {row["op"] for row in section["rows"]}
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    steps = [event for event in events if event["tid"] == 1]
    assert len(steps) == sum(section["num_steps"] for section in made["sections"])
    for event in events:  # every kernel ran inside a step
        assert any(s["ts"] <= event["ts"] and event["ts"] + event["dur"] <= s["ts"] + s["dur"] + 1e-3 for s in steps)
    assert "timing it costs" in done.stderr


def test_micro():
    done = genai(LLAMA, *QUICK, "--micro", "--only", "*.[ma]*", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["schema"] == "genai.micro/1"
    names = {found["name"] for found in made["results"]}
    assert {"sample.min-p-0.05", "pages.mirror", "pages.allocate-release"} <= names
    assert all(found["native_s"]["median"] > 0 for found in made["results"])
    assert "pages.mirror" in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--vs", "llama.cpp"), "wanted ort"),
        (("--prompt-tokens", "0"), "--prompt-tokens"),
        (("--micro", "--only", "nothing"), "names no micro-benchmark"),
        (("--phases", "prefil"), "is none of load, prefill, decode, batch"),
        (("--max-regression", "x"), "--max-regression"),
        (("--compare", "missing.json"), "missing.json"),
    ],
)
def test_2_what_cannot_be_measured(args, words):
    done = genai(LLAMA, *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
