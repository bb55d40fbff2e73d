"""Answer one question on both engines and say whether they chose the same tokens.

python scripts/demo.py models/smollm2-135m-int4 "What is the capital of France?"
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from genai_cli.generate import Limits
from genai_cli.model import Answer, Ask, BackendName, Model, OpenOptions, open_model

# ORT's own logits move by up to this much between prefill and decode with int8 activations (docs/parity.md): a smaller
# margin decides nothing.
INT8_NOISE = 0.15


def answer(path: Path, question: str, backend: BackendName) -> tuple[Model, Answer]:
    """Stream one answer."""
    model = open_model(path, OpenOptions(backend=backend, prefix_cache=False))
    info = model.runner.info
    print(f"\n{backend} ({', '.join(info.providers)}, {info.threads or 'default'} threads)\n> {question}", flush=True)
    made = model.ask(
        Ask(prompt=question, limits=Limits(max_new_tokens=64)), lambda text: print(text, end="", flush=True)
    )
    timings = made.generated.timings
    decode = "n/a" if timings.decode_tok_s is None else f"{timings.decode_tok_s:.1f}"
    print(f"\n  loaded in {model.load_s:.2f} s, first token {timings.ttft_s or 0:.3f} s, decode {decode} tok/s")
    return model, made


def margin_at(model: Model, ids: list[int]) -> float:
    """Difference of the two largest logits after `ids`."""
    model.runner.reset()
    logits = np.sort(model.runner.step(np.array(ids, np.int64))[0])
    return float(logits[-1] - logits[-2])


def main() -> int:
    """0: the same tokens, or a near-tie; 1: a decisive difference."""
    path, question = Path(sys.argv[1]), sys.argv[2]
    _, ours = answer(path, question, "native")
    oracle, theirs = answer(path, question, "ort")
    mine, other = ours.generated.token_ids, theirs.generated.token_ids
    if mine == other:
        print(f"\nThe two engines chose the same {len(mine)} tokens.")
        return 0
    same = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other)))
    margin = margin_at(oracle, theirs.generated.prompt_token_ids + other[:same])
    kind = "a near-tie" if margin < INT8_NOISE else "a decisive difference"
    print(f"\nThe engines differ from token {same} on; ORT's margin there is {margin:.3f}: {kind}.")
    print(f"  genai parity {path}")
    return 0 if margin < INT8_NOISE else 1


if __name__ == "__main__":
    sys.exit(main())
