"""One self-contained page: no scripts, no network. Drawings are inline SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from genai_cli.report.parity import Floor, KvRow, Layer, ParityReport, Point, Splice
from genai_cli.report.text import headline, number

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#667080;--line:#d8dde3;--good:#1a7f4b;
--bad:#c0392b;--warn:#b7791f;--card:#fff;--page:#f5f6f8}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#9aa4b2;--line:#323a45;--good:#4cc38a;
--bad:#ff6b5e;--warn:#e5b567;--card:#171b21;--page:#0f1216}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:20px;margin:0 0 6px}
h2{font-size:15px;margin:0 0 10px}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;
padding:16px 18px;margin-top:16px;overflow-x:auto}
.pass{color:var(--good)}
.fail{color:var(--bad)}
.other{color:var(--warn)}
.soft{color:var(--soft);font-size:13px}
table{border-collapse:collapse;width:100%;font-size:13px}
th,td{text-align:left;padding:4px 10px 4px 0;
border-bottom:1px solid var(--line);vertical-align:top}
td.n{font-variant-numeric:tabular-nums;white-space:nowrap}
code{font:12.5px ui-monospace,monospace;overflow-wrap:anywhere}
svg{max-width:min(100%,560px);height:auto;display:block}
svg.wide{max-width:100%}
svg text{fill:var(--soft);font:11px system-ui,sans-serif}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:16px}
.grid section{margin-top:0}
.grid{margin-top:16px}
"""
MAX_FLIPS = 20  # rows shown
OPEN_ROWS = 12  # a longer table of KV components is folded
_CLASS = {0: "pass", 1: "fail"}


def page(report: ParityReport) -> str:
    """The whole report as one HTML document."""
    title = html.escape(headline(report))
    body = [
        f'<h1 class="{_CLASS.get(report.exit_code, "other")}">{title}</h1>',
        _summary(report),
        '<div class="grid">',
        _section("Margin and delta of every position", scatter(report), _SCATTER_NOTE),
        _section("Layers", waterfall(report.layers, report.splice), _LAYER_NOTE) if report.layers else "",
        "</div>",
        _section("Checks", _checks(report), ""),
        _section("Shares", _splices(report), _SPLICE_NOTE) if report.splice else "",
        _section("Flips", _flips(report), "") if report.flips else "",
        _section("KV", _kv(report.kv), _KV_NOTE) if report.kv else "",
        _section("The oracle's own noise", _floor(report.floor), "") if report.floor else "",
        _section("Proof", _proof(report), "") if report.proof else "",
        _section("What was compared", _facts(report), ""),
    ]
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head = f"{meta}<title>{title}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body><main>{''.join(body)}</main></body></html>\n"


_SCATTER_NOTE = (
    "Across: how far the oracle's first token was ahead of its second. Up: how far a deciding logit moved. Above the"
    " diagonal (margin = 2 x delta) a token can flip; above the dashed line a difference is no noise of the oracle's."
    " Red: native chose another token."
)
_LAYER_NOTE = (
    "NMSE at the cut after each layer (bar), its limit (tick), and the share of the final difference made in it."
)
_SPLICE_NOTE = (
    "One engine up to a cut, the other after it; or the oracle's past with a part of native's. Each row's contributions"
    " sum to what the gap between the two tokens in question moved by."
)
_KV_NOTE = "Largest difference by head (row) and position (column); darker is larger, on one scale a component."


def _section(title: str, body: str, note: str) -> str:
    foot = f'<p class="soft">{html.escape(note)}</p>' if note else ""
    return f"<section><h2>{html.escape(title)}</h2>{body}{foot}</section>"


def _summary(report: ParityReport) -> str:
    rows = [("reason", report.reason), ("place", report.place), ("next", report.next_command)]
    lines = [f'<div><span class="soft">{k}</span> <code>{html.escape(v)}</code></div>' for k, v in rows if v]
    warnings = [f'<div class="other">warning: {html.escape(text)}</div>' for text in report.warnings]
    return "".join(lines + warnings)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f'<td class="n">{number(value)}</td>'
    kind = {"pass": "pass", "killed": "pass", "fail": "fail", "survived": "fail", "DEFECT": "fail", "DRIFT": "fail"}
    text = "" if value is None else html.escape(str(value))
    return f'<td class="{kind.get(str(value), "n" if isinstance(value, int) else "")}">{text}</td>'


def _checks(report: ParityReport) -> str:
    rows = [(c.id, c.verdict, c.compared, c.value, c.limit, c.limit_source, c.reason) for c in report.checks]
    return _table(("check", "verdict", "compared", "value", "limit", "source of the limit", "reason"), rows)


def _flips(report: ParityReport) -> str:
    rows = [
        (f.input, f.pos, _token(f.native, f.native_text), _token(f.oracle, f.oracle_text), f.class_, f.margin,
         f.pair_delta, f.bound, f.arbiter)
        for f in report.flips[:MAX_FLIPS]
    ]  # fmt: skip
    head = ("input", "position", "native", "oracle", "class", "margin", "pair delta", "bound", "arbiter")
    more = len(report.flips) - MAX_FLIPS
    return _table(head, rows) + (f'<p class="soft">and {more} more in the JSON report</p>' if more > 0 else "")


def _token(id_: int, text: str) -> str:
    return f"{text!r} ({id_})" if text else str(id_)


def _splices(report: ParityReport) -> str:
    rows = [(s.direction, s.pos, s.observed, s.sum_check, _parts(s)) for s in report.splice]
    return _table(("what was exchanged", "position", "gap moved by", "sum off by", "contributions (logits)"), rows)


def _parts(splice: Splice) -> str:
    pairs = zip(splice.parts, splice.contributions, strict=False)
    return ", ".join(f"{name} {number(part)}" for name, part in pairs)


def _floor(floor: Floor) -> str:
    rows = [
        (p.name, "yes" if p.bit_equal else "no", p.nmse, p.pair, p.max_abs, p.flips, p.n) for p in floor.perturbations
    ]
    return _table(("variation", "bit-equal", "NMSE", "pair", "max", "flips", "of"), rows)


def _proof(report: ParityReport) -> str:
    assert report.proof is not None
    rows = [(m.id, m.target, m.state, m.expected_check, m.failed_check, m.note) for m in report.proof.mutants]
    return _table(("mutant", "target", "state", "expected", "failed", "note"), rows)


def _facts(report: ParityReport) -> str:
    facts = {**report.artifact, **{f"{side}.{k}": v for side, part in report.sides.items() for k, v in part.items()}}
    facts |= {
        **report.environment,
        "seed": report.seed,
        "created": report.created,
        "tool": report.tool.get("version", ""),
    }
    return _table(("what", "value"), [(key, str(value)) for key, value in facts.items()])


# -- drawings ----------------------------------------------------------------------------------------------------

_W, _H, _PAD = 460, 320, 46
_LEAST = 1e-9  # logits: smaller values are drawn here


def scatter(report: ParityReport) -> str:
    """Margin against delta on log axes; the diagonal is the flip line."""
    points = report.points
    if not points:
        return '<p class="soft">nothing was compared</p>'
    bound = next((c.limit for c in report.checks if c.id == "logits.pair"), None)
    values = [max(v, _LEAST) for p in points for v in (p.margin, p.pair_delta) if math.isfinite(v)] + [bound or _LEAST]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)
    high = max(high, low + 1)
    place = _Axes(low, high)
    marks = "".join(_dot(place, p) for p in points)
    x1, y1 = place.x(2 * 10.0**low), place.y(10.0**low)
    x2, y2 = place.x(10.0**high), place.y(10.0**high / 2)
    line = f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="var(--bad)"/>'
    limit = "" if bound is None else _dashed(place, bound)
    inside = f"{place.frame()}{line}{limit}{marks}"
    return f'<svg viewBox="0 0 {_W} {_H}" role="img" aria-label="margin against delta">{inside}</svg>'


class _Axes:
    """log10 axes from 10^low to 10^high, both ways."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def x(self, value: float) -> float:
        return _PAD + self._share(value) * (_W - _PAD - 14)

    def y(self, value: float) -> float:
        return _H - _PAD - self._share(value) * (_H - _PAD - 14)

    def _share(self, value: float) -> float:
        clipped = min(max(value, 10.0**self.low), 10.0**self.high) if math.isfinite(value) else 10.0**self.high
        return (math.log10(clipped) - self.low) / (self.high - self.low)

    def frame(self) -> str:
        step = max(1, (self.high - self.low) // 6)
        ticks = range(self.low, self.high + 1, step)
        marks = [self._tick(10.0**t, f"1e{t}") for t in ticks]
        names = (
            f'<text x="{_W / 2}" y="{_H - 8}" text-anchor="middle">margin (logits)</text>'
            f'<text x="12" y="{_H / 2}" text-anchor="middle" transform="rotate(-90 12 {_H / 2})">'
            "pair delta (logits)</text>"
        )
        return "".join(marks) + names

    def _tick(self, value: float, label: str) -> str:
        x, y = f"{self.x(value):.1f}", f"{self.y(value):.1f}"
        return (
            f'<line x1="{x}" x2="{x}" y1="14" y2="{_H - _PAD}" stroke="var(--line)"/>'
            f'<text x="{x}" y="{_H - _PAD + 15}" text-anchor="middle">{label}</text>'
            f'<line y1="{y}" y2="{y}" x1="{_PAD}" x2="{_W - 14}" stroke="var(--line)"/>'
            f'<text x="{_PAD - 5}" y="{self.y(value) + 4:.1f}" text-anchor="end">{label}</text>'
        )


def _dot(place: _Axes, point: Point) -> str:
    colour = "var(--bad)" if point.flipped else "var(--good)"
    size = 4 if point.flipped else 2.4
    where = f'cx="{place.x(point.margin):.1f}" cy="{place.y(point.pair_delta):.1f}"'
    label = f"position {point.pos}: margin {number(point.margin)}, delta {number(point.pair_delta)}"
    return f'<circle {where} r="{size}" fill="{colour}" fill-opacity=".65"><title>{label}</title></circle>'


def _dashed(place: _Axes, bound: float) -> str:
    y = place.y(bound)
    return (
        f'<line x1="{_PAD}" x2="{_W - 14}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--warn)" stroke-dasharray="5 4"/>'
        f'<text x="{_W - 16}" y="{y - 4:.1f}" text-anchor="end">limit {number(bound)}</text>'
    )


def waterfall(layers: Sequence[Layer], splice: Sequence[Splice]) -> str:
    """One row a layer: accumulated NMSE (log bar), its limit (tick), its share of the final difference."""
    row, left, right = 22, 66, 130
    finite = [v for x in layers for v in (x.accumulated, x.limit or 0.0) if math.isfinite(v) and v > 0] or [1e-12, 1.0]
    low, high = math.floor(math.log10(min(finite))) - 1, math.ceil(math.log10(max(finite)) + 1e-9)
    width = _W - left - right

    def reach(value: float) -> float:
        clipped = min(max(value, 10.0**low), 10.0**high) if math.isfinite(value) else 10.0**high
        return (math.log10(clipped) - low) / (high - low) * width

    parts = []
    for index, layer in enumerate(layers):
        y = 6 + index * row
        bad = layer.limit is not None and not layer.accumulated <= layer.limit
        colour = "var(--bad)" if bad else "var(--good)"
        tick = left + reach(layer.limit or 10.0**low)
        share = "" if layer.share is None else f"   {round(100 * layer.share, 1) + 0.0:.1f} %"
        parts.append(
            f'<text x="{left - 6}" y="{y + 12}" text-anchor="end">layer {layer.k}</text>'
            f'<rect x="{left}" y="{y}" width="{max(reach(layer.accumulated), 1):.1f}" height="14" rx="2"'
            f' fill="{colour}"><title>{html.escape(layer.where)}</title></rect>'
            f'<line x1="{tick:.1f}" x2="{tick:.1f}" y1="{y - 2}" y2="{y + 16}" stroke="var(--ink)"/>'
            f'<text x="{left + width + 6}" y="{y + 12}">{number(layer.accumulated)}{share}</text>'
        )
    height = 10 + row * len(layers)
    note = "".join(
        f'<p class="soft">Shares sum to the observed change of {number(s.observed)} logits at position {s.pos}'
        f" (off by {number(s.sum_check)}).</p>"
        for s in splice[:1]
    )
    return f'<svg viewBox="0 0 {_W} {height}" role="img" aria-label="layers">{"".join(parts)}</svg>{note}'


def _kv(rows: Sequence[KvRow]) -> str:
    table = _table(
        ("layer", "tensor", "NMSE", "limit", "max ULP", "bit-equal", "worst at", "cause"),
        [(r.layer, r.tensor, r.nmse, r.limit, r.max_ulp, r.equal, _where(r.worst), r.cause) for r in rows],
    )
    worst = sorted((r for r in rows if r.by_head), key=lambda r: -(r.nmse if math.isfinite(r.nmse) else math.inf))[:4]
    maps = "".join(f'<p class="soft">layer {r.layer} {r.tensor}</p>{heat_map(r.by_head)}' for r in worst)
    return (
        maps
        + f"<details{' open' if len(rows) <= 12 else ''}><summary>all {len(rows)} components</summary>{table}</details>"
    )


def _where(worst: dict[str, int]) -> str:
    return " ".join(f"{name} {index}" for name, index in worst.items())


def heat_map(by_head: Sequence[Sequence[float]]) -> str:
    """Heads down, positions across; opacity is the logarithm of the difference."""
    finite = [v for row in by_head for v in row if math.isfinite(v) and v > 0]
    if not finite:
        return '<p class="soft">bit-equal everywhere</p>'
    low, high = math.log10(min(finite)), math.log10(max(finite))
    count = max(len(row) for row in by_head)
    size = max(3.0, min(14.0, 900 / count))
    cells = []
    for head, row in enumerate(by_head):
        for pos, value in enumerate(row):
            depth = (
                1.0
                if not math.isfinite(value)
                else 0.0
                if value <= 0
                else 0.08 + 0.92 * _share(math.log10(value), low, high)
            )
            cells.append(
                f'<rect x="{40 + pos * size:.1f}" y="{head * 14}" width="{size:.1f}" height="13" fill="var(--bad)"'
                f' fill-opacity="{depth:.2f}"><title>head {head} position {pos}: {number(value)}</title></rect>'
            )
        cells.append(f'<text x="34" y="{head * 14 + 11}" text-anchor="end">h{head}</text>')
    width = 40 + count * size + 4
    box = f'width="{width:.0f}" viewBox="0 0 {width:.0f} {14 * len(by_head) + 2}"'
    return f'<svg class="wide" {box} role="img">{"".join(cells)}</svg>'


def _share(value: float, low: float, high: float) -> float:
    return 1.0 if high == low else (value - low) / (high - low)
