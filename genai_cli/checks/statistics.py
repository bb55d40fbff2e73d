"""Equivalence of means, signs of flips, and tokens sampled with shared noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from genai_cli.checks.compare import first_max, second_of
from genai_cli.checks.limits import TOST_MARGIN, TOST_TOKENS
from genai_cli.report.parity import Check, CheckVerdict

LEVEL = 0.05  # of both tests on the mean


@dataclass(frozen=True)
class Paired:
    """Mean and standard error of paired differences."""

    mean: float
    se: float
    n: int

    @property
    def plain(self) -> dict[str, float]:
        """For reports."""
        return {"mean": self.mean, "se": self.se, "n": self.n}


def paired(differences: np.ndarray) -> Paired:
    """Of differences [n], one a token."""
    n = len(differences)
    spread = float(differences.std(ddof=1)) if n > 1 else math.inf
    return Paired(float(differences.mean()) if n else math.nan, spread / math.sqrt(n) if n else math.inf, n)


def tost(found: Paired, margin: float = TOST_MARGIN) -> float:
    """p of two one-sided tests that |mean| >= margin (normal approximation, n >= 1,000); small means equivalent."""
    if found.se == 0:
        return 0.0 if abs(found.mean) < margin else 1.0
    lower, upper = (found.mean + margin) / found.se, (found.mean - margin) / found.se
    return max(1 - _phi(lower), _phi(upper))


def _beyond(found: Paired, margin: float = TOST_MARGIN) -> float:
    """p of the one-sided test that |mean| <= margin; small means a difference that matters."""
    if found.se == 0:
        return 1.0 if abs(found.mean) <= margin else 0.0
    return 1 - _phi((abs(found.mean) - margin) / found.se)


def _phi(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


def sign_test(wins: int, losses: int) -> float:
    """Two-sided p that an arbiter sides with either engine equally often."""
    n = wins + losses
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2.0**n)


def nll_check(differences: np.ndarray, what: str, natural: bool = True) -> Check:
    """ΔNLL within the margin, tested, not assumed: too few tokens are said to be too few, and decide nothing. Nor do
    random ids, whose spread may be any, unless they are clearly outside."""
    found = paired(differences)
    source = f"TOST, margin {TOST_MARGIN} nat/token (a choice), n >= {TOST_TOKENS}"
    extra = {**found.plain, "what": what}
    if found.n and not np.isfinite(found.mean):
        return Check("statistics.nll", "statistics", "fail", found.n, value=found.mean, limit=TOST_MARGIN,
                     limit_source=source, reason="the likelihood is not finite", extra=extra)  # fmt: skip
    if found.n < TOST_TOKENS:
        reason = f"{found.n} tokens, {TOST_TOKENS} are needed for a statement about the mean"
        return Check("statistics.nll", "statistics", "info", found.n, value=found.mean, limit=TOST_MARGIN,
                     limit_source=source, reason=reason, extra=extra)  # fmt: skip
    p, beyond = tost(found), _beyond(found)
    verdict: CheckVerdict = "pass" if p <= LEVEL else "fail" if beyond <= LEVEL else "inconclusive"
    said = {"fail": "is outside the margin", "inconclusive": "may lie on either side of the margin: a longer text"}
    if not natural and verdict == "inconclusive":
        verdict = "info"
        said["info"] = "on random ids says nothing: no tokenizer here knows a text"
    reason = "" if verdict == "pass" else f"mean ΔNLL {found.mean:.3g} ± {found.se:.2g} nat/token {said[verdict]}"
    return Check("statistics.nll", "statistics", verdict, found.n, value=found.mean, limit=TOST_MARGIN,
                 limit_source=source, reason=reason, extra={**extra, "p": p})  # fmt: skip


def gumbel(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Noise f32 of `shape` drawn from `seed` alone: adding it to logits and taking the maximum samples a token."""
    return np.asarray(-np.log(np.random.default_rng(seed).standard_exponential(shape, dtype=np.float32)))


def shared_noise_tokens(logits: np.ndarray, temperature: float, seed: int) -> np.ndarray:
    """Tokens sampled with noise drawn from `seed` alone, int64 [T]: both engines get the same noise."""
    return first_max(logits / np.float32(temperature) + gumbel(logits.shape, seed))


def sampled_check(got: np.ndarray, want: np.ndarray, bound: float, temperature: float, seed: int) -> Check:
    """Sampled tokens must agree wherever the noisy margin is beyond 2B / temperature."""
    noise = gumbel(want.shape, seed)
    scale = np.float32(temperature)
    noisy = want / scale + noise
    tops, seconds = first_max(noisy), second_of(noisy)
    rows = np.arange(len(noisy))
    rounding = 4 * np.spacing(np.abs(noisy[rows, tops]))  # of the f32 sums themselves
    decisive = (noisy[rows, tops] - noisy[rows, seconds]) > 2 * bound / temperature + rounding
    differ = first_max(got / scale + noise) != tops
    bad = int((differ & decisive).sum())
    return Check(
        "tokens.sampled", "tokens", "fail" if bad else "pass", len(want), decisive=int(decisive.sum()),
        value=float(bad), limit=0.0, limit_source="same noise on both sides; post-noise margin > 2B",
        reason=f"{bad} sampled tokens differ beyond the bound" if bad else "", extra={"flips": int(differ.sum())},
    )  # fmt: skip
