"""A folder that shows a failure again: ids, options, hashes, and the report it gave. Verified before it is written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from genai_cli.errors import GenaiError
from genai_cli.report.json import dumps
from genai_cli.report.parity import ParityReport

NAME = "bundle.json"
SCHEMA = "genai.bundle/1"


@dataclass(frozen=True)
class Bundle:
    """Everything `genai parity FOLDER` needs, but the model, which it finds by path and knows by hash."""

    model: str
    model_sha256: str
    ids: list[int]
    steps: int
    oracle: str
    seed: int
    verdict: str
    failed: list[str]
    place: str
    minimised_from: int
    schema: str = SCHEMA


def signature(report: ParityReport) -> tuple[tuple[str, ...], str]:
    """What makes two failures the same: the checks that failed, and the layer."""
    failed = tuple(sorted(check.id for check in report.checks if check.verdict == "fail"))
    return failed, report.place.split(":")[0]


def same_failure(report: ParityReport, wanted: ParityReport) -> bool:
    """Same layer, and at least one failed check in common."""
    (failed, place), (others, where) = signature(report), signature(wanted)
    return place == where and bool(set(failed) & set(others))


def bundle_of(report: ParityReport, model: Path, ids: Sequence[int], steps: int, before: int) -> Bundle:
    """Of a failing report on `ids`."""
    return Bundle(
        model=str(model), model_sha256=report.artifact["sha256"], ids=[int(token) for token in ids], steps=steps,
        oracle=report.sides["oracle"]["kind"], seed=report.seed, verdict=report.verdict,
        failed=list(signature(report)[0]),
        place=report.place, minimised_from=before,
    )  # fmt: skip


def write(folder: Path, bundle: Bundle, report: ParityReport, rerun: Callable[[Bundle], ParityReport]) -> Path:
    """Re-run, and write only what failed again in the same way. GenaiError otherwise: a bundle must not lie."""
    again = rerun(bundle)
    if again.exit_code != report.exit_code or not same_failure(again, report):
        raise GenaiError(
            f"the bundle does not show the failure again: found {again.verdict} at `{again.place}`, wanted"
            f" {report.verdict} at `{report.place}`; nothing was written",
            hint="run `genai parity` again with the same --seed",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / NAME).write_text(json.dumps(asdict(bundle), indent=2) + "\n")
        (folder / "report.json").write_text(dumps(again))
    except OSError as error:
        raise GenaiError(f"cannot write the bundle `{folder}`: {error.strerror}") from None
    return folder / NAME


def read(folder: Path) -> Bundle:
    """A bundle written before; its model must be the same bytes."""
    try:
        data = json.loads((folder / NAME).read_text())
        bundle = Bundle(**data)
    except (OSError, ValueError, TypeError) as error:
        raise GenaiError(f"cannot read the bundle `{folder / NAME}`: {error}") from None
    if bundle.schema != SCHEMA:
        raise GenaiError(f"`{folder / NAME}` has the schema `{bundle.schema}`, wanted `{SCHEMA}`")
    return bundle


def check_model(bundle: Bundle, model: Path) -> None:
    """GenaiError when the model changed since."""
    found = hashlib.sha256(model.read_bytes()).hexdigest() if model.is_file() else "nothing"
    if found != bundle.model_sha256:
        raise GenaiError(
            f"the bundle was made from the model {bundle.model_sha256[:12]}, `{model}` is {found[:12]}",
            hint="run `genai parity MODEL` on the model as it is now",
        )
