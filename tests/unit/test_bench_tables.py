"""The page of speeds: every marked part has a table, every table its part, and figures come from reports alone."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_tables  # noqa: E402

PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
SPREAD = {"median": 200.0, "p5": 190.0, "p95": 210.0, "n": 4}
CEILINGS = {"read_gb_s": 30.0, "float_gop_s": 200.0, "byte_gop_s": 800.0}


def entry(engine, rate):
    return {
        "engine": engine, "phase": "decode", "n_prompt": 0, "n_context": 64, "n_new": 8, "batch": 1,
        "tok_s": SPREAD | {"median": rate}, "seconds": SPREAD, "bandwidth_fraction": rate / 400, "peak_fraction": None,
    }  # fmt: skip


def bench(**changed):
    ratio = {"phase": "decode", "n_prompt": 0, "n_context": 64, "a": "native", "b": "ort", "difference": "faster"}
    return {
        "day": "2026-01-02", "threads": 2, "isa": "cpu:fake", "ceilings": CEILINGS, "parity": "passed",
        "results": [entry("native", 200.0), entry("ort", 100.0)], "ratios": [ratio | SPREAD | {"median": 2.0}],
        "noise": [{"phase": "decode", "n_prompt": 0, "n_context": 64, "floor": 0.1}], "unavailable": [],
        "withheld": None, "processes": [], "artifact_bytes": 2**20,
    } | changed  # fmt: skip


@pytest.fixture
def reports(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_tables, "REPORTS", tmp_path)
    return lambda name, report: (tmp_path / f"{name}.json").write_text(json.dumps(report))


def test_every_part_of_the_page_has_its_table_and_the_other_way_round():
    marked = re.findall(r"<!-- bench:([a-z0-9-]+) -->", PAGE)
    assert sorted(marked) == sorted({*bench_tables.SECTIONS, "targets"})
    assert PAGE.count("<!-- /bench -->") == len(marked)
    assert {run for run, _ in bench_tables.SECTIONS.values()} <= {run.name for run in bench_tables.RUNS}


def test_a_report_is_written_into_its_part_and_nothing_else_moves(reports):
    page = "before 1.23\n<!-- bench:fp16 -->\nold\n<!-- /bench -->\nafter\n<!-- bench:bf16 -->\nkept\n<!-- /bench -->\n"
    reports("fp16", bench())
    made = bench_tables.render(page)
    assert "| decode behind 64 | native | 200 tok/s | 190–210 | 50% |  |" in made
    assert "| decode behind 64 | ort | 100 tok/s | 190–210 | 25% | 2.00× (190.00–210.00) |" in made
    assert "2026-01-02, 2 threads, cpu:fake; read 30.0 GB/s, f32 200 Gop/s, int8 800 Gop/s; parity passed." in made
    assert "old" not in made
    assert made.startswith("before 1.23\n")
    assert "kept" in made  # nothing was measured for it


def test_what_forbids_a_ratio_is_on_the_page(reports):
    away = [{"engine": "x", "phase": None, "reason": "no such op"}]
    reports("int4", bench(ratios=[], withheld="parity failed", unavailable=away))
    made = bench_tables.render("<!-- bench:int4 -->\n\n<!-- /bench -->")
    assert "Ratios withheld: parity failed." in made
    assert "x : n/a, no such op." in made


def test_what_was_measured_in_a_crowd_is_not_shown(reports):
    reports("int4", bench(others_cpu=0.3))
    assert "kept" in bench_tables.render("<!-- bench:int4 -->\nkept\n<!-- /bench -->")


def test_targets_are_judged_by_the_reports(reports):
    reports("int4", bench())
    rows = {line.split(" | ")[0].strip("| "): line for line in bench_tables.targets().splitlines()}
    assert "| ≥ 1.70× | 2.00× | reached |" in rows["int4 decode behind 64, over ORT"]
    assert "| ≥ 75% | 50% | 1.50× |" in rows["int4 decode behind 64, share of bandwidth"]
    assert "| n/a | not measured |" in rows["fp16 decode over fp32"]
