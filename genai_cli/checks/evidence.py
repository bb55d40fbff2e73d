"""The checks of a parity run: each turns two sides into one `Check` with a denominator, a limit and its source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from genai_cli.checks import compare, statistics
from genai_cli.checks.compare import RowMetrics, row_metrics
from genai_cli.checks.flips import PASSING, decisive, flips_of, mismatch_bound
from genai_cli.checks.floor import Ask
from genai_cli.checks.limits import Bound
from genai_cli.checks.paths import Path, Run, greedy_path
from genai_cli.kv.layout import KvLayout
from genai_cli.report.parity import Check, CheckVerdict, Flip, KvRow, Point
from genai_cli.runners.base import Runner

SAMPLED_TEMPERATURE = 0.8  # of the tokens sampled with shared noise
Pick = Callable[[np.ndarray], int]  # the greedy rule over one row [V]
MAX_POINTS = 2000  # positions drawn in the scatter


@dataclass(frozen=True)
class Logits:
    """Both sides' logits on every input, and their row metrics."""

    paths: Sequence[Path]
    got: list[np.ndarray]
    want: list[np.ndarray]
    rows: list[RowMetrics]

    @classmethod
    def of(cls, runs: Sequence[Run], references: Sequence[Run], paths: Sequence[Path]) -> Logits:
        """Metrics of each input."""
        got, want = [run.logits for run in runs], [run.logits for run in references]
        return cls(paths, got, want, [row_metrics(a, b) for a, b in zip(got, want, strict=True)])

    @property
    def num_rows(self) -> int:
        """Positions compared, over all inputs."""
        return sum(len(rows.nmse) for rows in self.rows)

    def worst(self, metric: str) -> tuple[float, dict[str, object]]:
        """Largest value of a metric and where it is."""
        peaks = [float(getattr(rows, metric).max(initial=0.0)) for rows in self.rows]
        index = int(np.argmax(peaks))
        pos = int(getattr(self.rows[index], metric).argmax())
        return peaks[index], {"input": self.paths[index].id, "pos": pos, "where": f"position {pos}"}

    def points(self) -> list[Point]:
        """For the scatter."""
        made = [
            Point(pos, float(r.margin[pos]), float(r.pair[pos]), bool(r.top_got[pos] != r.top_want[pos]))
            for r in self.rows
            for pos in range(len(r.nmse))
        ]
        return made[:MAX_POINTS]


def flips(logits: Logits, pair_bound: float, limit: Bound, expected: dict[int, str]) -> list[Flip]:
    """Every flipped position, classified; `expected` positions carry the reason the user gave."""
    made: list[Flip] = []
    for path, got, want, rows in zip(logits.paths, logits.got, logits.want, logits.rows, strict=True):
        if len(rows.flips):
            made += flips_of(got, want, pair_bound, pair_ceiling(want, limit), input_id=path.id, metrics=rows)
    return [replace(flip, expected=expected.get(flip.pos, "")) for flip in made]


def pair_ceiling(want: np.ndarray, limit: Bound) -> float:
    """The NMSE ceiling in logits: the RMS error it allows at the logits' own RMS."""
    finite = want[np.isfinite(want)].astype(np.float64)
    rms = float(np.sqrt(np.square(finite).mean())) if finite.size else 0.0
    return float(np.sqrt(limit.ceiling)) * rms if limit.ceiling is not None else np.inf


def finite_check(logits: Logits) -> Check:
    """A non-finite value on either side is a verdict of its own: two NaNs are not equal."""
    for path, got, want in zip(logits.paths, logits.got, logits.want, strict=True):
        for side, array in (("native", got), ("the oracle", want)):
            bad = compare.non_finite(array)
            if bad is not None:
                return Check(
                    "logits.finite", "logits", "fail", logits.num_rows, value=float(bad.count), limit=0.0,
                    limit_source="non-finite values are never equal",
                    worst={"input": path.id, "pos": bad.position, "side": side},
                    reason=f"{side} gives {bad.kind} logits at position {bad.position} ({bad.count} values)",
                )  # fmt: skip
    return Check("logits.finite", "logits", "pass", logits.num_rows, value=0.0, limit=0.0, limit_source="finite")


def nmse_check(logits: Logits, limit: Bound) -> Check:
    """Worst row's NMSE, beside what is recorded with it."""
    value, worst = logits.worst("nmse")
    verdict, reason = _judge(value, limit, f"logits differ by NMSE {value:.2g} at {worst['where']}")
    return Check(
        "logits.nmse", "logits", verdict, logits.num_rows, value=value, limit=limit.value, limit_source=limit.source,
        worst=worst, reason=reason, extra=_recorded(logits),
    )  # fmt: skip


def _judge(value: float, limit: Bound, what: str) -> tuple[CheckVerdict, str]:
    if limit.too_noisy and value <= limit.kappa**2 * limit.floor:
        return "inconclusive", (
            f"{limit.kappa:g} x the oracle's own noise (NMSE {limit.kappa**2:g} x {limit.floor:.2g}) is above the limit"
            f" ({limit.ceiling:.0e}): a pass would not be evidence"
        )
    if not value <= limit.value:
        return "fail", f"{what}, limit {limit.value:.2g} ({limit.source})"
    return "pass", ""


def _recorded(logits: Logits) -> dict[str, object]:
    got, want = np.concatenate(logits.got), np.concatenate(logits.want)
    targets = np.concatenate([path.ids[1:] for path in logits.paths])
    inner = [np.arange(len(path.ids) - 1) for path in logits.paths]
    rows = np.concatenate([index + sum(len(p.ids) for p in logits.paths[:i]) for i, index in enumerate(inner)])
    divergence = compare.kl(got, want)
    return {
        "kl_mean": float(divergence.mean()), "kl_p99": float(np.quantile(divergence, 0.99, method="higher")),
        "kl_max": float(divergence.max()),
        "top1": 1 - sum(len(found.flips) for found in logits.rows) / logits.num_rows,
        "top5": compare.top_overlap(got, want, 5),
        "delta_nll": statistics.paired(compare.nll(got[rows], targets) - compare.nll(want[rows], targets)).plain,
    }  # fmt: skip


def pair_check(logits: Logits, bound: float, limit: Bound) -> Check:
    """Largest change of a token that decides a row: no token match excuses it."""
    value, worst = logits.worst("pair")
    verdict: CheckVerdict = "pass" if value <= bound else "inconclusive" if limit.too_noisy else "fail"
    reason = (
        f"a deciding logit moved by {value:.3g} at {worst['where']}, limit {bound:.3g}" if verdict != "pass" else ""
    )
    return Check(
        "logits.pair", "logits", verdict, logits.num_rows, value=value, limit=bound,
        limit_source=f"{limit.kappa:g} x the oracle's own noise", worst=worst, reason=reason,
    )  # fmt: skip


def tokens_check(logits: Logits, found: Sequence[Flip], bound: float) -> Check:
    """First maxima on the oracle's path. Near-ties and exact ties pass; everything else does not."""
    num_decisive = int(sum(decisive(rows, bound).sum() for rows in logits.rows))
    bad = [flip for flip in found if flip.class_ not in PASSING and not flip.expected]
    matched = logits.num_rows - len(found)
    reason = ""
    if bad:
        first = bad[0]
        reason = (
            f"token at position {first.pos}: native {first.native}, oracle {first.oracle}, {first.class_}"
            f" (margin {first.margin:.3g}, delta {first.pair_delta:.3g}, bound {first.bound:.2g})"
        )
    return Check(
        "tokens", "tokens", "fail" if bad else "pass", logits.num_rows, decisive=num_decisive, value=float(len(bad)),
        limit=0.0, limit_source="margin > 2B cannot flip by noise", reason=reason,
        extra={"matched": matched, "flips": len(found), "mismatch_rate_below": mismatch_bound(num_decisive)},
    )  # fmt: skip


def sampled_check(logits: Logits, bound: float, seed: int) -> Check:
    """Tokens sampled with one noise on both sides, over all inputs."""
    got, want = np.concatenate(logits.got), np.concatenate(logits.want)
    finite = np.isfinite(got).all(axis=1) & np.isfinite(want).all(axis=1)
    return statistics.sampled_check(got[finite], want[finite], bound, SAMPLED_TEMPERATURE, seed)


def free_run(native: Runner, paths: Sequence[Path], runs: Sequence[Run], pick: Pick) -> Check:
    """Native generates by itself, with the sampler the user has: every token must be the first maximum of its logits,
    and must stay so when a later token is given the same logit.

    While it is on the oracle's path its steps are those of `runs`; only the prompt is fed again, for the row that
    generation asks of it.
    """
    compared, wrong, diverged = 0, [], None
    for path, run in zip(paths, runs, strict=True):
        native.reset()
        rows = [native.step(path.ids[: path.prompt_len])[0], *run.logits[path.prompt_len : -1]]
        for pos, row in enumerate(rows[: path.steps], path.prompt_len):
            if not np.isfinite(row).all():
                break  # `logits.finite` says so
            compared += 1
            token = pick(row)
            if token != int(compare.first_max(row[None])[0]) or pick(_tied(row)) != token:
                wrong.append(f"sampling: token {token} at position {pos} is not the first of the largest logits")
            if token != path.ids[pos]:
                diverged = diverged if diverged is not None else pos
                break
    return Check(
        "free_run", "tokens", "fail" if wrong else "pass", compared, value=float(len(wrong)), limit=0.0,
        limit_source="argmax takes the first maximum", reason=wrong[0] if wrong else "",
        extra={"first_divergence": diverged},
    )  # fmt: skip


def own_path(
    native: Runner, oracle: Runner, paths: Sequence[Path], runs: Sequence[Run], limit: Bound, ask: Ask
) -> Check:
    """After a flip that passes, native goes its own way; the oracle is asked about that way too, by the same limit."""
    own, said = [], []
    for path, run in zip(paths, runs, strict=True):
        if (compare.first_max(run.logits)[path.prompt_len - 1 : -1] == path.ids[path.prompt_len :]).all():
            continue  # it went the oracle's way
        walked, answer = greedy_path(native, path.ids[: path.prompt_len], path.steps, path.id)
        own.append(walked)
        said.append(answer)
    if not own:
        return Check("own_path", "logits", "not applicable", reason="native went the oracle's way")
    logits = Logits.of(said, [ask(oracle, path) for path in own], own)
    value, worst = logits.worst("nmse")
    verdict, reason = _judge(
        value, limit, f"on native's own path logits differ by NMSE {value:.2g} at {worst['where']}"
    )
    return Check(
        "own_path", "logits", verdict, logits.num_rows, value=value, limit=limit.value, limit_source=limit.source,
        worst=worst, reason=reason, extra={"flips": sum(len(rows.flips) for rows in logits.rows)},
    )  # fmt: skip


def _tied(row: np.ndarray) -> np.ndarray:
    """The row with its last token as large as its first maximum."""
    tied = row.copy()
    tied[-1] = row.max()
    return tied


def worst_input(runs: Sequence[Run], references: Sequence[Run]) -> int:
    """Index of the input whose logits differ most."""
    peaks = [row_metrics(a.logits, b.logits).nmse.max() for a, b in zip(runs, references, strict=True)]
    return int(np.argmax(peaks))


def kv_rows(runs: Sequence[Run], references: Sequence[Run], layout: KvLayout, limit: Bound) -> list[KvRow]:
    """Values of every cache component, worst input first seen; states follow the KV under `state`."""
    labels = [(c.layer, c.kind) for c in layout.components]
    made: list[KvRow] = []
    for index in range(len(references[0].caches)):
        layer, tensor = labels[index] if index < len(labels) else (-1, f"state {index - len(labels)}")
        pairs = [(a.caches[index], b.caches[index]) for a, b in zip(runs, references, strict=True)]
        got, want = max(pairs, key=lambda pair: compare.nmse(*pair))
        made.append(kv_row(layer, str(tensor), got, want, limit.value))
    return made


def kv_row(layer: int, tensor: str, got: np.ndarray, want: np.ndarray, limit: float) -> KvRow:
    """One component [H_kv, T, D]: worst element, ULPs, share of bit-equal elements, a head x position map."""
    wide_got, wide_want = got.astype(np.float32), want.astype(np.float32)
    delta = np.abs(wide_got.astype(np.float64) - wide_want)
    delta = np.where(np.isfinite(delta), delta, np.inf)
    where = np.unravel_index(int(delta.argmax()), delta.shape) if delta.size else ()
    return KvRow(
        layer=layer, tensor=tensor, bytes_diff=None, max_ulp=int(compare.ulps(wide_got, wide_want).max(initial=0)),
        nmse=compare.nmse(got, want), limit=limit, equal=float((wide_got == wide_want).mean()) if delta.size else 1.0,
        worst={name: int(i) for name, i in zip(("head", "pos", "dim"), where, strict=False)},
        by_head=delta.max(axis=-1).tolist() if delta.ndim == 3 else [],
    )  # fmt: skip


def kv_check(rows: Sequence[KvRow], limit: Bound, has_caches: bool) -> Check:
    """Worst component against the floor's KV noise."""
    if not rows:
        reason = "the oracle's caches cannot be read" if has_caches else "no KV to compare"
        return Check("kv.value", "kv", "not applicable", reason=reason)
    worst = max(rows, key=lambda row: row.nmse)
    first = next((row for row in rows if not row.nmse <= limit.value), None)
    place = first or worst
    verdict, reason = _judge(worst.nmse, limit, f"layer {place.layer} {place.tensor} differs by NMSE {place.nmse:.2g}")
    return Check(
        "kv.value", "kv", verdict, len(rows), value=worst.nmse, limit=limit.value, limit_source=limit.source,
        worst={"layer": place.layer, "tensor": place.tensor, **place.worst}, reason=reason,
        extra={"max_ulp": max(row.max_ulp for row in rows), "equal": float(np.mean([row.equal for row in rows]))},
    )  # fmt: skip
