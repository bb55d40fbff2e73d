"""genai: run ONNX language models offline, and prove that a native engine computes what ONNX Runtime computes."""

__version__ = "0.1.0"
