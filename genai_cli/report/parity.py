"""What `genai parity` found: frozen data, schema genai.parity/1. Renderers read it; nothing here computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA = "genai.parity/1"
Verdict = Literal["PASS", "PASS with near-ties", "FAIL", "INCONCLUSIVE", "UNPROVEN", "NOT COMPARED"]
CheckVerdict = Literal["pass", "fail", "inconclusive", "skipped", "info", "not applicable", "unproven"]


@dataclass(frozen=True)
class Check:
    """One comparison with its denominator, its limit and where that limit comes from."""

    id: str
    level: str  # preflight, liveness, tokens, logits, layers, kv, ops, statistics, proof
    verdict: CheckVerdict
    compared: int = 0  # how many things were compared; 0 is never a pass
    decisive: int | None = None
    value: float | None = None
    limit: float | None = None
    limit_source: str = ""
    worst: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Flip:
    """A position whose greedy token differs. Margin, deltas and bound in logits."""

    input: str
    pos: int
    native: int
    oracle: int
    margin: float
    pair_delta: float
    bound: float
    ulps: float
    class_: str
    arbiter: str
    expected: str = ""  # the reason of a matching --expect-flip
    native_text: str = ""  # the tokens as text, where there is a tokenizer
    oracle_text: str = ""


@dataclass(frozen=True)
class Layer:
    """One block: its error on the oracle's input (isolated), in the whole run (accumulated), and its share."""

    k: int
    isolated: float | None
    accumulated: float
    gain: float | None
    share: float | None
    limit: float | None = None
    where: str = ""


@dataclass(frozen=True)
class Splice:
    """Contributions that sum to the observed difference."""

    direction: str
    input: str
    pos: int
    observed: float  # change of the gap between the two tokens, in logits
    sum_check: float  # |sum of the contributions - observed|
    contributions: list[float]
    parts: list[str] = field(default_factory=list)  # what each contribution is of


@dataclass(frozen=True)
class KvRow:
    """One KV component: transport (bytes) and value (ULPs)."""

    layer: int
    tensor: str
    bytes_diff: int | None
    max_ulp: int
    nmse: float
    limit: float
    equal: float  # share of elements that are bit-equal
    worst: dict[str, int]
    cause: str = ""
    confidence: float | None = None
    by_head: list[list[float]] = field(default_factory=list)  # max |Δ| [head][position], where wanted


@dataclass(frozen=True)
class Perturbation:
    """One valid variation of the oracle, and how far its own logits moved."""

    name: str
    bit_equal: bool
    max_abs: float
    nmse: float
    flips: int
    n: int
    pair: float = 0.0
    kv_nmse: float = 0.0


@dataclass(frozen=True)
class Floor:
    """The oracle's own noise."""

    perturbations: list[Perturbation]
    used: dict[str, float]  # nmse, pair, kv
    kappa: float
    cached: bool
    key: str


@dataclass(frozen=True)
class Probe:
    """Something changed that must move the logits."""

    probe: str
    moved_in_floors: float
    ok: bool
    reason: str = ""


@dataclass(frozen=True)
class Mutant:
    """A planted defect and what became of it."""

    id: str
    target: str  # engine, pages, checker
    state: str  # killed, killed-for-another-reason, survived, not-applied, equivalent, timeout, error
    expected_check: str
    failed_check: str
    note: str = ""


@dataclass(frozen=True)
class Proof:
    """Mutants, and the smallest difference that the limits used can see."""

    mutants: list[Mutant]
    killed: int
    applicable: int
    power: dict[str, float]


@dataclass(frozen=True)
class Override:
    """A choice of the user's that weakens or changes the verdict."""

    key: str
    value: str
    reason: str
    expires: str = ""


@dataclass(frozen=True)
class Point:
    """One position for the scatter: how sure the oracle was, how far the pair moved."""

    pos: int
    margin: float
    pair_delta: float
    flipped: bool


@dataclass(frozen=True)
class ParityReport:
    """The one document."""

    tool: dict[str, str]
    created: str
    verdict: Verdict
    exit_code: int
    reason: str
    place: str
    next_command: str
    artifact: dict[str, Any]
    sides: dict[str, Any]
    environment: dict[str, Any]
    seed: int
    inputs: list[dict[str, Any]]
    floor: Floor | None
    liveness: list[Probe]
    checks: list[Check]
    flips: list[Flip]
    layers: list[Layer] = field(default_factory=list)
    splice: list[Splice] = field(default_factory=list)
    kv: list[KvRow] = field(default_factory=list)
    proof: Proof | None = None
    perf: dict[str, Any] | None = None
    bundle: dict[str, Any] | None = None
    overrides: list[Override] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    elapsed_s: float = 0.0
    schema: str = SCHEMA
