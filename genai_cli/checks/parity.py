"""`genai parity`: the same ids through native and an oracle, judged by the oracle's own noise.

preflight -> oracle's path -> floor and liveness (cached) -> teacher-forced logits, tokens, KV -> the mode the user runs
-> on failure, or when asked: layers -> verdict. Each step is a function of one of the modules beside this one.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path as FilePath
from typing import Protocol

import numpy as np

from genai_cli import __version__
from genai_cli.backends.base import Backend
from genai_cli.checks import evidence, floor, layers, likelihood, liveness, preflight, user_mode
from genai_cli.checks.f64 import f64_run
from genai_cli.checks.floor import Ask
from genai_cli.checks.limits import KAPPA, Bound, ceiling
from genai_cli.checks.op_battery import RunModel
from genai_cli.checks.oracles import DEFAULTS, Golden, OpenModel, Oracle, load_golden, parse_kind, save_golden
from genai_cli.checks.paths import Path, Run, forced, greedy_path, prefilled
from genai_cli.checks.taps import TappedRunner
from genai_cli.checks.verdict import Judgement, judge
from genai_cli.errors import ExitCode, GenaiError
from genai_cli.graph.ir import Graph
from genai_cli.kv.layout import KvLayout
from genai_cli.report.parity import Check, Flip, Floor, KvRow, Layer, Override, ParityReport, Point, Probe, Splice
from genai_cli.runners.base import Runner, RunnerInfo
from genai_cli.sampling import SamplingOptions, sample

Transform = Callable[[Graph], Graph]
Progress = Callable[[str], None]
SECOND_MODE = ("f16", "bf16", "q_int8")  # native's own mode differs from the exact mode that gates


class OpenNative(Protocol):
    """Opens the package on the native engine: `exact` is f32 everywhere, `transform` plants a defect."""

    def __call__(self, *, exact: bool, transform: Transform | None = None) -> TappedRunner: ...


@dataclass(frozen=True)
class Target:
    """One package, and how each engine opens it."""

    name: str
    model_path: FilePath
    graph: Graph
    open_native: OpenNative
    open_ort: OpenModel
    open_backend: Callable[[], Backend]
    run_ort: RunModel  # ONNX Runtime on any model in memory
    tokenizer_path: FilePath | None = None
    typed: str = ""  # the model as the user named it, for the next command
    context_len: int | None = None
    environment: dict[str, object] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """Ids of one input; `embeds` for decoders that are fed embeddings."""

    id: str
    ids: np.ndarray  # int64 [P]


def first_maximum(row: np.ndarray) -> int:
    """Greedy, by the sampler that `genai generate` uses."""
    return sample(row, SamplingOptions(), [], 0)


@dataclass(frozen=True)
class Settings:
    """What the user may choose."""

    steps: int = 64
    oracle: str | None = None
    level: str = "all"  # the oracle's graph optimisation
    kappa: float = KAPPA
    seed: int = 0
    explain: bool = False
    text: likelihood.Text | None = None  # a long one, for ΔNLL
    user_mode: bool = True  # judge the mode the user runs too, where it is not the exact one
    locate: bool = True  # look for the layer of a failure
    allow_skip: bool = False
    cache_dir: FilePath | None = None
    save_golden: FilePath | None = None
    transform: Transform | None = None  # a planted defect, for mutants
    overrides: tuple[Override, ...] = ()
    pick: Callable[[np.ndarray], int] = first_maximum  # the sampler's greedy rule over one row [V]
    expected_flips: dict[int, str] = field(default_factory=dict)  # position -> reason


@dataclass
class Oracles:
    """What the oracle said, and how sure it is."""

    kind: str
    info: dict[str, object]
    runner_info: RunnerInfo | None
    paths: list[Path]
    references: list[Run]
    floor: Floor
    probes: list[Probe]
    oracle: Oracle | None
    ask: Ask = prefilled  # how the references were asked
    likelihood: likelihood.Likelihood | None = None  # of a long text, where the mode the user runs needs one


@dataclass
class Found:
    """What accumulates on the way to the report."""

    checks: list[Check] = field(default_factory=list)
    flips: list[Flip] = field(default_factory=list)
    kv: list[KvRow] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    splice: list[Splice] = field(default_factory=list)
    place: str = ""


def parity(
    target: Target, prompts: Sequence[Prompt], settings: Settings, progress: Progress, oracles: Oracles | None = None
) -> ParityReport:
    """Everything, in order; `oracles` where the oracle was asked before. GenaiError where a side cannot run at all."""
    started = time.monotonic()
    if not prompts or any(not len(prompt.ids) for prompt in prompts):
        raise GenaiError("no prompt tokens were given: nothing to compare", exit_code=ExitCode.NOT_COMPARED)
    artifact = preflight.artifact(target.model_path, target.graph, target.tokenizer_path)
    oracles = oracles or consult(target, artifact, prompts, settings, progress)
    found = Found()
    exact = artifact.precision in SECOND_MODE and (oracles.kind, artifact.precision) != ("ort", "q_int8")
    progress("native: exact mode" if exact else "native")
    native = target.open_native(exact=exact, transform=settings.transform)
    try:
        runs = [forced(native, path) for path in oracles.paths]
        found.checks += _preflight_checks(native, oracles, artifact)
        compare_runs(found, runs, native.kv_layout, oracles, artifact, settings)
        found.checks.append(evidence.free_run(native, oracles.paths, runs, settings.pick))
        if found.flips and oracles.oracle is not None and not _numbers_differ(found.checks):
            found.checks.append(_own_path(native, oracles, runs, settings, artifact))
    finally:
        native.close()
    if exact and settings.user_mode:
        found.checks += user_mode.checks(target, oracles, artifact, settings.transform, settings.seed, progress)
    judgement = judge(found.checks, found.flips, settings.allow_skip)
    found.place = next((c.reason for c in found.checks if c.id == "free_run" and c.verdict == "fail"), "")
    found.place = found.place or next((str(c.extra["place"]) for c in found.checks if c.extra.get("place")), "")
    if (settings.locate and _numbers_differ(found.checks)) or (settings.explain and oracles.oracle is not None):
        locate(found, target, oracles, runs, exact, settings, progress)
    return _report(target, artifact, oracles, found, judgement, native.info, settings, time.monotonic() - started)


def consult(
    target: Target, artifact: preflight.Artifact, prompts: Sequence[Prompt], settings: Settings, progress: Progress
) -> Oracles:
    """The oracle's path, logits, floor and liveness."""
    kind, file = parse_kind(settings.oracle or DEFAULTS[artifact.precision])
    if kind == "golden":
        assert file is not None
        return _golden(load_golden(file, artifact.identity), settings)
    oracle = Oracle(kind, target.model_path, target.open_ort, settings.level)
    progress(f"oracle: {kind}")
    runner = oracle.open()
    try:
        _check_ids(prompts, runner.vocab_size)
        machine = str([target.environment.get(name) for name in ("cpu", "cpu_flags_sha256")])
        asked = _Asked(oracle, runner, artifact, prompts, settings, progress, machine, asking(target.graph))
        paths, references, measured, found = asked.kept() or asked.measured()
        info = runner.info
        long = _likelihood(runner, info, oracle, artifact, settings, machine, progress)
    finally:
        runner.close()
    if kind == "f64":
        progress("oracle: f64")
        references = [f64_run(target.graph, path) for path in paths]
    about, ask = _oracle_info(kind, info, oracle), asking(target.graph)
    made = Oracles(kind, about, info, paths, references, measured, found, oracle, ask, long)
    if settings.save_golden is not None:
        _save(settings.save_golden, made, artifact)
    return made


def asking(graph: Graph) -> Ask:
    """One prefill of everything; but where a graph decides by its input (two rotary tables, by length), a prefill and a
    decode compute different things by right, and the oracle is asked in the steps that native takes."""
    return forced if any(node.op_type == "If" for node in graph.nodes) else prefilled


def _check_ids(prompts: Sequence[Prompt], vocab_size: int) -> None:
    """Before ONNX Runtime refuses them in its own words, or reads a row from the end."""
    bad = [int(i) for prompt in prompts for i in prompt.ids if i < 0 or (vocab_size and i >= vocab_size)]
    if bad:
        raise GenaiError(f"token {bad[0]} was given, the vocabulary has 0..{vocab_size - 1}", hint="give other ids")


@dataclass(frozen=True)
class _Asked:
    """An open oracle and what it is asked: paths, references, floor and probes, from the cache or measured."""

    oracle: Oracle
    runner: Runner
    artifact: preflight.Artifact
    prompts: Sequence[Prompt]
    settings: Settings
    progress: Progress
    machine: str
    ask: Ask

    @property
    def key(self) -> str:
        """Everything that the floor and the paths depend on."""
        info, settings = self.runner.info, self.settings
        return floor.cache_key(
            [self.artifact.identity, self.oracle.kind, info.version, str(info.providers), str(info.threads),
             str(settings.seed), str(settings.steps), str(self.runner.context_len), self.machine,
             *(Path(prompt.id, prompt.ids, len(prompt.ids)).sha256 for prompt in self.prompts),
             *map(str, sorted(info.options.items()))]
        )  # fmt: skip

    def kept(self) -> tuple[list[Path], list[Run], Floor, list[Probe]] | None:
        """From the cache; the references are asked again."""
        known = floor.load(self.settings.cache_dir, self.key, self.settings.kappa)
        if known is None or len(known.paths) != len(self.prompts):
            return None
        pairs = zip(self.prompts, known.paths, strict=True)
        paths = [Path(prompt.id, np.array(ids, np.int64), len(prompt.ids)) for prompt, ids in pairs]
        return paths, [self.ask(self.runner, path) for path in paths], known.floor, known.probes

    def measured(self) -> tuple[list[Path], list[Run], Floor, list[Probe]]:
        """Measured, and kept."""
        settings, runner = self.settings, self.runner
        walked = [greedy_path(runner, prompt.ids, settings.steps, prompt.id) for prompt in self.prompts]
        paths = [path for path, _ in walked]
        references = [self.ask(runner, path) for path in paths]
        found = floor.measure(
            self.oracle, paths, references, [run for _, run in walked], settings.seed, self.progress, settings.kappa,
            self.key, settings.cache_dir, self.ask,
        )  # fmt: skip
        self.progress("liveness")
        noise = floor.pair_floor(found, references[0].logits)
        longest = max(range(len(paths)), key=lambda i: paths[i].prompt_len)
        probes = liveness.probes(self.oracle, runner, paths[longest], references[longest].logits, noise)
        floor.save(settings.cache_dir, found, probes, paths)
        return paths, references, found, probes


def _likelihood(
    runner: Runner, info: RunnerInfo, oracle: Oracle, artifact: preflight.Artifact, settings: Settings,
    machine: str, progress: Progress,
) -> likelihood.Likelihood | None:  # fmt: skip
    """Only where native has a second mode to judge by it."""
    if settings.text is None or not settings.user_mode or artifact.precision not in SECOND_MODE:
        return None
    progress("oracle: likelihood of a long text")
    parts = [
        artifact.identity,
        oracle.kind,
        info.version,
        str(info.providers),
        str(info.threads),
        str(info.options),
        machine,
    ]
    return likelihood.oracle_score(runner, settings.text, settings.cache_dir, parts)


def _oracle_info(kind: str, info: RunnerInfo, oracle: Oracle) -> dict[str, object]:
    changes = [] if kind == "ort" else oracle.twin().changes
    version = f"numpy {np.__version__}" if kind == "f64" else info.version
    return {
        "kind": kind, "version": version, "ep": list(info.providers), "nodes": info.nodes,
        "options": info.options, "rewrites": changes, "threads": info.threads,
    }  # fmt: skip


def _golden(golden: Golden, settings: Settings) -> Oracles:
    path = Path("golden", golden.ids, golden.prompt_len)
    measured = Floor([], golden.floor, settings.kappa, cached=True, key="golden")
    info: dict[str, object] = {"kind": "golden", "version": golden.origin, "ep": [], "nodes": 0, "options": {}}
    return Oracles("golden", info, None, [path], [Run(golden.logits, [])], measured, [], None)


def _save(file: FilePath, made: Oracles, artifact: preflight.Artifact) -> None:
    path, reference = made.paths[0], made.references[0]
    origin = f"{made.kind} {made.info['version']}"
    save_golden(file, Golden(path.ids, path.prompt_len, reference.logits, artifact.identity, origin, made.floor.used))


def _preflight_checks(native: Runner, oracles: Oracles, artifact: preflight.Artifact) -> list[Check]:
    ids = np.concatenate([path.ids for path in oracles.paths])
    checks = [
        preflight.sides_check(native.info, oracles.runner_info, artifact.num_nodes),
        preflight.ids_check(ids, oracles.references[0].logits.shape[1]),
    ]
    return [*checks, liveness.liveness_check(oracles.probes)] if oracles.probes else checks


def _as_it_is(oracles: Oracles) -> bool:
    """The oracle, or whoever wrote the golden file, ran the artifact with its own rounding."""
    return oracles.kind == "ort" or (oracles.kind == "golden" and str(oracles.info["version"]).split()[0] == "ort")


def _limit(oracles: Oracles, settings: Settings, artifact: preflight.Artifact) -> Bound:
    """Of the logits' NMSE."""
    top = ceiling(artifact.precision if _as_it_is(oracles) else "f32").nmse
    return Bound(oracles.floor.used["nmse"], settings.kappa, top)


def _own_path(
    native: Runner, oracles: Oracles, runs: Sequence[Run], settings: Settings, artifact: preflight.Artifact
) -> Check:
    assert oracles.oracle is not None
    runner = oracles.oracle.open()
    try:
        return evidence.own_path(native, runner, oracles.paths, runs, _limit(oracles, settings, artifact), oracles.ask)
    finally:
        runner.close()


def compare_runs(
    found: Found,
    runs: Sequence[Run],
    layout: KvLayout,
    oracles: Oracles,
    artifact: preflight.Artifact,
    settings: Settings,
) -> None:
    """Teacher-forced logits, tokens and KV against the floor."""
    limit = _limit(oracles, settings, artifact)
    pair_floor = floor.pair_floor(oracles.floor, oracles.references[0].logits)
    pair = settings.kappa * pair_floor
    logits = evidence.Logits.of(runs, oracles.references, oracles.paths)
    found.flips = evidence.flips(logits, pair, limit, settings.expected_flips)
    found.points = logits.points()
    found.checks += [
        evidence.finite_check(logits),
        evidence.nmse_check(logits, limit),
        evidence.pair_check(logits, pair, limit),
        evidence.tokens_check(logits, found.flips, pair),
        evidence.sampled_check(logits, pair, settings.seed),
    ]
    kv_limit = Bound(oracles.floor.used["kv_nmse"], settings.kappa, limit.ceiling)
    found.kv = evidence.kv_rows(runs, oracles.references, layout, kv_limit)
    found.checks.append(evidence.kv_check(found.kv, kv_limit, bool(oracles.references[0].caches)))


def _numbers_differ(checks: Sequence[Check]) -> bool:
    own = [
        check for check in checks if not check.id.startswith("user_mode")
    ]  # those are no differences of the exact mode
    return any(check.verdict == "fail" and check.level in ("logits", "kv") for check in own)


def locate(
    found: Found,
    target: Target,
    oracles: Oracles,
    runs: Sequence[Run],
    exact: bool,
    settings: Settings,
    progress: Progress,
) -> None:
    """Which layer: taps, accepted only where the tapped run still shows the failure."""
    if oracles.oracle is None:
        found.place = "not localised: golden logits have no layers"
        return
    progress("layers")
    planted = settings.transform or (lambda graph: graph)
    native = target.open_native(exact=exact, transform=settings.transform)
    try:
        worst = evidence.worst_input(runs, oracles.references)
        located = layers.localise(
            native, lambda change: target.open_native(exact=exact, transform=lambda graph: change(planted(graph))),
            oracles.oracle, target.graph, oracles.paths[worst], runs[worst], oracles.references[worst],
            oracles.floor, progress, settings.explain,
        )  # fmt: skip
    finally:
        native.close()
    found.layers, found.splice = located.layers, located.splice
    if _numbers_differ(found.checks):
        found.place = located.place if located.source is not None else _kv_place(found) or located.place


def _kv_place(found: Found) -> str:
    """Where no cut is beyond its limit, the first cache that is beyond its own."""
    row = next((row for row in found.kv if not row.nmse <= row.limit and row.layer >= 0), None)
    return f"layer {row.layer}: {row.tensor} differs, worst at {_spelled(row.worst)}" if row else ""


def _spelled(worst: dict[str, int]) -> str:
    return " ".join(f"{name} {index}" for name, index in worst.items())


def _report(
    target: Target, artifact: preflight.Artifact, oracles: Oracles, found: Found, judgement: Judgement,
    native: RunnerInfo, settings: Settings, elapsed_s: float,
) -> ParityReport:  # fmt: skip
    return ParityReport(
        tool={"name": "genai", "version": __version__},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        verdict=judgement.verdict,
        exit_code=int(judgement.exit_code),
        reason=judgement.reason,
        place=found.place,
        next_command=next_command(judgement, target, oracles.kind),
        artifact={
            "name": target.name, "path": str(target.model_path), "sha256": artifact.sha256,
            "external_data_sha256": artifact.external_data_sha256, "tokenizer_sha256": artifact.tokenizer_sha256,
            "dtypes": artifact.dtypes, "accuracy_levels": artifact.accuracy_levels, "precision": artifact.precision,
        },
        sides={
            "native": {
                "version": native.version, "nodes_native": native.nodes, "nodes_fallback": native.nodes_fallback,
                "providers": list(native.providers), "options": native.options,
            },
            "oracle": oracles.info,
        },
        environment={**target.environment, "threads": native.threads},
        seed=settings.seed,
        inputs=[
            {"id": p.id, "n_tokens": p.prompt_len, "steps": p.steps, "ids_sha256": p.sha256} for p in oracles.paths
        ],
        floor=oracles.floor,
        liveness=oracles.probes,
        checks=found.checks,
        flips=found.flips,
        layers=found.layers,
        splice=found.splice,
        kv=found.kv,
        overrides=list(settings.overrides),
        warnings=list(target.warnings),
        points=found.points,
        elapsed_s=elapsed_s,
    )  # fmt: skip


def report_of_checks(
    target: Target, artifact: preflight.Artifact, checks: list[Check], settings: Settings, elapsed_s: float
) -> ParityReport:
    """A report of checks that need no runner of the whole model: the op battery."""
    judgement = judge(checks, [], settings.allow_skip)
    floor_of_nothing = Floor([], {}, settings.kappa, cached=False, key="")
    oracle = Oracles("ort", {"kind": "ort", "version": "one node at a time"}, None, [], [], floor_of_nothing, [], None)
    native = RunnerInfo("native", __version__, "cpu", (), len(target.graph.nodes), 0, 1)
    report = _report(target, artifact, oracle, Found(checks=checks), judgement, native, settings, elapsed_s)
    failed = [check for check in checks if check.verdict == "fail"]
    repro = next(
        (str(check.extra["repro"]) for check in failed), f"genai parity {shlex.quote(target.typed or target.name)}"
    )
    return replace(report, floor=None, next_command=repro)


def next_command(judgement: Judgement, target: Target, kind: str) -> str:
    """What to type next."""
    model = shlex.quote(target.typed or target.name)
    if judgement.exit_code == ExitCode.INCONCLUSIVE and "ΔNLL" in judgement.reason:
        return f"genai parity {model} --prompts texts.jsonl"
    if judgement.exit_code == ExitCode.INCONCLUSIVE:
        return f"genai parity {model} --oracle {'ort-sharp' if kind == 'ort' else 'ort-f32'}"
    if judgement.exit_code == ExitCode.DIFFERENT:
        return f"genai parity {model} --explain --bundle repro"
    if judgement.exit_code == ExitCode.UNPROVEN:
        return f"genai parity {model} --prompt 'a longer text'"
    return f"genai mirror-check {model}" if judgement.exit_code == ExitCode.OK else f"genai inspect {model}"
