"""`genai parity --ops`: every op x dtype x shape that the artifact uses, on the values it really meets; then random calls
over the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np

from genai_cli.checks.op_battery import OpResult, artifact_ops, ops_check, quantized_products
from genai_cli.checks.op_random import random_ops
from genai_cli.checks.oracles import DEFAULTS, Oracle, OracleRunner
from genai_cli.checks.parity import Prompt, Settings, Target
from genai_cli.checks.preflight import Artifact
from genai_cli.graph.io import DecoderIo, decoder_io
from genai_cli.graph.ir import Graph
from genai_cli.graph.twins import is_narrow
from genai_cli.report.parity import Check

Values = dict[str, np.ndarray]


def ops_checks(
    target: Target, artifact: Artifact, prompt: Prompt, settings: Settings, progress: Callable[[str], None]
) -> list[Check]:
    """All ops together, then one check a kind of op and dtype."""
    oracle = Oracle(DEFAULTS[artifact.precision], target.model_path, target.open_ort)
    progress("ops: values of the artifact")
    values = used_values(target.graph, oracle, prompt.ids)
    progress("ops: one node at a time")
    backend = target.open_backend()
    results = artifact_ops(target.graph, values, backend, target.run_ort, target.typed or target.name)
    results += quantized_products(target.graph, backend, target.run_ort, settings.seed)
    drawn = random_ops(backend, target.run_ort, settings.seed, progress)
    return [ops_check(results), random_check(drawn, target.typed or target.name), *_by_op(results)]


def random_check(drawn: list[OpResult], model: str) -> Check:
    """All random calls together; the worst of every op and the ops without one are in `extra`."""
    check = ops_check(drawn, "ops.random")
    worst: dict[str, float] = {}
    for result in drawn:
        if result.nmse is not None:
            worst[result.op] = max(worst.get(result.op, 0.0), result.nmse)
    repro = str(check.extra.get("repro", "")).replace("MODEL", model)
    return replace(check, extra={**check.extra, "repro": repro, "worst_by_op": worst})


def _by_op(results: list[OpResult]) -> list[Check]:
    """One check a kind of op and dtype, with its worst case."""
    groups: dict[str, list[OpResult]] = {}
    for result in results:
        groups.setdefault(f"ops.{result.op}.{result.dtype or 'none'}", []).append(result)
    return [_group_check(name, group) for name, group in sorted(groups.items())]


def _group_check(name: str, group: list[OpResult]) -> Check:
    check = ops_check(group, name)
    worst = next((r for r in group if r.node == check.worst.get("node")), group[0])
    reason = check.reason or (worst.where if check.verdict == "not applicable" else "")
    return replace(check, reason=reason, extra={**check.extra, "worst": asdict(worst)})


def used_values(graph: Graph, oracle: Oracle, ids: np.ndarray) -> list[Values]:
    """Every intermediate value the oracle can show, for the prompt at once and for one token after it."""
    io = decoder_io(graph)
    names = tuple(_showable(graph, io))
    runner = oracle.open(outputs=names)
    try:
        runner.reset()
        return [_step(runner, graph, io, names, part) for part in (ids[:-1], ids[-1:]) if len(part)]
    finally:
        runner.close()


def _showable(graph: Graph, io: DecoderIo) -> list[str]:
    hidden = {value.name for value in graph.outputs}
    hidden |= {name for node in graph.nodes if node.op_type == "Constant" for name in node.outputs}
    return [name for node in graph.nodes for name in node.outputs if name and name not in hidden and name != io.logits]


def _step(runner: OracleRunner, graph: Graph, io: DecoderIo, names: tuple[str, ...], ids: np.ndarray) -> Values:
    past = runner.length
    logits = runner.step(ids, logits="all")
    seen = {name: _declared(graph, name, runner.taps[name]) for name in names}
    seen[io.logits] = _declared(graph, io.logits, logits[None])
    seen |= {name: values for name, values in _inputs(graph, io, ids, past).items() if name}
    return seen | {
        node.outputs[0]: np.asarray(node.attrs["value"])
        for node in graph.nodes
        if node.op_type == "Constant" and "value" in node.attrs
    }


def _inputs(graph: Graph, io: DecoderIo, ids: np.ndarray, past: int) -> Values:
    total = past + len(ids)
    made = {
        io.input_ids or "": ids[None],
        io.attention_mask or "": np.ones((1, total), np.int64),
        io.position_ids or "": np.arange(past, total)[None],
    }
    return {name: _declared(graph, name, values) for name, values in made.items() if name}


def _declared(graph: Graph, name: str, values: np.ndarray) -> np.ndarray:
    """In the dtype the artifact gives this value; the oracle's twin may be wider."""
    info = graph.values.get(name)
    if info is None or info.dtype is None or info.dtype == values.dtype:
        return values
    narrowed = is_narrow(info.dtype) or info.dtype.kind in "iu"
    return values.astype(info.dtype) if narrowed else values
