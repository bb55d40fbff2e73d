"""What a CUDA device says of itself: attributes, a measured copy, and the driver's answers to mistakes. They calibrate the
CPU double."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

COPY_BYTES, COPIES = 256 << 20, 20
ATTRIBUTES = (
    "COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT", "MAX_THREADS_PER_BLOCK",
    "WARP_SIZE", "MAX_SHARED_MEMORY_PER_BLOCK", "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", "L2_CACHE_SIZE",
    "GLOBAL_MEMORY_BUS_WIDTH", "MEMORY_CLOCK_RATE", "CLOCK_RATE", "MEMORY_POOLS_SUPPORTED",
    "UNIFIED_ADDRESSING", "MAX_GRID_DIM_X", "MAX_GRID_DIM_Y",
)  # fmt: skip

# Each in a process of its own, because a fault is sticky. `probe(driver, backend)` returns what the driver said.
MISTAKES = {
    "launch with 2048 threads a block": "launch(kernel('extern \"C\" __global__ void f() {}', 'f'), block=2048)",
    "launch with 100 KiB of shared memory unasked":
        "launch(kernel('extern \"C\" __global__ void f() {}', 'f'), shared=100 << 10)",
    "read of address 64": "launch(kernel('extern \"C\" __global__ void f() { *(int*)64 = 1; }', 'f')), wait()",
    "misaligned store":
        "launch(kernel('extern \"C\" __global__ void f(char* x) { *(int*)(x + 1) = 1; }', 'f'), memory()), wait()",
    "trap": "launch(kernel('extern \"C\" __global__ void f() { __trap(); }', 'f')), wait()",
    "wait inside a capture": "capture(wait)",
    "allocation of 1 PiB": "backend.empty((1 << 50,), np.dtype(np.uint8))",
    "a second free": "free_twice()",
}  # fmt: skip
PROBE = """
import sys
import numpy as np
from genai_cli.backends.cuda import CudaBackend, CudaOptions
backend = CudaBackend(0, CudaOptions(code_type=sys.argv[1]))
device = backend.device

def kernel(source, name):
    from cuda.core import Program, ProgramOptions
    made = Program(source, "c++", ProgramOptions(std="c++17", arch=device.arch)).compile(sys.argv[1])
    return made.get_kernel(name)

def launch(kernel, *args, block=32, shared=0):
    from cuda.core import LaunchConfig, launch as queue
    queue(device.stream, LaunchConfig(grid=1, block=block, shmem_size=shared), kernel, *args)

def wait():
    device.stream.sync()

def memory():
    global kept
    kept = backend.empty((64,), np.dtype(np.uint8))
    return np.uint64(kept.address)

def capture(inside):
    builder = device.stream.create_graph_builder()
    builder.begin_building()
    inside()

def free_twice():
    from cuda.bindings import driver
    status, address = driver.cuMemAlloc(256)
    driver.cuMemFree(address)
    (status,) = driver.cuMemFree(address)
    print(status.name)

try:
    eval(sys.argv[2])
except BaseException as error:
    print(str(error).splitlines()[0].split(":")[0])
sys.stdout.flush()
import os
os._exit(0)  # after a fault even destructors fail
"""


def device_facts(code_type: str) -> dict[str, Any]:
    """Name, driver, attributes, and a measured device-to-device copy in GB/s."""
    from cuda.bindings import __version__, driver

    backend = open_backend(code_type)
    attributes = {}
    for name in ATTRIBUTES:
        which = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        attributes[name.lower()] = int(driver.cuDeviceGetAttribute(which, 0)[1])
    return {
        "name": backend.device.name,
        "arch": backend.device.arch,
        "driver": int(driver.cuDriverGetVersion()[1]),
        "cuda_bindings": str(__version__),
        "cuda_core": installed("cuda-core"),
        "nvrtc": installed("nvidia-cuda-nvrtc"),
        "copy_gb_s": round(copy_speed(backend), 1),
        "attributes": attributes,
    }


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not a package"


def open_backend(code_type: str, **options: Any) -> Any:
    from genai_cli.backends.cuda import CudaBackend, CudaOptions

    return CudaBackend(0, CudaOptions(code_type=code_type, **options))


def copy_speed(backend: Any) -> float:
    """Bytes read and written per second, in GB/s, of the driver's own copy."""
    from cuda.bindings import driver

    kind = np.dtype(np.uint8)
    a, b = backend.empty((COPY_BYTES,), kind), backend.empty((COPY_BYTES,), kind)
    stream = backend.device.stream

    def copies(count: int) -> float:
        backend.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            driver.cuMemcpyAsync(b.address, a.address, COPY_BYTES, stream.handle)
        backend.synchronize()
        return time.perf_counter() - start

    copies(2)
    return 2 * COPY_BYTES * COPIES / copies(COPIES) / 1e9


def error_codes(code_type: str) -> dict[str, str]:
    """What the driver says to each mistake."""
    found = {}
    for name, mistake in MISTAKES.items():
        command = [sys.executable, "-c", PROBE, code_type, mistake]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        lines = done.stdout.strip().splitlines()
        found[name] = lines[-1] if lines else f"exit {done.returncode}"
    return found
