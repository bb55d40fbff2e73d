"""How long kernels take on the case table: alternating runs of the kernel and of ONNX Runtime's one-node session.

    python tests/ops/speed.py [OP ...] [--isa avx2] [--threads 1]

Only the ratio means something, and only on a quiet machine. Not a test: nothing fails because a machine is slow.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np
import onnxruntime as ort
from cases import Case, _guarded, _known, accepted
from contrib import contrib_cases, normal, rng
from contrib_quantized import nbits
from oracle import model_of, options
from standard import case, standard_cases

from genai_cli.backends.cpu import CpuBackend

TRIALS, SPAN_S = 7, 0.02  # medians of 7, each about 20 ms long


def decode_sizes() -> Iterator[Case]:
    """What one token of a small decoder asks: hidden 576, feed-forward 1536, vocabulary 49152 (SmolLM2-135M)."""
    r = rng("speed")
    for k, n in ((576, 960), (576, 3072), (1536, 576), (576, 49152)):
        for level in (0, 4):
            yield nbits(r, (1, 1), k, n, bits=4, block=32, zero="none", level=level, name="-speed")
        yield case("MatMul", (normal(r, 1, 1, k), normal(r, k, n)), f"speed-{k}x{n}", constants=(1,))
    yield case("Softmax", (normal(r, 9, 1, 1024),), "speed")
    yield case("Add", (normal(r, 64, 576), normal(r, 64, 576)), "speed")


def kernel_call(one: Case, backend: Any) -> Callable[[], None]:
    """One replay of the recorded kernel."""
    opdef = one.opdef
    assert opdef is not None
    assert opdef.infer is not None
    attrs = dict(one.attrs)
    if one.op in ("MatMul", "Gemm"):
        attrs["constant_b"] = int(1 in one.constants)
    arrays = [None if a is None else np.ascontiguousarray(a) for a in one.inputs]
    inputs = [None if a is None else backend.constant(a) for a in arrays]
    outputs = [_guarded(backend, *spec)[1] for spec in opdef.infer(_known(one), one.attrs)[: len(one.outputs)]]
    recording = backend.record()
    recording.call(opdef.kernels[backend.name].name, inputs, outputs, attrs)
    return recording.replay


def ort_call(one: Case, threads: int) -> Callable[[], None]:
    """One run of ORT's session, inputs and outputs bound."""
    chosen = options()
    chosen.intra_op_num_threads = threads
    kinds = [1] * len(one.outputs)
    session = ort.InferenceSession(model_of(one, kinds).SerializeToString(), chosen, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for i, array in enumerate(one.inputs):
        if array is not None and i not in one.constants:
            binding.bind_cpu_input(f"x{i}", np.ascontiguousarray(array))
    for i, wanted in enumerate(one.outputs):
        if wanted:
            binding.bind_output(f"y{i}", "cpu")
    return lambda: session.run_with_iobinding(binding)


def seconds(call: Callable[[], None], number: int) -> float:
    """Mean of `number` calls."""
    start = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start) / number


def compare(one: Case, backend: Any, threads: int) -> tuple[float, float]:
    """Median seconds of the kernel and of ORT, alternating."""
    ours, theirs = kernel_call(one, backend), ort_call(one, threads)
    number = max(int(SPAN_S / max(seconds(theirs, 1), seconds(theirs, 1), 1e-6)), 1)
    pairs = [(seconds(ours, number), seconds(theirs, number)) for _ in range(TRIALS)]
    return median(p[0] for p in pairs), median(p[1] for p in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", nargs="*", help="ops; without any, what one decoded token needs")
    parser.add_argument("--isa")
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    backend = CpuBackend(isa=chosen.isa, threads=chosen.threads)
    pool = [*decode_sizes(), *(one for one in (*standard_cases(), *contrib_cases()) if one.op in chosen.op)]
    for one in pool:
        floats = all(a is None or a.dtype != np.float16 for a in one.inputs) and "bf16" not in one.id
        if (not chosen.op or one.op in chosen.op) and floats and accepted(one, backend):
            ours, theirs = compare(one, backend, chosen.threads)
            print(f"{one.id:50} {ours * 1e6:9.2f} us   ORT {theirs * 1e6:9.2f} us   x{theirs / ours:.2f}")


if __name__ == "__main__":
    main()
