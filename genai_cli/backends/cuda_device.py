"""One CUDA device: context, compute stream, memory, pinned staging, and the cache of compiled kernels."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import numpy as np

from genai_cli.backends.cuda_launch import Launch
from genai_cli.errors import ExitCode, GenaiError

STAGING_BYTES = 16 << 20  # pinned; larger copies go through it piece by piece
STAGING_ALIGNMENT = 64
FAULT_BASE = 1 << 62  # kernels store it plus the offending value; 0 is no fault
DEFAULT_SHARED = 48 << 10  # bytes of dynamic shared memory a kernel may use unasked
MMA_ARCH = 80  # mma.sync m16n8k16 of f16 and bf16
CodeType = Literal["cubin", "ptx"]


@dataclass(frozen=True)
class CudaOptions:
    """How to use a device. `cache_dir`: compiled kernels are kept there between runs; None: not kept."""

    code_type: CodeType = "cubin"  # PTX is for drivers that translate it themselves
    cache_dir: Path | None = None
    capture: bool = True
    tensor_cores: bool = True  # where the device has those of sm_80
    wait_after_launch: bool = False  # slow; a kernel that faults is then named for certain


def _major() -> str:
    from cuda.bindings import __version__

    return str(__version__).split(".")[0]


def _missing(what: str, detail: str, hint: str) -> GenaiError:
    return GenaiError(f"`--device cuda` was asked for: {what} ({detail}); CUDA {_major()} is needed", hint=hint)


def open_device(index: int) -> Any:
    """cuda.core's Device, made current. GenaiError (exit 2) names the missing piece."""
    try:
        from cuda.bindings import driver
        from cuda.core import Device
    except ImportError as error:
        raise GenaiError(
            f"`--device cuda` was asked for: the Python package `cuda-python` is missing ({error}); CUDA 13 is needed",
            hint="pip install cuda-python",
        ) from error
    _check_driver(driver)
    count = _value(driver.cuDeviceGetCount(), "no CUDA device")
    if not 0 <= index < count:
        raise GenaiError(f"device `cuda:{index}` was asked for, this machine has `{count}`", hint="--device cuda:0")
    device = Device(index)
    device.set_current()
    return device


def _check_driver(driver: Any) -> None:
    hint = "run on a machine with an NVIDIA driver, or use --device cpu"
    try:
        version = _value(driver.cuDriverGetVersion(), "no CUDA driver")
    except GenaiError:
        raise
    except Exception as error:  # cuda.pathfinder has an exception type of its own for each way of not finding it
        raise _missing("no CUDA driver", f"libcuda.so.1: {_first_line(error)}", hint) from error
    if version // 1000 < int(_major()):
        found = f"the driver is for CUDA {version // 1000}.{version % 1000 // 10}"
        raise _missing("the CUDA driver is too old", found, "update the NVIDIA driver")
    _value(driver.cuInit(0), "no CUDA device")


def _value(result: tuple[Any, ...], what: str) -> Any:
    status, *values = result
    if int(status) != 0:
        raise _missing(what, f"the driver says {status.name}", "use --device cpu")
    return values[0] if values else None


def _first_line(error: BaseException) -> str:
    """The first sentence of a message: CUDA's go on for a paragraph."""
    return (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0].rstrip(".")


def kernel_source(name: str) -> str:
    """common.cuh and one family's .cu as one text."""
    checkout = Path(__file__).parents[2] / "native" / "cuda"  # an editable install's copies may be old
    folder = checkout if checkout.is_dir() else importlib.resources.files("genai_cli") / "cuda"
    try:
        return (folder / "common.cuh").read_text() + (folder / f"{name}.cu").read_text()
    except FileNotFoundError as error:
        raise GenaiError(f"the CUDA kernel source `{name}.cu` is not installed") from error


class KernelCache:
    """Compiled kernels by (source, instantiation, arch, code type): in memory, and on disk where that is possible."""

    def __init__(self, device: int, arch: str, code_type: CodeType, directory: Path | None) -> None:
        self.device, self.arch, self.code_type, self.directory = device, arch, code_type, directory
        self.notes: list[str] = []
        self.compiled = 0
        self._kernels: dict[tuple[str, str], Any] = {}
        self._allowed: dict[tuple[str, str], int] = {}

    def kernel(self, source: str, function: str) -> Any:
        """The kernel, compiled at first use."""
        key = (source, function)
        if key not in self._kernels:
            self._kernels[key] = self._load(self._object(source, function), function)
        return self._kernels[key]

    def _load(self, made: Any, function: str) -> Any:
        """The driver reads an image only now, and may be too old for it."""
        from cuda.core._utils.cuda_utils import CUDAError

        try:
            return made.get_kernel(function)
        except CUDAError as error:
            other = "ptx" if self.code_type == "cubin" else "cubin"
            raise GenaiError(
                f"the CUDA driver does not load the {self.code_type} made for `{self.arch}`: {_first_line(error)}",
                hint=f"update the NVIDIA driver, or have kernels compiled to {other}",
            ) from error

    def allow_shared(self, source: str, function: str, nbytes: int) -> None:
        """More dynamic shared memory than every kernel has must be asked for, once."""
        if nbytes <= self._allowed.get((source, function), DEFAULT_SHARED):
            return
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        handle = self.kernel(source, function).handle
        _value(
            driver.cuKernelSetAttribute(attribute, nbytes, handle, self.device), f"`{nbytes}` bytes of shared memory"
        )
        self._allowed[source, function] = nbytes

    def _object(self, source: str, function: str) -> Any:
        text = kernel_source(source)
        file = self._file(text, function)
        found = self._read(file)
        if found is not None:
            return found
        made = compile_kernel(text, function, self.arch, self.code_type)
        self.compiled += 1
        self._write(file, made)
        return made

    def _file(self, text: str, function: str) -> Path | None:
        if self.directory is None:
            return None
        from cuda.bindings import __version__

        key = "\0".join((text, function, self.arch, self.code_type, str(__version__)))
        return self.directory / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.{self.code_type}"

    def _read(self, file: Path | None) -> Any | None:
        if file is None or not file.exists():
            return None
        from cuda.core import ObjectCode

        names, _, code = file.read_bytes().partition(b"\n")
        load = ObjectCode.from_cubin if self.code_type == "cubin" else ObjectCode.from_ptx
        return load(code, symbol_mapping={key: value.encode() for key, value in json.loads(names).items()})

    def _write(self, file: Path | None, made: Any) -> None:
        """Whole or not at all: another process may read at any time."""
        if file is None:
            return
        names = {key: value if isinstance(value, str) else value.decode() for key, value in made.symbol_mapping.items()}
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
                temporary.write(json.dumps(names).encode() + b"\n" + bytes(made.code))
            os.replace(temporary.name, file)
        except OSError as error:
            self.notes.append(f"compiled kernels are not kept: `{file.parent}` is not writable ({error.strerror})")
            self.directory = None


def compile_kernel(text: str, function: str, arch: str, code_type: CodeType) -> Any:
    """NVRTC: one instantiation as PTX or cubin. No fast math: results are compared with another engine's."""
    from cuda.core import Program

    half, brain = "__half" in function, "__nv_bfloat16" in function
    defines = [name for name, used in (("GENAI_F16", half), ("GENAI_BF16", brain)) if used]
    options = program_options(function, arch, defines)
    try:
        return Program(text, "c++", options).compile(code_type, name_expressions=(function,))
    except GenaiError:
        raise
    except Exception as error:  # NVRTCError, or pathfinder's errors when the library itself is missing
        raise _compile_error(error, function) from error


def program_options(name: str, arch: str, defines: list[str]) -> Any:
    """C++17 for `arch`. 16-bit floats need cuda_fp16.h: beside the runtime's package, else in NVRTC itself (new ones)."""
    from cuda import pathfinder
    from cuda.core import ProgramOptions

    options: dict[str, Any] = {"std": "c++17", "arch": arch, "define_macro": defines or None, "name": name}
    find = getattr(pathfinder, "find_nvidia_header_directory", None)  # old ones have none
    headers = find("cudart") if defines and find else None
    if headers:
        options["include_path"] = [headers]
    elif defines and "use_bundled_headers" in signature(ProgramOptions).parameters:
        options["use_bundled_headers"] = True
    elif defines:
        raise _missing("CUDA's headers are missing", "cuda_fp16.h", "pip install nvidia-cuda-runtime")
    return ProgramOptions(**options)


def _compile_error(error: Exception, function: str) -> GenaiError:
    text = str(error)
    if "gpu-architecture" in text:
        return GenaiError(
            f"NVRTC does not know this device's architecture: {_first_line(error)}",
            hint="pip install --upgrade nvidia-cuda-nvrtc",
        )
    if "error:" in text or "NVRTC_ERROR_COMPILATION" in text:
        line = next((line for line in text.splitlines() if "error" in line and "(" in line), _first_line(error))
        return GenaiError(f"the CUDA kernel `{function}` does not compile: {line.strip()}", exit_code=ExitCode.INTERNAL)
    return _missing("NVRTC, the run-time compiler, is missing", _first_line(error), "pip install nvidia-cuda-nvrtc")


class Memory:
    """Device memory of one tensor. Freed in stream order: after all work queued before, from whichever thread."""

    __slots__ = ("_device", "address", "buffer", "nbytes")

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self._device, self.nbytes = device, nbytes
        self.buffer = device.take(nbytes)
        self.address = int(self.buffer.handle)

    def __del__(self) -> None:
        if hasattr(self, "address") and not sys.is_finalizing():  # a dying process gives everything back anyway
            self._device.give_back(self)


@dataclass
class Counters:
    """What crossed the bus and what was launched, for tests and reports."""

    launches: int = 0
    htod: int = 0
    htod_bytes: int = 0
    dtoh: int = 0
    dtoh_bytes: int = 0
    kernels: Counter[str] = field(default_factory=Counter)


class CudaDevice:
    """Device `index` with one compute stream. Everything here happens in that stream's order."""

    def __init__(self, index: int, options: CudaOptions) -> None:
        from cuda.bindings import driver
        from cuda.core import LegacyPinnedMemoryResource

        self._driver = driver
        self.core = open_device(index)
        self.options = options
        self.name, self.arch = str(self.core.name), f"sm_{self.core.arch}"
        self.tensor_cores = options.tensor_cores and int(self.core.arch.rstrip("af")) >= MMA_ARCH
        self.num_sms = int(self.core.properties.multiprocessor_count)
        self.stream = self.core.create_stream()
        self.kernels = KernelCache(index, self.arch, options.code_type, options.cache_dir)
        self.counters = Counters()
        self.allocated_bytes = 0
        self._pinned = LegacyPinnedMemoryResource()
        self._fault_buffer, fault = self._pin(8)
        self._fault = fault.view(np.int64)
        self._fault[0] = 0
        self.fault_address = int(self._fault_buffer.handle)
        self._staging_buffer, self._staging = self._pin(STAGING_BYTES)
        self._staged = 0  # bytes of staging that queued copies may still use
        self._since_wait: list[str] = []
        self._capturing = False
        self._freed_in_capture: list[Any] = []

    def _pin(self, nbytes: int) -> tuple[Any, np.ndarray]:
        buffer = self._pinned.allocate(nbytes, stream=None)
        return buffer, np.from_dlpack(buffer).view(np.uint8)

    # -- memory ------------------------------------------------------------------------------------------------------

    def take(self, nbytes: int) -> Any:
        """A buffer from the stream-ordered pool. GenaiError says what was asked and what there is."""
        self.core.set_current()
        try:
            buffer = self.core.allocate(max(nbytes, 1), stream=self.stream)
        except Exception as error:
            if "OUT_OF_MEMORY" not in str(error):
                raise
            raise self._out_of_memory(nbytes) from error
        self.allocated_bytes += nbytes
        return buffer

    def _out_of_memory(self, nbytes: int) -> GenaiError:
        free, total = _value(self._driver.cuMemGetInfo(), "no memory information"), self.allocated_bytes
        found = f"`{nbytes}` bytes were asked for, `{free}` are free, `{total}` are held by this process"
        return GenaiError(
            f"out of memory on `{self.name}`: {found}",
            hint="use a smaller context, a quantized model, or --device cpu",
        )

    def give_back(self, memory: Memory) -> None:
        """Free in stream order; the last reference may die on any thread, which then has no current context."""
        self.allocated_bytes -= memory.nbytes
        if self._capturing:
            self._freed_in_capture.append(memory.buffer)
            return
        self.core.set_current()
        memory.buffer.close(self.stream)

    @contextmanager
    def capture(self) -> Iterator[Any]:
        """A graph builder on the stream. What the garbage collector frees meanwhile is freed afterwards: a free in the
        captured stream would become part of the graph, and happen at every replay."""
        builder = self.stream.create_graph_builder()
        self._capturing = True
        try:
            yield builder
        finally:
            self._capturing = False
            freed, self._freed_in_capture = self._freed_in_capture, []
            for buffer in freed:
                buffer.close(self.stream)

    # -- copies ------------------------------------------------------------------------------------------------------

    def upload(self, address: int, data: np.ndarray) -> None:
        """Queue a copy of contiguous bytes [n] to the device; the source may be reused at once."""
        for start in range(0, data.size, STAGING_BYTES):
            piece = data[start : start + STAGING_BYTES]
            offset = self._reserve(piece.size)
            self._staging[offset : offset + piece.size] = piece
            self._copy(address + start, int(self._staging_buffer.handle) + offset, piece.size)
        self.counters.htod += 1
        self.counters.htod_bytes += data.size

    def download(self, address: int, nbytes: int) -> np.ndarray:
        """Bytes [n] from the device, after all queued work."""
        result = np.empty(nbytes, np.uint8)
        for start in range(0, nbytes, STAGING_BYTES):
            count = min(STAGING_BYTES, nbytes - start)
            offset = self._reserve(count)
            self._copy(int(self._staging_buffer.handle) + offset, address + start, count)
            self.wait()
            result[start : start + count] = self._staging[offset : offset + count]
        self.counters.dtoh += 1
        self.counters.dtoh_bytes += nbytes
        return result

    def _reserve(self, nbytes: int) -> int:
        """An offset into staging that no queued copy uses."""
        offset = -(-self._staged // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
        if offset + nbytes > STAGING_BYTES:
            self.wait()
            offset = 0
        self._staged = offset + nbytes
        return offset

    def _copy(self, to: int, source: int, nbytes: int) -> None:
        (status,) = self._driver.cuMemcpyAsync(to, source, nbytes, self.stream.handle)
        if int(status) != 0:
            raise self._fault_error(status.name)

    # -- work --------------------------------------------------------------------------------------------------------

    def launch(self, launch: Launch, builder: Any = None) -> None:
        """Queue a kernel, or add it to the graph being built."""
        from cuda.core import LaunchConfig
        from cuda.core import launch as core_launch

        kernel = self.prepare(launch)
        config = LaunchConfig(grid=launch.grid, block=launch.block, shmem_size=launch.shared)
        with self._naming(launch.name):
            core_launch(builder if builder is not None else self.stream, config, kernel, *launch.args)
            if builder is None and self.options.wait_after_launch:
                self.stream.sync()
        if builder is None:
            self.counters.launches += 1
            self.counters.kernels[launch.name] += 1
            self.ran((launch.name,))

    def prepare(self, launch: Launch) -> Any:
        """The kernel, compiled and loaded: neither may happen while a graph is captured."""
        self.kernels.allow_shared(launch.source, launch.function, launch.shared)
        return self.kernels.kernel(launch.source, launch.function)

    def ran(self, names: Sequence[str]) -> None:
        """Remember what was queued since the last wait: a fault is one of these."""
        self._since_wait += names

    def wait(self) -> None:
        """Wait for the stream. GenaiError (exit 70) when a kernel faulted; values out of range are exit 2."""
        with self._naming(None):
            self.stream.sync()
        self._staged = 0
        self._since_wait.clear()
        if self._fault[0]:
            code = int(self._fault[0])
            self._fault[0] = 0
            raise GenaiError(f"index or position `{code - FAULT_BASE}` is outside its table")

    @contextmanager
    def _naming(self, kernel: str | None) -> Iterator[None]:
        from cuda.core._utils.cuda_utils import CUDAError  # not exported, but what every call raises

        try:
            yield
        except CUDAError as error:
            raise self._fault_error(_first_line(error), kernel) from error

    def _fault_error(self, what: str, kernel: str | None = None) -> GenaiError:
        names = [kernel] if kernel else list(dict.fromkeys(self._since_wait))[-8:]
        listed = ", ".join(f"`{name}`" for name in names) or "none"
        return GenaiError(
            f"a CUDA kernel failed on `{self.name}`: {what}; running since the last wait: {listed}",
            hint="--debug waits after every kernel and names the one that failed",
            exit_code=ExitCode.INTERNAL,
        )

    def __del__(self) -> None:
        """Pinned memory dies with this object, and queued copies may still use it: wait, whoever drops it."""
        if not hasattr(self, "_staging_buffer") or sys.is_finalizing():
            return
        self.core.set_current()
        with suppress(GenaiError), self._naming(None):  # after a fault there is nothing to wait for, and it was told
            self.stream.sync()


def as_bytes(array: np.ndarray) -> np.ndarray:
    """A contiguous array's bytes [n]; a copy only where it is not contiguous."""
    array = np.ascontiguousarray(array)
    return array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)
