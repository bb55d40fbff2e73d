"""`genai mirror-check`: pages hold exactly what the decoder computed, on both engines, and a seeded past goes on as if it
had been computed. Transport is judged by bytes, values by the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from genai_cli.checks import mirror_checks as checks
from genai_cli.checks import mirror_script as script
from genai_cli.checks.forensics import compare_rows
from genai_cli.checks.limits import KAPPA
from genai_cli.checks.mirror_checks import Outcome
from genai_cli.checks.mirror_mutants import Judged, controls, prove
from genai_cli.checks.mirror_scene import Scene
from genai_cli.checks.oracles import DEFAULTS, Oracle
from genai_cli.checks.parity import Target
from genai_cli.checks.preflight import artifact
from genai_cli.errors import ExitCode, GenaiError, worst
from genai_cli.kv.mirror import CopyRows, copy_rows
from genai_cli.runners.base import Runner
from genai_cli.runners.pipeline import PipelineRunner

Progress = Callable[[str], None]
SCHEMA = "genai.mirror-check/1"
VALUE_NMSE = 1e-6  # checks/limits.py, the f32 ceiling: values are compared in exact mode


@dataclass(frozen=True)
class SideOutcome:
    """A check on one side: "native", "ort", "both" or "pages" (no decoder)."""

    side: str
    check: Outcome


@dataclass(frozen=True)
class MirrorReport:
    """What was compared, byte by byte, and what survived."""

    schema: str
    model: str
    verdict: str
    exit_code: int
    reason: str
    page_size: int
    bytes_compared: int
    bytes_per_token: int
    outcomes: list[SideOutcome] = field(default_factory=list)
    mutants: list[Judged] = field(default_factory=list)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class MirrorSettings:
    """What the user may choose."""

    page_size: int = 16
    prove: bool = False
    copy: CopyRows = copy_rows
    pictures: tuple[np.ndarray, ...] = ()  # for the image tokens of the prompt, as the vision encoder takes them


def mirror_check(target: Target, prompt: list[int], settings: MirrorSettings, progress: Progress) -> MirrorReport:
    """Run every check on a package. `prompt` should cross a page border; it is cut to a third of the context."""
    native = target.open_native(exact=False)
    prompt = _prepared(native, prompt, settings)
    gate = native.supports_paged_kv()
    if not gate.supported:
        return _report(target, settings, 0, [], [], f"not applicable: {gate.reason}")
    whole, prompt = prompt, _fitting(prompt, native, settings.page_size)
    found = [SideOutcome("pages", checks.lossless(dtype)) for dtype in _dtypes(native)]
    found += _side(native, prompt, settings, progress, 0.0)
    found += _oracle_side(target, whole, prompt, settings, progress)
    mutants = _mutants(progress) if settings.prove else []
    return _report(target, settings, native.kv_layout.bytes_per_token, found, mutants, "")


def _prepared(runner: Runner, prompt: list[int], settings: MirrorSettings) -> list[int]:
    """The prompt's ids once its pictures are encoded; pipelines keep the feature rows for the image tokens."""
    if isinstance(runner, PipelineRunner):
        return runner.prepare(prompt, settings.pictures)[0]
    if settings.pictures:
        raise GenaiError("pictures were given, the package takes none")
    return prompt


def _dtypes(runner: Runner) -> list[np.dtype]:
    return sorted({component.dtype for component in runner.kv_layout.components}, key=str)


def _fitting(prompt: list[int], runner: Runner, page_size: int) -> list[int]:
    """Long enough to end off a page border, short enough to be decoded on twice."""
    room = (runner.context_len or 4096) // 3
    wanted = prompt[: max(2, min(room, len(prompt)))]
    return wanted[:-1] if len(wanted) % page_size == 0 and len(wanted) > 2 else wanted


def _scene(runner: Runner, prompt: list[int], settings: MirrorSettings) -> Scene:
    pages = 2 + 4 * (len(prompt) // settings.page_size + 3)
    token = runner.image_token if isinstance(runner, PipelineRunner) else None
    return Scene(runner, prompt, settings.page_size, pages, copy=settings.copy, image_token=token)


def _side(
    runner: Runner, prompt: list[int], settings: MirrorSettings, progress: Progress, tolerance: float
) -> list[SideOutcome]:
    scene = _scene(runner, prompt, settings)
    name = runner.info.name
    made = []
    for title, check in (
        ("liveness", checks.liveness), ("addresses", checks.address_map), ("transport", checks.transport),
        ("rewinds", checks.rewinds), ("warm against cold", lambda s: checks.warm_is_cold(s, tolerance)),
        ("separation", checks.separation), ("rewound decoder", script.rewound), ("forks", script.forked),
        ("eviction", script.evicted), ("growth", script.grown), ("batch rows", script.batch_rows),
    ):  # fmt: skip
        progress(f"{name}: {title}")
        made.append(SideOutcome(name, check(scene)))
    return made


def _oracle_side(
    target: Target, whole: list[int], prompt: list[int], settings: MirrorSettings, progress: Progress
) -> list[SideOutcome]:
    """The same checks over ONNX Runtime, on the twin it can run, then values and ORT's KV inside native."""
    kind = DEFAULTS[artifact(target.model_path, target.graph, None).precision]
    oracle = Oracle(kind, target.model_path, target.open_ort).open()
    exact = target.open_native(exact=True)
    for runner in (oracle, exact):
        _prepared(runner, whole, settings)
    noise = _decode_noise(oracle, prompt)
    made = _side(oracle, prompt, settings, progress, KAPPA * noise)
    progress("values: native against the oracle")
    made.append(SideOutcome("both", _values(exact, oracle, prompt)))
    made.append(SideOutcome("both", _injected(exact, oracle, prompt)))
    oracle.close()
    return made


def _decode_noise(runner: Runner, prompt: list[int]) -> float:
    """How far the oracle's last logits move when the prompt comes in two parts instead of one: its own noise."""
    answers = []
    for cut in (0, len(prompt) - 1, len(prompt) // 2):
        runner.reset()
        if cut:
            runner.step(np.array(prompt[:cut], np.int64))
        answers.append(runner.step(np.array(prompt[cut:], np.int64)))
    spread = max(float(np.abs(answer - answers[0]).max()) for answer in answers[1:])
    return max(spread, float(np.abs(answers[0]).max()) * 2**-22)  # at least two units in the last place of f32


def _values(native: Runner, oracle: Runner, prompt: list[int]) -> Outcome:
    ids = np.array(prompt, np.int64)
    for runner in (native, oracle):
        runner.reset()
        runner.step(ids)
    return checks.value_parity(
        checks.in_order(native.kv_rows(0, len(ids))), checks.in_order(oracle.kv_rows(0, len(ids))), VALUE_NMSE
    )


def _injected(native: Runner, oracle: Runner, prompt: list[int]) -> Outcome:
    """The oracle's KV seeded into native: the next token's logits agree, and the KV comes back byte for byte."""
    ids = np.array(prompt, np.int64)
    oracle.reset()
    oracle.step(ids[:-1])
    rows, state = checks.in_order(oracle.kv_rows(0, len(ids) - 1)), oracle.snapshot_state()
    native.reset()
    native.seed(rows, state or None)
    back = checks.in_order(native.kv_rows(0, len(ids) - 1))
    size, cause = compare_rows(back, rows, native.kv_layout)
    if cause is not None:
        return Outcome("inject", size, False, str(cause))
    theirs, ours = oracle.step(ids[-1:]), native.step(ids[-1:])
    outcome = checks.value_parity([ours[None]], [theirs[None]], VALUE_NMSE)
    return replace(outcome, id="inject", compared_bytes=size + outcome.compared_bytes)


def _mutants(progress: Progress) -> list[Judged]:
    progress("mutants")
    return [*controls(), *prove()]


def _report(
    target: Target, settings: MirrorSettings, bytes_per_token: int, found: list[SideOutcome], mutants: list[Judged],
    reason: str,
) -> MirrorReport:  # fmt: skip
    compared = sum(side.check.compared_bytes for side in found)
    codes = [_code(side.check) for side in found] + [_mutant_code(judged) for judged in mutants]
    code = worst(codes) if compared else ExitCode.NOT_COMPARED
    return MirrorReport(
        SCHEMA, target.name, _VERDICTS[code], int(code), reason or _reason(found, mutants), settings.page_size, compared,
        bytes_per_token, found, mutants, target.warnings,
    )  # fmt: skip


_VERDICTS = {
    ExitCode.OK: "PASS",
    ExitCode.DIFFERENT: "FAIL",
    ExitCode.NOT_COMPARED: "NOT COMPARED",
    ExitCode.UNPROVEN: "UNPROVEN",
}


def _code(outcome: Outcome) -> ExitCode:
    if outcome.ok:
        return ExitCode.OK
    if not outcome.compared_bytes:
        return ExitCode.NOT_COMPARED
    return ExitCode.UNPROVEN if outcome.id == "liveness" else ExitCode.DIFFERENT


def _mutant_code(judged: Judged) -> ExitCode:
    control = judged.id.startswith("control")
    return (
        ExitCode.OK if (judged.state == "survived") == control and "another" not in judged.state else ExitCode.UNPROVEN
    )


def _reason(found: list[SideOutcome], mutants: list[Judged]) -> str:
    for side in found:
        if not side.check.ok:
            return f"{side.side} {side.check.id}: {side.check.detail}"
    wrong = [judged.id for judged in mutants if _mutant_code(judged) is not ExitCode.OK]
    return f"not killed as they should be: {', '.join(wrong)}" if wrong else ""
