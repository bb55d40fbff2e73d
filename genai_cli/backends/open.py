"""From a device's name to its backend."""

from __future__ import annotations

from genai_cli.backends.base import Backend
from genai_cli.backends.cuda_device import CudaOptions
from genai_cli.errors import GenaiError


def device_index(device: str) -> int | None:
    """None for `cpu`, n for `cuda:n` (`cuda` is `cuda:0`). GenaiError for any other name."""
    if device == "cpu":
        return None
    name, separator, number = device.partition(":")
    if name != "cuda" or (separator and not number.isdecimal()):
        raise GenaiError(f"device `{device}` was asked for, wanted `cpu`, `cuda` or `cuda:N`", hint="--device cpu")
    return int(number or 0)


def open_backend(
    device: str = "cpu", *, threads: int | None = None, isa: str | None = None, cuda: CudaOptions | None = None
) -> Backend:
    """The backend of a device, never another's. GenaiError (exit 2) names what is missing; nothing is imported that the
    device does not need."""
    index = device_index(device)
    if index is None:
        from genai_cli.backends.cpu import CpuBackend

        return CpuBackend(threads=threads, isa=isa)
    from genai_cli.backends.cuda import CudaBackend

    return CudaBackend(index, cuda)
