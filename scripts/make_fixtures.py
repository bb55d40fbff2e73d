"""Tiny packages whose KV is known in closed form, with the arithmetic in fixtures/README.md.

python scripts/make_fixtures.py            write fixtures/kv-*/
python scripts/make_fixtures.py --check    exit 1 when a file differs from what would be written; writes nothing
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper

ROOT = Path(__file__).resolve().parent.parent / "fixtures"
VOCAB, CONTEXT, HIDDEN = 17, 32, 13
# (H, H_kv, D) of each layer: no two layers alike. ONNX Runtime's GroupQueryAttention wants D to be a multiple of 8; the
# standard op takes any, so there D and H_kv are primes of their own and no two strides coincide.
GEOMETRY = {"GroupQueryAttention": ((4, 2, 8), (3, 3, 16)), "Attention": ((4, 2, 7), (3, 3, 5))}
ONNX_TYPES = {
    "f32": (TensorProto.FLOAT, np.dtype(np.float32)),
    "f16": (TensorProto.FLOAT16, np.dtype(np.float16)),
    "bf16": (TensorProto.BFLOAT16, np.dtype(ml_dtypes.bfloat16)),
}


@dataclass(frozen=True)
class Variant:
    """One package. `attention` is the op that reads the KV."""

    name: str
    dtype: str = "f32"
    attention: str = "GroupQueryAttention"
    window: int = 0  # layer 0 only
    tie: bool = False  # vocabulary rows 4 and 9 of lm_head are equal
    overflow: bool = False  # the last layer passes the largest f16
    pipeline: str = ""  # "embedding" or "vision": the decoder reads embeddings that other components make

    @property
    def layers(self) -> tuple[tuple[int, int, int], ...]:
        return GEOMETRY[self.attention]

    @property
    def token_elements(self) -> int:
        """Scalars of KV a token has: 128 with GroupQueryAttention, 58 with Attention."""
        return sum(2 * kv_heads * head_dim for _, kv_heads, head_dim in self.layers)


VARIANTS = (
    Variant("kv-f32"),
    Variant("kv-f16", "f16"),
    Variant("kv-bf16", "bf16"),
    Variant("kv-window", window=4),
    Variant("kv-attention", attention="Attention"),
    Variant("kv-tie", tie=True),
    Variant("kv-overflow", "f16", overflow=True),
    Variant("kv-embedding", pipeline="embedding"),
    Variant("kv-vision", pipeline="vision"),
)
IMAGE_TOKEN, FEATURE_ROWS, PIXELS = 6, 2, (1, 3, 4, 4)  # a picture gives two feature rows of 24 pixels each


def kv_element(variant: Variant, layer: int, value: bool, head: int, position: int, dim: int, token: int) -> float:
    """The closed form. i numbers (position, layer, K or V, head, dim) without gaps, so no two elements of a prompt
    share it. f32: (i*V + token + 1) / 2^13, exact, distinct over tokens too. 16-bit: bit pattern first + i, rotated by
    the token: distinct within one token id."""
    _, kv_heads, head_dim = variant.layers[layer]
    base = sum(2 * heads * size for _, heads, size in variant.layers[:layer]) + int(value) * kv_heads * head_dim
    i = position * variant.token_elements + base + head * head_dim + dim
    if variant.dtype == "f32":
        return (i * VOCAB + token + 1) / 2**13
    i = (i + 109 * token) % (CONTEXT * variant.token_elements)  # of 4096
    if variant.dtype == "f16":
        return float(np.uint16(0x3C00 + i).view(np.float16))  # 1 .. 16
    pattern = 0x3C00 + i // 2 + 0x8000 * (i % 2)  # +-0.0078 .. 512
    return float(np.uint16(pattern).view(ml_dtypes.bfloat16))


def kv_of_embedding(variant: Variant, layer: int, value: bool, position: int, embedding: np.ndarray) -> np.ndarray:
    """[H_kv, D] of a pipeline's decoder: the element of token 0, and the embedding [E] times a matrix. Exact in f32."""
    _, kv_heads, head_dim = variant.layers[layer]
    named = kv_table(variant, layer, value)[position * VOCAB]
    return (named + embedding @ kv_weight(variant, layer, value)).reshape(kv_heads, head_dim)


def kv_weight(variant: Variant, layer: int, value: bool) -> np.ndarray:
    """[E, H_kv * D]."""
    _, kv_heads, head_dim = variant.layers[layer]
    return weight(HIDDEN, kv_heads * head_dim, 11 + 2 * layer + int(value))


def kv_table(variant: Variant, layer: int, value: bool) -> np.ndarray:
    """Rows [position * V + token, H_kv * D]."""
    _, kv_heads, head_dim = variant.layers[layer]
    return np.array(
        [
            [kv_element(variant, layer, value, h, position, d, token) for h in range(kv_heads) for d in range(head_dim)]
            for position in range(CONTEXT)
            for token in range(VOCAB)
        ]
    )


def weight(rows: int, columns: int, salt: int) -> np.ndarray:
    """Multiples of 1/16 in [-11/16, 11/16]: exact in every dtype."""
    i, j = np.arange(rows)[:, None], np.arange(columns)[None, :]
    return ((37 * i + 11 * j + 5 * i * j + salt) % 23 - 11) / 16


class Builder:
    """Nodes and weights in order."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.onnx_type, self.dtype = ONNX_TYPES[variant.dtype]
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def add(self, op: str, inputs: list[str], outputs: list[str], domain: str = "", **attrs: object) -> str:
        self.nodes.append(helper.make_node(op, inputs, outputs, f"n{len(self.nodes)}.{op}", domain=domain, **attrs))
        return outputs[0]

    def constant(self, name: str, array: np.ndarray, onnx_type: int | None = None) -> str:
        kind = onnx_type or self.onnx_type
        stored = array.astype(
            np.int64 if kind == TensorProto.INT64 else np.int32 if kind == TensorProto.INT32 else self.dtype
        )
        self.weights.append(helper.make_tensor(name, kind, array.shape, stored.tobytes(), raw=True))
        return name

    def matmul(self, name: str, x: str, array: np.ndarray) -> str:
        return self.add("MatMul", [x, self.constant(f"{name}.weight", array)], [name])


def attention(b: Builder, layer: int, query: str, key: str, value: str) -> str:
    """[B, T, H*D], and the layer's present."""
    heads, kv_heads, _ = b.variant.layers[layer]
    past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
    outputs = [f"attn.{layer}", f"present.{layer}.key", f"present.{layer}.value"]
    if b.variant.attention == "Attention":
        return b.add(
            "Attention", [query, key, value, "", *past], outputs, q_num_heads=heads, kv_num_heads=kv_heads, is_causal=1
        )
    window = {"local_window_size": b.variant.window} if layer == 0 and b.variant.window else {}
    return b.add(
        "GroupQueryAttention", [query, key, value, *past, "seqlens_k", "total_len"], outputs, "com.microsoft",
        num_heads=heads, kv_num_heads=kv_heads, **window,
    )  # fmt: skip


def build(variant: Variant) -> onnx.ModelProto:
    """ids -> x; per layer K, V = tables at (position, token), q = x @ Wq, x += attention @ Wo; logits = x @ lm_head."""
    b = Builder(variant)
    if variant.attention == "GroupQueryAttention":
        b.constant("one", np.array([1]), TensorProto.INT64)
        b.constant("axis", np.array(1), TensorProto.INT64)
        total = b.add("ReduceSum", ["attention_mask", "one"], ["mask_sum"], keepdims=1)
        b.add("Cast", [b.add("Sub", [total, "one"], ["last"])], ["seqlens_k"], to=TensorProto.INT32)
        shape = b.add("Shape", ["attention_mask"], ["mask_shape"])
        b.add("Cast", [b.add("Gather", [shape, "axis"], ["mask_len"])], ["total_len"], to=TensorProto.INT32)
    b.constant("vocab", np.array(VOCAB), TensorProto.INT64)
    row = b.add("Mul", ["position_ids", "vocab"], ["row_of_position"])
    x = embeds = "inputs_embeds"
    if not variant.pipeline:
        row = b.add("Add", [row, "input_ids"], ["row"])
        x = b.add("Gather", [b.constant("embed.weight", weight(VOCAB, HIDDEN, 3)), "input_ids"], ["x"])
    for layer, (heads, _, head_dim) in enumerate(variant.layers):
        tables = [b.constant(f"{kind}.{layer}.table", kv_table(variant, layer, kind == "v")) for kind in ("k", "v")]
        key, value = (b.add("Gather", [table, row], [f"{table}.row"]) for table in tables)
        if variant.pipeline:
            key = b.add(
                "Add", [key, b.matmul(f"k.{layer}", embeds, kv_weight(variant, layer, False))], [f"key.{layer}"]
            )
            value = b.add(
                "Add", [value, b.matmul(f"v.{layer}", embeds, kv_weight(variant, layer, True))], [f"val.{layer}"]
            )
        query = b.matmul(f"q.{layer}", x, weight(HIDDEN, heads * head_dim, layer))
        mixed = weight(heads * head_dim, HIDDEN, 7 + layer)
        if variant.overflow and layer == len(variant.layers) - 1:
            mixed = mixed * 65504  # 11/16 * 65504 is still finite; the sum over all rows is not
        out = b.matmul(f"o.{layer}", attention(b, layer, query, key, value), mixed)
        x = b.add("Add", [x, out], [f"x.{layer}"])
    lm_head = weight(HIDDEN, VOCAB, 1)
    if variant.tie:
        lm_head[:, 9] = lm_head[:, 4] = np.abs(lm_head).max(axis=1) * np.sign(lm_head[:, 4] + 0.01)
    if variant.pipeline:
        lm_head[:, IMAGE_TOKEN] = lm_head[:, 4]  # a tie with a smaller id: greedy never says the image token
    b.matmul("logits", x, lm_head)
    return model_of(b)


def model_of(b: Builder) -> onnx.ModelProto:
    info, i64 = helper.make_tensor_value_info, TensorProto.INT64
    inputs = [info("input_ids", i64, ["batch", "seq"]), info("attention_mask", i64, ["batch", "total"])]
    if b.variant.pipeline:
        inputs[0] = info("inputs_embeds", b.onnx_type, ["batch", "seq", HIDDEN])
    if b.variant.attention == "Attention":
        inputs.pop()
    inputs.append(info("position_ids", i64, ["batch", "seq"]))
    outputs = [info("logits", b.onnx_type, ["batch", "seq", VOCAB])]
    for layer, (_, kv_heads, head_dim) in enumerate(b.variant.layers):
        for kind in ("key", "value"):
            inputs.append(info(f"past_key_values.{layer}.{kind}", b.onnx_type, ["batch", kv_heads, "past", head_dim]))
            outputs.append(info(f"present.{layer}.{kind}", b.onnx_type, ["batch", kv_heads, "total", head_dim]))
    return finished(b, inputs, outputs)


def finished(b: Builder, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]) -> onnx.ModelProto:
    graph = helper.make_graph(b.nodes, b.variant.name, inputs, outputs, b.weights)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="make_fixtures")


def embedding_part(variant: Variant) -> onnx.ModelProto:
    """inputs_embeds [B, T, E]: rows of embed, image tokens replaced by the feature rows in their order."""
    b, info, i64 = Builder(variant), helper.make_tensor_value_info, TensorProto.INT64
    inputs = [info("input_ids", i64, ["batch", "seq"])]
    outputs = [info("inputs_embeds", b.onnx_type, ["batch", "seq", HIDDEN])]
    table = b.constant("embed.weight", weight(VOCAB, HIDDEN, 3))
    if variant.pipeline == "embedding":
        b.add("Gather", [table, "input_ids"], ["inputs_embeds"])
        return finished(b, inputs, outputs)
    inputs.append(info("image_features", b.onnx_type, ["rows", HIDDEN]))
    text = b.add("Gather", [table, "input_ids"], ["text"])
    b.constant("image_token", np.array(IMAGE_TOKEN), i64)
    b.constant("axis1", np.array(1), i64)
    b.constant("axes", np.array([2]), i64)
    is_image = b.add("Equal", ["input_ids", "image_token"], ["is_image"])
    marks = b.add("Cast", [is_image], ["marks"], to=i64)
    place = b.add("Mul", [b.add("CumSum", [marks, "axis1"], ["count"]), marks], ["place"])  # 0 is the row of zeros
    rows = b.add("Concat", [b.constant("no_row", np.zeros((1, HIDDEN))), "image_features"], ["padded"], axis=0)
    seen = b.add("Gather", [rows, place], ["seen"])
    b.add("Where", [b.add("Unsqueeze", [is_image, "axes"], ["mask"]), seen, text], ["inputs_embeds"])
    return finished(b, inputs, outputs)


def vision_part(variant: Variant) -> onnx.ModelProto:
    """image_features [2, E]: halves of the flat picture times a matrix."""
    b, info = Builder(variant), helper.make_tensor_value_info
    pixels = int(np.prod(PIXELS)) // FEATURE_ROWS
    shape = b.constant("halves", np.array([FEATURE_ROWS, pixels]), TensorProto.INT64)
    flat = b.add("Reshape", ["pixel_values", shape], ["flat"])
    b.matmul("image_features", flat, weight(pixels, HIDDEN, 5))
    inputs = [info("pixel_values", b.onnx_type, list(PIXELS))]
    return finished(b, inputs, [info("image_features", b.onnx_type, [FEATURE_ROWS, HIDDEN])])


def with_parts(variant: Variant, model: dict[str, object]) -> dict[str, object]:
    """The config of a pipeline, component by component."""
    features = {"image_features": "image_features"}
    made = model | {
        "embedding": {
            "filename": "embedding.onnx", "outputs": {"inputs_embeds": "inputs_embeds"},
            "inputs": {"input_ids": "input_ids"} | (features if variant.pipeline == "vision" else {}),
        },
    }  # fmt: skip
    if variant.pipeline == "vision":
        made["type"] = "gemma3"
        made["image_token_id"] = IMAGE_TOKEN
        made["vision"] = {"filename": "vision.onnx", "inputs": {"pixel_values": "pixel_values"}, "outputs": features}
    return made


def config(variant: Variant) -> dict[str, object]:
    inputs = {
        "input_ids": "input_ids", "attention_mask": "attention_mask", "position_ids": "position_ids",
        "past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value",
    }  # fmt: skip
    if variant.attention == "Attention":
        del inputs["attention_mask"]
    outputs = {
        "logits": "logits", "present_key_names": "present.%d.key", "present_value_names": "present.%d.value",
    }  # fmt: skip
    decoder = {
        "filename": "model.onnx", "hidden_size": HIDDEN, "inputs": inputs, "outputs": outputs,
        "num_attention_heads": variant.layers[0][0], "num_key_value_heads": variant.layers[0][1],
        "num_hidden_layers": len(variant.layers),
    }  # fmt: skip
    model = {
        "type": "llama", "vocab_size": VOCAB, "context_length": CONTEXT, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0, "decoder": decoder,
    }  # fmt: skip
    if variant.pipeline:
        inputs["inputs_embeds"] = inputs.pop("input_ids").replace("input_ids", "inputs_embeds")
        model = with_parts(variant, model)
    return {"model": model, "search": {"do_sample": False, "max_length": CONTEXT, "past_present_share_buffer": False}}


def tokenizer() -> dict[str, object]:
    """Words t0 ... t16, one id each."""
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(VOCAB)}, "unk_token": "t0"},
    }  # fmt: skip


def files() -> dict[Path, bytes]:
    """Every file this script owns."""
    made = {}
    for variant in VARIANTS:
        folder = ROOT / variant.name
        model = build(variant)
        made[folder / "model.onnx"] = model.SerializeToString(deterministic=True)
        if variant.pipeline:
            made[folder / "embedding.onnx"] = embedding_part(variant).SerializeToString(deterministic=True)
        if variant.pipeline == "vision":
            made[folder / "vision.onnx"] = vision_part(variant).SerializeToString(deterministic=True)
        made[folder / "genai_config.json"] = (json.dumps(config(variant), indent=2) + "\n").encode()
        made[folder / "tokenizer.json"] = (json.dumps(tokenizer(), indent=2) + "\n").encode()
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        stale = [path for path, data in files().items() if not path.exists() or path.read_bytes() != data]
        for path in stale:
            print(f"differs: {path.relative_to(ROOT.parent)}")
        return int(bool(stale))
    for path, data in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    print(f"wrote {len(VARIANTS)} packages, {sum(len(data) for data in files().values())} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
