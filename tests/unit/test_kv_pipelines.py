"""Vision -> embedding -> decoder with KV in closed form: whose picture a prefix belongs to, and what is computed again."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from test_kv_fixtures import FIXTURES, ROOT

from genai_cli.backends.cpu import CpuBackend
from genai_cli.checks.mirror import MirrorSettings, mirror_check
from genai_cli.checks.target import Place, open_target
from genai_cli.generate import Limits, generate
from genai_cli.kv.session import PagedKv
from genai_cli.model import BackendName, OpenOptions, open_model
from genai_cli.runners.pipeline import PipelineRunner
from genai_cli.sampling import SamplingOptions

VARIANTS = {variant.name: variant for variant in FIXTURES.VARIANTS if variant.pipeline}
IMAGE = FIXTURES.IMAGE_TOKEN
WITH_PICTURE = [3, 7, IMAGE, IMAGE, 0, 5, 7]
ENGINES: tuple[BackendName, ...] = ("native", "ort")


def picture(seed: int) -> np.ndarray:
    """Multiples of 1/16: products and sums with the weights are exact."""
    values = np.arange(48) * seed % 23 - 11
    return (values / 16).astype(np.float32).reshape(FIXTURES.PIXELS)


def pipeline(name: str, engine: BackendName) -> PipelineRunner:
    runner = open_model(ROOT / "fixtures" / name, OpenOptions(engine, threads=1)).runner
    assert isinstance(runner, PipelineRunner)
    return runner


def embeddings(ids: list[int], pixels: np.ndarray | None) -> np.ndarray:
    """[T, E] by the formula of the README."""
    made = FIXTURES.weight(FIXTURES.VOCAB, FIXTURES.HIDDEN, 3)[ids]
    if pixels is not None:
        made[np.array(ids) == IMAGE] = pixels.reshape(2, 24).astype(float) @ FIXTURES.weight(24, FIXTURES.HIDDEN, 5)
    return made


@pytest.mark.parametrize(("name", "engine"), list(product(VARIANTS, ENGINES)))
def test_present_is_the_closed_form(name: str, engine: BackendName) -> None:
    """Fed in two parts, the first of which ends inside the picture."""
    pixels = picture(7) if name == "kv-vision" else None
    ids = WITH_PICTURE if pixels is not None else [3, 7, 1, 8, 0, 5, 7]
    runner = pipeline(name, engine)
    runner.prepare(ids, [] if pixels is None else [pixels])
    for part in (ids[:3], ids[3:]):
        runner.step(np.array(part))
    rows = embeddings(ids, pixels)
    for (layer, value), found in zip(product((0, 1), (False, True)), runner.kv_rows(0, len(ids)), strict=True):
        wanted = [FIXTURES.kv_of_embedding(VARIANTS[name], layer, value, at, row) for at, row in enumerate(rows)]
        assert np.array_equal(np.asarray(found, np.float64), np.stack(wanted, 1))


class Chat:
    """Requests on one pipeline with one prefix cache, as `genai generate` makes them."""

    def __init__(self, engine: BackendName, num_pages: int = 64) -> None:
        self.runner = pipeline("kv-vision", engine)
        self.kv = PagedKv(self.runner.kv_layout, 2, num_pages)

    def ask(self, ids: list[int], *pictures: np.ndarray, num_new: int = 2) -> tuple[list[int], int]:
        """New tokens, and how many of the prompt were cached."""
        made_ids, key = self.runner.prepare(ids, pictures)
        made = generate(self.runner, made_ids, SamplingOptions(), Limits(num_new, ignore_eos=True), kv=self.kv, key=key)
        return made.token_ids, made.num_cached_tokens


@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_picture_is_encoded_once_and_another_is_another_prefix(engine: BackendName) -> None:
    chat = Chat(engine)
    first, cached = chat.ask(WITH_PICTURE, picture(7), num_new=6)
    assert (cached, chat.runner.pictures_encoded) == (0, 1)
    again, cached = chat.ask(WITH_PICTURE, picture(7), num_new=6)
    assert (again, cached, chat.runner.pictures_encoded) == (first, len(WITH_PICTURE) - 1, 1)
    other, cached = chat.ask([*WITH_PICTURE, *first[:1], 9], picture(5), num_new=6)
    assert (cached, chat.runner.pictures_encoded) == (0, 2)  # the ids only extend, the picture is new
    fresh, _ = Chat(engine).ask([*WITH_PICTURE, *first[:1], 9], picture(5), num_new=6)
    assert other == fresh


@pytest.mark.parametrize("engine", ENGINES)
def test_a_picture_changes_the_logits(engine: BackendName) -> None:
    runner, answers = pipeline("kv-vision", engine), []
    for seed in (7, 5):
        runner.reset()
        runner.prepare(WITH_PICTURE, [picture(seed)])
        answers.append(runner.step(np.array(WITH_PICTURE)))
    assert np.abs(answers[0] - answers[1]).max() > 1e-2


@pytest.mark.parametrize("engine", ENGINES)
def test_turns(engine: BackendName) -> None:
    """Turn 1 feeds [3, 7, 0, 5] and one of its two new tokens; turn 2 shares the first four."""
    chat = Chat(engine)
    made, cached = chat.ask([3, 7, 0, 5])
    assert cached == 0
    assert chat.ask([3, 7, 0, 5, made[0]])[1] == 4  # five match: a full hit, cut by one
    assert chat.ask([3, 7, 0, 5, made[0], 1, 8])[1] == 5  # seven tokens: five reused, two prefilled
    assert chat.ask([4, 7, 0, 5])[1] == 0  # no shared first token


@pytest.mark.parametrize("engine", ENGINES)
def test_interleaved_conversations_do_not_see_each_other(engine: BackendName) -> None:
    chat, alone = Chat(engine), [Chat(engine), Chat(engine)]
    talks = [[3, 7, 0], [3, 8, 1]]
    for _ in range(3):
        for number in (0, 1):
            made, _ = chat.ask(talks[number])
            assert made == alone[number].ask(talks[number])[0]
            talks[number] = [*talks[number], *made, 4 + number]
    assert chat.ask(talks[0])[1] == len(talks[0]) - 2  # its own tail came back after the other ran


@pytest.mark.parametrize("engine", ENGINES)
def test_no_pages_give_the_same_answer_and_many_give_every_page_back(engine: BackendName) -> None:
    """A zero budget beside a pool of 24 pages over 200 requests; then 12 that are interrupted."""
    bare, chat = Chat(engine, 0), Chat(engine, 24)
    for number in range(200):
        ids = [1 + number % 5, 7 + number % 7, 0, number % 4]
        assert bare.ask(ids, num_new=1)[0] == chat.ask(ids, num_new=1)[0]
        assert chat.kv.pool.pages_minted <= 24
    before = chat.kv.pool.pages_used

    def interrupted(token: int) -> bool:
        raise KeyboardInterrupt

    for number in range(12):
        ids, key = chat.runner.prepare([14, 15, number % 6])
        with pytest.raises(KeyboardInterrupt):
            generate(chat.runner, ids, SamplingOptions(), Limits(3), kv=chat.kv, key=key, on_token=interrupted)
        assert chat.kv.pool.pages_used <= before
    chat.kv.cache.clear()
    assert (chat.kv.pool.pages_used, bare.kv.pool.pages_used) == (0, 0)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_mirror_check(name: str) -> None:
    target = open_target(ROOT / "fixtures" / name, Place(1, lambda: CpuBackend(threads=1), "cpu"), isolated=True)
    pictures = (picture(7),) if name == "kv-vision" else ()
    ids = WITH_PICTURE if pictures else [3, 7, 1, 8, 0, 5, 7]
    report = mirror_check(target, ids, MirrorSettings(page_size=2, pictures=pictures), lambda text: None)
    assert (report.exit_code, report.reason) == (0, "")
    assert report.bytes_per_token == 512
