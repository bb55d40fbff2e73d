"""Micro-benchmarks of everything between kernels: sampling, logit processing, pages, text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from genai_cli.backends.cpu import copy_table
from genai_cli.bench.micro import Case
from genai_cli.kv.layout import KvLayout
from genai_cli.kv.page_table import PageTable
from genai_cli.kv.pages import DEFAULT_PAGE_SIZE, PagePool
from genai_cli.sampling import SamplingOptions, adjusted, sample
from genai_cli.text.tokenizer import Tokenizer

HISTORY = 512  # tokens that penalties look back on, and that pages hold
PAGES = 64
TEXT = (
    "The quick brown fox jumps over the lazy dog. Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. "
    "def add(a: int, b: int) -> int:\n    return a + b\n"
) * 8
SAMPLERS = {
    "greedy": SamplingOptions(),
    "temperature": SamplingOptions(greedy=False, temperature=0.8),
    "top-k-50": SamplingOptions(greedy=False, top_k=50),
    "top-p-0.9": SamplingOptions(greedy=False, top_p=0.9),
    "min-p-0.05": SamplingOptions(greedy=False, min_p=0.05),
}
PROCESSORS = {
    "repetition-penalty": SamplingOptions(repetition_penalty=1.1),
    "no-repeat-3-gram": SamplingOptions(no_repeat_ngram=3),
}
Makers = dict[str, Callable[[], Case]]


def sampling_cases(vocab_size: int) -> Makers:
    """One token from logits [V] by every way of choosing, and what is done to logits before."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(vocab_size).astype(np.float32) * 4
    history = rng.integers(0, vocab_size, HISTORY).tolist()
    shape = f"V {vocab_size}"

    def case(name: str, call: Callable[[], object]) -> Case:
        return Case(name, shape, call, num_bytes=logits.nbytes, num_items=1, items="tokens")

    made: Makers = {}
    for name, options in SAMPLERS.items():
        call = partial(sample, logits, options, history, 0)
        made[f"sample.{name}"] = partial(case, f"sample.{name}", call)
    for name, options in PROCESSORS.items():
        process = partial(adjusted, logits, options, history, 0, ())
        made[f"logits.{name}"] = partial(case, f"logits.{name}", process)
    return made


def page_cases(layout: KvLayout) -> Makers:
    """Taking and giving back pages, rows into pages and back, a page copied on write; beside them a plain copy."""
    if not layout.components:
        return {}
    rng = np.random.default_rng(0)
    rows = [
        rng.standard_normal((c.num_heads, HISTORY, c.head_dim), np.float32).astype(c.dtype) for c in layout.components
    ]
    num_bytes = sum(array.nbytes for array in rows)
    shape = f"{HISTORY} tokens × {layout.bytes_per_token} bytes"
    table = PageTable(PagePool(layout, DEFAULT_PAGE_SIZE, PAGES), copy=copy_table)
    table.write(0, rows)
    pool = PagePool(layout, DEFAULT_PAGE_SIZE, PAGES)
    targets = [np.empty_like(array) for array in rows]

    def churn() -> None:
        for page in [pool.allocate() for _ in range(PAGES)]:
            pool.release(page)

    def plain() -> None:
        for target, source in zip(targets, rows, strict=True):
            target[...] = source

    def fork() -> None:
        table.fork().remove()

    calls: dict[str, Case] = {
        "pages.allocate-release": Case("", f"{PAGES} pages", churn, num_items=PAGES, items="pages"),
        "pages.mirror": Case("", shape, lambda: table.write(0, rows), num_bytes=2 * num_bytes),
        "pages.seed": Case("", shape, lambda: table.read(0, HISTORY, targets), num_bytes=2 * num_bytes),
        "pages.plain-copy": Case("", shape, plain, num_bytes=2 * num_bytes),
        "pages.fork-remove": Case("", shape, fork, num_items=1, items="sequences"),
    }
    return {name: partial(_named, name, case) for name, case in calls.items()}


def text_cases(tokenizer: Tokenizer) -> Makers:
    """Encoding a text, decoding it at once, and token by token as a stream."""
    ids = tokenizer.encode(TEXT, add_special_tokens=False)

    def stream() -> None:
        flow = tokenizer.stream()
        for token in ids:
            flow.push(token)
        flow.finish()

    calls: dict[str, Callable[[], object]] = {
        "tokenizer.encode": lambda: tokenizer.encode(TEXT, add_special_tokens=False),
        "tokenizer.decode": lambda: tokenizer.decode(ids),
        "tokenizer.stream": stream,
    }
    shape = f"{len(TEXT)} characters"
    return {name: partial(Case, name, shape, call, num_items=len(ids), items="tokens") for name, call in calls.items()}


def _named(name: str, case: Case) -> Case:
    return Case(name, case.shape, case.native, 1, case.num_bytes, 0, case.num_items, case.items)
