"""Every op the project knows, one module a family. Importing this package fills the registry."""

from genai_cli.ops import kernels, kernels_cuda  # noqa: F401  (registers the families, then their kernels)
from genai_cli.ops.registry import OpDef, lookup, run_reference, table

__all__ = ["OpDef", "lookup", "run_reference", "table"]
