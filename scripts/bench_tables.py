"""Measure what docs/performance.md shows, and write it there between its markers: no figure is typed by hand.

python scripts/bench_tables.py                        # everything, some ten minutes on two quiet cores
python scripts/bench_tables.py --runs int4,batch      # only these; the others keep their last reports
python scripts/bench_tables.py --runs ''              # measure nothing, write the tables anew
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "build" / "bench"
PAGE = ROOT / "docs" / "performance.md"
CROWDED = 0.2  # share of the CPU; what was measured beside more is not shown
PEER = "onnxruntime-genai"
BOTH = ("--vs", "ort", "--vs", PEER)
Report = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One call of `genai bench`."""

    name: str
    model: str
    args: tuple[str, ...]


RUNS = [
    Run("int4", "smollm2-135m-int4", (*BOTH, "--phases", "prefill,decode")),
    Run("int4-load", "smollm2-135m-int4", (*BOTH, "--phases", "load")),
    Run("builder", "smollm2-135m-int4-builder", (*BOTH, "--phases", "prefill,decode")),
    Run("fp32", "smollm2-135m-fp32", ("--vs", "ort", "--phases", "prefill,decode")),
    Run("fp32-load", "smollm2-135m-fp32", ("--vs", "ort", "--phases", "load")),
    Run("fp16", "smollm2-135m-fp16", ("--phases", "decode", "--context-tokens", "64")),
    Run("bf16", "smollm2-135m-bf16", ("--phases", "decode", "--context-tokens", "64")),
    Run("long", "smollm2-135m-int4",
        ("--vs", "ort", "--phases", "decode", "--context-tokens", "2048", "--rounds", "1")),
    Run("longest", "smollm2-135m-int4",
        ("--vs", "ort", "--phases", "decode", "--context-tokens", "7936", "--rounds", "1", "--new-tokens", "16")),
    Run("batch", "smollm2-135m-int4", ("--vs", PEER, "--phases", "batch")),
    Run("micro", "smollm2-135m-int4", ("--micro",)),
    Run("micro-fp32", "smollm2-135m-fp32", ("--micro", "--only", "MatMul*")),
    Run("profile", "smollm2-135m-int4",
        ("--profile", "--new-tokens", "128", "--trace", str(REPORTS / "trace.json"))),
]  # fmt: skip


def measure(run: Run) -> None:
    """Keep the JSON of one run, with its day."""
    model = ROOT / "models" / run.model
    if not model.is_dir():
        print(f"{run.name}: `{model}` is not there, skipped", file=sys.stderr)
        return
    command = [str(Path(sys.executable).with_name("genai")), "bench", str(model), "--json", *run.args]
    print(" ".join(command[1:]), file=sys.stderr)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(done.stdout) | {"day": date.today().isoformat()}
    REPORTS.mkdir(parents=True, exist_ok=True)
    (REPORTS / f"{run.name}.json").write_text(json.dumps(report))


def load(name: str) -> Report | None:
    """A kept report; none of a machine that others used for more than CROWDED."""
    path = REPORTS / f"{name}.json"
    report: Report | None = json.loads(path.read_text()) if path.exists() else None
    return None if report is None or (report.get("others_cpu") or 0) > CROWDED else report


# -- tables ----------------------------------------------------------------------------------------------------------------


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Markdown; every column but the first two is a number."""
    rule = ["---", "---", *["--:"] * (len(columns) - 2)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [columns, rule, *rows])


def head(report: Report) -> str:
    """When, where, and against which ceilings."""
    machine, others = report["ceilings"], report.get("others_cpu")
    crowd = "" if others is None else f", others used {others:.0%} of the CPU"
    return (
        f"{report['day']}, {report['threads']} threads, {report['isa']}; read {machine['read_gb_s']:.1f} GB/s, f32 "
        f"{machine['float_gop_s']:.0f} Gop/s, int8 {machine['byte_gop_s']:.0f} Gop/s{crowd}"
    )


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def where(entry: Report) -> str:
    """The phase and its length."""
    if entry["phase"] == "load":
        return "load"
    if entry["phase"] == "batch":
        return f"batch, {entry['n_prompt']} prompt tokens"
    return f"prefill {entry['n_prompt']}" if entry["phase"] == "prefill" else f"decode behind {entry['n_context']}"


def ratio_of(report: Report, result: Report) -> str:
    """Native over this engine in this phase."""
    key = ("phase", "n_prompt", "n_context")
    for ratio in report["ratios"]:
        if ratio["b"] == result["engine"] and all(ratio[k] == result[k] for k in key):
            none = ", no difference" if ratio["difference"] == "none" else ""
            return f"{ratio['median']:.2f}× ({ratio['p5']:.2f}–{ratio['p95']:.2f}){none}"
    return ""


def speeds(report: Report) -> str:
    """All results of a `genai.bench/1` report."""
    rows = []
    for result in report["results"]:
        rate, seconds = result["tok_s"], result["seconds"]
        rows.append([
            where(result), result["engine"],
            f"{rate['median']:.0f} tok/s" if rate else f"{seconds['median']:.3f} s",
            f"{rate['p5']:.0f}–{rate['p95']:.0f}" if rate else f"{seconds['p5']:.3f}–{seconds['p95']:.3f}",
            percent(result["bandwidth_fraction"] or result["peak_fraction"]), ratio_of(report, result),
        ])  # fmt: skip
    rows.sort(key=lambda row: [where(r) for r in report["results"]].index(row[0]))
    noise = ", ".join(f"{where(n)} {n['floor']:.0%}" for n in report["noise"])
    last = [f"A/A noise: {noise}."] if noise else []
    last += [f"{u['engine']} {u['phase'] or ''}: n/a, {u['reason']}." for u in report["unavailable"]]
    last += [f"Ratios withheld: {report['withheld']}."] if report["withheld"] else []
    columns = ["phase", "engine", "median", "p5–p95", "of ceiling", "native / it"]
    return f"{head(report)}; parity {report['parity']}.\n\n{table(columns, rows)}\n\n{' '.join(last)}"


def processes(report: Report) -> str:
    """Cold starts and memory."""
    rows = [
        [
            found["engine"], f"{found['first_token_s']['median']:.2f} s",
            *(f"{found[key] / 2**20:.0f} MiB" if found[key] is not None else "n/a"
              for key in ("peak_rss_bytes", "mapped_bytes", "private_bytes")),
        ]
        for found in report["processes"]
    ]  # fmt: skip
    columns = ["engine", "first token", "peak", "mapped, shared", "private"]
    return f"Artifact {report['artifact_bytes'] / 2**20:.0f} MiB.\n\n{table(columns, rows)}"


def micro(report: Report) -> str:
    """Every micro-benchmark."""
    rows = []
    for found in report["results"]:
        rates = [f"{found[key]:.{digits}f}" if found[key] else "" for key, digits in (("gb_s", 1), ("gop_s", 0))]
        per = f"{found['items_s']:,.0f} {found['items']}/s" if found["items_s"] else ""
        ort, ratio = found["ort_s"], found["ratio"]
        rows.append([
            found["name"], found["shape"], f"{found['native_s']['median'] * 1e6:.1f} µs", *rates, per,
            f"{ort['median'] * 1e6:.1f} µs" if ort else found["ort_reason"] and f"n/a: {found['ort_reason']}",
            f"{ratio['median']:.2f}× ({ratio['p5']:.2f}–{ratio['p95']:.2f})" if ratio else "",
        ])  # fmt: skip
    columns = ["name", "shape", "native", "GB/s", "Gop/s", "", "ORT's node", "ORT / native"]
    return f"{head(report)}.\n\n{table(columns, rows)}"


def of_section(section: Report) -> str:
    """The phase and its length, or how many sequences share the step."""
    if section["phase"] == "batch":
        return f"{section['num_rows']} sequences behind {section['n_context']}"
    return where(section)


def profile(report: Report) -> str:
    """Time per op of every phase."""
    parts = []
    for section in report["sections"]:
        by_op: dict[str, list[Report]] = {}
        for row in section["rows"]:
            by_op.setdefault(row["op"], []).append(row)
        rows = sorted(
            ([op, f"{sum(r['calls'] for r in found):g}", sum(r["ms"] for r in found), sum(r["share"] for r in found)]
             for op, found in by_op.items()), key=lambda row: -row[2]
        )  # fmt: skip
        shown = [[op, calls, f"{ms:.3f}", f"{share:.1%}"] for op, calls, ms, share in rows]
        parts.append(
            f"{of_section(section)}: {section['step_ms']:.2f} ms a step, timing it costs {section['cost']:+.1%}.\n\n"
            + table(["op", "calls", "ms", "share"], shown)
        )
    return f"{report['day']}, {report['threads']} threads, {report['isa']}.\n\n" + "\n\n".join(parts)


# -- targets ---------------------------------------------------------------------------------------------------------------


def result(report: Report | None, engine: str, phase: str, **length: int) -> Report | None:
    """One result of a report."""
    found = (r for r in (report or {"results": []})["results"] if r["engine"] == engine and r["phase"] == phase)
    return next((r for r in found if all(r[key] == value for key, value in length.items())), None)


def worst_ratio(report: Report | None, phase: str, against: str | None = None, **length: int) -> float | None:
    """Native over the best of the peers (or over `against`)."""
    found = [
        r["median"] for r in (report or {"ratios": []})["ratios"]
        if r["phase"] == phase and all(r[k] == v for k, v in length.items()) and (against is None or r["b"] == against)
    ]  # fmt: skip
    return min(found, default=None)


def field(name: str, report: Report | None, phase: str, **length: int) -> float | None:
    """A figure of native's."""
    found = result(report, "native", phase, **length)
    return None if found is None else found[name]


def faster(name: str) -> float | None:
    """A 16-bit export's decode tok/s over fp32's, from two runs."""
    narrow, wide = (result(load(run), "native", "decode", n_context=64) for run in (name, "fp32"))
    return narrow["tok_s"]["median"] / wide["tok_s"]["median"] if narrow and wide else None


def attention() -> float | None:
    """GB/s of one attention step over the bandwidth."""
    report = load("micro")
    rates = [
        f["gb_s"] for f in (report or {"results": []})["results"]
        if f["name"] == "genai.Attention" and f["shape"].startswith("1×1×")
    ]  # fmt: skip
    return rates[0] / report["ceilings"]["read_gb_s"] if report and rates else None


def cold() -> float | None:
    """Native's first token over that of the fastest peer's process."""
    report = load("int4-load")
    found = {p["engine"]: p["first_token_s"]["median"] for p in (report or {"processes": []})["processes"]}
    peers = [found[name] for name in ("ort", PEER) if name in found]
    return found["native"] / min(peers) if peers and "native" in found else None


def held(name: str) -> float | None:
    """Bytes mapped and private over the artifact's."""
    report = load(name)
    native = next((p for p in (report or {"processes": []})["processes"] if p["engine"] == "native"), None)
    if report is None or native is None or native["mapped_bytes"] is None:
        return None
    return (native["mapped_bytes"] + native["private_bytes"]) / report["artifact_bytes"]


@dataclass(frozen=True)
class Target:
    """`value` should reach `wanted` (or stay below it, `least` False)."""

    text: str
    wanted: float
    value: Callable[[], float | None]
    share: bool = False
    least: bool = True


TARGETS = [
    Target("int4 decode behind 64, over ORT", 1.7, lambda: worst_ratio(load("int4"), "decode", "ort", n_context=64)),
    Target("int4 decode behind 64, over the best peer", 1.7, lambda: worst_ratio(load("int4"), "decode", n_context=64)),
    Target("int4 decode behind 64, share of bandwidth", 0.75,
           lambda: field("bandwidth_fraction", load("int4"), "decode", n_context=64), share=True),
    Target("the same on the builder's export, over ORT", 1.7,
           lambda: worst_ratio(load("builder"), "decode", "ort", n_context=64)),
    Target("fp32 decode behind 64, over ORT", 1.1, lambda: worst_ratio(load("fp32"), "decode", n_context=64)),
    Target("fp32 decode behind 64, share of bandwidth", 0.9,
           lambda: field("bandwidth_fraction", load("fp32"), "decode", n_context=64), share=True),
    Target("fp16 decode over fp32", 1.7, lambda: faster("fp16")),
    Target("bf16 decode over fp32", 1.7, lambda: faster("bf16")),
    Target("int4 prefill 128, over the best peer", 2.0, lambda: worst_ratio(load("int4"), "prefill", n_prompt=128)),
    Target("int4 prefill 512, over the best peer", 2.0, lambda: worst_ratio(load("int4"), "prefill", n_prompt=512)),
    Target("int4 prefill 512, share of the arithmetic peaks", 0.6,
           lambda: field("peak_fraction", load("int4"), "prefill", n_prompt=512), share=True),
    Target("fp32 prefill 128, over ORT", 1.1, lambda: worst_ratio(load("fp32"), "prefill", n_prompt=128)),
    Target("fp32 prefill 512, over ORT", 1.1, lambda: worst_ratio(load("fp32"), "prefill", n_prompt=512)),
    Target("fp32 prefill 512, share of the f32 peak", 0.85,
           lambda: field("peak_fraction", load("fp32"), "prefill", n_prompt=512), share=True),
    Target("int4 decode behind 2048, over ORT", 1.7, lambda: worst_ratio(load("long"), "decode", n_context=2048)),
    Target("int4 decode behind 7936, over ORT", 1.7, lambda: worst_ratio(load("longest"), "decode", n_context=7936)),
    Target("attention of one token behind 1024, share of bandwidth", 0.7, attention, share=True),
    Target("batch of 16, over one by one", 3.0, lambda: worst_ratio(load("batch"), "batch", "native one by one")),
    Target("batch of 16, over onnxruntime-genai's", 2.5, lambda: worst_ratio(load("batch"), "batch", PEER)),
    Target("first token of a cold process, int4, over the best peer's", 0.5, cold, least=False),
    Target("memory of weights, KV and activations over the artifact, int4", 1.1, lambda: held("int4-load"), least=False),
    Target("memory of weights, KV and activations over the artifact, fp32", 1.1, lambda: held("fp32-load"), least=False),
]  # fmt: skip


def targets() -> str:
    """What is wanted, what is there, and the factor between."""
    rows = []
    for target in TARGETS:
        value = target.value()
        form = (lambda x: f"{x:.0%}") if target.share else (lambda x: f"{x:.2f}×")
        sign = "≥" if target.least else "≤"
        if value is None:
            rows.append([target.text, f"{sign} {form(target.wanted)}", "n/a", "not measured"])
            continue
        left = target.wanted / value if target.least else value / target.wanted
        rows.append(
            [target.text, f"{sign} {form(target.wanted)}", form(value), "reached" if left <= 1 else f"{left:.2f}×"]
        )
    return table(["figure", "target", "here", "left"], rows)


SECTIONS: dict[str, tuple[str, Callable[[Report], str]]] = {
    "int4": ("int4", speeds),
    "builder": ("builder", speeds),
    "fp32": ("fp32", speeds),
    "fp16": ("fp16", speeds),
    "bf16": ("bf16", speeds),
    "long": ("long", speeds),
    "longest": ("longest", speeds),
    "batch": ("batch", speeds),
    "int4-load": ("int4-load", speeds),
    "fp32-load": ("fp32-load", speeds),
    "processes": ("int4-load", processes),
    "processes-fp32": ("fp32-load", processes),
    "micro": ("micro", micro),
    "micro-fp32": ("micro-fp32", micro),
    "profile": ("profile", profile),
}


def render(page: str) -> str:
    """The page with every marked part written anew; a part whose report is missing keeps what it says."""

    def replaced(match: re.Match[str]) -> str:
        name = match[1]
        if name == "targets":
            return f"<!-- bench:{name} -->\n{targets()}\n<!-- /bench -->"
        run, form = SECTIONS[name]
        report = load(run)
        return match[0] if report is None else f"<!-- bench:{name} -->\n{form(report)}\n<!-- /bench -->"

    return re.sub(r"<!-- bench:([a-z0-9-]+) -->\n.*?<!-- /bench -->", replaced, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=",".join(run.name for run in RUNS))
    wanted = [name for name in parser.parse_args().runs.split(",") if name]
    unknown = set(wanted) - {run.name for run in RUNS}
    if unknown:
        parser.error(f"unknown runs {sorted(unknown)}; there are {[run.name for run in RUNS]}")
    for run in RUNS:
        if run.name in wanted:
            measure(run)
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
