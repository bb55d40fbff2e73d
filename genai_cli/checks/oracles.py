"""Who is right: the artifact on ONNX Runtime, a sharper twin of it, or a file of golden logits."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args
from zipfile import BadZipFile

import numpy as np

from genai_cli.checks.limits import Precision
from genai_cli.errors import ExitCode, GenaiError
from genai_cli.graph.twins import Twin
from genai_cli.runners.base import Runner

OracleKind = Literal["ort", "ort-sharp", "ort-f32", "f64", "golden"]
Change = Callable[[Twin], Twin]
DEFAULTS: dict[Precision, OracleKind] = {
    "f32": "ort",
    "q_f32": "ort",
    "q_int8": "ort-sharp",  # ORT flips its own argmax with int8 activations; f32 activations do not
    "f16": "ort-f32",  # ORT's CPU computes f16 wider than f16 and elides casts
    "bf16": "ort-f32",  # ORT's CPU has no bf16 MatMul
    "f8": "ort-f32",
}


class OracleRunner(Runner, Protocol):
    """A runner that also shows intermediate values: `taps` holds the extra outputs of the last step."""

    @property
    def taps(self) -> dict[str, np.ndarray]:
        """By name."""
        ...


class OpenModel(Protocol):
    """Opens the package on ONNX Runtime; `model` replaces the artifact's protobuf; `optimization` is all|basic|off."""

    def __call__(
        self, model: bytes | None, *, optimization: str = "all", outputs: tuple[str, ...] = ()
    ) -> OracleRunner: ...


def parse_kind(text: str) -> tuple[OracleKind, Path | None]:
    """`--oracle` as typed: a kind, or golden:FILE."""
    kind, _, file = text.partition(":")
    if kind not in get_args(OracleKind) or bool(file) != (kind == "golden"):
        raise GenaiError(f"unknown oracle `{text}`; wanted ort, ort-sharp, ort-f32, f64 or golden:FILE")
    return kind, Path(file) if file else None  # type: ignore[return-value]  # checked above


class Oracle:
    """Opens runners of one kind over one artifact; every variant goes through `open`."""

    def __init__(self, kind: OracleKind, model_path: Path, open_model: OpenModel, level: str = "all") -> None:
        """`level` is ONNX Runtime's graph optimisation wherever nothing else is asked for."""
        self.kind, self.model_path, self.level, self._open_model = kind, model_path, level, open_model

    def twin(self) -> Twin:
        """A fresh copy of the artifact's graph with this kind's rewrites."""
        twin = Twin(self.model_path)
        if self.kind in ("ort-sharp", "ort-f32", "f64"):
            twin.sharp()
        return twin.wide() if self.kind != "ort" and twin.has_16_bit() else twin

    def open(
        self, change: Change | None = None, *, optimization: str | None = None, outputs: tuple[str, ...] = ()
    ) -> OracleRunner:
        """A session on the twin, changed. The unmodified artifact is opened as the file it is."""
        optimization = optimization or self.level
        if self.kind == "ort" and change is None and not outputs:
            return self._open_model(None, optimization=optimization)
        twin = change(self.twin()) if change else self.twin()
        if outputs:
            twin.with_outputs(outputs)
        return self._open_model(twin.serialize(), optimization=optimization, outputs=outputs)


@dataclass(frozen=True)
class Golden:
    """Logits somebody saved: what an oracle said, where it cannot run now."""

    ids: np.ndarray  # int64 [T]
    prompt_len: int
    logits: np.ndarray  # f32 [T, V]
    artifact_sha256: str
    origin: str
    floor: dict[str, float]  # nmse, pair, kv_nmse of the oracle that made it


LEVELS = ("all", "basic", "off")


def parse_level(text: str) -> str:
    """`--level` as typed."""
    if text not in LEVELS:
        raise GenaiError(f"unknown optimisation level `{text}`; wanted {', '.join(LEVELS)}")
    return text


def save_golden(path: Path, golden: Golden) -> None:
    """Write golden logits as one .npz."""
    try:
        file = path.open("wb")
    except OSError as error:
        raise GenaiError(f"cannot write golden logits to `{path}`: {error.strerror}") from None
    with file:
        np.savez_compressed(
            file, ids=golden.ids, prompt_len=golden.prompt_len, logits=golden.logits,
            artifact_sha256=golden.artifact_sha256, origin=golden.origin, floor_names=np.array(list(golden.floor)),
            floor_values=np.array(list(golden.floor.values())), digest=_digest(golden.ids, golden.logits),
        )  # fmt: skip


def load_golden(path: Path, artifact_sha256: str) -> Golden:
    """Read and verify golden logits. GenaiError when missing, damaged, or of another artifact."""
    try:
        with np.load(path, allow_pickle=False) as file:
            noise = dict(zip(file["floor_names"].tolist(), file["floor_values"].tolist(), strict=True))
            golden = Golden(
                file["ids"],
                int(file["prompt_len"]),
                file["logits"],
                str(file["artifact_sha256"]),
                str(file["origin"]),
                noise,
            )
            digest = str(file["digest"])
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is no file that parity wrote"
        raise GenaiError(
            f"cannot read golden logits from `{path}`: {why}", hint="write it with --save-golden"
        ) from None
    if digest != _digest(golden.ids, golden.logits):
        raise GenaiError(f"`{path}` is damaged: its content does not fit its digest", hint="write it again")
    if golden.artifact_sha256 != artifact_sha256:
        raise GenaiError(
            f"`{path}` was made from the artifact {golden.artifact_sha256[:12]}, this one is {artifact_sha256[:12]}",
            hint="write it again with --save-golden",
            exit_code=ExitCode.NOT_COMPARED,
        )
    return golden


def _digest(ids: np.ndarray, logits: np.ndarray) -> str:
    return hashlib.sha256(ids.tobytes() + logits.tobytes()).hexdigest()
