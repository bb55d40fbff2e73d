"""The phase batch on a clock of its own: what is compared, and what forbids it."""

from __future__ import annotations

import pytest

from genai_cli.bench.batch import ALONE, BatchArm, BatchSize, bench_batch
from genai_cli.bench.report import Unavailable
from genai_cli.bench.trials import Meters
from genai_cli.errors import GenaiError

SIZE = BatchSize(4, 2, 8, 3)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Engine:
    """`ms` for all prompts together; answers are made of each prompt, so that they can be compared."""

    def __init__(self, clock, ms=10.0, threads=2, short=False, wrong=(), stops=False):
        self.clock, self.ms, self.threads, self.short, self.wrong = clock, ms, threads, short, wrong
        self.seen, self.stops = [], stops

    def answer(self, prompts, n_new):
        if self.stops and n_new > 2:  # not yet in the warm-up
            raise GenaiError("too long")
        self.seen.append(prompts)
        self.clock.now += self.ms * 1e-3
        made = [[sum(ids) + (number in self.wrong)] * n_new for number, ids in enumerate(prompts)]
        return [answer[1:] for answer in made] if self.short else made

    def close(self):
        pass


def run(*arms, parity="passed", clock=None):
    clock = clock or Clock()

    def opened(made):
        if isinstance(made, str):
            raise GenaiError(made)
        return made if isinstance(made, Engine) else Engine(clock, **made)

    named = [BatchArm(name, rows, lambda made=made: opened(made)) for name, rows, made in arms]
    return bench_batch(
        named, SIZE, 100, Meters(clock), lambda: None, seed=0, parity=parity, progress=lambda text: None
    )  # fmt: skip


def test_tokens_of_all_prompts_a_second_and_paired_ratios():
    found = run(("native", 4, {}), (ALONE, 1, {"ms": 30}), ("peer", 4, {"ms": 25}))
    assert [(r.engine, r.batch, r.n_new) for r in found.results] == [("native", 4, 3), (ALONE, 1, 3), ("peer", 4, 3)]
    assert found.results[0].tok_s.median == pytest.approx(4 * 3 / 10e-3)
    assert [(r.b, pytest.approx(r.median), r.difference) for r in found.ratios] == [
        (ALONE, 3.0, "faster"), ("peer", 2.5, "faster"),
    ]  # fmt: skip
    assert found.noise[0].floor == pytest.approx(0)
    assert found.results[0].n_prompt == sum(map(len, SIZE.prompts(100, 0, 0))) == 20
    assert found.num_ids == 6 * 20


def test_pairs_share_prompts_and_no_two_pairs_do():
    clock = Clock()
    native, peer = Engine(clock), Engine(clock)
    run(("native", 4, native), ("peer", 4, peer), clock=clock)
    assert native.seen[1:] == peer.seen[1:]  # behind the warm-up
    assert native.seen[1] != native.seen[2]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ((ALONE, 1, {"wrong": (2,)}), "rows [2] of a batch differ from the same prompts alone"),
        (("peer", 4, {"threads": 1}), "settings differ: native ran on 2 threads, peer on 1"),
        (("peer", 4, {"short": True}), "settings differ: native made 12 tokens, peer 8"),
    ],
)
def test_no_ratio_between_what_differs(other, reason):
    found = run(("native", 4, {}), other)
    assert (found.ratios, found.withheld) == ([], reason)


def test_a_peer_may_choose_other_tokens():
    assert run(("native", 4, {}), ("peer", 4, {"wrong": (1,)})).withheld is None


def test_no_ratio_without_parity():
    found = run(("native", 4, {}), (ALONE, 1, {}), parity="failed")
    assert (found.ratios, found.withheld) == ([], "parity failed")
    assert len(found.results) == 2


def test_an_engine_without_batches_is_named():
    found = run(("native", 4, "recurrent state"), (ALONE, 1, {}), ("peer", 4, {}))
    assert found.unavailable == [Unavailable("native", "recurrent state", "batch")]
    assert [r.engine for r in found.results] == [ALONE, "peer"]
    assert (found.ratios, found.withheld) == ([], None)


def test_an_engine_that_stops_on_the_way_is_named():
    found = run(("native", 4, {}), ("peer", 4, {"stops": True}), (ALONE, 1, {}))
    assert found.unavailable == [Unavailable("peer", "too long", "batch")]
    assert [r.engine for r in found.results] == ["native", ALONE]
    assert [r.b for r in found.ratios] == [ALONE]


def test_lengths_fit_the_context():
    assert BatchSize().cut_to(8192) == BatchSize()
    small = BatchSize().cut_to(128)
    assert (small.longest, small.n_new, small.shortest) == (64, 64, 64)
    assert [len(ids) for ids in sorted(BatchSize().prompts(99, 0, 0), key=len)][:2] == [64, 93]
