"""Vision -> embedding -> decoder: a real export on every mix of engines, against the ids recorded with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai_cli.backends.cpu import CpuBackend
from genai_cli.checks.mirror import MirrorSettings, mirror_check
from genai_cli.checks.target import Place, open_target
from genai_cli.engine.component import NativeComponent
from genai_cli.errors import GenaiError
from genai_cli.graph.loader import load_graph
from genai_cli.package.decoder import load_decoder
from genai_cli.package.model import Component as PackagePart
from genai_cli.package.model import ModelPackage
from genai_cli.package.open import open_package
from genai_cli.runners.native import NativeRunner
from genai_cli.runners.ort import OrtComponent, OrtRunner
from genai_cli.runners.pipeline import PipelineRunner, Wiring, over_components, wiring

FOLDER = Path(__file__).parents[2] / "fixtures" / "packages" / "gemma3-vlm"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
PROMPT: list[int] = EXPECTED["prompt"]
ENGINES = ("native", "ort")


def picture(seed: int) -> np.ndarray:
    """expected.json: element i (flat) = ((i * seed) % 255) / 255 * 2 - 1."""
    values = (np.arange(3 * 28 * 28) * seed % 255) / 255 * 2 - 1
    return values.astype(np.float32).reshape(1, 3, 28, 28)


def opened(part: PackagePart, engine: str) -> Any:
    return OrtComponent(part.path) if engine == "ort" else NativeComponent(load_graph(part.path), CpuBackend(threads=1))


def component(package: ModelPackage, role: str, engine: str) -> Any:
    part = package.component(role)
    assert part is not None
    return opened(part, engine)


def pipeline(decoder: str = "native", parts: str = "native") -> PipelineRunner:
    package = open_package(FOLDER)
    loaded = load_decoder(package)
    runner: Any = (
        OrtRunner(loaded.path, io=loaded.io, graph=loaded.graph, context_len=loaded.context_len)
        if decoder == "ort"
        else NativeRunner(loaded.graph, CpuBackend(threads=1), io=loaded.io, context_len=loaded.context_len)
    )
    return over_components(package, runner, 64, lambda part: opened(part, parts))


def greedy(runner: PipelineRunner, ids: list[int], num_new: int, start: int = 0) -> list[int]:
    logits, made = runner.step(np.array(ids[start:])), []
    while True:
        made.append(int(logits[-1].argmax()))
        if len(made) == num_new:
            return made
        logits = runner.step(np.array(made[-1:]))


@pytest.mark.parametrize("parts", ENGINES)
@pytest.mark.parametrize("decoder", ENGINES)
def test_recorded_ids(decoder: str, parts: str) -> None:
    runner = pipeline(decoder, parts)
    for run in EXPECTED["runs"]:
        runner.reset()
        ids, _ = runner.prepare(PROMPT, [picture(run["seed"])])
        assert ids == PROMPT
        assert greedy(runner, ids, len(run["ort_greedy"])) == run["ort_greedy"]


@pytest.mark.parametrize("role", ["embedding", "vision"])
def test_components_agree(role: str) -> None:
    package = open_package(FOLDER)
    native, ort = component(package, role, "native"), component(package, role, "ort")
    rng = np.random.default_rng(0)
    for num_rows, num_ids in ((4, 11), (0, 1), (0, 1), (4, 11), (2, 5)):
        feeds: dict[str, np.ndarray] = {"pixel_values": rng.standard_normal((1, 3, 28, 28), np.float32)}
        if role == "embedding":
            ids = rng.integers(6, 512, (1, num_ids))
            ids[0, :num_rows] = 5
            feeds = {"input_ids": ids, "image_features": rng.standard_normal((num_rows, 64), np.float32)}
        found, wanted = native.run(feeds), ort.run(feeds)
        assert found.keys() == wanted.keys()
        for name in wanted:
            # f32 sums in another order over a few hundred terms of magnitude ~1
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-4, atol=1e-4)


def test_outputs_are_copies_and_recordings_are_replayed() -> None:
    part = component(open_package(FOLDER), "vision", "native")
    first = part.run({"pixel_values": picture(37)})["image_features"]
    kept = first.copy()
    second = part.run({"pixel_values": picture(91)})["image_features"]
    assert (first == kept).all()
    assert not np.array_equal(first, second)
    assert np.array_equal(part.run({"pixel_values": picture(37)})["image_features"], kept)


def test_one_image_token_is_widened_to_its_rows() -> None:
    runner = pipeline()
    short = [1, 20, 6, 5, 7, 100, 33, 210]
    ids, key = runner.prepare(short, [picture(37)])
    assert ids == PROMPT
    assert key
    assert runner.prepare([1, 5, 9, 5], [picture(37), picture(91)])[0] == [1, 5, 5, 5, 5, 9, 5, 5, 5, 5]


def test_the_picture_is_part_of_the_identity_and_encoded_once() -> None:
    runner = pipeline()
    keys = [runner.prepare(PROMPT, [picture(seed)])[1] for seed in (37, 91, 37)]
    assert keys[0] == keys[2] != keys[1]
    assert runner.pictures_encoded == 2
    assert runner.prepare([1, 20, 6]) == ([1, 20, 6], b"")


@pytest.mark.parametrize("cut", [3, 5, 6, 7, 9])
def test_a_prefix_may_end_inside_a_picture(cut: int) -> None:
    """Fed in two parts, or seeded from another run: the rows of the rest are the right ones."""
    run = EXPECTED["runs"][0]
    runner = pipeline()
    ids, _ = runner.prepare(PROMPT, [picture(run["seed"])])
    runner.step(np.array(ids[:cut]))
    rows = [array.copy() for array in runner.kv_rows(0, cut)]
    assert greedy(runner, ids, 4, start=cut) == run["ort_greedy"][:4]
    runner.reset()
    runner.seed(rows)
    assert greedy(runner, ids, 4, start=cut) == run["ort_greedy"][:4]


@pytest.mark.parametrize("engine", ENGINES)
def test_text_without_pictures(engine: str) -> None:
    runner = pipeline(engine, engine)
    ids, key = runner.prepare([1, 20, 6, 100])
    assert key == b""
    assert greedy(runner, ids, 5) == greedy_reference([1, 20, 6, 100], 5)


def greedy_reference(ids: list[int], num_new: int) -> list[int]:
    """Everything fed again at each step, on ONNX Runtime."""
    made: list[int] = []
    runner = pipeline("ort", "ort")
    for _ in range(num_new):
        runner.reset()
        runner.prepare(ids + made)
        made.append(int(runner.step(np.array(ids + made))[-1].argmax()))
    return made


def with_pictures(num: int) -> Callable[[PipelineRunner], object]:
    return lambda runner: runner.prepare(PROMPT, [picture(1)] * num)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (with_pictures(0), r"holds 4 image tokens \(id 5\), 0 pictures give 0"),
        (with_pictures(2), "holds 4 image tokens .*, 2 pictures give 8"),
        (lambda runner: runner.prepare([1, 2, 3], [picture(1)]), "holds 0 image tokens"),
    ],
)
def test_tokens_and_pictures_must_fit(use: Callable[[PipelineRunner], object], message: str) -> None:
    with pytest.raises(GenaiError, match=message):
        use(pipeline())


def test_a_package_without_the_needed_parts() -> None:
    with pytest.raises(GenaiError, match="no component makes them"):
        wiring(open_package(FOLDER.parent / "llama-fp32-cpu"))
    full = pipeline()
    blind = PipelineRunner(full.decoder, component(open_package(FOLDER), "embedding", "native"), None, Wiring("a", "b"))
    with pytest.raises(GenaiError, match="no vision encoder"):
        blind.prepare(PROMPT, [picture(1)])


def test_inputs_of_a_component_are_checked() -> None:
    with pytest.raises(GenaiError, match="the component takes"):
        component(open_package(FOLDER), "vision", "native").run({"pixels": picture(1)})


@pytest.mark.parametrize("seed", [37, 91])
def test_the_decoder_is_mirror_checked_with_a_picture_in_its_prompt(seed: int) -> None:
    """Isolated: the same feature rows and embeddings, made by ONNX Runtime, go into both decoders."""
    target = open_target(FOLDER, Place(1, lambda: CpuBackend(threads=1), "cpu"), isolated=True)
    settings = MirrorSettings(page_size=3, pictures=(picture(seed),))
    report = mirror_check(target, PROMPT, settings, lambda text: None)
    assert (report.exit_code, report.reason) == (0, "")
    assert report.bytes_compared > 500_000
    with pytest.raises(GenaiError, match="4 image tokens"):
        mirror_check(target, PROMPT, MirrorSettings(page_size=3), lambda text: None)
