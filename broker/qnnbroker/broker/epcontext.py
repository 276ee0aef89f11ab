# SPDX-License-Identifier: Apache-2.0
"""Reads the ONNX wrapper of a context binary: its nodes, their names, where the bytes lie.

A wrapper is an ordinary ONNX model whose nodes of the type `com.microsoft.EPContext` stand for the
graphs of a context binary. The binary is a file beside the wrapper (embed mode 0) or lies inside
the node (embed mode 1). This module finds and checks; it opens no file, and it neither reads nor
copies weights: an embedded binary of gigabytes is stepped over.

The numbers below are field numbers of onnx.proto, which is public and append-only.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qnnbroker.protos.errors import Unsupported

from .epcontext_node import ByteRange, EPContextNode, read_node
from .protowire import Budget, Message, Source, bad, quote

__all__ = [
    "ByteRange",
    "EPContextNode",
    "ValueInfo",
    "Wrapper",
    "binary_path",
    "check_fully_offloaded",
    "embedded_binary",
    "names_for",
    "read_wrapper",
    "read_wrapper_from",
    "sniff",
]

#: How a context binary of the fake backend starts.
FAKE_MAGIC = b"qnnbroker-fake"
#: Nodes of one wrapper, EPContext or not.
MAX_NODES = 65536
#: Operators that a refusal names.
_NAMED_OPERATORS = 10

_MODEL_IR_VERSION, _MODEL_GRAPH, _MODEL_METADATA = 1, 7, 14
_MODEL_FIELDS = frozenset({2, 3, 4, 5, 6, 7, 8, 14})
_GRAPH_NODE, _GRAPH_NAME, _GRAPH_INPUT, _GRAPH_OUTPUT = 1, 2, 11, 12
_VALUE_NAME, _VALUE_TYPE = 1, 2
_TYPE_TENSOR, _TENSOR_ELEM, _TENSOR_SHAPE, _SHAPE_DIM, _DIM_VALUE, _DIM_PARAM = 1, 1, 2, 1, 1, 2
_ENTRY_KEY, _ENTRY_VALUE = 1, 2


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """An input or output of the wrapper's graph.

    `elem_type` is ONNX's number, 0 when it is not a tensor. A dimension is an int, or the text of a
    symbolic one ("" when unnamed); `shape` is None when the rank is unknown.
    """

    name: str
    elem_type: int
    shape: tuple[int | str, ...] | None


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A wrapper, read. Holds no reference to the bytes. `other_nodes` are (op_type, name)."""

    ir_version: int
    metadata: dict[str, str]
    graph_name: str
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    nodes: tuple[EPContextNode, ...]
    other_nodes: tuple[tuple[str, str], ...]

    @property
    def main_nodes(self) -> tuple[EPContextNode, ...]:
        """The nodes that carry or name a context binary."""
        return tuple(n for n in self.nodes if n.main_context)


def sniff(data: memoryview | bytes) -> Literal["wrapper", "binary", "unknown"]:
    """What kind of file this is, from its first bytes; says nothing about it being sound.

    "wrapper" is any ONNX model, cut off or not: read_wrapper then says what is wrong with it.
    """
    with memoryview(data) as whole, whole.cast("B") as view:
        head = bytes(view[:64])
    if head.startswith(FAKE_MAGIC):
        return "binary"
    # QNN's HTP binaries start with a small big-endian number; 0 is no protobuf tag.
    if len(head) == 64 and 0 < int.from_bytes(head[:4], "big") < 0x100:
        return "binary"
    # ONNX writers put ir_version first (a varint below 128), then the tag of another field.
    if len(head) >= 2 and head[0] == _MODEL_IR_VERSION << 3 and 0 < head[1] < 0x80:
        return "wrapper" if len(head) == 2 or head[2] >> 3 in _MODEL_FIELDS else "unknown"
    return "unknown"


def read_wrapper(data: memoryview | bytes, *, budget: Budget | None = None) -> Wrapper:
    """The wrapper in `data`, all of the file. Keeps no reference to `data`.

    `data` may be a memoryview of an mmap: only the pages that hold structure are touched. The file
    must not shrink meanwhile (a mapped page that is gone kills the process).

    Raises:
        InvalidRequest: reason BAD_FILE; not a well-formed wrapper.
        Unsupported: reason LAYOUT; an EPContext node of another execution provider.
    """
    with memoryview(data) as whole, whole.cast("B") as view:
        del data  # or a caller's mapping could not be closed while our exception is handled
        return read_wrapper_from(view, budget=budget)


def read_wrapper_from(source: Source, *, budget: Budget | None = None) -> Wrapper:
    """The same of anything that has bytes, of which it asks for those that hold structure.

    Raises:
        InvalidRequest, Unsupported: as `read_wrapper`; and what `source` raises.
    """
    model = Message(source, 0, len(source), budget or Budget())
    ir_version, graph_field, metadata = 0, None, dict[str, str]()
    for field in model.fields():
        if field.number == _MODEL_IR_VERSION:
            ir_version = field.signed()
        elif field.number == _MODEL_GRAPH:
            if graph_field is not None:
                raise bad(f"a second graph at byte {field.start}; a model has one")
            graph_field = field
        elif field.number == _MODEL_METADATA:
            key, value = _read_entry(model.message(field))
            metadata[key] = value
    if ir_version < 1 or graph_field is None:
        raise bad(
            f"not an ONNX model: {len(source)} bytes with ir_version {ir_version} "
            f"and {'no' if graph_field is None else 'a'} graph"
        )
    return _read_graph(model.message(graph_field), ir_version, metadata)


def check_fully_offloaded(wrapper: Wrapper) -> None:
    """Refuses a wrapper that leaves work to the CPU, or that holds nothing for the NPU.

    Raises:
        Unsupported: reason LAYOUT; not compiled, or operators outside EPContext nodes, of which up
            to 10 are named.
        InvalidRequest: reason BAD_FILE; no EPContext node, or none that carries a binary.
    """
    if wrapper.other_nodes:
        count = len(wrapper.other_nodes)
        if not wrapper.nodes:
            raise Unsupported(
                f"the model {quote(wrapper.graph_name)}, of {count} "
                f"operator{'' if count == 1 else 's'}, is not compiled: run `qnnbroker compile` "
                "on it first",
                reason="LAYOUT",
                operators=count,
            )
        names = ", ".join(
            f"{quote(op)[1:-1]} {quote(name)}".removesuffix(" ''")
            for op, name in wrapper.other_nodes[:_NAMED_OPERATORS]
        )
        if count > _NAMED_OPERATORS:
            names += f" and {count - _NAMED_OPERATORS} more"
        plural = "" if count == 1 else "s"
        raise Unsupported(
            f"the model {quote(wrapper.graph_name)} has {count} operator{plural} beside its "
            f"EPContext nodes: {names}; only models that run on the NPU as a whole are taken",
            reason="LAYOUT",
            operators=count,
        )
    if not wrapper.main_nodes:
        raise bad(
            f"the model {quote(wrapper.graph_name)} has {len(wrapper.nodes)} EPContext nodes, "
            "none of which carries a context binary (main_context 1)"
        )


def binary_path(wrapper_path: Path, node: EPContextNode) -> Path:
    """The file that holds the node's context binary, beside the wrapper. Opens nothing.

    Raises:
        InvalidRequest: reason BAD_FILE; the node names no file, or one that is not below the
            wrapper's directory by its name.
    """
    name = node.cache_context
    if not isinstance(name, str):
        held = "holds its binary itself" if name is not None else "carries no binary"
        raise bad(f"the EPContext node {quote(node.name)} {held}, it names no file")
    parts = name.replace("\\", "/").split("/")
    drive = len(parts[0]) >= 2 and parts[0][1] == ":"
    if parts[0] == "" or parts[-1] in ("", ".") or ".." in parts or drive or "\0" in name:
        raise bad(
            f"the EPContext node {quote(node.name)} names the binary {quote(name)}; "
            "wanted a file beside the wrapper, without '..'"
        )
    return wrapper_path.parent / name


def embedded_binary(data: memoryview, node: EPContextNode) -> memoryview:
    """The bytes of an embedded context binary, as a view of the wrapper's bytes.

    Raises:
        InvalidRequest: reason BAD_FILE; the node has none, or `data` is not the wrapper it is from.
    """
    span = node.cache_context
    if not isinstance(span, ByteRange):
        raise bad(f"the EPContext node {quote(node.name)} holds no embedded binary")
    if span.offset + span.length > len(data):
        raise bad(
            f"the EPContext node {quote(node.name)} has its binary at bytes {span.offset} to "
            f"{span.offset + span.length}, the file has {len(data)}"
        )
    return data[span.offset : span.offset + span.length]


def names_for(node: EPContextNode) -> dict[str, str]:
    """QNN tensor name -> edge name, for each input and output of the node that is connected.

    Raises:
        InvalidRequest: reason BAD_FILE; two edges have one QNN name.
    """
    names: dict[str, str] = {}
    for edge in (*node.inputs, *node.outputs):
        if not edge:
            continue  # ONNX writes "" for an optional input that is not connected
        name = node.io_name_overrides.get(edge, edge)
        if names.setdefault(name, edge) != edge:
            raise bad(
                f"the EPContext node {quote(node.name)} gives two edges, {quote(names[name])} "
                f"and {quote(edge)}, the same QNN tensor name {quote(name)}"
            )
    return names


def _read_graph(graph: Message, ir_version: int, metadata: dict[str, str]) -> Wrapper:
    name = ""
    inputs: list[ValueInfo] = []
    outputs: list[ValueInfo] = []
    nodes: list[EPContextNode] = []
    other_nodes: list[tuple[str, str]] = []
    for field in graph.fields():
        if field.number == _GRAPH_NODE:
            if len(nodes) + len(other_nodes) == MAX_NODES:
                raise bad(f"more than {MAX_NODES} nodes (at byte {field.start})")
            node = read_node(graph.message(field))
            if isinstance(node, EPContextNode):
                nodes.append(node)
            else:
                other_nodes.append(node)
        elif field.number == _GRAPH_NAME:
            name = graph.text(field)
        elif field.number == _GRAPH_INPUT:
            inputs.append(_read_value(graph.message(field)))
        elif field.number == _GRAPH_OUTPUT:
            outputs.append(_read_value(graph.message(field)))
    return Wrapper(
        ir_version, metadata, name, tuple(inputs), tuple(outputs), tuple(nodes), tuple(other_nodes)
    )


def _read_entry(entry: Message) -> tuple[str, str]:
    key = value = ""
    for field in entry.fields():
        if field.number == _ENTRY_KEY:
            key = entry.text(field)
        elif field.number == _ENTRY_VALUE:
            value = entry.text(field)
    return key, value


def _read_value(value: Message) -> ValueInfo:
    name, elem_type = "", 0
    shape: tuple[int | str, ...] | None = None
    for field in value.fields():
        if field.number == _VALUE_NAME:
            name = value.text(field)
        elif field.number == _VALUE_TYPE:
            kind = value.message(field)
            for tensor_field in kind.only(_TYPE_TENSOR):
                tensor = kind.message(tensor_field)
                for part in tensor.fields():
                    if part.number == _TENSOR_ELEM:
                        elem_type = part.signed()
                    elif part.number == _TENSOR_SHAPE:
                        dims = tensor.message(part)
                        shape = tuple(_read_dim(dims.message(d)) for d in dims.only(_SHAPE_DIM))
    return ValueInfo(name, elem_type, shape)


def _read_dim(dim: Message) -> int | str:
    result: int | str = ""
    for field in dim.fields():
        if field.number == _DIM_VALUE:
            result = field.signed()
        elif field.number == _DIM_PARAM:
            result = dim.text(field)
    return result
