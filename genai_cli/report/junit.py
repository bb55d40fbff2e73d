"""JUnit XML: one test case a check. Inconclusive and unproven are failures with a type of their own."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from genai_cli.report.parity import Check, ParityReport

_FAILING = ("fail", "inconclusive", "unproven")


def junit(report: ParityReport) -> str:
    """One test suite."""
    failures = sum(check.verdict in _FAILING for check in report.checks)
    skipped = sum(check.verdict in ("skipped", "not applicable") for check in report.checks)
    suite = ET.Element(
        "testsuite", name=f"genai parity {report.artifact.get('name', '')}", tests=str(len(report.checks)),
        failures=str(failures), skipped=str(skipped), errors="0", time=f"{report.elapsed_s:.3f}",
        timestamp=report.created,
    )  # fmt: skip
    for check in report.checks:
        _case(suite, check)
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _case(suite: ET.Element, check: Check) -> None:
    case = ET.SubElement(suite, "testcase", classname=f"parity.{check.level}", name=check.id, time="0")
    text = f"value {check.value}, limit {check.limit} ({check.limit_source}), compared {check.compared}"
    if check.verdict in _FAILING or (check.verdict == "pass" and not check.compared):
        kind = check.verdict if check.verdict in _FAILING else "nothing compared"
        ET.SubElement(case, "failure", type=kind, message=check.reason or check.id).text = text
    elif check.verdict in ("skipped", "not applicable"):
        ET.SubElement(case, "skipped", message=check.reason or check.verdict)
    else:
        ET.SubElement(case, "system-out").text = text
