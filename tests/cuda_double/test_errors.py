"""What the CUDA backend says when something is missing, wrong or broken."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuda_double.step import Step
from genai_cli.backends.cuda_device import CudaOptions
from genai_cli.backends.open import device_index, open_backend
from genai_cli.errors import ExitCode, GenaiError

Make = Callable[..., Any]
F32 = np.dtype(np.float32)

OPEN = """
import sys
from genai_cli.backends.cuda import CudaBackend, CudaOptions
from genai_cli.errors import GenaiError
try:
    CudaBackend(int(sys.argv[1]), CudaOptions(code_type="ptx"))
except GenaiError as error:
    print(error.message)
    sys.exit(int(error.exit_code))
"""


def opened(index: int, **environment: str) -> tuple[int, str]:
    """Exit code and message of opening a device in a process of its own."""
    command = [sys.executable, "-c", OPEN, str(index)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout.strip()


def test_no_driver(double: Any) -> None:
    code, said = opened(0, LD_LIBRARY_PATH="")
    assert code == ExitCode.CANNOT
    assert "libcuda.so.1" in said
    assert "CUDA 13 is needed" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("index", "environment", "said"),
    [
        (3, {}, "device `cuda:3` was asked for, this machine has `1`"),
        (0, {"CUDA_DOUBLE_DEVICES": "0"}, "CUDA_ERROR_NO_DEVICE"),
        (0, {"CUDA_DOUBLE_DRIVER_VERSION": "12040"}, "the driver is for CUDA 12.4"),
    ],
)
def test_a_device_that_cannot_be_used(index: int, environment: dict[str, str], said: str, double: Any) -> None:
    code, message = opened(index, **double.environment(), **environment)
    assert code == ExitCode.CANNOT
    assert said in message
    assert "\n" not in message


def test_the_gpu_report_fails_without_a_device(double: Any) -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "gpu_report.py"
    environment = {**os.environ, "LD_LIBRARY_PATH": ""}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == ExitCode.CANNOT
    assert "no CUDA driver" in done.stderr
    assert done.stdout == ""


def test_a_cache_that_cannot_be_written_is_only_a_note(tmp_path: Path, cuda_backend: Make) -> None:
    (tmp_path / "file").write_text("not a directory")
    backend = cuda_backend(cache_dir=tmp_path / "file" / "kernels")
    assert Step(backend).token(0)
    (note,) = backend.device.kernels.notes
    assert "not kept" in note


def test_kernels_are_kept_between_runs(tmp_path: Path, cuda_backend: Make) -> None:
    first, second = cuda_backend(cache_dir=tmp_path), cuda_backend(cache_dir=tmp_path)
    assert Step(first).token(0) == Step(second).token(0)
    assert first.device.kernels.compiled > 0
    assert second.device.kernels.compiled == 0


def test_a_kernel_that_does_not_compile_shows_the_line(cuda_driver: Any) -> None:
    from genai_cli.backends.cuda_device import compile_kernel

    with pytest.raises(GenaiError, match=r"wrong.*\(2\).*identifier \"nonsense\"") as caught:
        compile_kernel("__global__ void wrong() {\n  nonsense = 1;\n}\n", "wrong", "sm_90", "ptx")
    assert caught.value.exit_code is ExitCode.INTERNAL


def test_a_driver_that_refuses_the_image(cuda_backend: Make, double: Any) -> None:
    """The double runs PTX only: to a cubin it answers as a driver does to an image that it cannot read."""
    with pytest.raises(
        GenaiError, match="does not load the cubin made for `sm_90`: CUDA_ERROR_NO_BINARY_FOR_GPU"
    ) as caught:
        Step(cuda_backend(code_type="cubin", cache_dir=None)).token(0)
    assert caught.value.exit_code is ExitCode.CANNOT
    double.reports()


def test_an_architecture_nvrtc_does_not_know(cuda_driver: Any) -> None:
    from genai_cli.backends.cuda_device import compile_kernel

    with pytest.raises(GenaiError, match="architecture") as caught:
        compile_kernel("__global__ void f() {}", "f", "sm_999", "cubin")
    assert caught.value.exit_code is ExitCode.CANNOT


def test_no_nvrtc(cuda_driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from genai_cli.backends.cuda_device import compile_kernel

    def absent(*args: Any) -> None:
        raise RuntimeError('Failure finding "libnvrtc.so": not in site-packages, not in the system')

    monkeypatch.setattr("cuda.core.Program", absent)
    with pytest.raises(GenaiError, match=r"NVRTC.*libnvrtc.*CUDA 13 is needed") as caught:
        compile_kernel("", "none", "sm_90", "ptx")
    assert caught.value.exit_code is ExitCode.CANNOT


def test_a_fault_names_the_kernel(cuda_backend: Make, double: Any) -> None:
    backend = cuda_backend(wait_after_launch=True)
    short = backend.alias(backend.constant(np.zeros(4, np.float32)), (4,), F32)
    long = backend.empty((64,), F32)
    short.shape = (64,)
    with pytest.raises(GenaiError, match="`unary`") as caught:
        backend.record().call("Exp", [short], [long], {})
    assert caught.value.exit_code is ExitCode.INTERNAL
    assert "past the end" in double.reports()
    double.clear_error()


@pytest.mark.parametrize(("device", "index"), [("cpu", None), ("cuda", 0), ("cuda:3", 3)])
def test_device_names(device: str, index: int | None) -> None:
    assert device_index(device) == index


@pytest.mark.parametrize("device", ["cuda:", "cuda:-1", "cuda:x", "gpu", "", "cpu:0"])
def test_other_device_names_are_refused(device: str) -> None:
    with pytest.raises(GenaiError, match="wanted `cpu`, `cuda` or `cuda:N`"):
        open_backend(device)


def test_a_name_opens_its_own_backend(cuda_driver: Any) -> None:
    options = CudaOptions(code_type=cuda_driver.code_type, cache_dir=cuda_driver.cache_dir)
    assert open_backend("cuda:0", cuda=options).name == "cuda"
    assert open_backend("cpu", threads=1).name == "cpu"
    with pytest.raises(GenaiError, match="`cuda:99` was asked for"):
        open_backend("cuda:99", cuda=options)


FAULT = """
import sys
import numpy as np
from genai_cli.backends.cuda import CudaBackend, CudaOptions
from genai_cli.errors import GenaiError
backend = CudaBackend(0, CudaOptions(code_type=sys.argv[1]))
slot = backend.kv_slot(2, 4, np.dtype(np.float32))
backend.reserve(4)
try:
    backend._move_rows(slot, 64, 4, slot.address, slot.capacity, 2)  # to an address that nobody allocated
    backend.synchronize()
except GenaiError as error:
    print(error.message)
    sys.exit(int(error.exit_code))
"""


def test_a_fault_ends_the_process_cleanly(cuda_driver: Any) -> None:
    """Sticky: nothing works afterwards. The process still ends, at once, with 70 and the kernel's name."""
    environment = dict(os.environ)
    if cuda_driver.kind == "double":
        import cuda_double

        environment |= cuda_double.environment()
    command = [sys.executable, "-c", FAULT, cuda_driver.code_type]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == ExitCode.INTERNAL, done.stderr
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in done.stdout
    assert "`move_rows`" in done.stdout
