"""Every renderer says the same verdict; JSON holds no NaN; HTML needs neither scripts nor the network."""

import json
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

from genai_cli.report import html, junit, markdown, text
from genai_cli.report import json as report_json
from genai_cli.report.parity import (
    Check,
    Flip,
    Floor,
    KvRow,
    Layer,
    Mutant,
    ParityReport,
    Perturbation,
    Point,
    Proof,
    Splice,
)  # fmt: skip

CHECKS = [
    Check(
        "logits.nmse", "logits", "fail", 50, value=math.inf, limit=1e-11, limit_source="4 x floor", reason="NaN <at> 3"
    ),
    Check("tokens", "tokens", "pass", 50, decisive=40, extra={"matched": 49, "mismatch_rate_below": 0.075}),
    Check("kv.value", "kv", "inconclusive", 6, reason="too noisy"),
    Check("kv.paged", "kv", "not applicable", reason="no paged KV"),
    Check("liveness", "liveness", "unproven", 3, reason="blind"),
]
REPORT = ParityReport(
    tool={"version": "1"}, created="2026-12-01T00:00:00+00:00", verdict="FAIL", exit_code=1, reason="NaN <at> 3",
    place="layer 1: MatMul `a<b>`", next_command="genai parity m --explain", artifact={"name": "m", "precision": "f32"},
    sides={"native": {"version": "1"}, "oracle": {"kind": "ort", "version": "1.31"}}, environment={}, seed=0, inputs=[],
    floor=Floor([Perturbation("off", True, 0.0, 0.0, 0, 50)], {"nmse": 1e-12}, 4.0, False, "k"), liveness=[],
    checks=CHECKS,
    flips=[Flip("0", 3, 1, 2, 0.1, math.inf, 1e-5, 7.0, "DEFECT", "none")],
    layers=[Layer(0, None, 1e-13, None, 0.0, 1e-11), Layer(1, 1.0, math.inf, None, 1.0, 1e-11)],
    splice=[Splice("native then oracle", "0", 3, 2.5, 0.0, [0.0, 2.5])],
    kv=[KvRow(0, "key", None, 3, 1e-13, 1e-11, 0.5, {"head": 1}, by_head=[[0.0, 1e-7], [math.inf, 1e-3]])],
    proof=Proof([Mutant("scale", "engine", "survived", "logits.nmse", "")], 0, 1, {}),
    points=[Point(0, 1.0, 1e-6, False), Point(1, 0.0, math.inf, True)],
)  # fmt: skip


def test_json_is_strict_and_starts_with_the_schema():
    found = report_json.dumps(REPORT)
    data = json.loads(found, parse_constant=lambda name: (_ for _ in ()).throw(AssertionError(name)))
    assert next(iter(data)) == "schema"
    assert data["schema"] == "genai.parity/1"
    assert data["checks"][0]["value"] == "Infinity"
    assert data["flips"][0]["class"] == "DEFECT"
    wanted = "tool created verdict exit_code reason next_command artifact sides environment seed inputs floor liveness"
    assert set((wanted + " checks flips layers splice kv proof overrides").split()) <= set(data)


def test_junit_has_a_case_a_check_and_types_its_failures():
    suite = ET.fromstring(junit.junit(REPORT).split("\n", 1)[1]).find("testsuite")
    assert suite is not None
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == [check.id for check in CHECKS]
    types = {case.get("name"): case.find("failure").get("type") for case in cases if case.find("failure") is not None}
    assert types == {"logits.nmse": "fail", "kv.value": "inconclusive", "liveness": "unproven"}
    assert (suite.get("failures"), suite.get("skipped")) == ("3", "1")


def test_junit_counts_a_pass_over_nothing_as_a_failure():
    report = replace(REPORT, checks=[Check("tokens", "tokens", "pass", 0)])
    assert "nothing compared" in junit.junit(report)


def test_html_is_self_contained_and_escaped():
    page = html.page(REPORT)
    assert "<script" not in page
    assert not re.search(r"(src|href)=|https?://|@import|url\(", page)
    assert "a&lt;b&gt;" in page
    assert "a<b>" not in page
    assert page.count("<svg") == 3  # scatter, layers, one head x position map
    assert "nan" not in re.sub(r"<style.*?</style>", "", page).lower().replace("nan &lt;at&gt;", "")


def test_markdown_has_ten_lines_at_most_with_limits():
    found = markdown.markdown(REPORT).strip().split("\n")
    assert len(found) <= 10
    assert found[0].startswith("**FAIL")
    assert any("1e-11" in line for line in found)


def test_first_line_of_a_failure_names_the_layer():
    first, second = text.lines(REPORT)[:2]
    assert first.startswith("FAIL")
    assert "layer 1" in first
    assert "NaN" in second


def test_first_line_of_a_pass_has_denominators():
    passing = replace(REPORT, verdict="PASS", exit_code=0, flips=[], place="")
    assert "49/50 tokens, 40 decisive" in text.headline(passing)
    near = replace(passing, flips=[replace(REPORT.flips[0], class_="NEAR-TIE")])
    assert text.headline(near).startswith("PASS with 1 near-tie")
