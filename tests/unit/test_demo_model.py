"""The demo model: its tokenizer against the GGUF file, its graph, and what it answers on plain ONNX Runtime."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime
import pytest

from genai_cli.checks.inspect import inspect_model
from genai_cli.package.decoder import load_decoder
from genai_cli.package.open import open_package
from genai_cli.package.prompts import open_chat_template, open_tokenizer

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.demo

PARAGRAPH = (
    "Ça coûte 1234,50 € — naïve café, Zürich!\n\n\nDon't panic: 🙂👩‍🚀 emoji, 東京 and мир.\n"
    "\tTabs,  two spaces, 3.14159 and x=y**2;  <|im_end|>\nThe end.   "
)
# From Hugging Face's `tokenizers` on the rebuilt tokenizer.json; `reference_ids` below agrees, from the GGUF alone.
PARAGRAPH_IDS = [
    142, 225, 81, 857, 41307, 676, 216, 33, 34, 35, 36, 28, 37, 32, 24927, 1841, 15486, 46494, 37366, 28,
    1777, 7170, 5130, 17, 1116, 198, 8084, 982, 14455, 42, 47526, 10813, 235, 119, 321, 231, 10813, 244, 218,
    649, 33777, 28, 17097, 247, 126, 16736, 122, 284, 41337, 7872, 9175, 30, 198, 197, 68, 7366, 28, 216, 827,
    5600, 28, 216, 35, 30, 33, 36, 33, 37, 41, 284, 1792, 45, 105, 828, 34, 43, 256, 2, 198, 504, 1112, 30,
    333,
]  # fmt: skip


@pytest.fixture(scope="session")
def maker() -> ModuleType:
    """The script, as a module; it imports its neighbour as it does when run."""
    sys.path.insert(0, str(ROOT / "scripts"))
    return importlib.import_module("make_demo_model")


@pytest.fixture(scope="session")
def demo(maker: ModuleType) -> Callable[[str], Path]:
    """precision -> folder under models/, built when missing."""
    return lambda precision: Path(maker.make(precision, ROOT / "models", maker.weights_file())[0])


@pytest.fixture(scope="session")
def source(maker: ModuleType) -> object:
    return maker.Source(maker.weights_file())


def split(text: str) -> Iterator[str]:
    """`smollm`'s pieces by hand: every digit alone, then GPT-2's rules on what lies between."""
    for part in re.findall(r"\d|\D+", text):
        kinds = "".join(_kind(char) for char in part)
        at = 0
        while at < len(part):
            short = re.compile(r"'(?:s|t|re|ve|m|ll|d)").match(part, at)
            found = short or re.compile(r"_?L+|_?N+|_?O+|[_w]+(?![LNO])|[_w]+").match(kinds, at)
            assert found is not None
            end = found.end()
            yield part[at:end]
            at = end


def _kind(char: str) -> str:
    """_ a plain space, w other whitespace, Letter, Number, Other."""
    if char.isspace():
        return "_" if char == " " else "w"
    category = unicodedata.category(char)[0]
    return category if category in "LN" else "O"


def reference_ids(text: str, source: object) -> list[int]:
    """Byte-level BPE from the GGUF's vocabulary and merges, written for clearness."""
    ids = {token: index for index, token in enumerate(source.get("tokenizer.ggml.tokens"))}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(source.get("tokenizer.ggml.merges"))}
    specials = [token for token, kind in zip(ids, source.get("tokenizer.ggml.token_type"), strict=True) if kind == 3]
    found: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, specials)) + ")", text):
        if part in specials:
            found.append(ids[part])
            continue
        for piece in split(part):
            symbols = [_stand_in(byte) for byte in piece.encode()]
            while pairs := [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(symbols)) if pair in ranks]:
                _, at = min(pairs)
                symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
            found += [ids[symbol] for symbol in symbols]
    return found


def _stand_in(byte: int) -> str:
    """GPT-2's printable stand-in of a byte: itself where printable, else the next free code point from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in printable else chr(256 + [b for b in range(256) if b not in printable].index(byte))


def test_token_ids_of_a_paragraph(demo: Callable[[str], Path], source: object) -> None:
    tokenizer = open_tokenizer(open_package(demo("int4")))
    ids = tokenizer.encode(PARAGRAPH, add_special_tokens=False)
    assert ids == PARAGRAPH_IDS
    assert ids == reference_ids(PARAGRAPH, source)
    assert tokenizer.decode(ids, skip_special_tokens=False) == PARAGRAPH
    stream = tokenizer.stream(skip_special_tokens=False)
    assert "".join([*(stream.push(token) for token in ids), stream.finish()]) == PARAGRAPH


def test_every_merge_makes_a_token(source: object) -> None:
    tokens = set(source.get("tokenizer.ggml.tokens"))
    assert all("".join(merge.split(" ")) in tokens for merge in source.get("tokenizer.ggml.merges"))


def test_package(demo: Callable[[str], Path]) -> None:
    package = open_package(demo("int4"))
    loaded = load_decoder(package)
    assert (package.warnings, loaded.warnings) == ((), ())
    assert (package.bos_token_id, package.eos_token_ids, package.pad_token_id) == (1, (2,), 2)
    assert (loaded.context_len, package.vocab_size, len(loaded.io.kv)) == (8192, 49152, 60)
    assert {(b.num_heads, b.head_dim, b.window) for b in loaded.io.kv} == {(3, 64, None)}


@pytest.mark.parametrize("precision", ["int4", "fp32"])
def test_tied_weights_count_once(demo: Callable[[str], Path], precision: str) -> None:
    found = inspect_model(demo(precision))
    # 49152 * 576 embedding, 30 layers of qkv, o, gate, up, down and two norms, a last norm
    layer = 576 * (9 + 3 + 3) * 64 + 576 * 576 + 3 * 576 * 1536 + 2 * 576
    assert found.components[0].num_parameters == 49152 * 576 + 30 * layer + 576 == 134_515_008
    assert [native.supported for native in found.native] == [True, True]


@pytest.mark.parametrize(("precision", "num_bytes"), [("int4", 86_518_016), ("fp32", 540_264_704)])
def test_weights_are_aligned_and_tied(demo: Callable[[str], Path], precision: str, num_bytes: int) -> None:
    folder = demo(precision)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    entries = {t.name: {e.key: e.value for e in t.external_data} for t in model.graph.initializer}
    places = sorted({(int(e["offset"]), int(e["length"])) for e in entries.values()})
    assert all(offset % (4096 if length >= 4096 else 64) == 0 for offset, length in places)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(places))
    assert (folder / "model.onnx.data").stat().st_size == sum(places[-1]) == num_bytes
    embed = next(entry for name, entry in entries.items() if name.startswith("model.embed_tokens.weight"))
    if precision == "int4":
        assert embed == entries["lm_head.MatMul.weight_Q4"]  # one copy of the bytes, two shapes
    else:
        assert not any(name.startswith("lm_head") for name in entries)  # the head reads the embedding transposed


def test_int4_takes_the_fast_path(demo: Callable[[str], Path]) -> None:
    """No zero points (float ones are 48 times slower in ONNX Runtime), int8 activations, blocks of 32."""
    graph = load_decoder(open_package(demo("int4"))).graph
    products = [node for node in graph.nodes if node.op_type == "MatMulNBits"]
    assert len(products) == 30 * 5 + 1
    assert all(len([name for name in node.inputs if name]) == 3 for node in products)
    assert {tuple(node.attrs[key] for key in ("bits", "block_size", "accuracy_level")) for node in products} == {
        (4, 32, 4)
    }


def answer(folder: Path, question: str, max_new_tokens: int = 16) -> str:
    """Greedy, on plain ONNX Runtime, feeding present back as past."""
    package = open_package(folder)
    tokenizer, template = open_tokenizer(package), open_chat_template(package)
    assert template is not None
    ids = tokenizer.encode(template.render([{"role": "user", "content": question}]), add_special_tokens=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    types = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
    past = {
        entry.name: np.zeros((1, entry.shape[1], 0, entry.shape[3]), types[entry.type])
        for entry in session.get_inputs() if entry.name.startswith("past")
    }  # fmt: skip
    names = [entry.name for entry in session.get_outputs()]
    new: list[int] = []
    fed = 0
    while len(new) < max_new_tokens:
        step = np.array([ids if not new else new[-1:]], np.int64)
        fed += step.shape[1]
        feeds = {"input_ids": step, "attention_mask": np.ones((1, fed), np.int64), **past}
        out = dict(zip(names, session.run(None, feeds), strict=True))
        past = {name: out[name.replace("past_key_values", "present")] for name in past}
        new.append(int(out["logits"][0, -1].argmax()))
        if new[-1] in package.eos_token_ids:
            break
    return tokenizer.decode(new)


QUESTION = "What is the capital of France?"


def test_fp32_answers(demo: Callable[[str], Path]) -> None:
    assert answer(demo("fp32"), QUESTION) == "The capital of France is Paris."


def test_int4_still_says_paris(demo: Callable[[str], Path]) -> None:
    assert answer(demo("int4"), QUESTION).startswith("The capital of France is Paris")


@pytest.mark.slow
def test_fp16_answers(demo: Callable[[str], Path]) -> None:
    assert answer(demo("fp16"), QUESTION) == "The capital of France is Paris."


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_the_same_bytes_again(maker: ModuleType, demo: Callable[[str], Path], tmp_path: Path, precision: str) -> None:
    folder, built = maker.make(precision, tmp_path, maker.weights_file())
    assert built
    for path in sorted(folder.iterdir()):
        assert path.read_bytes() == (demo(precision) / path.name).read_bytes(), path.name


@pytest.mark.parametrize("bits", [4, 8])
def test_quantize(maker: ModuleType, bits: int) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((6, 96)).astype(np.float32)
    weight[0, :32] = 0
    packed, scales = maker.quantize(weight, bits)
    assert packed.shape == (6, 3, 32 * bits // 8)
    codes = packed if bits == 8 else np.stack([packed & 15, packed >> 4], -1).reshape(6, 3, 32)
    back = ((codes.astype(np.float32) - (1 << bits - 1)) * scales[..., None]).reshape(weight.shape)
    error = np.abs(back - weight).reshape(6, 3, 32).max(-1)
    # rounding costs half a step; the fitted scale may push the largest element half a step beyond the last code
    assert (error <= np.abs(scales) * 1.0).all()
    assert (back[0, :32] == 0).all()


def test_quantize_gives_q8_0_back(maker: ModuleType) -> None:
    codes = np.random.default_rng(0).integers(-127, 128, (4, 2, 32))
    codes[..., 5] = 127
    scales = np.float32(2.0) ** np.random.default_rng(1).integers(-9, 0, (4, 2, 1))
    packed, found = maker.quantize((codes * scales).astype(np.float32).reshape(4, 64), 8)
    assert ((packed.astype(int) - 128) * found[..., None] == codes * scales).all()


def test_rows_of_rotary_pairs(maker: ModuleType) -> None:
    """Row 2i of a head goes to i, row 2i + 1 to i + D/2."""
    rows = np.arange(2 * 6, dtype=np.float32)[:, None]
    assert maker.halves_first(rows, 2)[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_cached_atomic_and_left_alone(maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / "w.gguf"
    weights.write_bytes(b"1")
    written: list[str] = []

    def write(source: object, precision: str, folder: Path) -> None:
        (folder / "model.onnx").write_text(precision)
        written.append(precision)
        if precision == "fp16":
            raise OSError("disk full")

    monkeypatch.setattr(maker, "write_package", write)
    monkeypatch.setattr(maker, "Source", lambda path: None)
    models = tmp_path / "models"
    assert maker.make("int4", models, weights) == (models / "smollm2-135m-int4", True)
    assert maker.make("int4", models, weights) == (models / "smollm2-135m-int4", False)
    weights.write_bytes(b"2")  # other weights: made again
    assert maker.make("int4", models, weights)[1]
    assert written == ["int4", "int4"]
    with pytest.raises(OSError, match="disk full"):
        maker.make("fp16", models, weights)
    assert [path.name for path in models.iterdir()] == ["smollm2-135m-int4"]  # nothing half-made is left
    assert json.loads((models / "smollm2-135m-int4" / "made_from.json").read_text())["precision"] == "int4"
