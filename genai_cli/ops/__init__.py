"""Every op the project knows, one module a family. Importing this package fills the registry."""

from genai_cli.ops import cast, elementwise, gather, reduce, shape, unary
from genai_cli.ops.registry import OpDef, lookup, run_reference, table

__all__ = ["OpDef", "cast", "elementwise", "gather", "lookup", "reduce", "run_reference", "shape", "table", "unary"]
