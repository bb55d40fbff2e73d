"""What paging costs and saves, in one alternating run: prefix reuse, page operations, mirror against memcpy.

python scripts/bench_kv.py models/smollm2-135m-int4
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from genai_cli.backends.cpu import copy_table
from genai_cli.generate import Limits
from genai_cli.kv.page_table import PageTable
from genai_cli.kv.pages import PagePool
from genai_cli.model import Ask, Model, OpenOptions, open_model

SHARED, OWN, PROMPTS, ROUNDS = 512, 8, 32, 9


def median_s(run: Callable[[], object]) -> float:
    """Median seconds of ROUNDS runs."""
    spent = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        run()
        spent.append(time.perf_counter() - started)
    return statistics.median(spent)


def first_tokens(model: Model, prompts: list[tuple[int, ...]]) -> list[float]:
    """TTFT of each prompt, in order."""
    asks = [Ask(prompt_ids=ids, limits=Limits(max_new_tokens=1, ignore_eos=True)) for ids in prompts]
    return [model.ask(ask).generated.timings.ttft_s or 0.0 for ask in asks]


def reuse(path: Path) -> None:
    """A batch that shares 512 tokens, with and without the prefix cache."""
    rng = np.random.default_rng(0)
    shared = rng.integers(10, 1000, SHARED).tolist()
    prompts = [(*shared, *rng.integers(10, 1000, OWN).tolist()) for _ in range(PROMPTS)]
    warm_model, cold_model = open_model(path), open_model(path, OpenOptions(prefix_cache=False))
    first_tokens(cold_model, prompts[:1])
    warm, cold = first_tokens(warm_model, prompts), first_tokens(cold_model, prompts[:6])
    ratio = statistics.median(warm[1:]) / statistics.median(cold)
    print(f"TTFT of {PROMPTS} prompts sharing {SHARED} tokens: cold {statistics.median(cold) * 1e3:.1f} ms, "
          f"warm {statistics.median(warm[1:]) * 1e3:.1f} ms, warm/cold {ratio:.3f}")  # fmt: skip
    kv = warm_model.kv
    assert kv is not None
    print(f"KV bytes a token: {kv.layout.bytes_per_token}")


def mirror(path: Path) -> None:
    """Mirroring rows into pages against a plain copy of the same rows."""
    runner = open_model(path).runner
    runner.step(np.arange(SHARED) + 10)
    rows = runner.kv_rows(0, SHARED)
    packed = [np.ascontiguousarray(array) for array in rows]
    targets = [np.empty_like(array) for array in packed]
    table = PageTable(PagePool(runner.kv_layout, 16, SHARED // 16), copy=copy_table)
    table.write(0, rows)

    def plain() -> None:
        for target, source in zip(targets, packed, strict=True):
            target[...] = source

    num_bytes = sum(array.nbytes for array in packed)
    paged, copied = median_s(lambda: table.write(0, rows)), median_s(plain)
    print(f"mirror {num_bytes / paged / 1e9:.2f} GB/s, memcpy of the same rows {num_bytes / copied / 1e9:.2f} GB/s, "
          f"ratio {copied / paged:.2f}")  # fmt: skip


def pages(path: Path) -> None:
    """Allocations and releases a second."""
    pool = PagePool(open_model(path).runner.kv_layout, 16, 64)
    count = 20000

    def churn() -> None:
        for _ in range(count):
            pool.release(pool.allocate())

    print(f"page allocate + release: {count / median_s(churn) / 1e6:.2f} million a second")


if __name__ == "__main__":
    for part in (reuse, mirror, pages):
        part(Path(sys.argv[1]))
