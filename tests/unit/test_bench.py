"""The benchmark measured: engines that cost 1 ms a token on a clock of their own, so that every figure is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from genai_cli.backends.cpu import CpuBackend
from genai_cli.bench import table
from genai_cli.bench.compare import compare, parse_percent, read_report
from genai_cli.bench.energy import open_joules
from genai_cli.bench.machine import Ceilings, Operations, weight_bytes_per_token
from genai_cli.bench.open import BenchOptions, num_trials
from genai_cli.bench.report import Noise, Unavailable, ratio, result, unequal
from genai_cli.bench.session import Subject, Tools, bench
from genai_cli.bench.trials import Arm, Meters, Phase, Trial, decode_trial, in_turn, phases, prefill_trial
from genai_cli.errors import ExitCode, GenaiError
from genai_cli.graph.ir import Graph, Initializer, Node
from genai_cli.model import OpenOptions, open_model
from genai_cli.report.json import dumps
from genai_cli.runners.base import RunnerInfo

MS = 1e-3
VOCAB = 50
MACHINE = Ceilings(40.0, 100.0, 400.0)  # GB/s, f32 and int8 Gop/s
DONE = {8: Operations(10**8, 8 * 10**8), 64: Operations(0, 6 * 10**9)}
PHASES = [Phase("load", 1), Phase("prefill", 8), Phase("prefill", 64), Phase("decode", n_context=16, n_new=4)]


class FakeClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class FakeRunner:
    """`ms` a token. `cached` tokens survive a reset, as with an engine that keeps prefixes."""

    context_len, vocab_size = 128, VOCAB

    def __init__(
        self, clock, name="native", ms=1.0, threads=2, cached=0, jitter=(), refuses="", recurrent=False, fails_at=None
    ):
        self.fails_at = fails_at
        if refuses:
            raise GenaiError(refuses)
        self.clock, self.ms, self.cached, self.length, self.fed = clock, ms, cached, 0, []
        self.jitter, self.recurrent = list(jitter), recurrent
        self.info = RunnerInfo(name, "0", "cpu", (), 1, 0, threads)

    def reset(self):
        self.length = self.cached

    def rewind(self, length):
        if self.recurrent:
            raise GenaiError("recurrent state cannot be rewound")
        self.length = length

    def step(self, ids, *, embeds=None, logits="last"):
        if len(ids) == self.fails_at:
            raise GenaiError("too long")
        self.fed.append(tuple(ids.tolist()))
        self.length += len(ids)
        extra = self.jitter.pop(0) if self.jitter else 1.0
        self.clock.now += MS * self.ms * len(ids) * extra
        return np.zeros((1, VOCAB), np.float32)

    def close(self):
        pass


def measured(
    peer=None, *, parity="passed", native=None, phases_=PHASES, seed=0, clock=None, runners=None, more=None, joules=None,
    progress=lambda text: None,
):  # fmt: skip
    clock = clock or FakeClock()

    def arm(name, options):
        def open_():
            made = FakeRunner(clock, name, **options)
            if runners is not None:
                runners.append(made)
            return made

        return Arm(name, open_)

    tools = Tools(
        lambda: MACHINE, lambda: 1 << 20, lambda: parity, Meters(clock, joules), "a counter",
        collect=lambda: None, settle=lambda: None,
    )  # fmt: skip
    subject = Subject(Path("m"), "cpu:fake", 2, phases_, lambda context: 1_000_000, DONE, VOCAB)
    others = ([] if peer is None else [arm("ort", peer)]) + [arm(name, made) for name, made in (more or {}).items()]
    return bench(subject, arm("native", native or {}), others, tools, seed=seed, rounds=2, progress=progress)


def of(report, phase, **fields):
    return next(r for r in report.results if r.phase == phase and all(getattr(r, k) == v for k, v in fields.items()))


def test_time_scales_with_the_tokens_really_processed():
    report = measured()
    short, long = of(report, "prefill", n_prompt=8), of(report, "prefill", n_prompt=64)
    assert short.seconds.median == pytest.approx(8 * MS)
    assert long.seconds.median == pytest.approx(64 * MS)
    assert long.ttft_s == pytest.approx(64 * MS)
    assert short.tok_s.median == long.tok_s.median == pytest.approx(1000)


def test_decode_leaves_the_prompt_and_the_first_token_out():
    found = of(measured(), "decode")
    assert found.seconds.median == pytest.approx(4 * MS)
    assert found.tpot_s == pytest.approx(MS)
    assert found.gb_s == pytest.approx(1.0)  # 1 MB a token, 1000 tokens a second
    assert found.bandwidth_fraction == pytest.approx(1 / 40)


def test_prefill_is_a_share_of_what_the_arithmetic_peaks_allow():
    report = measured()
    short, long = of(report, "prefill", n_prompt=8), of(report, "prefill", n_prompt=64)
    assert short.peak_fraction == pytest.approx((1e8 / 100e9 + 8e8 / 400e9) / (8 * MS))
    assert long.peak_fraction == pytest.approx(6e9 / 400e9 / (64 * MS))
    assert of(report, "decode").peak_fraction is None


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_context_is_filled_once_and_found_again_by_every_trial(recurrent):
    runners = []
    report = measured({"recurrent": recurrent}, phases_=[PHASES[3]], runners=runners)
    assert report.withheld is None
    native, ort = runners[2:]  # behind the run alone and the probe
    for runner, fills in ((native, 1), (ort, 5 + 1 if recurrent else 1)):
        contexts = [ids for ids in runner.fed if len(ids) == 16]
        assert len(contexts) == fills
        assert len(set(contexts)) == 1
        steps = [ids[0] for ids in runner.fed if len(ids) == 1]
        assert len(steps) == 5 * 4  # a warm-up and four trials
        assert len({tuple(steps[i : i + 4]) for i in range(0, 20, 4)}) == 5  # of fresh ids


def test_load_goes_up_to_the_first_answer():
    clock = FakeClock()
    report = measured(clock=clock)
    assert of(report, "load").seconds.median == pytest.approx(MS)
    assert of(report, "load").tok_s is None


def test_a_ratio_is_paired():
    report = measured({"ms": 3.0})
    assert [(r.phase, r.difference) for r in report.ratios] == [(p.kind, "faster") for p in PHASES]
    assert all(r.median == pytest.approx(3.0) for r in report.ratios)
    assert report.withheld is None


@pytest.mark.parametrize("parity", ["failed", "not run"])
def test_no_ratio_without_parity(parity):
    report = measured({"ms": 3.0}, parity=parity)
    assert report.ratios == []
    assert table.verdicts(report) == [f"ratio withheld: parity {parity}", "energy: a counter"]


def test_no_ratio_when_threads_differ():
    report = measured({"threads": 1})
    assert report.ratios == []
    assert report.withheld == "settings differ: native ran on 2 threads, ort on 1"


def test_a_prefix_hit_voids_the_figure_and_the_ratio():
    report = measured({"cached": 5})
    voided = of(report, "prefill", engine="ort", n_prompt=8)
    assert (voided.tok_s, voided.ttft_s, voided.num_cached_tokens) == (None, None, 5)
    assert report.ratios == []
    assert "prefix hit: 5 tokens" in report.withheld
    assert any("n/a: 5 tokens came from a cache" in row for row in table.rows(report))


def test_two_peers_run_in_turn_with_native():
    report = measured({"ms": 3.0}, more={"third": {"ms": 2.0}}, phases_=[PHASES[1]])
    assert [(r.a, r.b, pytest.approx(r.median)) for r in report.ratios] == [
        ("native", "ort", 3.0), ("native", "third", 2.0),
    ]  # fmt: skip


def test_an_engine_that_cannot_run_the_model_is_named_and_the_others_are_measured():
    report = measured({"ms": 3.0}, more={"third": {"refuses": "no such op"}}, phases_=[PHASES[1]])
    assert {r.engine for r in report.results} == {"native", "ort"}
    assert report.unavailable == [Unavailable("third", "no such op")]
    assert "third: n/a: no such op" in table.verdicts(report)
    alone = measured({"refuses": "no such op"}, phases_=[PHASES[1]])
    assert (alone.parity, alone.ratios, len(alone.results)) == ("not run", [], 1)


def test_a_peer_that_fails_in_one_phase_is_named_and_measured_in_the_others():
    report = measured({"fails_at": 64})
    assert report.unavailable == [Unavailable("ort", "too long", "prefill")]
    assert [(r.phase, r.n_prompt) for r in report.results if r.engine == "ort"] == [
        ("load", 1), ("prefill", 8), ("decode", 0),
    ]  # fmt: skip
    assert [(r.phase, r.n_prompt) for r in report.ratios] == [("load", 1), ("prefill", 8), ("decode", 0)]
    assert len([r for r in report.results if r.engine == "native"]) == len(PHASES)
    assert "ort prefill: n/a: too long" in table.verdicts(report)


def test_native_may_not_fail():
    with pytest.raises(GenaiError, match="too long"):
        measured({}, native={"fails_at": 64})


def test_the_progress_bar_ends_where_the_trials_do():
    ticks = []
    measured({}, progress=lambda text: ticks.append(text))
    options = BenchOptions(("ort",), prompts=(8, 64), contexts=(16,), rounds=2, phases=("load", "prefill", "decode"))
    cold = 2 * 2 * 3  # native, native exact, ort: started by the caller
    assert ticks.count(None) == num_trials(options) - cold


def test_energy_is_that_of_the_timed_tokens():
    clock = FakeClock()
    report = measured(phases_=[PHASES[1], PHASES[3]], clock=clock, joules=lambda: clock.now * 50)  # 50 W
    assert [r.joules_per_token for r in report.results] == pytest.approx([0.05, 0.05])
    assert measured(phases_=[PHASES[1]]).results[0].joules_per_token is None


def test_a_crowd_is_warned_of():
    quiet, crowded = (replace(measured(phases_=[PHASES[1]]), others_cpu=share) for share in (0.04, 0.3))
    assert not any("warning" in line for line in table.verdicts(quiet))
    assert table.verdicts(crowded)[-1].startswith("warning: other processes used 30% of the CPU")


def test_joules_from_counters_that_wrap(tmp_path):
    for name, value in (("intel-rapl:0", 900), ("intel-rapl:1", 10), ("intel-rapl:0:0", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{value}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("999\n")
    joules, words = open_joules(tmp_path)
    assert words == "RAPL of 2 packages"
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("100")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("30")
    assert joules() == pytest.approx((200 + 20) / 1e6)
    assert joules() == pytest.approx(220 / 1e6)
    assert open_joules(tmp_path / "none")[0] is None
    assert "not available" in open_joules(tmp_path / "none")[1]


def test_no_generated_tokens_are_not_divided_by():
    report = measured({}, phases_=[Phase("decode", n_context=16, n_new=0)])
    assert (report.noise, report.ratios) == ([], [])
    assert report.results[0].tok_s is None
    assert report.results[0].tpot_s is None
    assert table.rows(report)[0][3] == "n/a"


def test_both_engines_get_the_same_ids_and_no_trial_gets_those_of_another():
    runners = []
    measured({}, runners=runners, phases_=[Phase("prefill", 16)])
    alone, _, native, ort = runners  # the second shows that the peer can open the model at all
    assert native.fed[1:] == ort.fed[1:]  # behind the warm-up, in pairs
    fed = alone.fed + native.fed
    assert len(set(fed)) == len(fed)


def test_a_warm_up_is_as_long_as_a_trial():
    runners = []
    measured(runners=runners, phases_=[Phase("prefill", 16)])
    assert [len(ids) for ids in runners[0].fed] == [16] * 9


def test_arms_that_were_not_fed_the_same_have_no_ratio():
    def trial(arm, sha, num_tokens=8, cached=0):
        return [Trial(arm, 0, 1.0, num_tokens, cached, sha, 2)]

    assert unequal(trial("native", "a"), trial("ort", "a")) is None
    assert (
        unequal(trial("native", "a"), trial("ort", "b")) == "settings differ: native and ort were not fed the same ids"
    )
    assert "not fed the same ids" in unequal(trial("native", "a"), trial("ort", "a", num_tokens=1))
    assert "a prefix hit: 7 tokens" in unequal(trial("native", "a", cached=7), trial("ort", "a"))


def test_the_device_is_waited_for_before_the_clock_stops(monkeypatch):
    happened = []
    waited = CpuBackend.synchronize
    monkeypatch.setattr(CpuBackend, "synchronize", lambda self: (happened.append("wait"), waited(self)))
    package = Path(__file__).resolve().parents[2] / "fixtures" / "packages" / "llama-fp32-cpu"
    runner = open_model(package, OpenOptions(threads=1, prefix_cache=False)).runner
    meters = Meters(lambda: happened.append("clock") or float(len(happened)))
    ids = np.arange(3, 9)
    prefill_trial("native", 0, runner, ids, meters)
    decode_trial("native", 0, runner, ids, ids[:2], 0, meters)
    assert happened == ["clock", "wait", "clock", "clock", "wait", "wait", "clock"]


def test_the_ids_come_from_the_seed():
    assert measured(seed=1).ids_sha256 == measured(seed=1).ids_sha256 != measured(seed=2).ids_sha256
    timed = sum(9 * (phase.num_ids - phase.n_context) for phase in PHASES)  # a warm-up and eight trials
    assert measured().num_ids == timed + 16  # and the context, once


def test_the_order_is_abba():
    assert "".join(arm for arm, _ in in_turn("ab", 2)) == "abbaabba"
    assert "".join(arm for arm, _ in in_turn("abc", 1)) == "abccba"
    assert [pair for _, pair in in_turn("ab", 1)] == [0, 0, 1, 1]


def test_lengths_are_cut_to_the_context():
    found = phases(100, (128, 512), (64, 1024), 32)
    assert found == [Phase("load", 1), Phase("prefill", 100), Phase("decode", 0, 64, 32), Phase("decode", 0, 68, 32)]


def trials(name, seconds):
    return [Trial(name, i, s, 8, 0, "", 2) for i, s in enumerate(seconds)]


@pytest.mark.parametrize(
    ("peer", "floor", "difference"),
    [
        ([1.1, 1.1], 0.2, "none"),
        ([1.3, 1.3], 0.2, "faster"),
        ([0.7, 0.7], 0.2, "slower"),
        ([0.5, 2.9], 0.2, "none"),  # the median is beyond the floor, but the pairs disagree
    ],
)
def test_a_difference_inside_the_noise_is_none(peer, floor, difference):
    assert ratio(PHASES[1], trials("native", [1.0, 1.0]), trials("ort", peer), floor).difference == difference


def test_the_noise_floor_is_the_worst_pair_of_native_against_itself():
    steady = measured(phases_=[PHASES[1]])
    assert steady.noise == [Noise("prefill", 8, 0, pytest.approx(0.0, abs=1e-9))]
    # warm-up, then eight trials: the third takes half as long again as the fourth
    jumpy = measured(phases_=[PHASES[1]], native={"jitter": [9, 1, 1, 1.5, 1, 1, 1, 1, 1]})
    assert jumpy.noise[0].floor == pytest.approx(0.5)
    assert jumpy.results[0].tok_s.p95 == pytest.approx(1000)  # the warm-up counts nowhere


def old_report(tmp_path, report):
    path = tmp_path / "old.json"
    path.write_text(dumps(report))
    return read_report(path)


@pytest.mark.parametrize(("ms", "regressed"), [(1.0, False), (1.1, False), (1.3, True), (0.5, False)])
def test_compare(tmp_path, ms, regressed):
    old = old_report(tmp_path, measured())
    found = compare(old, measured(native={"ms": ms}), 0.15)
    assert len(found) == len(PHASES)
    assert {change.regressed for change in found} == {regressed}


def test_compare_forgives_what_the_noise_explains(tmp_path):
    old = old_report(tmp_path, measured())
    new = measured(native={"ms": 1.3})
    noisy = replace(new, noise=[replace(n, floor=0.4) for n in new.noise])
    assert not any(change.regressed for change in compare(old, noisy, 0.15))


def test_compare_refuses_other_settings_and_nothing_in_common(tmp_path):
    old = old_report(tmp_path, measured())
    other = replace(measured(), model="elsewhere/another")
    for new in (other, measured(native={"threads": 1}), measured(phases_=[Phase("prefill", 9)])):
        with pytest.raises(GenaiError) as raised:
            compare(old, new, 0.15)
        assert raised.value.exit_code == ExitCode.NOT_COMPARED


def test_what_is_no_report_is_refused(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"schema": "genai.parity/1"}))
    for name in ("x.json", "missing.json"):
        with pytest.raises(GenaiError, match=r"x\.json|missing\.json"):
            read_report(tmp_path / name)


def test_percent():
    assert parse_percent("15%") == parse_percent("0.15") == 0.15
    with pytest.raises(GenaiError, match="wanted a share"):
        parse_percent("much")


def weight(name, *shape):
    return Initializer(name, np.dtype(np.float32), shape, int(np.prod(shape)) * 4, lambda: np.zeros(shape, np.float32))


def graph(*nodes):
    held = {w.name: w for w in (weight("table", 10, 4), weight("w", 4, 4), weight("unused", 100))}
    return Graph("g", [], [], list(nodes), held, {}, {})


def test_of_a_table_that_is_only_gathered_from_one_row_is_read():
    gather = Node("Gather", "", ["table", "ids"], ["x"])
    matmul = Node("MatMul", "", ["x", "w"], ["y"])
    assert weight_bytes_per_token(graph(gather, matmul)) == 16 + 64
    tied = Node("MatMul", "", ["y", "table"], ["z"])
    assert weight_bytes_per_token(graph(gather, matmul, tied)) == 160 + 64
    assert weight_bytes_per_token(graph(Node("QMoE", "com.microsoft", ["x", "w"], ["y"]))) is None


def test_a_rate_needs_every_trial():
    half = [Trial("native", 0, 1.0, 8, 0, "", 2), Trial("native", 1, 1.0, 8, 3, "", 2)]
    assert result(PHASES[1], half, MACHINE, None, None).tok_s is None
