"""A MirrorReport as text, Markdown and JUnit XML."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from genai_cli.checks.mirror import MirrorReport


def _summary(report: MirrorReport) -> str:
    applied = [side.check for side in report.outcomes if side.check.applies]
    checked = sum(check.ok for check in applied)
    return (
        f"{report.bytes_compared:,} bytes compared in {checked}/{len(applied)} passing checks, page size "
        f"{report.page_size}, {report.bytes_per_token:,} KV bytes a token"
    )


def _proof(report: MirrorReport) -> str:
    if not report.mutants:
        return "not run (--prove)"
    mutants = [judged for judged in report.mutants if not judged.id.startswith("control")]
    killed = sum(judged.state == "killed" for judged in mutants)
    controls = [judged for judged in report.mutants if judged.id.startswith("control")]
    green = sum(judged.state == "survived" for judged in controls)
    return f"{killed}/{len(mutants)} mutants killed for the right reason, {green}/{len(controls)} controls green"


def text(report: MirrorReport) -> str:
    """Verdict, reason, then what was compared; every failure with its cause."""
    lines = [f"{report.verdict}  {report.model}  {report.reason or 'pages hold what the decoder computed'}"]
    lines.append(f"      {_summary(report)}")
    for side in report.outcomes:
        mark = ("ok  " if side.check.applies else "n/a ") if side.check.ok else "FAIL"
        lines.append(f"      {mark} {side.side:<6} {side.check.id:<17} {side.check.detail}")
    lines.append(f"      proof  {_proof(report)}")
    lines += [
        f"      {judged.state}: {judged.id} {judged.detail}"
        for judged in report.mutants
        if (judged.state == "survived") != judged.id.startswith("control") or "another" in judged.state
    ]
    lines += [f"      warning: {warning}" for warning in report.warnings]
    return "\n".join(lines) + "\n"


def markdown(report: MirrorReport) -> str:
    """A table for a pull request."""
    lines = [
        f"**{report.verdict}** `{report.model}` {report.reason}",
        "",
        f"{_summary(report)}; proof: {_proof(report)}",
        "",
    ]
    lines += ["| side | check | bytes | result |", "|---|---|--:|---|"]
    for side in report.outcomes:
        result = (
            ("ok" if side.check.applies else f"n/a: {side.check.detail}")
            if side.check.ok
            else f"**{side.check.detail}**"
        )
        lines.append(f"| {side.side} | {side.check.id} | {side.check.compared_bytes:,} | {result} |")
    return "\n".join(lines) + "\n"


def junit(report: MirrorReport) -> str:
    """One test case a check and a mutant; a check that compared nothing is a failure."""
    applied = [side.check for side in report.outcomes if side.check.applies]
    failures = sum(not check.ok or not check.compared_bytes for check in applied)
    suite = ET.Element("testsuite", name=f"genai mirror-check {report.model}", errors="0")
    for side in report.outcomes:
        case = ET.SubElement(suite, "testcase", classname=f"mirror.{side.side}", name=side.check.id)
        if not side.check.applies:
            ET.SubElement(case, "skipped", message=side.check.detail)
        elif not side.check.ok or not side.check.compared_bytes:
            ET.SubElement(case, "failure", type="fail", message=side.check.detail)
    for judged in report.mutants:
        case = ET.SubElement(suite, "testcase", classname="mirror.mutants", name=judged.id)
        wanted = "survived" if judged.id.startswith("control") else "killed"
        if judged.state != wanted:
            failures += 1
            ET.SubElement(case, "failure", type="unproven", message=f"{judged.state} {judged.detail}".strip())
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(failures))
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"
