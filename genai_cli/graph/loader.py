"""ONNX file -> Graph. The only place that reads protobuf; weights stay in the file until someone looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from google.protobuf.message import DecodeError

from genai_cli.errors import GenaiError
from genai_cli.graph.external import LFS_MAGIC, ExternalFiles
from genai_cli.graph.ir import Dim, Graph, Initializer, Node, ValueInfo

_T = onnx.TensorProto
DTYPES: dict[int, np.dtype] = {
    _T.FLOAT: np.dtype(np.float32),
    _T.DOUBLE: np.dtype(np.float64),
    _T.FLOAT16: np.dtype(np.float16),
    _T.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    _T.INT8: np.dtype(np.int8),
    _T.UINT8: np.dtype(np.uint8),
    _T.INT16: np.dtype(np.int16),
    _T.UINT16: np.dtype(np.uint16),
    _T.INT32: np.dtype(np.int32),
    _T.UINT32: np.dtype(np.uint32),
    _T.INT64: np.dtype(np.int64),
    _T.UINT64: np.dtype(np.uint64),
    _T.BOOL: np.dtype(np.bool_),
    _T.INT4: np.dtype(ml_dtypes.int4),
    _T.UINT4: np.dtype(ml_dtypes.uint4),
    _T.FLOAT8E4M3FN: np.dtype(ml_dtypes.float8_e4m3fn),
    _T.FLOAT8E5M2: np.dtype(ml_dtypes.float8_e5m2),
}
_FOUR_BIT = {_T.INT4, _T.UINT4}


def read_model(path: Path) -> onnx.ModelProto:
    """The model's protobuf without external data. Raises GenaiError on a missing, empty, LFS-pointer or broken file."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise GenaiError(f"cannot read the model `{path}`: {error.strerror}") from None
    if raw.startswith(LFS_MAGIC):
        raise GenaiError(f"`{path}` is a Git-LFS pointer, not a model", hint="run `git lfs pull` in the model's folder")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(raw)
    except DecodeError:
        raise GenaiError(f"`{path}` ({len(raw)} bytes) is not an ONNX model", hint="export it again") from None
    if not model.graph.node:
        raise GenaiError(f"`{path}` ({len(raw)} bytes) holds no graph", hint="export it again")
    if any(isinstance(name, bytes) for name in _names(model.graph)):  # what protobuf makes of broken UTF-8
        raise GenaiError(f"`{path}` holds names that are not UTF-8; the file is damaged", hint="export it again")
    return model


def _names(graph: onnx.GraphProto) -> Iterator[str | bytes]:
    yield from (value.name for value in [*graph.input, *graph.output, *graph.value_info])
    yield from (tensor.name for tensor in graph.initializer)
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (attr.name for attr in node.attribute)


def load_graph(path: Path) -> Graph:
    """Load an .onnx file; external data is checked now (location, presence, size) and mapped, not read."""
    path = Path(path)
    model = read_model(path)
    return graph_from_proto(model, path.parent)


def graph_from_bytes(model: bytes, folder: Path) -> Graph:
    """A Graph of a serialized model; `folder` is where its external data lies."""
    return graph_from_proto(onnx.ModelProto.FromString(model), folder)


def graph_from_proto(model: onnx.ModelProto, folder: Path) -> Graph:
    """A Graph of a model already in memory; `folder` is where its external data lies."""
    opsets = {("" if entry.domain == "ai.onnx" else entry.domain): entry.version for entry in model.opset_import}
    graph = _graph(model.graph, opsets, ExternalFiles(folder))
    graph.ir_version = model.ir_version
    graph.producer = f"{model.producer_name} {model.producer_version}".strip()
    return graph


def _graph(proto: onnx.GraphProto, opsets: dict[str, int], files: ExternalFiles) -> Graph:
    initializers = {tensor.name: initializer(tensor, files) for tensor in proto.initializer}
    inputs = [_value(entry) for entry in proto.input if entry.name not in initializers]
    outputs = [_value(entry) for entry in proto.output]
    values = {entry.name: _value(entry) for entry in proto.value_info}
    values |= {value.name: value for value in [*inputs, *outputs]}
    nodes = [_node(entry, opsets, files) for entry in proto.node]
    return Graph(proto.name, inputs, outputs, _sorted(nodes, proto.name), initializers, values, opsets)


def _node(proto: onnx.NodeProto, opsets: dict[str, int], files: ExternalFiles) -> Node:
    domain = "" if proto.domain == "ai.onnx" else proto.domain
    attrs = {attr.name: _attribute(attr, opsets, files) for attr in proto.attribute}
    return Node(proto.op_type, domain, list(proto.input), list(proto.output), attrs, proto.name, opsets.get(domain, 1))


def _attribute(attr: onnx.AttributeProto, opsets: dict[str, int], files: ExternalFiles) -> Any:
    kind = onnx.AttributeProto
    if attr.type == kind.TENSOR:
        return initializer(attr.t, files).array()
    if attr.type == kind.GRAPH:
        return _graph(attr.g, opsets, files)
    value = onnx.helper.get_attribute_value(attr)
    if attr.type == kind.STRING:
        return value.decode("utf-8", "replace")
    if attr.type == kind.STRINGS:
        return [item.decode("utf-8", "replace") for item in value]
    return list(value) if attr.type in (kind.INTS, kind.FLOATS) else value


def _value(proto: onnx.ValueInfoProto) -> ValueInfo:
    tensor = proto.type.tensor_type
    shape = tuple(_dim(dim) for dim in tensor.shape.dim) if tensor.HasField("shape") else None
    return ValueInfo(proto.name, DTYPES.get(tensor.elem_type), shape)


def _dim(dim: onnx.TensorShapeProto.Dimension) -> Dim:
    return int(dim.dim_value) if dim.HasField("dim_value") else (dim.dim_param or None)


def initializer(proto: onnx.TensorProto, files: ExternalFiles) -> Initializer:
    """A weight whose bytes are checked now and viewed later."""
    dtype = DTYPES.get(proto.data_type)
    if dtype is None:
        names = {number: name for name, number in onnx.TensorProto.DataType.items()}
        kind = names.get(proto.data_type, f"number {proto.data_type}")
        raise GenaiError(f"weight `{proto.name}` has the type {kind}, which is not supported")
    shape = tuple(proto.dims)
    if any(dim < 0 for dim in shape):
        raise GenaiError(f"weight `{proto.name}` has the shape {list(shape)}; dimensions must be >= 0")
    size = int(np.prod(shape, dtype=np.int64))
    nbytes = (size + 1) // 2 if proto.data_type in _FOUR_BIT else size * dtype.itemsize
    return Initializer(proto.name, dtype, shape, nbytes, _reader(proto, files, dtype, shape, nbytes))


def _reader(
    proto: onnx.TensorProto, files: ExternalFiles, dtype: np.dtype, shape: tuple[int, ...], nbytes: int
) -> Callable[[], np.ndarray]:
    if proto.data_location == onnx.TensorProto.EXTERNAL:
        raw = files.view(proto.name, {entry.key: entry.value for entry in proto.external_data}, nbytes)
    elif proto.HasField("raw_data"):
        if len(proto.raw_data) != nbytes:
            raise GenaiError(
                f"weight `{proto.name}` holds {len(proto.raw_data)} bytes, but {list(shape)} {dtype} needs {nbytes}"
            )
        raw = np.frombuffer(proto.raw_data, np.uint8)
    else:
        try:
            typed = onnx.numpy_helper.to_array(proto).reshape(shape)
        except (ValueError, TypeError):
            raise GenaiError(f"weight `{proto.name}`: its values do not fill {list(shape)} {dtype}") from None
        return lambda: typed
    if proto.data_type in _FOUR_BIT:
        return lambda: _unpack_four_bit(raw, dtype, shape)
    return lambda: raw.view(dtype).reshape(shape)


def _unpack_four_bit(raw: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """ONNX packs two to a byte, the low nibble first; an odd count leaves the last high nibble unused."""
    nibbles = np.stack([raw & 0x0F, raw >> 4], axis=-1).reshape(-1)[: int(np.prod(shape, dtype=np.int64))]
    if dtype == ml_dtypes.int4:
        signed = nibbles.astype(np.int8)
        return np.where(signed > 7, signed - 16, signed).astype(ml_dtypes.int4).reshape(shape)
    return nibbles.astype(dtype).reshape(shape)


def _sorted(nodes: list[Node], name: str) -> list[Node]:
    """Topological order (exporters mostly keep it; ONNX asks for it), with a clear error on a cycle."""
    producer = {out: index for index, node in enumerate(nodes) for out in node.outputs if out}
    done: set[int] = set()
    order: list[Node] = []
    for start in range(len(nodes)):
        stack = [(start, False)]
        open_nodes: set[int] = set()
        while stack:
            index, ready = stack.pop()
            if index in done:
                continue
            if ready:
                done.add(index)
                open_nodes.discard(index)
                order.append(nodes[index])
                continue
            if index in open_nodes:
                raise GenaiError(f"graph `{name}` has a cycle through node `{nodes[index].name}`")
            open_nodes.add(index)
            stack.append((index, True))
            needs = {producer[value] for value in node_inputs(nodes[index]) if value in producer}
            stack.extend((need, False) for need in sorted(needs - done, reverse=True))
    return order


def node_inputs(node: Node) -> list[str]:
    """Names a node reads, those captured by its subgraphs included."""
    names = [name for name in node.inputs if name]
    for value in node.attrs.values():
        if isinstance(value, Graph):
            inner = {out for sub in value.nodes for out in sub.outputs} | set(value.initializers)
            used = [name for sub in value.nodes for name in node_inputs(sub)] + [out.name for out in value.outputs]
            names += [name for name in used if name not in inner]
    return names


def external_files(path: Path) -> list[str]:
    """Names of the data files a model refers to, relative to its folder, sorted."""
    tensors = read_model(path).graph.initializer
    entries = (entry for tensor in tensors for entry in tensor.external_data if entry.key == "location")
    return sorted({entry.value for entry in entries})
