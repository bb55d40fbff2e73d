"""Which checks notice a wrong KV cache? 28 corruptions x every layer, 32 tokens, against thresholds in use elsewhere.

python scripts/kill_table.py fixtures/packages/llama-fp32-cpu      # prints the Markdown table of docs/parity.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from genai_cli.backends.cpu import CpuBackend
from genai_cli.checks import compare, preflight
from genai_cli.checks.parity import Prompt, Settings, Target, consult
from genai_cli.checks.target import Place, open_target

STEPS, PAGE, PROMPT = 32, 16, 64
Rows = list[np.ndarray]  # one [H_kv, n, D] per component
Corruption = Callable[[np.ndarray, np.ndarray, Rows], tuple[np.ndarray, np.ndarray]]


def both(change: Callable[[np.ndarray], np.ndarray]) -> Corruption:
    return lambda k, v, _: (change(k), change(v))


def keys(change: Callable[[np.ndarray], np.ndarray]) -> Corruption:
    return lambda k, v, _: (change(k), v)


def values(change: Callable[[np.ndarray], np.ndarray]) -> Corruption:
    return lambda k, v, _: (k, change(v))


def shift(a: np.ndarray) -> np.ndarray:
    return np.roll(a, 1, axis=1)


def swap_positions(a: np.ndarray) -> np.ndarray:
    a = a.copy()
    a[:, [10, 40]] = a[:, [40, 10]]
    return a


def swap_pages(a: np.ndarray) -> np.ndarray:
    order = np.arange(a.shape[1])
    order[:PAGE], order[PAGE : 2 * PAGE] = np.arange(PAGE, 2 * PAGE), np.arange(PAGE)
    return a[:, order]


def repeat_page(a: np.ndarray) -> np.ndarray:
    a = a.copy()
    a[:, PAGE : 2 * PAGE] = a[:, :PAGE]
    return a


def swap_heads(a: np.ndarray) -> np.ndarray:
    return a[::-1]


def stride(a: np.ndarray) -> np.ndarray:
    """Read as if the capacity were eight rows larger: every head but the first comes from elsewhere."""
    flat = np.concatenate([a.reshape(-1), np.zeros(8 * a.shape[0] * a.shape[2], a.dtype)])
    step = (a.shape[1] + 8) * a.shape[2]
    return np.stack([flat[h * step : h * step + a.shape[1] * a.shape[2]].reshape(a.shape[1:]) for h in range(len(a))])


def rotate(a: np.ndarray) -> np.ndarray:
    """One position more of rotary phase, half-split pairs."""
    half = a.shape[2] // 2
    angle = 10000.0 ** (-np.arange(half) / half)
    x, y = a[..., :half], a[..., half:]
    return np.concatenate([x * np.cos(angle) - y * np.sin(angle), x * np.sin(angle) + y * np.cos(angle)], -1).astype(
        a.dtype
    )


def bit(position: int) -> Callable[[np.ndarray], np.ndarray]:
    def flip(a: np.ndarray) -> np.ndarray:
        a = np.ascontiguousarray(a).copy()
        a.view(np.uint32)[-1, 40, 5] ^= np.uint32(1 << position)
        return a

    return flip


def zero_at(where: slice) -> Callable[[np.ndarray], np.ndarray]:
    def clear(a: np.ndarray) -> np.ndarray:
        a = a.copy()
        a[:, where] = 0
        return a

    return clear


def at_head(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda a: np.concatenate([a[:-1], change(a[-1:])])


CORRUPTIONS: dict[str, Corruption] = {
    "K zero": keys(np.zeros_like),
    "V zero": values(np.zeros_like),
    "K and V exchanged": lambda k, v, _: (v, k),
    "K shifted by one": keys(shift),
    "V shifted by one": values(shift),
    "K and V shifted together": both(shift),
    "two positions of K swapped": keys(swap_positions),
    "two positions of V swapped": values(swap_positions),
    "two positions of K and V swapped": both(swap_positions),
    "two pages of K swapped": keys(swap_pages),
    "two pages of K and V swapped": both(swap_pages),
    "a page repeated": both(repeat_page),
    "K heads swapped": keys(swap_heads),
    "V heads swapped": values(swap_heads),
    "K and V heads swapped": both(swap_heads),
    "K dims reversed": keys(lambda a: a[..., ::-1]),
    "row stride of another capacity": both(stride),
    "rotary phase + 1": keys(rotate),
    "rotary phase + 1, one head": keys(at_head(rotate)),
    "V sign": values(lambda a: -a),
    "K x 1.01": keys(lambda a: a * np.float32(1.01)),
    "V through f16": values(lambda a: a.astype(np.float16).astype(a.dtype)),
    "one K element, bit 22": keys(bit(22)),
    "one V element, bit 22": values(bit(22)),
    "one V element, bit 10": values(bit(10)),
    "last position zero": both(zero_at(slice(-1, None))),
    "first position zero": both(zero_at(slice(0, 1))),
    "K of the next layer": lambda k, v, rows: (rows[-2] if rows[-2] is not k else rows[0], v),
}


@dataclass
class Seen:
    """One mutant's run beside the clean one."""

    got: np.ndarray  # logits on the clean path [STEPS, V]
    want: np.ndarray
    tokens: np.ndarray  # its own greedy tokens
    path: np.ndarray
    rows: Rows
    clean: Rows


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    if a.std() == 0 or b.std() == 0:
        return float(np.array_equal(a, b))
    return float(np.corrcoef(a.reshape(-1), b.reshape(-1))[0, 1])


def top5_rule(seen: Seen) -> bool:
    """At the first different token, each side's token must be among the other's five best."""
    first = np.flatnonzero(seen.tokens != seen.path)
    if not len(first):
        return True
    ours, theirs = (set(np.argsort(-logits[first[0]])[:5].tolist()) for logits in (seen.got, seen.want))
    return int(seen.tokens[first[0]]) in theirs and int(seen.path[first[0]]) in ours


def close(a: np.ndarray, b: np.ndarray, atol: float) -> bool:
    return bool(np.allclose(a, b, rtol=0, atol=atol))


def checksums(rows: Rows) -> np.ndarray:
    return np.array([[a.astype(np.float64).sum(), a.min(), a.max()] for a in rows])


def checks_of(floor: dict[str, float]) -> dict[str, Callable[[Seen], bool]]:
    """Name -> passes. The thresholds are those of the tools named."""
    worst = lambda s: compare.row_metrics(s.got, s.want)  # noqa: E731
    return {
        "logits allclose 2e1 (llama_parity, int4)": lambda s: close(s.got, s.want, 20),
        "top-5 membership at the first mismatch (check_logprobs_close)": top5_rule,
        "logits PCC >= 0.99": lambda s: correlation(s.got, s.want) >= 0.99,
        "greedy, first 8 tokens equal": lambda s: bool((s.tokens[:8] == s.path[:8]).all()),
        "logits NMSE <= 1e-2 (check-nmse)": lambda s: compare.nmse(s.got, s.want) <= 1e-2,
        "greedy, 32 tokens equal": lambda s: bool((s.tokens == s.path).all()),
        "mean KL <= 0.01": lambda s: float(compare.kl(s.got, s.want).mean()) <= 0.01,
        "logits allclose 5e-1 (llama_parity, fp16)": lambda s: close(s.got, s.want, 0.5),
        "KV PCC >= 0.99": lambda s: all(correlation(a, b) >= 0.99 for a, b in zip(s.rows, s.clean, strict=True)),
        "KV sum, min, max": lambda s: bool(np.allclose(checksums(s.rows), checksums(s.clean), rtol=1e-6, atol=1e-4)),
        "logits NMSE <= 1e-6 (llama-results)": lambda s: float(worst(s).nmse.max()) <= 1e-6,
        "logits allclose 1e-3": lambda s: close(s.got, s.want, 1e-3),
        "this tool, logits: max delta <= 4 x floor": lambda s: float(worst(s).max_abs.max()) <= 4 * floor["max_abs"],
        "KV allclose 1e-3": lambda s: all(close(a, b, 1e-3) for a, b in zip(s.rows, s.clean, strict=True)),
        "this tool, KV bytes by address": lambda s: all(
            a.tobytes() == b.tobytes() for a, b in zip(s.rows, s.clean, strict=True)
        ),
    }


def corrupted(rows: Rows, layer: int, change: Corruption) -> Rows:
    k, v = change(rows[2 * layer], rows[2 * layer + 1], rows)
    return [*rows[: 2 * layer], np.ascontiguousarray(k), np.ascontiguousarray(v), *rows[2 * layer + 2 :]]


def run(target: Target, prompt: np.ndarray) -> tuple[list[tuple[str, int, Seen]], int]:
    """Every corruption at every layer: seeded after the prompt, decoded on the clean path and on its own."""
    native = target.open_native(exact=False)
    native.reset()
    native.step(prompt[:-1], logits="none")
    clean = [np.array(a) for a in native.kv_rows(0, native.length)]
    path, want = decode(native, clean, prompt[-1], None)
    found = []
    layers = len(clean) // 2
    for name, change in CORRUPTIONS.items():
        for layer in range(layers):
            rows = corrupted(clean, layer, change)
            _, got = decode(native, rows, prompt[-1], path)
            tokens, _ = decode(native, rows, prompt[-1], None)
            found.append((name, layer, Seen(got, want, tokens, path, rows, clean)))
    return found, layers


def decode(native, rows: Rows, last: int, forced: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    native.seed(rows)
    token, tokens, logits = int(last), [], []
    for step in range(STEPS):
        row = native.step(np.array([token], np.int64))
        tokens.append(int(row[0].argmax()))
        logits.append(row[0])
        token = tokens[-1] if forced is None else int(forced[step])
    return np.array(tokens), np.stack(logits)


def main() -> None:
    folder = Path(sys.argv[1])
    target = open_target(folder, Place(2, lambda: CpuBackend(threads=2), "cpu"))
    seed = np.array(json.loads((folder / "expected.json").read_text())["prompt"], np.int64)
    prompt = np.resize(seed, PROMPT + 1)
    artifact = preflight.artifact(target.model_path, target.graph, None)
    settings = Settings(steps=STEPS)
    oracles = consult(target, artifact, [Prompt("0", prompt)], settings, lambda _: None)
    found, layers = run(target, prompt)
    floor = oracles.floor.used
    total = len(found)
    print(f"{len(CORRUPTIONS)} kinds x {layers} layers = {total} mutants; floor {floor['max_abs']:.2g} logits\n")
    print(
        f"| check, with the threshold its tool uses | killed of {total} | kinds that survive somewhere |\n|---|---|---|"
    )
    for name, passes in checks_of(floor).items():
        survivors = [kind for kind, _, seen in found if passes(seen)]
        print(f"| {name} | {total - len(survivors)} | {len(set(survivors))} |")
    moved = [(kind, float(compare.row_metrics(s.got, s.want).max_abs.max())) for kind, _, s in found]
    silent = [kind for kind, delta in moved if delta <= floor["max_abs"]]
    print(f"\nInvisible in the logits at any limit above the floor: {len(silent)} ({', '.join(sorted(set(silent)))}).")


if __name__ == "__main__":
    main()
