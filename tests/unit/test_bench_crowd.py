"""What others used of the machine while something was measured."""

from __future__ import annotations

import pytest

from genai_cli.bench.crowd import Crowd, busy_s, own_s


@pytest.mark.parametrize(
    ("busy", "own", "share"),
    [
        (4.0, 4.0, 0.0),
        (6.0, 4.0, 0.25),  # two of eight core-seconds
        (3.9, 4.0, 0.0),  # counters tick apart
        (None, 4.0, None),
    ],
)
def test_what_is_busy_and_not_ours_is_others(busy, own, share):
    seen = {"busy": 100.0 if busy is not None else None, "own": 10.0, "clock": 5.0}
    crowd = Crowd(lambda: seen["busy"], lambda: seen["own"], lambda: seen["clock"], cores=2)
    seen.update(busy=None if busy is None else 100 + busy, own=10 + own, clock=9.0)
    assert crowd.share() == (None if share is None else pytest.approx(share))


def test_busy_is_all_but_idle_and_waiting(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 5000 600 7 8 9 1000 0\ncpu0 1 2 3 4\n")
    ticks = 100 + 20 + 30 + 7 + 8 + 9
    assert busy_s(stat) * 100 == pytest.approx(ticks)  # of 10 ms each
    assert busy_s(tmp_path / "none") is None


def test_own_time_grows_with_work():
    before = own_s()
    while own_s() - before < 0.02:
        sum(range(10_000))
    assert own_s() > before
