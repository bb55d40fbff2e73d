"""A CPU double of the CUDA driver: the real cuda-python and NVRTC run against it, and it runs the kernels' own PTX.

Streams defer, memory is poisoned and checked to the byte, and planted bugs are caught (test_planted_bugs.py). Options,
read from the environment: CUDA_DOUBLE_MODE (lazy | thread), CUDA_DOUBLE_SEED, CUDA_DOUBLE_MEMORY_MB,
CUDA_DOUBLE_DRIVER_VERSION, CUDA_DOUBLE_DEVICES.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = sorted((HERE / "src").glob("*.cpp"))
RUNTIME = [HERE / "translate.py", HERE / "ptx_instructions.py", *sorted((HERE / "src").glob("*.h"))]


def _digest(files: list[Path]) -> str:
    return hashlib.blake2b(b"\0".join(file.read_bytes() for file in files), digest_size=8).hexdigest()


def cache_dir() -> Path:
    """Where built things are kept between runs, by content."""
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    directory = base / "genai-cuda-double" / _digest([*SOURCES, *RUNTIME])
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _compile(source: Path, target: Path, include: str) -> None:
    flags = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", f"-I{include}"]
    subprocess.run(["g++", *flags, "-c", str(source), "-o", str(target)], check=True)


@cache
def build() -> Path:
    """The directory that holds `libcuda.so.1`, built when missing."""
    import cuda.pathfinder

    directory = cache_dir()
    library = directory / "libcuda.so.1"
    if not library.exists():
        include = cuda.pathfinder.find_nvidia_header_directory("cudart")
        objects = [directory / f"{source.stem}.{os.getpid()}.o" for source in SOURCES]
        for source, target in zip(SOURCES, objects, strict=True):
            _compile(source, target, include)
        made = directory / f"libcuda.{os.getpid()}.so"
        subprocess.run(
            ["g++", "-shared", "-Wl,-soname,libcuda.so.1", *map(str, objects), "-o", str(made), "-lpthread"], check=True
        )
        os.replace(made, library)
        for target in objects:
            target.unlink()
    return directory


def environment() -> dict[str, str]:
    """What a subprocess needs to run on the double."""
    directory = build()
    search = os.environ.get("LD_LIBRARY_PATH")
    return {
        "LD_LIBRARY_PATH": f"{directory}:{search}" if search else str(directory),
        "CUDA_DOUBLE_CACHE": str(directory),
        "CUDA_DOUBLE_TRANSLATE": f"{sys.executable} {HERE / 'translate.py'}",
    }


@cache
def preload() -> ctypes.CDLL:
    """Make the double this process's driver. Must come before the first driver call; importing cuda before is fine."""
    for name in ("CUDA_DOUBLE_CACHE", "CUDA_DOUBLE_TRANSLATE"):
        os.environ[name] = environment()[name]
    library = ctypes.CDLL(str(build() / "libcuda.so.1"))
    library.cuda_double_memory_used.restype = ctypes.c_size_t
    library.cuda_double_set_memory.argtypes = [ctypes.c_size_t]
    return library


def reports() -> str:
    """What the double saw go wrong since the last call."""
    buffer = ctypes.create_string_buffer(65536)
    preload().cuda_double_reports(buffer, len(buffer))
    return buffer.value.decode()


def leaks() -> tuple[int, str]:
    """Live allocations: how many, and which."""
    buffer = ctypes.create_string_buffer(65536)
    count = preload().cuda_double_leaks(buffer, len(buffer))
    return count, buffer.value.decode()


def memory_used() -> int:
    """Device bytes allocated now."""
    return int(preload().cuda_double_memory_used())


def set_memory(nbytes: int) -> None:
    """The size of the device's memory from now on."""
    preload().cuda_double_set_memory(nbytes)


def clear_error() -> None:
    """Forget a kernel fault, which a real context never does."""
    preload().cuda_double_clear_error()
