"""The closed-form packages: both engines hold exactly the KV the formula says, and their logits read it."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest

from genai_cli.backends.cpu import CpuBackend
from genai_cli.checks.mirror import MirrorSettings, mirror_check
from genai_cli.checks.target import Place, open_target
from genai_cli.errors import ExitCode
from genai_cli.graph.loader import load_graph
from genai_cli.runners.base import Runner
from genai_cli.runners.native import NativeRunner
from genai_cli.runners.ort import OrtRunner

ROOT = Path(__file__).parents[2]
IDS = np.array([3, 7, 0, 5, 7, 16, 4])  # 7 tokens, one of them twice; 7 is off every page border of 2, 3 and 16


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_fixtures", ROOT / "scripts" / "make_fixtures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["make_fixtures"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


FIXTURES = script()
CLEAN = [v for v in FIXTURES.VARIANTS if not v.overflow and not v.pipeline]  # pipelines: test_kv_pipelines.py
ENGINES = [(v, engine) for v in CLEAN for engine in ("native", "ort") if not (engine == "ort" and v.dtype == "bf16")]


def open_runner(name: str, engine: str) -> Runner:
    path = ROOT / "fixtures" / name / "model.onnx"
    return NativeRunner(load_graph(path), CpuBackend()) if engine == "native" else OrtRunner(path)


def expected(variant) -> list[np.ndarray]:  # type: ignore[no-untyped-def]
    """K and V [H_kv, S, D] of every layer, element by element from the formula."""
    arrays = []
    for layer, (_, kv_heads, head_dim) in enumerate(variant.layers):
        for value in (False, True):
            array = np.zeros((kv_heads, len(IDS), head_dim))
            for head, position, dim in np.ndindex(*array.shape):
                array[head, position, dim] = FIXTURES.kv_element(
                    variant, layer, value, head, position, dim, int(IDS[position])
                )
            arrays.append(array)
    return arrays


def test_the_arithmetic_that_the_readme_tells() -> None:
    text = (ROOT / "fixtures" / "README.md").read_text()
    by_name = {variant.name: variant for variant in FIXTURES.VARIANTS}
    assert (FIXTURES.VOCAB, FIXTURES.CONTEXT, FIXTURES.HIDDEN) == (17, 32, 13)
    assert "Vocabulary 17, context 32, hidden size 13" in text
    assert by_name["kv-f32"].token_elements == 2 * (2 * 8 + 3 * 16) == 128
    assert by_name["kv-attention"].token_elements == 2 * (2 * 7 + 3 * 5) == 58
    told = {"kv-f32": 512, "kv-f16": 256, "kv-bf16": 256, "kv-attention": 232, "kv-embedding": 512, "kv-vision": 512}
    for name, num_bytes in told.items():
        assert f"`{name}`" in text or name in text
        variant = by_name[name]
        assert variant.token_elements * FIXTURES.ONNX_TYPES[variant.dtype][1].itemsize == num_bytes
        if not variant.pipeline:
            assert open_runner(name, "native").kv_layout.bytes_per_token == num_bytes
    missing = [name for name in by_name if name not in text]
    assert missing == []


def test_the_files_are_what_the_script_writes() -> None:
    stale = [path.name for path, data in FIXTURES.files().items() if path.read_bytes() != data]
    assert stale == []


NAMED = [v for v in CLEAN if v.name in ("kv-f32", "kv-f16", "kv-bf16", "kv-attention")]


@pytest.mark.parametrize("variant", NAMED, ids=lambda variant: variant.name)
def test_no_two_elements_of_one_token_id_share_a_value(variant) -> None:  # type: ignore[no-untyped-def]
    dtype = variant.dtype
    tables = [FIXTURES.kv_table(variant, layer, value) for layer in (0, 1) for value in (False, True)]
    if dtype == "f32":  # distinct over tokens as well
        every = np.concatenate([table.ravel() for table in tables])
        assert len(np.unique(every)) == every.size == FIXTURES.CONTEXT * variant.token_elements * FIXTURES.VOCAB
        assert np.array_equal(every.astype(np.float32).astype(np.float64), every)
        return
    for token in range(FIXTURES.VOCAB):
        every = np.concatenate([table[token :: FIXTURES.VOCAB].ravel() for table in tables])
        assert len(np.unique(every)) == every.size == FIXTURES.CONTEXT * variant.token_elements
        assert np.array_equal(every.astype({"f16": np.float16, "bf16": ml_dtypes.bfloat16}[dtype]).astype(float), every)


@pytest.mark.parametrize(("variant", "engine"), ENGINES, ids=lambda value: getattr(value, "name", value))
def test_present_is_the_closed_form(variant, engine: str) -> None:  # type: ignore[no-untyped-def]
    runner = open_runner(variant.name, engine)
    runner.step(IDS[:4])
    for token in IDS[4:]:
        runner.step(np.array([token]))
    found = runner.kv_rows(0, len(IDS))
    assert [array.dtype for array in found] == [FIXTURES.ONNX_TYPES[variant.dtype][1]] * 4
    for array, wanted in zip(found, expected(variant), strict=True):
        assert np.array_equal(np.asarray(array, np.float64), wanted)


@pytest.mark.parametrize(("variant", "engine"), ENGINES, ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("component", range(4))
def test_zeroed_kv_moves_the_logits(variant, engine: str, component: int) -> None:  # type: ignore[no-untyped-def]
    """Not blind: K and V of either layer, zeroed before a decode step, must show far above any floor."""
    runner = open_runner(variant.name, engine)
    runner.step(IDS)
    rows = [np.array(array) for array in runner.kv_rows(0, len(IDS))]
    clean = runner.step(np.array([5]))
    runner.seed(rows)
    assert np.array_equal(runner.step(np.array([5])), clean)  # the seed itself changes nothing
    rows[component] = np.zeros_like(rows[component])
    runner.seed(rows)
    moved = np.abs(runner.step(np.array([5])) - clean).max()
    assert moved > 1e-2  # 16-bit logits of this size have steps of 4e-3 and less


def test_a_window_of_four_reads_four() -> None:
    """Layer 0 sees the token itself and three before it: what lies further back may change, what lies inside may not."""
    runner = open_runner("kv-window", "native")
    runner.step(IDS)
    rows = [np.array(array) for array in runner.kv_rows(0, len(IDS))]
    clean = runner.step(np.array([5]))
    for position, visible in ((3, False), (4, True)):  # the new token is at 7
        changed = [np.array(array) for array in rows]
        changed[1][:, position] = 9.0
        runner.seed(changed)
        assert np.array_equal(runner.step(np.array([5])), clean) is not visible


@pytest.mark.parametrize("engine", ["native", "ort"])
def test_equal_rows_tie_exactly(engine: str) -> None:
    logits = open_runner("kv-tie", engine).step(IDS, logits="all")
    assert np.array_equal(logits[:, 4], logits[:, 9])


def test_overflow_is_not_finite() -> None:
    assert not np.isfinite(open_runner("kv-overflow", "native").step(IDS)).all()


def test_a_blind_fixture_is_refused_with_exit_5(tmp_path: Path) -> None:
    """Attention that does not reach the logits: every byte is right, and nothing could have shown that it is not."""
    folder = tmp_path / "blind"
    shutil.copytree(ROOT / "fixtures" / "kv-f32", folder)
    model = FIXTURES.build(next(v for v in CLEAN if v.name == "kv-f32"))
    for weight in model.graph.initializer:
        if weight.name.startswith("o."):
            weight.raw_data = bytes(len(weight.raw_data))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    target = open_target(folder, Place(1, lambda: CpuBackend(threads=1), "cpu"))
    report = mirror_check(target, IDS.tolist(), MirrorSettings(page_size=3), lambda text: None)
    assert (report.exit_code, report.verdict) == (ExitCode.UNPROVEN, "UNPROVEN")
    assert report.exit_code == 5
    assert "liveness" in report.reason
    assert [side.check.id for side in report.outcomes if not side.check.ok] == ["liveness", "liveness"]
