"""What tests of every kind share: a CUDA driver for those that ask for one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # `cuda_double` is a package of the tests

DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg")  # Linux; Windows' subsystem for it


@dataclass(frozen=True)
class Driver:
    """A real device, or the CPU double. A device takes cubins; the double runs PTX."""

    kind: Literal["device", "double"]
    code_type: Literal["cubin", "ptx"]
    cache_dir: Path


def has_gpu() -> bool:
    """Asked of the system, not of the driver: once loaded, that could not be replaced any more."""
    return any(Path(file).exists() for file in DEVICE_FILES)


@pytest.fixture(scope="session")
def cuda_driver() -> Iterator[Driver]:
    """The real driver where there is a GPU, else the double, preloaded for this process."""
    with pytest.MonkeyPatch.context() as patch:
        if "XDG_CACHE_HOME" not in os.environ:  # the double, compiled kernels and CUDA's headers stay with the checkout
            patch.setenv("XDG_CACHE_HOME", str(ROOT / "build" / "test-cache"))
        if has_gpu():
            yield Driver("device", "cubin", Path(os.environ["XDG_CACHE_HOME"]) / "kernels")
            return
        import cuda_double

        cuda_double.preload()
        yield Driver("double", "ptx", cuda_double.cache_dir() / "kernels")


@pytest.fixture
def cuda_backend(cuda_driver: Driver) -> Iterator[Callable[..., Any]]:
    """Makes backends on device 0. On the double nothing may have gone wrong unseen when the test ends."""
    from genai_cli.backends.cuda import CudaBackend, CudaOptions

    def make(**options: Any) -> CudaBackend:
        chosen = {"code_type": cuda_driver.code_type, "cache_dir": cuda_driver.cache_dir, **options}
        return CudaBackend(0, CudaOptions(**chosen))

    yield make
    if cuda_driver.kind == "double":
        import cuda_double

        left = cuda_double.reports()
        cuda_double.clear_error()
        assert not left, f"the driver double reports: {left}"


@pytest.fixture
def double(cuda_driver: Driver) -> Any:
    """The double itself, for tests of what only it can see."""
    if cuda_driver.kind != "double":
        pytest.skip("a real device is here: it cannot tell")
    import cuda_double

    return cuda_double
