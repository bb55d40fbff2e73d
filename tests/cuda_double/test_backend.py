"""The CUDA backend: KV on the device, growth, graphs, memory, and what it says when something is missing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cuda_double.step import Step, fill_to
from genai_cli.errors import ExitCode, GenaiError

Make = Callable[..., Any]
F32 = np.dtype(np.float32)
KINDS = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


def numbered(shape: tuple[int, ...], dtype: Any, start: int = 0) -> np.ndarray:
    """Distinct values (as far as 16 bits can tell)."""
    return (np.arange(np.prod(shape)) % 251 + start).reshape(shape).astype(dtype)


# -- KV ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KINDS, ids=lambda kind: kind.name)
def test_what_is_seeded_is_read_out(dtype: Any, cuda_backend: Make) -> None:
    """Slots of different geometry; rows from the middle; a capacity larger than the length."""
    backend = cuda_backend()
    geometry = [(2, 8), (3, 5), (1, 7)]
    slots = [backend.kv_slot(heads, dim, dtype) for heads, dim in geometry]
    backend.reserve(11)
    rows = [numbered((heads, 11, dim), dtype, i) for i, (heads, dim) in enumerate(geometry)]
    for slot, part in zip(slots, rows, strict=True):
        backend.kv_write(slot, part)
    backend.kv_write(slots[1], rows[1][:, :3] * 2, start=4)
    rows[1][:, 4:7] = rows[1][:, :3] * 2
    for slot, part in zip(slots, rows, strict=True):
        np.testing.assert_array_equal(backend.kv_view(slot, 2, 9), part[:, 2:9])


def test_a_read_out_is_one_copy_for_all_slots(cuda_backend: Make) -> None:
    backend = cuda_backend()
    slots = [backend.kv_slot(2, 4, F32) for _ in range(6)]
    backend.reserve(3)
    for slot in slots:
        backend.kv_write(slot, numbered((2, 3, 4), F32, slot.index))
    before = backend.device.counters.dtoh
    for slot in slots:
        np.testing.assert_array_equal(backend.kv_view(slot, 1, 3), numbered((2, 3, 4), F32, slot.index)[:, 1:3])
    assert backend.device.counters.dtoh == before + 1


def test_growth_keeps_every_head(cuda_backend: Make) -> None:
    backend = cuda_backend()
    slots = [backend.kv_slot(2, 3, F32), backend.kv_slot(3, 5, F32)]
    backend.reserve(4)
    rows = [numbered((s.num_heads, 4, s.head_dim), F32, s.index) for s in slots]
    for slot, part in zip(slots, rows, strict=True):
        backend.kv_write(slot, part)
    backend.set_past_len(4)
    for tokens, capacity in ((256, 256), (257, 512), (600, 1024)):
        backend.reserve(tokens)
        assert [slot.capacity for slot in slots] == [capacity, capacity]
        for slot, part in zip(slots, rows, strict=True):
            np.testing.assert_array_equal(backend.kv_view(slot, 0, 4), part)


def test_growth_that_fails_changes_nothing(cuda_backend: Make, double: Any) -> None:
    backend = cuda_backend()
    slots = [backend.kv_slot(4, 64, F32) for _ in range(2)]
    backend.reserve(10)
    for slot in slots:
        backend.kv_write(slot, numbered((4, 10, 64), F32, slot.index))
    backend.set_past_len(10)
    backend.synchronize()
    held, generation = double.memory_used(), backend.generation
    double.set_memory(held + slots[0].nbytes(512) + 1000)  # room for one of two
    try:
        with pytest.raises(GenaiError, match="out of memory") as caught:
            backend.reserve(500)
    finally:
        double.set_memory(2 << 30)
    backend.synchronize()
    assert caught.value.exit_code is ExitCode.CANNOT
    assert f"`{slots[0].nbytes(512)}` bytes were asked for" in caught.value.message
    assert (double.memory_used(), backend.generation, backend.capacity) == (held, generation, 256)
    for slot in slots:
        np.testing.assert_array_equal(backend.kv_view(slot, 0, 10), numbered((4, 10, 64), F32, slot.index))


@pytest.mark.parametrize("ask", [(-1, 2), (0, 300), (3, 2)])
def test_rows_that_are_not_there_are_refused(ask: tuple[int, int], cuda_backend: Make) -> None:
    backend = cuda_backend()
    slot = backend.kv_slot(1, 4, F32)
    backend.reserve(2)
    with pytest.raises(GenaiError, match="were asked for"):
        backend.kv_view(slot, *ask)
    with pytest.raises(GenaiError, match="found `float32"):
        backend.kv_write(slot, np.zeros((1, 2, 5), np.float32))
    with pytest.raises(GenaiError, match="were given"):
        backend.kv_write(slot, np.zeros((1, 2, 4), np.float32), start=255)


# -- recordings --------------------------------------------------------------------------------------------------------


def test_eager_and_captured_are_the_same_over_three_growths(cuda_backend: Make) -> None:
    """256, 512, 1024, 2048: every growth makes the graph stale, and the counters tell all of it."""
    positions = [*range(3), 255, 256, 257, 511, 512, 513, 1023, 1024, 1025]
    eager, captured = Step(cuda_backend(capture=False)), Step(cuda_backend())
    for step in (eager, captured):  # what lies between the fed positions is the same in both
        step.backend.reserve(256)
    for position in positions:
        for step in (eager, captured):
            fill_to(step, position)
        assert eager.token(position) == captured.token(position), position
    assert eager.present(1026) == captured.present(1026)
    counts = captured.backend.captures
    assert (counts.warm_ups, counts.captures, counts.invalidations) == (1, 4, 3)
    assert counts.replays == counts.graph_launches == len(positions) - 1
    assert counts.declined == []
    assert eager.backend.captures.eager_replays == len(positions) - 1
    assert eager.backend.captures.captures == 0


def test_slots_may_be_narrower_than_the_activations(cuda_backend: Make) -> None:
    """K and V in f32, kept in f16: rounded once when they are stored, nothing else."""
    wide, narrow = cuda_backend(), cuda_backend()
    x = np.random.default_rng(3).standard_normal((1, 4, 16)).astype(np.float32)
    seen = []
    for backend, kind in ((wide, np.float32), (narrow, np.float16)):
        slots = [backend.kv_slot(2, 8, np.dtype(kind)) for _ in range(2)]
        backend.reserve(4)
        given, y = backend.constant(x), backend.empty((1, 4, 16), F32)
        attrs = {"num_heads": 2, "kv_num_heads": 2, "key_slot": 0, "value_slot": 1}
        backend.record().call("genai.Attention", [given, given, given], [y], attrs)
        backend.set_past_len(4)
        seen.append((backend.kv_view(slots[0], 0, 4), backend.download(y)))
    np.testing.assert_array_equal(seen[1][0], seen[0][0].astype(np.float16))
    np.testing.assert_allclose(seen[1][1], seen[0][1], rtol=1e-3, atol=2.5e-3)  # f16, as in ops/tolerance.py


def test_a_stale_graph_is_seen(cuda_backend: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: growth does not make graphs stale. The grid then ends at the old capacity, and newer keys are missed."""
    honest, stale = Step(cuda_backend(capture=False)), Step(cuda_backend())
    for step in (honest, stale):
        fill_to(step, 250)
        step.token(250)
        step.token(251)

    def forget(recording: Any) -> None:
        recording._generation = recording._backend.generation

    monkeypatch.setattr("genai_cli.backends.cuda_recording.CudaRecording._invalidate", forget)
    for step in (honest, stale):
        fill_to(step, 300)
    honest.recording = None
    assert honest.token(300) != stale.token(300)


def test_a_declined_capture_goes_on_eagerly_and_says_why(cuda_backend: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, declined = Step(cuda_backend(capture=False)), Step(cuda_backend())
    launch = declined.backend.device.launch

    def waits_inside(work: Any, builder: Any = None) -> None:
        """A wait is not allowed in a capture: it breaks it."""
        launch(work, builder)
        if builder is not None:
            declined.backend.device.wait()

    monkeypatch.setattr(declined.backend.device, "launch", waits_inside)
    for position in range(4):
        assert honest.token(position) == declined.token(position)
    counts = declined.backend.captures
    assert counts.captures == 0
    assert counts.eager_replays == 3
    (reason,) = counts.declined
    assert reason.first_kernel == "norm"
    assert "CAPTURE" in reason.reason


def test_what_is_freed_during_a_capture_is_freed_once(cuda_backend: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may run at any time; a free in the captured stream would happen at every replay."""
    step, again = Step(cuda_backend()), Step(cuda_backend(capture=False))
    device = step.backend.device
    garbage = [step.backend.empty((100,), F32)]
    launch = device.launch

    def drops(work: Any, builder: Any = None) -> None:
        launch(work, builder)
        if builder is not None:
            garbage.clear()

    monkeypatch.setattr(device, "launch", drops)
    for position in range(4):
        assert step.token(position) == again.token(position)
    assert not garbage
    assert step.backend.captures.graph_launches == 3


def test_an_interrupt_leaves_the_stream_usable(cuda_backend: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    step, again = Step(cuda_backend()), Step(cuda_backend(capture=False))
    assert step.token(0) == again.token(0)
    launch = step.backend.device.launch

    def interrupted(work: Any, builder: Any = None) -> None:
        launch(work, builder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(step.backend.device, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step.token(1)
    assert step.token(1) == again.token(1)


def test_an_index_outside_is_told_after_the_step(cuda_backend: Make) -> None:
    backend = cuda_backend()
    table, y = backend.constant(np.zeros((4, 2), np.float32)), backend.empty((1, 2), F32)
    backend.record().call("Gather", [table, backend.constant(np.array([9]))], [y], {"axis": 0})
    with pytest.raises(GenaiError, match="index or position `9`"):
        backend.synchronize()
    backend.synchronize()


# -- memory and threads ------------------------------------------------------------------------------------------------


def test_the_last_reference_may_die_on_any_thread(cuda_backend: Make, double: Any) -> None:
    gc.collect()
    backend = cuda_backend()
    double.leaks()  # waits for every stream, dropped ones too
    before = double.memory_used()
    held = [backend.empty((100,), F32) for _ in range(1000)]

    def drop() -> None:
        while held:
            held.pop()

    worker = threading.Thread(target=drop)
    worker.start()
    worker.join()
    double.leaks()
    assert double.memory_used() == before
    assert backend.device.allocated_bytes == sum(m.nbytes for m in (backend._state,))


def test_a_dropped_backend_gives_everything_back(cuda_backend: Make, double: Any) -> None:
    gc.collect()
    before = double.leaks()[0]
    for _ in range(20):
        Step(cuda_backend()).token(0)
    gc.collect()
    assert double.leaks()[0] == before


# -- products ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("k", "n"), [(37, 41), (72, 152)])
@pytest.mark.parametrize("dtype", KINDS, ids=lambda kind: kind.name)
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    dtype: Any, k: int, n: int, transposed: bool, cuda_backend: Make
) -> None:
    """Decode (1 row), a chunk (3) and a prefill (20, its own tiles): cold and warm KV must not differ. Odd widths are
    not for tensor cores, the even ones fill neither tiles nor steps."""
    backend = cuda_backend()
    random = np.random.default_rng(1)
    a, b = random.standard_normal((20, k)).astype(dtype), random.standard_normal((k, n)).astype(dtype)
    weight = backend.constant(np.ascontiguousarray(b.T) if transposed else b)

    def product(rows: np.ndarray) -> np.ndarray:
        y = backend.empty((len(rows), n), np.dtype(dtype))
        inputs = [backend.constant(rows), weight]
        if transposed:
            backend.record().call("Gemm", inputs, [y], {"transB": 1})
        else:
            backend.record().call("MatMul", inputs, [y], {})
        return np.asarray(backend.download(y))

    whole = product(a)
    np.testing.assert_array_equal(whole, np.concatenate([product(a[i : i + 1]) for i in range(20)]))
    np.testing.assert_array_equal(whole[:3], product(a[:3]))
    wide = a.astype(np.float32) @ b.astype(np.float32)
    np.testing.assert_allclose(whole.astype(np.float32), wide, rtol=1.6e-2, atol=3e-2)  # bf16, as in ops/tolerance.py
    on_tensor_cores = backend.device.counters.kernels["product"] > 0
    assert on_tensor_cores == (np.dtype(dtype).itemsize == 2 and k == 72)


def test_without_tensor_cores_of_sm_80_other_kernels_run(cuda_backend: Make) -> None:
    """As on sm_75; the answers are within rounding of each other."""
    random, seen = np.random.default_rng(2), []
    a, b = (random.standard_normal(shape).astype(np.float16) for shape in ((3, 64), (64, 32)))
    for tensor_cores in (True, False):
        backend = cuda_backend(tensor_cores=tensor_cores)
        y = backend.empty((3, 32), np.dtype(np.float16))
        backend.record().call("MatMul", [backend.constant(a), backend.constant(b)], [y], {})
        seen.append(backend.download(y).astype(np.float32))
        (kernel,) = {"product", "columns"} & set(backend.device.counters.kernels)
        assert ("mma.sync" in backend.description) == tensor_cores == (kernel == "product")
    np.testing.assert_allclose(seen[0], seen[1], rtol=1e-3, atol=2.5e-3)  # f16, as in ops/tolerance.py
