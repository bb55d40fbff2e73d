"""The CPU backend: memory, recordings, KV slots, threads."""

from __future__ import annotations

import itertools
import mmap
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from genai_cli import _native
from genai_cli.backends import cpu
from genai_cli.backends.cpu import CpuBackend, copy_rows
from genai_cli.errors import GenaiError

F32 = np.dtype(np.float32)


def test_isa_and_threads_are_checked() -> None:
    assert CpuBackend(isa="portable").description == "cpu:portable"
    assert CpuBackend().isa == _native.isas()[-1]
    with pytest.raises(GenaiError, match="`sse9` was asked for"):
        CpuBackend(isa="sse9")
    with pytest.raises(GenaiError, match="`0` threads"):
        CpuBackend(threads=0)


def test_every_isa_has_the_same_kernels() -> None:
    names = [_native.kernels(isa) for isa in _native.isas()]
    assert all(names[0] == other for other in names)
    assert len(names[0]) == len(set(names[0])) > 0
    assert _native.kernels("sse9") == []


def test_constants_are_not_copied() -> None:
    array = np.arange(8, dtype=F32)
    assert CpuBackend().constant(array).address == array.ctypes.data


def _resident_pages(array: np.ndarray) -> int:
    """Pages of this process's mapping around `array` that are in memory, as Linux tells (kB of Rss over 4)."""
    inside, pages = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and ":" not in first:
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= array.ctypes.data < high
        elif inside and first == "Rss:":
            pages += int(line.split()[1]) // 4
    return pages


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("mapped", [True, False])
def test_repacked_weights_leave_their_mapped_pages_and_nothing_else(mapped: bool, tmp_path: Path) -> None:
    """A mapping of a file is read again when it is needed; other memory must not be touched."""
    n, k = 256, 1024
    packed = np.random.default_rng(0).integers(0, 256, (n, k // 32, 16)).astype(np.uint8)
    file = tmp_path / "weights"
    file.write_bytes(packed.tobytes())
    with file.open("rb") as opened:
        bytes_ = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    held = np.frombuffer(bytes_, np.uint8).reshape(packed.shape) if mapped else packed.copy()
    assert np.array_equal(held, packed)  # every page is there now
    on = CpuBackend()
    rows, out = on.empty((1, 1, k), F32), on.empty((1, 1, n), F32)
    on.upload(rows, np.ones((1, 1, k), F32))
    scales = on.constant(np.full((n, k // 32), 0.01, F32))
    recording = on.record()
    attrs = {"N": n, "K": k, "bits": 4, "block_size": 32, "accuracy_level": 4}
    before = _resident_pages(held)
    recording.call("MatMulNBits", [rows, on.constant(held), scales, None, None, None], [out], attrs)
    first = on.download(out).copy()
    if mapped:
        assert _resident_pages(held) <= before // 4
    assert np.array_equal(held, packed)
    recording.replay()
    assert np.array_equal(on.download(out), first)


def test_recording_interleaves_host_steps_and_replays() -> None:
    on = CpuBackend(threads=1)
    x, y, z = (on.empty((3,), F32) for _ in range(3))
    on.upload(x, np.array([1, 2, 3], F32))
    recording, seen = on.record(), []
    recording.call("Add", [x, x], [y], {})
    recording.host(lambda: seen.append(on.download(y)))
    recording.host(lambda: on.upload(y, on.download(y) + 1))
    recording.call("Mul", [y, y], [z], {})
    assert on.download(z).tolist() == [9, 25, 49]
    on.upload(x, np.array([0, 0, 1], F32))
    recording.replay()
    assert on.download(z).tolist() == [1, 1, 9]
    assert [s.tolist() for s in seen] == [[2, 4, 6], [0, 0, 2]]


def test_a_failed_call_is_not_recorded() -> None:
    on = CpuBackend(threads=1)
    x, index, y = on.constant(np.ones((2, 2), F32)), on.empty((1,), np.dtype(np.int64)), on.empty((1, 2), F32)
    on.upload(index, np.array([5]))
    recording = on.record()
    with pytest.raises(GenaiError, match="outside"):
        recording.call("Gather", [x, index], [y], {"axis": 0})
    recording.replay()


def test_profile_times_every_step_in_order_and_nothing_after_it() -> None:
    on = CpuBackend(threads=1)
    x, y = on.constant(np.ones(5, F32)), on.empty((5,), F32)
    recording = on.record()
    recording.call("Add", [x, x], [y], {})
    recording.host(lambda: None)
    recording.call("Exp", [x], [y], {})
    on.profile(True)
    for _ in range(3):
        recording.replay()
    on.record().call("Neg", [x], [y], {})  # recorded once, dropped at once
    spans = on.take_spans()
    assert [span.step.kernel for span in spans] == ["Add", "host", "Exp"] * 3 + ["Neg"]
    assert spans[0].step.inputs == (x, x)
    assert all(a.start_ns <= a.end_ns <= b.start_ns for a, b in itertools.pairwise(spans))
    assert time.perf_counter_ns() - spans[-1].end_ns < 60e9  # the clock that the caller reads
    on.profile(False)
    recording.replay()
    on.profile(True)
    assert on.take_spans() == []


@pytest.mark.parametrize("isa", _native.isas())
def test_ceilings_do_what_they_count(isa: str) -> None:
    on = CpuBackend(threads=2, isa=isa)
    out = on.empty((2, 2), F32)
    on.record().call("bench.FloatPeak", [on.constant(np.full(32, 0.5, F32))], [out], {"rounds": 3})
    (first, second), (count, other) = on.view(out)
    chains = count / (2 * 16 * 3)
    assert chains == other / (2 * 16 * 3) == int(chains) >= 3
    # chain i goes i/2 -> x/2 + 1/2 three times: i/16 + 7/8; sixteen lanes
    assert first == second == 16 * sum(i / 16 + 7 / 8 for i in range(int(chains)))
    on.record().call("bench.BytePeak", [on.constant(np.full(64, 2, np.int8))], [out], {"rounds": 3})
    (first, _), (count, _) = on.view(out)
    sums = {"avx512vnni": 10, "avx512": 10, "avx2": 10}.get(isa, 3)
    width = count / (2 * sums * 3)
    assert width in (16, 32, 64)
    assert first == sum(i + 3 * 4 * 4 for i in range(sums))  # four products of 2 * 2, three times


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("shape", [(3, 7, 5), (2, 5, 64), (1, 4, 1), (2, 0, 3)])
def test_copy_rows_between_strided_views(shape: tuple[int, int, int], dtype: str) -> None:
    heads, rows, width = shape
    big = np.arange(heads * (rows + 6) * width, dtype=np.int64).astype(dtype).reshape(heads, rows + 6, width)
    source = big[:, 3 : 3 + rows]
    target = np.full((heads, 2 * rows + 1, width), 99, dtype)
    copy_rows(target[:, 1 : 2 * rows + 1 : 2], source)
    want = np.full_like(target, 99)
    want[:, 1 : 2 * rows + 1 : 2] = source
    np.testing.assert_array_equal(target, want)
    turned = np.zeros((rows, heads, width), dtype)  # heads inside positions
    copy_rows(turned.transpose(1, 0, 2), source + source.dtype.type(1))
    np.testing.assert_array_equal(turned, (source + source.dtype.type(1)).transpose(1, 0, 2))


def test_copy_rows_refuses_what_it_cannot_copy() -> None:
    rows = np.zeros((2, 3, 4), F32)
    for other in (
        np.zeros((2, 3, 5), F32),
        np.zeros((2, 3, 4), np.float16),
        rows.transpose(0, 2, 1).copy().transpose(0, 2, 1),
    ):
        with pytest.raises(GenaiError, match="copying KV rows"):
            copy_rows(rows, other)


def test_growth_keeps_every_head() -> None:
    on = CpuBackend()
    slots = [on.kv_slot(2, 5, F32), on.kv_slot(3, 4, np.dtype(np.float16))]
    on.reserve(200)
    assert on.capacity == 256
    kept = [
        np.random.default_rng(i).normal(size=(s.num_heads, 200, s.head_dim)).astype(s.dtype)
        for i, s in enumerate(slots)
    ]
    for slot, rows in zip(slots, kept, strict=True):
        on.kv_write(slot, rows)
    on.set_past_len(200)
    on.reserve(257)
    assert on.capacity == 512
    for slot, rows in zip(slots, kept, strict=True):
        np.testing.assert_array_equal(on.kv_view(slot, 0, 200), rows)
    late = on.kv_slot(1, 8, F32)
    assert late.capacity == 512


def test_growth_without_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    on = CpuBackend()
    slots = [on.kv_slot(2, 4, F32), on.kv_slot(2, 4, F32)]
    on.reserve(10)
    on.set_past_len(10)
    before = [slot.buffer for slot in slots]

    def fails(nbytes: int) -> np.ndarray:
        raise MemoryError(nbytes)

    monkeypatch.setattr(cpu, "aligned", fails)
    with pytest.raises(GenaiError, match="no memory for the KV of `512` tokens"):
        on.reserve(300)
    assert all(slot.buffer is old for slot, old in zip(slots, before, strict=True))
    assert on.capacity == 256
    assert on.past_len == 10


def test_lengths_outside_the_capacity_are_refused() -> None:
    on = CpuBackend()
    slot = on.kv_slot(1, 4, F32)
    on.reserve(1)
    for wrong in (lambda: on.set_past_len(257), lambda: on.set_past_len(-1), lambda: on.kv_view(slot, 0, 257)):
        with pytest.raises(GenaiError, match="asked for"):
            wrong()
    with pytest.raises(GenaiError, match="257"):
        on.kv_write(slot, np.zeros((1, 257, 4), F32))


def busy_step(on: CpuBackend):
    """A recording that uses all threads, and what it computes."""
    x = np.random.default_rng(0).normal(size=(64, 4096)).astype(F32)
    out = on.empty(x.shape, F32)
    recording = on.record()
    recording.call("Exp", [on.constant(x)], [out], {})
    return recording, out, on.download(out)


def test_pool_shared_by_python_threads() -> None:
    """Recordings of one backend replayed from several Python threads at once: jobs take turns."""
    on = CpuBackend(threads=3)
    steps = [busy_step(on) for _ in range(4)]
    workers = [threading.Thread(target=lambda r=step[0]: [r.replay() for _ in range(20)]) for step in steps]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(np.array_equal(on.download(out), want) for _, out, want in steps)


def test_interpreter_is_released_while_kernels_run() -> None:
    on = CpuBackend(threads=1)
    recording, _, _ = busy_step(on)
    ticks, done = [], threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    ticker = threading.Thread(target=tick)
    ticker.start()
    for _ in range(200):
        recording.replay()
    done.set()
    ticker.join()
    assert len(ticks) > 3


def test_forked_child_computes_without_workers() -> None:
    on = CpuBackend(threads=3)
    recording, out, want = busy_step(on)
    child = os.fork()
    if child == 0:
        on.upload(out, np.zeros(out.shape, F32))
        recording.replay()
        os._exit(0 if np.array_equal(on.download(out), want) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_many_pools_come_and_go() -> None:
    for _ in range(30):
        on = CpuBackend(threads=4)
        recording, out, want = busy_step(on)
        assert np.array_equal(on.download(out), want)
        del recording, on
