"""Every op the project knows, one module a family. Importing this package fills the registry."""

from genai_cli.ops import (  # noqa: F401  (imported to register)
    attention,
    cast,
    conv,
    elementwise,
    gather,
    group_query_attention,
    internal,
    kernels,
    matmul,
    moe,
    norms,
    quant,
    recurrent,
    reduce,
    rotary,
    shape,
    unary,
)
from genai_cli.ops.registry import OpDef, lookup, run_reference, table

__all__ = ["OpDef", "lookup", "run_reference", "table"]
