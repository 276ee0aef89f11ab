# SPDX-License-Identifier: Apache-2.0
"""Reads one EPContext node: its attributes, with the defaults of ONNX Runtime's own reader.

The numbers below are field numbers of onnx.proto, which is public and append-only.
"""

from dataclasses import dataclass
from typing import NamedTuple

from qnnbroker.protos.errors import InvalidRequest, Unsupported

from .protowire import Field, Message, WireType, bad, quote

EPCONTEXT_OP = "EPContext"
EPCONTEXT_DOMAIN = "com.microsoft"
#: Values of the attribute `source` that mean QNN, in lower case.
QNN_SOURCES = frozenset({"qnn", "qnnexecutionprovider"})

_NODE_INPUT, _NODE_OUTPUT, _NODE_NAME, _NODE_OP, _NODE_ATTRIBUTE, _NODE_DOMAIN = 1, 2, 3, 4, 5, 7
_ATTRIBUTE_NAME, _ATTRIBUTE_INT, _ATTRIBUTE_BYTES, _ATTRIBUTE_TYPE = 1, 3, 4, 20
_ATTRIBUTE_TYPE_INT, _ATTRIBUTE_TYPE_STRING = 2, 3


class ByteRange(NamedTuple):
    """Where the embedded context binary lies in the wrapper file, in bytes."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class EPContextNode:
    """One EPContext node: one graph of a context binary.

    `cache_context` is the file name of the binary (embed mode 0), the range of its bytes (embed
    mode 1), or None for a node that uses the binary of the main node. `io_name_overrides` maps
    those edges of this node whose tensor has another name in the QNN graph.
    """

    name: str
    partition_name: str
    main_context: bool
    embed_mode: int
    cache_context: str | ByteRange | None
    source: str
    sdk_version: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    io_name_overrides: dict[str, str]


def read_node(node: Message) -> EPContextNode | tuple[str, str]:
    """An EPContext node, or (op_type, name) of another one, whose attributes are not looked at."""
    name = op_type = domain = ""
    for field in node.fields():
        if field.number == _NODE_NAME:
            name = node.text(field)
        elif field.number == _NODE_OP:
            op_type = node.text(field)
        elif field.number == _NODE_DOMAIN:
            domain = node.text(field)
    if op_type != EPCONTEXT_OP or domain != EPCONTEXT_DOMAIN:
        return op_type, name
    inputs = tuple(node.text(f) for f in node.only(_NODE_INPUT))
    outputs = tuple(node.text(f) for f in node.only(_NODE_OUTPUT))
    return _Attributes(node, name).to_node(inputs, outputs)


class _Attributes:
    """The attributes of one EPContext node, by name, with the values left where they lie."""

    def __init__(self, node: Message, node_name: str) -> None:
        self._node_name = node_name
        self._found: dict[str, tuple[Message, int, Field | None, Field | None]] = {}
        for field in node.only(_NODE_ATTRIBUTE):
            attribute = node.message(field)
            name, kind, integer, span = "", 0, None, None
            for part in attribute.fields():
                if part.number == _ATTRIBUTE_NAME:
                    name = attribute.text(part)
                elif part.number == _ATTRIBUTE_TYPE:
                    kind = part.signed()
                elif part.number == _ATTRIBUTE_INT:
                    integer = part
                elif part.number == _ATTRIBUTE_BYTES:
                    span = part
            if name in self._found:
                raise self._bad(name, "is there twice")
            self._found[name] = attribute, kind, integer, span

    def _bad(self, name: str, what: str) -> InvalidRequest:
        return bad(
            f"the attribute {quote(name)} of the EPContext node {quote(self._node_name)} {what}"
        )

    def _flag(self, name: str, default: int) -> int:
        if name not in self._found:
            return default
        _, kind, integer, _ = self._found[name]
        if kind != _ATTRIBUTE_TYPE_INT:
            raise self._bad(name, f"should be an integer, its type is {kind}")
        value = integer.signed() if integer is not None else 0
        if value not in (0, 1):
            raise self._bad(name, f"is {value}; 0 or 1 is wanted")
        return value

    def _span(self, name: str) -> tuple[Message, Field | None] | None:
        if name not in self._found:
            return None
        attribute, kind, _, span = self._found[name]
        if kind != _ATTRIBUTE_TYPE_STRING:
            raise self._bad(name, f"should be a string, its type is {kind}")
        if span is not None and span.wire_type is not WireType.BYTES:
            raise self._bad(name, f"holds no bytes but a {span.wire_type.name}")
        return attribute, span

    def _text(self, name: str) -> str:
        found = self._span(name)
        return "" if found is None or found[1] is None else found[0].text(found[1])

    def _cache_context(self, embed_mode: int) -> str | ByteRange | None:
        found = self._span("ep_cache_context")
        if found is None or found[1] is None:
            return None
        attribute, span = found[0], found[1]
        if embed_mode == 1:
            return ByteRange(span.start, span.value)
        return attribute.text(span)

    def _overrides(self, edges: frozenset[str]) -> dict[str, str]:
        """The overrides of `edges`; the attribute lists those of all nodes of the model."""
        overrides: dict[str, str] = {}
        for entry in self._text("io_name_overrides").split(";"):
            if not entry:
                continue  # after the trailing ';'
            edge, _, qnn_name = entry.partition("=")
            if not (edge and qnn_name):
                raise self._bad("io_name_overrides", f"has {quote(entry)}; 'edge=name' is wanted")
            if edge in edges and overrides.setdefault(edge, qnn_name) != qnn_name:
                raise self._bad("io_name_overrides", f"names the edge {quote(edge)} twice")
        return overrides

    def to_node(self, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> EPContextNode:
        """The node, with the defaults that ONNX Runtime's own reader uses."""
        source = self._text("source")
        if source.lower() not in QNN_SOURCES:
            raise Unsupported(
                f"the EPContext node {quote(self._node_name)} is of the source {quote(source)}; "
                "QNNExecutionProvider is wanted",
                reason="LAYOUT",
            )
        main_context = bool(self._flag("main_context", 1))
        embed_mode = self._flag("embed_mode", 1)
        cache_context = self._cache_context(embed_mode)
        size = cache_context.length if isinstance(cache_context, ByteRange) else cache_context
        if main_context and not size:
            wanted = "the binary" if embed_mode else "its file name"
            raise self._bad("ep_cache_context", f"is empty; {wanted} is wanted")
        partition_name = self._text("partition_name") or self._node_name
        if not partition_name:
            raise self._bad("partition_name", "is empty, and the node has no name either")
        return EPContextNode(
            name=self._node_name,
            partition_name=partition_name,
            main_context=main_context,
            embed_mode=embed_mode,
            cache_context=cache_context,
            source=source,
            sdk_version=self._text("ep_sdk_version"),
            inputs=inputs,
            outputs=outputs,
            io_name_overrides=self._overrides(frozenset(inputs + outputs)),
        )
