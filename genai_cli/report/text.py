"""What a human sees first: one verdict line, reason, place and next command; then numbers with denominators."""

from __future__ import annotations

import json
from typing import Any

from genai_cli.report.parity import Check, ParityReport, Splice

_SHOWN = {"logits.nmse": "logits", "kv.value": "kv", "ops": "ops", "ops.quantized": "ops", "ops.random": "random"}


MAX_NAMES = 6  # ops named in one line


def number(value: float | None) -> str:
    """Three digits."""
    return "n/a" if value is None else f"{value:.3g}"


def find(report: ParityReport, check_id: str) -> Check | None:
    """A check by its id."""
    return next((check for check in report.checks if check.id == check_id), None)


def headline(report: ParityReport) -> str:
    """The verdict line."""
    name, precision = report.artifact.get("name", ""), report.artifact.get("precision", "")
    oracle = report.sides.get("oracle", {})
    engine = f"{_oracle_name(oracle)} {oracle.get('version', '')}".strip()
    if report.exit_code == 1:
        return f"FAIL  {name} ({precision})  {report.place or report.reason}"
    if report.exit_code != 0:
        return f"{report.verdict}  {name} ({precision})  {report.reason}"
    verdict = report.verdict
    near = sum(flip.class_ in ("TIE", "NEAR-TIE") for flip in report.flips)
    if find(report, "ops.random") is not None:
        return f"{verdict}  {name} ({precision})  {_ops(report)}"
    if near:
        verdict = f"PASS with {near} near-tie{'s' if near > 1 else ''}"  # type: ignore[assignment]
    return f"{verdict}  {name} ({precision})  native = {engine} on {_tokens(report)}"


def _oracle_name(oracle: dict[str, object]) -> str:
    kind = str(oracle.get("kind", "ort"))
    return {"ort": "ORT", "ort-sharp": "ORT (f32 activations)", "ort-f32": "ORT (f32 twin)"}.get(kind, kind)


def _tokens(report: ParityReport) -> str:
    check = find(report, "tokens")
    if check is None:
        return "0 tokens"
    bound = float(check.extra.get("mismatch_rate_below", 1.0)) * 100
    matched = f"{check.extra.get('matched', 0)}/{check.compared} tokens, {check.decisive} decisive"
    return f"{matched} (true mismatch rate < {bound:.2g} %, 95 %)"


def lines(report: ParityReport) -> list[str]:
    """Everything a terminal shows without being asked."""
    made = [headline(report)]
    if report.exit_code == 1 and report.place:
        made.append(f"      {report.reason}")
    made += [f"      {line}" for line in [*share_lines(report), *_flip_lines(report)]]
    made += [f"      {line}" for line in _check_lines(report)]
    made += [f"      warning: {warning}" for warning in report.warnings]
    made += [f"      override: {o.key} = {o.value} ({o.reason})" for o in report.overrides]
    if report.proof is not None:
        made.append(f"      proof   {report.proof.killed}/{report.proof.applicable} mutants killed{_states(report)}")
        smallest = report.proof.power.get("smallest_detectable")
        if smallest is not None:
            made.append(f"      power   an attention scale wrong by a factor of 1 + {smallest:g} still fails")
    if report.perf is not None:
        made.append(f"      {_perf_line(report.perf)}")
    if report.bundle is not None:
        made.append(
            f"      bundle  {report.bundle['tokens']} of {report.bundle['of']} prompt tokens and {report.bundle['steps']} of"
            f" {report.bundle['of_steps']} steps still fail the same way: {report.bundle['path']}"
        )
    made += [f"      {line}" for line in _uncompared_lines(report)]
    made.append(f"      next    {report.next_command}      {report.elapsed_s:.1f} s")
    return made


def share_lines(report: ParityReport) -> list[str]:
    """Where the difference at one position was made, and what of it the cached past of the first bad layer carries."""
    total = next((s for s in report.splice if s.direction == "native then oracle"), None)
    if total is None or not total.observed:
        return []
    made = [
        f"shares  at position {total.pos} the gap of two tokens moved by {number(total.observed)}:"
        f" {_percents(total, total.observed)}"
    ]
    for found in report.splice:
        if found.direction.startswith("KV of layer") and found.direction.count(" ") == 3:
            made.append(f"        of it through {found.direction}: {_percents(found, total.observed)}")
    return made


def _percents(splice: Splice, observed: float) -> str:
    pairs = zip(splice.parts, splice.contributions, strict=False)
    largest = sorted(pairs, key=lambda pair: -abs(pair[1]))[:3]
    return ", ".join(f"{name} {round(100 * part / observed, 1) + 0.0:.1f} %" for name, part in largest)


def _uncompared_lines(report: ParityReport) -> list[str]:
    """Ops of a battery that were not compared, by name."""
    made = []
    for check_id, what in (("ops", "of the model"), ("ops.random", "of the registry")):
        check = find(report, check_id)
        names = check.extra.get("not_compared", []) if check else []
        if names:
            more = f" and {len(names) - MAX_NAMES} more (--json names all)" if len(names) > MAX_NAMES else ""
            made.append(f"not compared alone, {what}: {', '.join(names[:MAX_NAMES])}{more}")
    return made


def _ops(report: ParityReport) -> str:
    used, drawn = find(report, "ops"), find(report, "ops.random")
    assert used is not None
    assert drawn is not None
    worst = drawn.extra.get("worst_by_op", {})
    return (
        f"native = ORT, one node at a time: {used.compared} op x shapes of the model, {drawn.compared} random calls of"
        f" {len(worst)} ops"
    )


def _perf_line(perf: dict[str, Any]) -> str:
    sides = [f"{name} {number(perf[name]['median'])} {perf['unit']}" for name in ("native", "ort")]
    ratio = perf["ratio"]
    return f"speed   {', '.join(sides)}, " + (
        f"ratio {number(ratio)}" if ratio else f"no ratio: {perf['why_no_ratio']}"
    )


def _states(report: ParityReport) -> str:
    assert report.proof is not None
    others = [m for m in report.proof.mutants if m.state not in ("killed", "not-applicable")]
    listed = ", ".join(f"{m.id} ({m.target}) {m.state}" for m in others[:4])
    return f"; {listed}" if listed else ""


def _flip_lines(report: ParityReport) -> list[str]:
    made = []
    for flip in report.flips[:3]:
        made.append(
            f"position {flip.pos}: native {_token(flip.native, flip.native_text)} / oracle"
            f" {_token(flip.oracle, flip.oracle_text)}, {flip.class_}:"
            f" margin {number(flip.margin)}, pair delta {number(flip.pair_delta)},"
            f" bound {number(flip.bound)} (the oracle's own noise)"
            + (f", expected: {flip.expected}" if flip.expected else "")
        )
    more = len(report.flips) - 3
    return [*made, f"and {more} more flips"] if more > 0 else made


def _token(id_: int, text: str) -> str:
    return f"{json.dumps(text, ensure_ascii=False)} ({id_})" if text else str(id_)


def _check_lines(report: ParityReport) -> list[str]:
    made = []
    for check in report.checks:
        label = _SHOWN.get(check.id)
        if check.id == "kv.transport" and check.verdict == "pass":
            made.append(f"{'pages':<7} pass: {check.extra.get('detail')}")
        elif label and check.verdict != "not applicable":
            source = f" ({check.limit_source})" if check.limit_source else ""
            made.append(
                f"{label:<7} {check.verdict}: worst NMSE {number(check.value)} of {check.compared},"
                f" limit {number(check.limit)}{source}"
            )
        elif check.verdict in ("fail", "inconclusive", "unproven", "skipped") and check.reason:
            made.append(f"{check.id}: {check.reason}")
        elif check.id in ("user_mode.deviation", "user_mode.plain", "statistics.nll"):
            made.append(_user_mode_line(check))
    return made


def _user_mode_line(check: Check) -> str:
    if check.id == "user_mode.deviation":
        flips = check.extra.get("flips", 0)
        return (
            f"as run  worst NMSE {number(check.value)}, {flips} of {check.compared} tokens flip against"
            f" {check.extra.get('oracle')} (printed, not gated: rounding policy)"
        )
    if check.id == "user_mode.plain":
        sides = check.extra.get("arbiter", {})
        return (
            f"as run  {check.extra.get('flips')} of {check.compared} tokens flip against ORT as it is, which flips"
            f" {check.extra.get('ort_flips_itself')} of its own; the sharp oracle sides {sides.get('native')} :"
            f" {sides.get('oracle')}"
        )
    mean, se = check.extra.get("mean"), check.extra.get("se")
    return (
        f"as run  ΔNLL {number(mean)} ± {number(se)} nat/token, n = {check.compared}: {check.reason or check.verdict}"
    )
