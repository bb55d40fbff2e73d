"""Rewritten models for the oracle, as protobuf in memory: sharper arithmetic, taps, one-ulp changes, splices.

A twin keeps references to the artifact's external data; whoever opens its bytes says in which folder that lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import helper, numpy_helper

from genai_cli.errors import GenaiError
from genai_cli.graph.external import ExternalFiles
from genai_cli.graph.loader import DTYPES, initializer, read_model

_T = onnx.TensorProto
_NARROW = (_T.FLOAT16, _T.BFLOAT16)
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_TYPE_ATTRS = ("to", "dtype", "output_dtype", "stash_type")  # attributes that hold a TensorProto type
PROTOBUF_LIMIT = 2**31 - 1  # bytes a serialized message may have
NARROW = "/narrow"  # ends the name of a 16-bit weight whose own name is that of its f32 values
# Inputs that belong to the norm: input, skip, gamma (and beta); a bias after them belongs to the sum
NORM_INPUTS = {"SkipSimplifiedLayerNormalization": 3, "SkipLayerNormalization": 4}
NUDGE_MAX_BYTES = 1 << 24  # weights worth copying into the twin to change one element


class Twin:
    """A model being rewritten. Every method changes it in place and returns it; `serialize()` hands it over."""

    def __init__(self, path: Path) -> None:
        """Read the graph at `path`; weights stay in their file."""
        self.path = path
        self.folder = path.parent
        self.model = read_model(path)
        self.changes: list[str] = []
        self._widened: set[str] = set()  # weights that a Cast reads from their 16-bit file

    @property
    def graph(self) -> onnx.GraphProto:
        """The main graph."""
        return self.model.graph

    def serialize(self) -> bytes:
        """The protobuf. GenaiError where it would exceed protobuf's 2 GiB."""
        if self.model.ByteSize() > PROTOBUF_LIMIT:
            raise GenaiError(
                f"the rewritten `{self.path.name}` needs {self.model.ByteSize()} bytes in memory; {PROTOBUF_LIMIT} fit",
                hint="use another oracle: `--oracle ort` or `--oracle golden:FILE`",
            )
        return bytes(self.model.SerializeToString())

    def sharp(self) -> Twin:
        """Quantized matmuls take f32 activations: accuracy_level 1."""
        count = 0
        for node in _nodes(self.graph):
            if node.op_type == "MatMulNBits":
                _set_int(node, "accuracy_level", 1)
                count += 1
        self.changes.append(f"accuracy_level 1 on {count} MatMulNBits")
        return self

    def wide(self) -> Twin:
        """f32 wherever the graph said f16 or bf16: weights, inputs and outputs (KV too), casts, constants.

        Weights stay in their file and are cast when the session opens: copying them into the protobuf costs seconds.
        """
        narrow = [tensor for tensor in self.graph.initializer if tensor.data_type in _NARROW]
        _widen_graph(self.graph, ExternalFiles(self.folder))
        self._widened = {tensor.name for tensor in narrow}
        for tensor in narrow:
            tensor.name += NARROW
        casts = [
            helper.make_node("Cast", [name + NARROW], [name], to=_T.FLOAT, name=name + "/wide")
            for name in sorted(self._widened)
        ]
        nodes = [*casts, *self.graph.node]
        del self.graph.node[:]
        self.graph.node.extend(nodes)
        self.changes.append("16-bit weights, values and KV widened to f32")
        return self

    def with_outputs(self, names: Sequence[str]) -> Twin:
        """Extra graph outputs (taps)."""
        present = {value.name for value in self.graph.output}
        declared = {value.name: value for value in self.graph.value_info}
        wanted = [name for name in names if name not in present]
        self.graph.output.extend(declared.get(name, onnx.ValueInfoProto(name=name)) for name in wanted)
        self.changes.append(f"{len(names)} taps")
        return self

    def nudge(self, name: str, index: int, ulps: int = 1) -> Twin:
        """Change element `index` (flat) of weight `name` by `ulps` representable values, away from zero."""
        values = self.weight(name).copy()
        flat = values.reshape(-1)
        bits = flat.view(np.dtype(f"u{flat.itemsize}"))
        bits[index] += ulps  # away from zero in sign-magnitude order
        self.changes.append(f"{ulps} ulp on {name}[{index}]")
        return self.replace(name, values)

    def replace(self, name: str, values: np.ndarray) -> Twin:
        """Give weight `name` other values of the same dtype and shape, held in memory."""
        tensor = self._tensor(name)
        tensor.CopyFrom(_tensor_proto(values, name))
        if name in self._widened:
            self._widened.remove(name)
            self.graph.node.remove(next(node for node in self.graph.node if name in node.output))
        return self

    def weight(self, name: str) -> np.ndarray:
        """The values of a weight, f32 where it was widened; a view of the file where possible."""
        values = initializer(self._tensor(name), ExternalFiles(self.folder)).array()
        return values.astype(np.float32) if name in self._widened else values

    def weights(self) -> set[str]:
        """Names of all weights, as nodes read them."""
        return {tensor.name.removesuffix(NARROW) for tensor in self.graph.initializer}

    def nudge_value(self, name: str, width: int, dtype: np.dtype, seed: int) -> Twin:
        """Multiply every column of value `name` [..., width] by 1 or 1 + one ulp, drawn by `seed`, for all readers."""
        ones = np.ones(width, dtype)
        raised = np.random.default_rng(seed).integers(0, 2, width)
        ones.view(np.dtype(f"u{dtype.itemsize}"))[:] += raised.astype(f"u{dtype.itemsize}")
        factor, moved = f"{name}/nudge", f"{name}/nudged"
        self._rewire(name, moved)
        self.graph.initializer.append(_tensor_proto(ones, factor))
        position = self._after(name)
        self.graph.node.insert(position, helper.make_node("Mul", [name, factor], [moved], name=moved))
        self.changes.append(f"1 ulp on half the columns of {name}")
        return self

    def splice(self, values: Mapping[str, np.ndarray]) -> Twin:
        """Everyone who reads one of these values gets the given array; what made it still runs."""
        for name, array in values.items():
            self._rewire(name, self._constant(f"{name}/spliced", array))
        self.changes.append(f"{len(values)} values spliced")
        return self

    def splice_sum(self, name: str, array: np.ndarray) -> Twin:
        """The skip-and-norm that makes the sum `name` gets `array` and zero to add: its norm is of the given sum."""
        maker = next(node for node in self.graph.node if name in node.output)
        given = self._constant(f"{name}/spliced", array), self._constant(f"{name}/zero", np.zeros_like(array))
        kept = list(maker.input[2 : NORM_INPUTS[maker.op_type]])
        del maker.input[:]
        maker.input.extend([*given, *kept])
        self.changes.append(f"sum {name} spliced")
        return self

    def _constant(self, name: str, array: np.ndarray) -> str:
        self.graph.initializer.append(_tensor_proto(np.ascontiguousarray(array), name))
        return name

    def nudgeable(self) -> list[str]:
        """Float weights that are read by a node and small enough to copy, in file order."""
        read = {name for node in _nodes(self.graph) for name in node.input}
        return [
            tensor.name.removesuffix(NARROW)
            for tensor in self.graph.initializer
            if tensor.name in read
            and tensor.data_type in (_T.FLOAT, *_NARROW)
            and 8 <= int(np.prod(tensor.dims, dtype=np.int64)) <= NUDGE_MAX_BYTES // 4
        ]

    def has_16_bit(self) -> bool:
        """Any f16 or bf16 weight, input or output."""
        types = {tensor.data_type for tensor in self.graph.initializer}
        types |= {value.type.tensor_type.elem_type for value in [*self.graph.input, *self.graph.output]}
        return bool(types & set(_NARROW))

    def accuracy_levels(self) -> dict[int, int]:
        """accuracy_level -> number of MatMulNBits nodes."""
        levels: dict[int, int] = {}
        for node in _nodes(self.graph):
            if node.op_type == "MatMulNBits":
                level = next((int(a.i) for a in node.attribute if a.name == "accuracy_level"), 0)
                levels[level] = levels.get(level, 0) + 1
        return levels

    def _tensor(self, name: str) -> onnx.TensorProto:
        stored = name + NARROW if name in self._widened else name
        found: onnx.TensorProto | None = next((t for t in self.graph.initializer if t.name == stored), None)
        if found is None:
            raise GenaiError(f"`{self.path.name}` has no weight `{name}`")
        return found

    def _rewire(self, name: str, new: str) -> None:
        for node in _nodes(self.graph):
            for index, read in enumerate(node.input):
                if read == name:
                    node.input[index] = new

    def _after(self, name: str) -> int:
        makers = [i for i, node in enumerate(self.graph.node) if name in node.output]
        return makers[0] + 1 if makers else 0


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """All nodes, those of subgraphs too."""
    for node in graph.node:
        yield node
        for attr in node.attribute:
            if attr.type == onnx.AttributeProto.GRAPH:
                yield from _nodes(attr.g)


def _set_int(node: onnx.NodeProto, name: str, value: int) -> None:
    kept = [attr for attr in node.attribute if attr.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def _tensor_proto(values: np.ndarray, name: str) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name=name, data_type=_CODES[values.dtype], dims=values.shape)
    tensor.raw_data = np.ascontiguousarray(values).tobytes()
    return tensor


def _widen_graph(graph: onnx.GraphProto, files: ExternalFiles) -> None:
    """Everything but the graph's own weights."""
    for value in [*graph.input, *graph.output, *graph.value_info]:
        if value.type.tensor_type.elem_type in _NARROW:
            value.type.tensor_type.elem_type = _T.FLOAT
    for node in graph.node:
        for attr in node.attribute:
            _widen_attribute(attr, files)


def _widen_tensor(tensor: onnx.TensorProto, files: ExternalFiles) -> None:
    if tensor.data_type in _NARROW:
        values = initializer(tensor, files).array().astype(np.float32)
        tensor.CopyFrom(_tensor_proto(values, tensor.name))


def _widen_attribute(attr: onnx.AttributeProto, files: ExternalFiles) -> None:
    if attr.type == onnx.AttributeProto.TENSOR:
        _widen_tensor(attr.t, files)
    elif attr.type == onnx.AttributeProto.GRAPH:
        for tensor in attr.g.initializer:
            _widen_tensor(tensor, files)
        _widen_graph(attr.g, files)
    elif attr.name in _TYPE_ATTRS and attr.type == onnx.AttributeProto.INT and attr.i in _NARROW:
        attr.i = _T.FLOAT


def one_node_model(
    op_type: str, domain: str, opsets: Mapping[str, int], inputs: Sequence[np.ndarray | None], attrs: Mapping[str, Any],
    num_outputs: Sequence[bool], constants: frozenset[int] = frozenset(), copies: int = 1,
) -> tuple[bytes, dict[str, np.ndarray]]:  # fmt: skip
    """A model of one node (or of equal ones beside each other, each with inputs of its own), and its feeds. Inputs in
    `constants` are weights; outputs are y0, y1, … where wanted, those of further copies y0_1, …"""
    ends = ["", *(f"_{copy}" for copy in range(1, copies))]
    given = {f"x{i}{end}": array for end in ends for i, array in enumerate(inputs) if array is not None}
    weights = {f"x{i}{end}" for end in ends for i in constants}
    feeds = {name: array for name, array in given.items() if name not in weights}
    outputs = [[f"y{i}{end}" if wanted else "" for i, wanted in enumerate(num_outputs)] for end in ends]
    nodes = [
        helper.make_node(
            op_type,
            [f"x{i}{end}" if array is not None else "" for i, array in enumerate(inputs)],
            names,
            domain=domain,
            **_onnx_attrs(attrs),
        )
        for end, names in zip(ends, outputs, strict=True)
    ]
    graph = helper.make_graph(
        nodes,
        "one_node",
        [helper.make_tensor_value_info(name, _CODES[array.dtype], array.shape) for name, array in feeds.items()],
        [onnx.ValueInfoProto(name=name) for names in outputs for name in names if name],
        [_tensor_proto(array, name) for name, array in given.items() if name not in feeds],
    )
    imports = [helper.make_opsetid(name, version) for name, version in {"": 21, **opsets}.items()]
    return helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString(), feeds


def _onnx_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value
        for name, value in attrs.items()
    }


def is_narrow(dtype: np.dtype) -> bool:
    """f16 or bf16."""
    return dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
