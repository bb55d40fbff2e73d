"""Before anything is compared: what exactly is compared, and is each side what it says it is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from genai_cli.checks.limits import Precision, precision_of
from genai_cli.graph.ir import Graph
from genai_cli.graph.loader import external_files
from genai_cli.ops.dtypes import is_float
from genai_cli.report.parity import Check
from genai_cli.runners.base import RunnerInfo

_QUANTIZED = {"MatMulNBits", "GatherBlockQuantized", "QMoE"}


@dataclass(frozen=True)
class Artifact:
    """Identity and nature of the model under test."""

    path: Path
    sha256: str
    external_data_sha256: dict[str, str]
    tokenizer_sha256: str | None
    dtypes: dict[str, int]  # dtype of weights -> how many
    accuracy_levels: dict[int, int]
    precision: Precision
    num_nodes: int

    @property
    def identity(self) -> str:
        """One hash over graph and data."""
        text = self.sha256 + "".join(f"{name}:{digest}" for name, digest in sorted(self.external_data_sha256.items()))
        return hashlib.sha256(text.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def artifact(model_path: Path, graph: Graph, tokenizer: Path | None) -> Artifact:
    """Hash everything that decides the answer, and read the class of arithmetic from the graph."""
    levels: dict[int, int] = {}
    for node in graph.nodes:
        if node.op_type == "MatMulNBits":
            level = int(node.attrs.get("accuracy_level", 0))
            levels[level] = levels.get(level, 0) + 1
    dtypes: dict[str, int] = {}
    for weight in graph.initializers.values():
        dtypes[weight.dtype.name] = dtypes.get(weight.dtype.name, 0) + 1
    return Artifact(
        path=model_path,
        sha256=file_sha256(model_path),
        external_data_sha256={name: file_sha256(model_path.parent / name) for name in external_files(model_path)},
        tokenizer_sha256=file_sha256(tokenizer) if tokenizer and tokenizer.is_file() else None,
        dtypes=dtypes,
        accuracy_levels=levels,
        precision=precision_of(_float_dtypes(graph), set(levels), any(n.op_type in _QUANTIZED for n in graph.nodes)),
        num_nodes=len(graph.nodes),
    )


def _float_dtypes(graph: Graph) -> set[np.dtype]:
    weights = {weight.dtype for weight in graph.initializers.values()}
    values = {value.dtype for value in [*graph.inputs, *graph.outputs] if value.dtype is not None}
    return {dtype for dtype in weights | values if is_float(dtype)}


def sides_check(native: RunnerInfo, oracle: RunnerInfo | None, num_nodes: int) -> Check:
    """Native really native: it ran the whole graph, handed nothing on, and the other side is another engine."""
    problems = []
    if native.name != "native" or native.nodes_fallback:
        problems.append(f"native handed {native.nodes_fallback} of {native.nodes} nodes to another engine")
    if any(provider.endswith("ExecutionProvider") for provider in native.providers):
        problems.append(f"native ran on {', '.join(native.providers)}")
    if native.nodes < num_nodes:
        problems.append(f"native planned {native.nodes} nodes, the graph has {num_nodes}")
    if oracle is not None and oracle.name != "ort":
        problems.append(f"the oracle is `{oracle.name}`, wanted `ort`: an engine compared with itself proves nothing")
    return Check(
        "sides", "preflight", "fail" if problems else "pass", compared=native.nodes, value=float(native.nodes_fallback),
        limit=0.0, limit_source="a silent fallback makes parity perfect and meaningless", reason="; ".join(problems),
    )  # fmt: skip


def ids_check(ids: np.ndarray, vocab_size: int) -> Check:
    """Ids are within the vocabulary; the same array goes to both sides."""
    bad = int(((ids < 0) | (ids >= vocab_size)).sum()) if vocab_size else 0
    return Check(
        "ids", "preflight", "fail" if bad or not len(ids) else "pass", compared=len(ids), value=float(bad), limit=0.0,
        limit_source="ids index the vocabulary", reason=f"{bad} ids outside 0..{vocab_size - 1}" if bad else "",
    )  # fmt: skip
