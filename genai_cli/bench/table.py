"""A report as rows of text."""

from __future__ import annotations

from math import isnan

from genai_cli.bench.compare import Change
from genai_cli.bench.machine import Ceilings
from genai_cli.bench.micro import MicroReport
from genai_cli.bench.profile import ProfileReport, Row, Section
from genai_cli.bench.report import BenchReport, Ratio, Result

CROWDED = 0.05  # share of the CPU that others may use

COLUMNS = [
    "engine",
    "phase",
    "tokens",
    "median",
    "p5–p95",
    "first token",
    "a token",
    "MB/token",
    "GB/s",
    "of bandwidth",
    "of peak",
    "J/token",
]


def title(report: BenchReport) -> str:
    """Model, machine and what one may rely on."""
    return (
        f"{report.model}: {report.threads} threads, {report.isa}, reads {report.bandwidth_gb_s:.1f} GB/s, "
        f"{_peaks(report.ceilings)}"
        f"native peak {report.peak_rss_bytes / 2**20:.0f} MiB, parity {report.parity}"
    )


def _peaks(ceilings: Ceilings) -> str:
    if isnan(ceilings.float_gop_s):  # a device: not measured
        return ""
    return f"f32 {ceilings.float_gop_s:.0f} and int8 {ceilings.byte_gop_s:.0f} Gop/s, "


def rows(report: BenchReport) -> list[list[str]]:
    """One row a result."""
    return [_row(result) for result in report.results]


def _row(result: Result) -> list[str]:
    return [
        result.engine, result.phase, _tokens(result), *_speed(result),
        _shown(result.ttft_s, "{:.3f} s"), _shown(result.tpot_s, "{:.4f} s"),
        _shown(None if result.bytes_per_token is None else result.bytes_per_token / 1e6, "{:.1f}"),
        _shown(result.gb_s, "{:.1f}"), _shown(result.bandwidth_fraction, "{:.0%}"),
        _shown(result.peak_fraction, "{:.0%}"),
        _shown(result.joules_per_token, "{:.3g}"),
    ]  # fmt: skip


def _tokens(result: Result) -> str:
    if result.phase == "batch":
        return f"{result.n_new} each, {result.batch} a step"
    return f"{result.n_new} behind {result.n_context}" if result.phase == "decode" else str(result.n_prompt)


def _speed(result: Result) -> tuple[str, str]:
    if result.phase == "load":
        seconds = result.seconds
        return f"{seconds.median:.3f} s", f"{seconds.p5:.3f}–{seconds.p95:.3f}"
    if result.num_cached_tokens:
        return f"n/a: {result.num_cached_tokens} tokens came from a cache", ""
    if result.tok_s is None:
        return "n/a", ""
    return f"{result.tok_s.median:.1f} tok/s", f"{result.tok_s.p5:.1f}–{result.tok_s.p95:.1f}"


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


PROCESS_COLUMNS = ["engine", "first token of a cold process", "p5–p95", "peak", "mapped (shared)", "private"]


def process_rows(report: BenchReport) -> list[list[str]]:
    """One row an engine."""
    return [
        [
            found.engine, _time(found.first_token_s.median),
            f"{_time(found.first_token_s.p5)}–{_time(found.first_token_s.p95)}",
            *(_shown(None if size is None else size / 2**20, "{:.0f} MiB")
              for size in (found.peak_rss_bytes, found.mapped_bytes, found.private_bytes)),
        ]
        for found in report.processes
    ]  # fmt: skip


def verdicts(report: BenchReport) -> list[str]:
    """Ratios or why there are none, engines that could not be measured, energy."""
    away = [f"{u.engine}{f' {u.phase}' if u.phase else ''}: n/a: {u.reason}" for u in report.unavailable]
    return [*_ratio_lines(report), *away, f"energy: {report.energy}", *_crowded(report)]


def _crowded(report: BenchReport) -> list[str]:
    if report.others_cpu is None or report.others_cpu <= CROWDED:
        return []
    return [
        f"warning: other processes used {report.others_cpu:.0%} of the CPU meanwhile; ratios of a crowded machine mislead"
    ]


def _ratio_lines(report: BenchReport) -> list[str]:
    if report.withheld:
        return [f"ratio withheld: {report.withheld}"]
    floors = {(n.phase, n.n_prompt, n.n_context): n.floor for n in report.noise}
    return [_verdict(ratio, floors[ratio.phase, ratio.n_prompt, ratio.n_context]) for ratio in report.ratios]


def _verdict(ratio: Ratio, floor: float) -> str:
    where = f"{ratio.phase} {ratio.n_prompt or ratio.n_context}"
    spread = f"{ratio.median:.2f}× ({ratio.p5:.2f}–{ratio.p95:.2f})"
    return f"{where}: {ratio.a} / {ratio.b} = {spread}, A/A noise {floor:.0%}, difference {ratio.difference}"


def changes(found: list[Change]) -> list[str]:
    """One line a phase that both reports hold."""
    return [
        f"{'REGRESSION' if c.regressed else 'ok'}: {c.phase} {c.n_prompt or c.n_context} takes {c.factor:.2f}× the time"
        f" of the old report (noise {c.noise:.0%})"
        for c in found
    ]


PROFILE_COLUMNS = ["op", "shape", "calls", "ms", "share", "GB/s", "GFLOP/s"]


def profile_title(report: ProfileReport, section: Section) -> str:
    """Phase, step time and what timing it cost."""
    where = f"{section.n_prompt} tokens" if section.phase == "prefill" else f"behind {section.n_context}"
    where += f", {section.num_rows} sequences" if section.num_rows > 1 else ""
    return (
        f"{report.model}: {section.phase} {where}, {report.threads} threads, {report.isa}: {section.step_ms:.3f} ms a "
        f"step (mean of {section.num_steps}; timing it costs {section.cost:+.1%})"
    )


def profile_rows(section: Section) -> list[list[str]]:
    """An op's total, its shapes below it; the largest first."""
    names = dict.fromkeys(row.op for row in section.rows)
    groups = [[row for row in section.rows if row.op == name] for name in names]
    groups.sort(key=lambda rows: -sum(row.ms for row in rows))
    return [line for rows in groups for line in _profiled(rows)]


def _profiled(rows: list[Row]) -> list[list[str]]:
    if len(rows) == 1:
        return [_profile_row(rows[0].op, rows[0])]
    ms, num_bytes, num_ops = (
        sum(part) for part in zip(*[(r.ms, (r.gb_s or 0) * r.ms, (r.gflop_s or 0) * r.ms) for r in rows], strict=True)
    )
    total = Row(
        rows[0].op, "", sum(row.calls for row in rows), ms, sum(row.share for row in rows),
        num_bytes / ms if num_bytes else None, num_ops / ms if num_ops else None,
    )  # fmt: skip
    return [_profile_row(total.op, total), *(_profile_row("", row) for row in rows)]


def _profile_row(op: str, row: Row) -> list[str]:
    return [
        op, row.shape, f"{row.calls:g}", f"{row.ms:.3f}", f"{row.share:.1%}", _shown(row.gb_s, "{:.1f}"),
        _shown(row.gflop_s, "{:.0f}"),
    ]  # fmt: skip


MICRO_COLUMNS = ["name", "shape", "native", "p5–p95", "GB/s", "Gop/s", "a second", "ort", "ort / native"]


def micro_title(report: MicroReport) -> str:
    """Model and ceilings."""
    machine = report.ceilings
    return (
        f"{report.model}: {report.threads} threads, {report.isa}; ceilings: read {machine.read_gb_s:.1f} GB/s, f32 "
        f"{machine.float_gop_s:.0f} Gop/s, int8 {machine.byte_gop_s:.0f} Gop/s"
    )


def micro_rows(report: MicroReport) -> list[list[str]]:
    """One row a case."""
    return [
        [
            found.name, found.shape, _time(found.native_s.median),
            f"{_time(found.native_s.p5)}–{_time(found.native_s.p95)}", _shown(found.gb_s, "{:.1f}"),
            _shown(found.gop_s, "{:.0f}"), _shown(found.items_s, "{:,.0f} ") + (found.items if found.items_s else ""),
            _time(found.ort_s.median) if found.ort_s else found.ort_reason and f"n/a: {found.ort_reason}",
            f"{found.ratio.median:.2f}× ({found.ratio.p5:.2f}–{found.ratio.p95:.2f})" if found.ratio else "",
        ]
        for found in report.results
    ]  # fmt: skip


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
