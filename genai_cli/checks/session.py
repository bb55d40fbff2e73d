"""One `genai parity` request on one model: prompts, parity, proof, bundle, ops, speed. Returns the report."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import lru_cache
from pathlib import Path

import numpy as np

from genai_cli.checks import bundle as bundles
from genai_cli.checks import likelihood, preflight
from genai_cli.checks.layers import Locator
from genai_cli.checks.limits import KAPPA, ceiling
from genai_cli.checks.minimise import Minimised, minimise
from genai_cli.checks.mirror_checks import transport
from genai_cli.checks.mirror_scene import Scene
from genai_cli.checks.ops_run import ops_checks
from genai_cli.checks.oracles import Oracle
from genai_cli.checks.parity import SECOND_MODE, Prompt, Settings, Target, first_maximum, parity, report_of_checks
from genai_cli.checks.prove import prove
from genai_cli.checks.target import Place, open_target
from genai_cli.checks.verdict import judge
from genai_cli.errors import ExitCode, GenaiError
from genai_cli.package.open import open_package
from genai_cli.package.prompts import open_tokenizer
from genai_cli.report.parity import Check, Flip, Override, ParityReport
from genai_cli.runners.base import Runner
from genai_cli.text.tokenizer import Tokenizer

Progress = Callable[[str], None]
DEFAULT_TEXT = (
    "The capital of France is Paris. It lies on the river Seine, and for many centuries it has been the centre of the"
    " country's trade, government, painting and music. Visitors come to see its museums, bridges and gardens, and to eat"
    " well in one of several thousand restaurants, bakeries and cafes in every quarter of the old town."
)
DEFAULT_TOKENS = 64  # of the text above (random ids where there is no tokenizer); half of a shorter context
PAGE_SIZE = 16  # tokens; `genai mirror-check --page-size` tries others
PERF_ROUNDS = 4  # native, ort, ort, native, …


@dataclass(frozen=True)
class Request:
    """What the command line asks for, beside `Settings`."""

    texts: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    prove: bool = False
    ops: bool = False
    perf: bool = False
    bundle: Path | None = None


def run(model: Path, request: Request, settings: Settings, place: Place, progress: Progress) -> ParityReport:
    """Parity of one model, or of a bundle written before."""
    if (model / bundles.NAME).is_file():
        return rerun(bundles.read(model), settings, place, progress)
    started = time.monotonic()
    target = open_target(model, place)
    prompts, checks = prompts_of(model, target, request, settings.seed)
    if request.ops:
        return _ops(target, prompts[0], settings, progress)
    if settings.text is None:
        settings = replace(settings, text=long_text(model, settings.seed))
    report = parity(target, prompts, settings, progress)
    checks.append(transport_check(target, prompts[0]))
    report = rejudged(replace(report, checks=[*checks, *report.checks]), settings)
    report = replace(report, flips=[_spelled(flip, model) for flip in report.flips])
    if request.prove and report.exit_code == ExitCode.OK:
        report = prove(target, prompts, settings, report, progress)
    if request.perf:
        report = replace(report, perf=perf(target, prompts[0], settings, report))
    if request.bundle is not None and report.exit_code == ExitCode.DIFFERENT:
        report = bundled(target, prompts, settings, report, request.bundle, progress)
    return replace(report, elapsed_s=time.monotonic() - started)


def expected_flips(given: Sequence[str], kappa: float) -> tuple[dict[int, str], tuple[Override, ...]]:
    """`POS:REASON[:YYYY-MM-DD]` and another kappa, as overrides that every report carries. An expired one is refused."""
    if not 0 < kappa < math.inf:
        raise GenaiError(f"--kappa `{kappa:g}`: wanted a number above 0", hint="4 is the default")
    expected: dict[int, str] = {}
    overrides = [] if kappa == KAPPA else [Override("kappa", f"{kappa:g}", "--kappa")]
    for text in given:
        match = re.fullmatch(r"(\d+):([^:]+?)(?::(\d{4}-\d\d-\d\d))?", text)
        if match is None:
            raise GenaiError(f"--expect-flip `{text}`: wanted POS:REASON or POS:REASON:YYYY-MM-DD")
        pos, reason, expires = match.groups()
        if expires and date.fromisoformat(expires) < date.today():
            raise GenaiError(f"--expect-flip `{text}` expired on {expires}", hint="look at the flip again")
        expected[int(pos)] = reason
        overrides.append(Override("expect-flip", pos, reason, expires or ""))
    return expected, tuple(overrides)


def transport_check(target: Target, prompt: Prompt) -> Check:
    """Present -> pages -> past, by address and byte, across a page border: a part of `genai mirror-check`."""
    native = target.open_native(exact=False)
    gate = native.supports_paged_kv()
    if not gate.supported:
        native.close()
        return Check("kv.transport", "kv", "not applicable", reason=gate.reason)
    room = native.context_len or len(prompt.ids) + PAGE_SIZE
    ids = np.resize(prompt.ids, max(2, min(PAGE_SIZE + 1, room // 3))).tolist()
    pages = 2 + 4 * (len(ids) // PAGE_SIZE + 3)
    outcome = transport(Scene(native, ids, PAGE_SIZE, pages))
    native.close()
    return Check(
        "kv.transport", "kv", "pass" if outcome.ok else "fail", outcome.compared_bytes, value=float(not outcome.ok),
        limit=0.0, limit_source="bytes", reason="" if outcome.ok else outcome.detail, extra={"detail": outcome.detail},
    )  # fmt: skip


def rejudged(report: ParityReport, settings: Settings) -> ParityReport:
    """The verdict over all checks, those added since included."""
    judgement = judge(report.checks, report.flips, settings.allow_skip)
    return replace(
        report, verdict=judgement.verdict, exit_code=int(judgement.exit_code), reason=judgement.reason or report.reason
    )


def rerun(bundle: bundles.Bundle, settings: Settings, place: Place, progress: Progress) -> ParityReport:
    """What a bundle recorded, again."""
    target = open_target(_package_of(Path(bundle.model)), place)
    bundles.check_model(bundle, target.model_path)
    again = replace(settings, steps=bundle.steps, oracle=bundle.oracle, seed=bundle.seed)
    return parity(target, [Prompt("bundle", np.array(bundle.ids, np.int64))], again, progress)


def _package_of(model: Path) -> Path:
    """The folder of the model file, or of the `onnx/` folder it lies in."""
    folder = model.parent
    return folder.parent if folder.name == "onnx" else folder


def prompts_of(model: Path, target: Target, request: Request, seed: int) -> tuple[list[Prompt], list[Check]]:
    """Ids of every input, and the tokenizer's own check where text was tokenized."""
    if request.ids:
        return [Prompt("0", np.array(request.ids, np.int64))], []
    package = open_package(model)
    default = min(DEFAULT_TOKENS, max(1, (target.context_len or 2 * DEFAULT_TOKENS) // 2))
    drawn = np.random.default_rng(seed).integers(0, package.vocab_size or 256, default)
    if package.tokenizer is None and not request.texts:
        return [Prompt("random", drawn)], []
    tokenizer = _tokenizer(model)
    texts = request.texts or (DEFAULT_TEXT,)
    encoded = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
    if not request.texts and not knows(np.array(encoded[0])):
        return [Prompt("random", drawn)], []
    limit = None if request.texts else default
    prompts = [Prompt(str(i), np.array(ids[:limit], np.int64)) for i, ids in enumerate(encoded)]
    return prompts, [tokenizer_check(texts, encoded, tokenizer.decode)]


def _spelled(flip: Flip, model: Path) -> Flip:
    """The two tokens as text, where the package has a tokenizer."""
    if open_package(model).tokenizer is None:
        return flip
    decode = _tokenizer(model).decode
    return replace(flip, native_text=decode([flip.native]), oracle_text=decode([flip.oracle]))


@lru_cache(maxsize=1)
def _tokenizer(model: Path) -> Tokenizer:
    return open_tokenizer(open_package(model))


def long_text(model: Path, seed: int) -> likelihood.Text:
    """Ids for ΔNLL: our own text in the package's tokens, or random ids where it has no tokenizer."""
    package = open_package(model)
    if package.tokenizer is not None:
        ids = np.array(_tokenizer(model).encode(likelihood.text(), add_special_tokens=True), np.int64)
        if knows(ids):
            return likelihood.Text(ids)
    drawn = np.random.default_rng(seed).integers(0, package.vocab_size or 256, 2 * likelihood.SCORED_TOKENS)
    return likelihood.Text(drawn, natural=False)


def knows(ids: np.ndarray) -> bool:
    """A tokenizer made for something else turns a text into one unknown token again and again."""
    return bool(len(ids)) and int(np.unique(ids, return_counts=True)[1].max()) <= len(ids) // 2


def tokenizer_check(
    texts: Sequence[str], encoded: Sequence[Sequence[int]], decode: Callable[[Sequence[int]], str]
) -> Check:
    """Text -> ids -> text. A tokenizer that normalises is no difference between engines, so this only informs."""
    changed = [
        i for i, (text, ids) in enumerate(zip(texts, encoded, strict=True)) if decode(ids).strip() != text.strip()
    ]
    return Check(
        "tokenizer", "preflight", "info", sum(map(len, encoded)), value=float(len(changed)), limit=0.0,
        limit_source="both sides get the same ids", reason=f"prompts {changed} change in a round trip" if changed else "",
    )  # fmt: skip


def _ops(target: Target, prompt: Prompt, settings: Settings, progress: Progress) -> ParityReport:
    started = time.monotonic()
    artifact = preflight.artifact(target.model_path, target.graph, target.tokenizer_path)
    checks = ops_checks(target, artifact, prompt, settings, progress)
    return report_of_checks(target, artifact, checks, settings, time.monotonic() - started)


# -- a failure, made small ------------------------------------------------------------------------------------------------


def bundled(
    target: Target,
    prompts: Sequence[Prompt],
    settings: Settings,
    report: ParityReport,
    folder: Path,
    progress: Progress,
) -> ParityReport:
    """The shortest prompt with the same failure at the same layer, written as a bundle that was seen to fail again."""
    prompt = _failing_prompt(prompts, report)
    small = shortest(target, prompt, settings, report, progress)
    ids = small.ids if small else prompt.ids.tolist()

    def again(bundle: bundles.Bundle) -> ParityReport:
        shorter = replace(settings, steps=bundle.steps, oracle=bundle.oracle, explain=False)
        return parity(target, [Prompt("bundle", np.array(bundle.ids, np.int64))], shorter, progress)

    def written(steps: int) -> Path:
        made = bundles.bundle_of(report, target.model_path, ids, steps, len(prompt.ids))
        return bundles.write(folder, made, report, again)

    steps = 1 if small else fewest_steps(report, prompt, settings.steps)
    try:
        path = written(steps)
    except GenaiError:
        if steps == settings.steps:
            raise
        steps = settings.steps  # fewer did not show the same failure
        path = written(steps)
    facts = {
        "path": str(path), "reverified": True, "tokens": len(ids), "of": len(prompt.ids), "steps": steps,
        "of_steps": settings.steps,
    }  # fmt: skip
    return replace(report, bundle=facts, next_command=f"genai parity {folder} --explain")


def fewest_steps(report: ParityReport, prompt: Prompt, steps: int) -> int:
    """Decode steps up to the first position beyond the bound; all of them where no position is."""
    bound = next((c.limit for c in report.checks if c.id == "logits.pair"), None)
    bad = [p.pos for p in report.points if bound is not None and not p.pair_delta <= bound]
    return min(steps, max(1, min(bad) - len(prompt.ids) + 1)) if bad and len(report.inputs) == 1 else steps


def _failing_prompt(prompts: Sequence[Prompt], report: ParityReport) -> Prompt:
    failed = next((c for c in report.checks if c.verdict == "fail" and "input" in c.worst), None)
    wanted = failed.worst["input"] if failed else prompts[0].id
    return next(prompt for prompt in prompts if prompt.id == wanted)


def shortest(
    target: Target, prompt: Prompt, settings: Settings, report: ParityReport, progress: Progress
) -> Minimised | None:
    """ddmin over the prompt; None where the failure does not show in a prefill of it, or has no layer."""
    kind = report.sides["oracle"]["kind"]
    limit = next((c.limit for c in report.checks if c.id == "logits.nmse"), None)
    if not report.layers or limit is None or kind == "golden":
        return None
    oracle = Oracle(kind, target.model_path, target.open_ort, settings.level)
    exact = report.artifact["precision"] in SECOND_MODE
    native = target.open_native(exact=exact, transform=settings.transform)
    locator = Locator(native, oracle, target.graph, report.layers, min(limit, ceiling("f32").nmse or limit))
    try:
        wanted = locator.source(prompt.ids)
        if wanted is None:
            return None
        progress("minimise")
        return minimise(prompt.ids.tolist(), lambda ids: locator.source(np.array(ids, np.int64)) == wanted)
    finally:
        locator.close()
        native.close()


# -- speed ---------------------------------------------------------------------------------------------------------------


def perf(target: Target, prompt: Prompt, settings: Settings, report: ParityReport) -> dict[str, object]:
    """Decode steps a second of both engines, alternating native, ort, ort, native; no ratio unless parity passed."""
    sides: dict[str, Runner] = {"native": target.open_native(exact=False), "ort": target.open_ort(None)}
    order = [name for pair in range(PERF_ROUNDS // 2) for name in ("native", "ort", "ort", "native")]
    rates: dict[str, list[float]] = {"native": [], "ort": []}
    for name in order:
        rates[name].append(_rate(sides[name], prompt, min(settings.steps, 32)))
    for runner in sides.values():
        runner.close()
    made: dict[str, object] = {"order": order, "unit": "tok/s", "what": "decode, greedy, one sequence"}
    for name, values in rates.items():
        made[name] = {"median": float(np.median(values)), "range": [min(values), max(values)]}
    if report.exit_code == ExitCode.OK:
        made["ratio"] = float(np.median(rates["native"]) / np.median(rates["ort"]))
    else:
        made["ratio"] = None
        made["why_no_ratio"] = f"parity says {report.verdict}"
    return made


def _rate(runner: Runner, prompt: Prompt, steps: int) -> float:
    if steps < 1:
        raise GenaiError("--perf needs at least one decode step", hint="--steps 32")
    runner.reset()
    row = runner.step(prompt.ids)
    started = time.perf_counter()
    for _ in range(steps):
        row = runner.step(np.array([first_maximum(row[0])], np.int64))
    return steps / (time.perf_counter() - started)
