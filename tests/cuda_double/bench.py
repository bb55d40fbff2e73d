"""Kernels straight on a backend's stream, outside the product's launch tables."""

from __future__ import annotations

from typing import Any

import numpy as np

WARP = 32


class Bench:
    """Compile and launch a few lines of CUDA."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.device = backend, backend.device

    def kernel(self, source: str, name: str) -> Any:
        from cuda.core import Program, ProgramOptions

        options = ProgramOptions(std="c++17", arch=self.device.arch, use_bundled_headers=True)
        made = Program(source, "c++", options).compile(self.device.options.code_type, name_expressions=(name,))
        return made.get_kernel(name)

    def launch(
        self, kernel: Any, *args: Any, grid: int = 1, block: int = WARP, shared: int = 0, stream: Any = None
    ) -> None:
        from cuda.core import LaunchConfig, launch

        config = LaunchConfig(grid=grid, block=block, shmem_size=shared)
        launch(stream or self.device.stream, config, kernel, *args)

    def tensor(self, array: np.ndarray) -> Any:
        return self.backend.constant(array)
