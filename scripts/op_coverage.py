"""Print what runs where: op x dtype x backend, from the registry. Without a kernel, numpy runs on the host.

python scripts/op_coverage.py [--markdown] [--kernels]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import numpy as np

from genai_cli.ops import OpDef, table
from genai_cli.ops.dtypes import BFLOAT16, FLOAT16

GROUPS = {
    "f32": {np.dtype(np.float32)},
    "f16": {FLOAT16},
    "bf16": {BFLOAT16},
    "f64": {np.dtype(np.float64)},
    "int": {np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)} | {np.dtype(f"uint{bits}") for bits in (8, 16, 32)},
    "bool": {np.dtype(np.bool_)},
}
BACKENDS = ("cpu", "cuda")


def names(dtypes: Iterable[np.dtype]) -> str:
    """`f32 f16 bf16`, or `all` for every group."""
    there = set(dtypes)
    found = [name for name, group in GROUPS.items() if group <= there]
    return "all" if len(found) == len(GROUPS) else " ".join(found)


def rows(only_kernels: bool) -> list[list[str]]:
    """One row an op: name, opsets, dtypes of each backend's kernel."""
    merged: dict[str, list[OpDef]] = {}
    for entry in table():
        merged.setdefault(entry.key, []).append(entry)
    made = []
    for key, entries in merged.items():
        newest = entries[-1]
        if only_kernels and not newest.kernels:
            continue
        cells = [names(newest.kernels[b].dtypes) if b in newest.kernels else "" for b in BACKENDS]
        made.append([key, ", ".join(f"{entry.since}+" for entry in entries), *cells])
    return made


def text(table_rows: list[list[str]], header: list[str]) -> str:
    """Aligned columns."""
    widths = [max(len(row[i]) for row in [header, *table_rows]) for i in range(len(header))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in [header, *table_rows]
    )


def markdown(table_rows: list[list[str]], header: list[str]) -> str:
    """A GitHub table."""
    lines = [header, ["---"] * len(header), *table_rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="a Markdown table")
    parser.add_argument("--kernels", action="store_true", help="only ops with a compiled kernel")
    options = parser.parse_args()
    header = ["op", "opset", *BACKENDS]
    made = rows(options.kernels)
    print(markdown(made, header) if options.markdown else text(made, header))
    total, covered = len(rows(False)), {b: sum(bool(row[2 + i]) for row in made) for i, b in enumerate(BACKENDS)}
    if not options.markdown:
        print(f"\n{total} ops; with a kernel: " + ", ".join(f"{b} {n}" for b, n in covered.items()))


if __name__ == "__main__":
    main()
