# SPDX-License-Identifier: Apache-2.0
"""Walks protobuf wire format in place: every length checked, nothing copied that is not asked for.

The broker worker reads EPContext wrappers with it (epcontext.py), because importing the onnx
package would cost every worker tens of megabytes. It knows no schema: a message is a span of a byte
buffer, and a field is a number, a wire type and either an integer or a smaller span.

The input is hostile by assumption. Whatever the bytes are, the only exception is
`InvalidRequest(reason="BAD_FILE")`, the time is bounded by `Budget.fields` and the memory by
`Budget.text_bytes`.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, overload

from qnnbroker.protos.errors import InvalidRequest

#: Fields that one reading may walk over. A million takes about a second.
MAX_FIELDS = 1_000_000
#: Bytes of text that one reading may decode.
MAX_TEXT_BYTES = 16 * 1024 * 1024
#: One text: a name, a metadata value.
MAX_ONE_TEXT_BYTES = 1024 * 1024
#: Messages inside messages.
MAX_DEPTH = 32

#: Characters of a file's text that an error message shows.
_QUOTED = 120
_VARINT_BYTES = 10
_MAX_TAG = 2**32 - 1


class WireType(enum.IntEnum):
    """How a field's value is laid out. Groups (3 and 4) are refused."""

    VARINT = 0
    FIXED64 = 1
    BYTES = 2
    FIXED32 = 5


_WIRE_TYPES = {int(w): w for w in WireType}


class Source(Protocol):
    """What is read: a memoryview, or something that fetches the bytes as they are asked for."""

    def __len__(self) -> int: ...

    @overload
    def __getitem__(self, at: int, /) -> int: ...
    @overload
    def __getitem__(self, at: slice, /) -> "bytes | memoryview": ...


def bad(message: str, **ids: object) -> InvalidRequest:
    """The one error of this module and of its users."""
    return InvalidRequest(message, reason="BAD_FILE", **ids)


def quote(text: str) -> str:
    """A text of the file as an error message shows it: escaped, and never long."""
    return repr(text if len(text) <= _QUOTED else text[:_QUOTED] + "...")


@dataclass(slots=True)
class Budget:
    """What is left of the work that one reading may do; shared by all its messages."""

    fields: int = MAX_FIELDS
    text_bytes: int = MAX_TEXT_BYTES

    def take_field(self, at: int) -> None:
        if self.fields <= 0:
            raise bad(f"more protobuf fields than a reading may walk over (at byte {at})")
        self.fields -= 1

    def take_text(self, length: int, at: int) -> None:
        if length > self.text_bytes:
            raise bad(
                f"a text of {length} bytes at byte {at}; {self.text_bytes} bytes of text are left "
                f"of the {MAX_TEXT_BYTES} that a file may have"
            )
        self.text_bytes -= length


class Field(NamedTuple):
    """One field. `start` and `end` are absolute offsets into the buffer that is being read.

    `value` is the unsigned integer of VARINT, FIXED64 and FIXED32, and the length of BYTES.
    """

    number: int
    wire_type: WireType
    value: int
    start: int
    end: int

    def signed(self) -> int:
        """The value of an int32 or int64 field.

        Raises:
            InvalidRequest: it is not a varint.
        """
        if self.wire_type is not WireType.VARINT:
            raise _wrong_type(self, "an integer")
        return self.value - 2**64 if self.value >= 2**63 else self.value


def _wrong_type(field: Field, wanted: str) -> InvalidRequest:
    return bad(
        f"field {field.number} at byte {field.start} should be {wanted}, "
        f"its wire type is {field.wire_type.name}"
    )


def _varint(data: Source, position: int, end: int) -> tuple[int, int]:
    """The varint at `position` and the offset behind it; never reads at or beyond `end`."""
    value = 0
    for index in range(_VARINT_BYTES):
        at = position + index
        if at >= end:
            raise bad(f"a varint that starts at byte {position} is cut off at byte {end}")
        byte = data[at]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if value >= 2**64:
                break
            return value, at + 1
    raise bad(f"a varint at byte {position} does not fit into 64 bits")


class Message:
    """A span of a buffer that is read as a protobuf message.

    It borrows the source it is given and must not outlive it.
    """

    __slots__ = ("_budget", "_data", "_depth", "end", "start")

    def __init__(self, data: Source, start: int, end: int, budget: Budget, depth: int = 0) -> None:
        if not 0 <= start <= end <= len(data):
            raise bad(f"a message from byte {start} to {end} in a file of {len(data)} bytes")
        if depth > MAX_DEPTH:
            raise bad(f"messages nested deeper than {MAX_DEPTH} at byte {start}")
        self._data = data
        self._budget = budget
        self._depth = depth
        self.start = start
        self.end = end

    def fields(self) -> Iterator[Field]:
        """The fields in the order of the file. Values of BYTES fields are not touched.

        Raises:
            InvalidRequest: not a well-formed message.
        """
        data, position, end = self._data, self.start, self.end
        while position < end:
            self._budget.take_field(position)
            at = position
            tag, position = _varint(data, position, end)
            number, wire_type = tag >> 3, _WIRE_TYPES.get(tag & 7)
            if tag > _MAX_TAG or number == 0:
                raise bad(f"the field number {number} at byte {at} is not one")
            if wire_type is None:
                raise bad(f"field {number} at byte {at} has the unsupported wire type {tag & 7}")
            if wire_type is WireType.VARINT:
                value, stop = _varint(data, position, end)
            elif wire_type is WireType.BYTES:
                value, position = _varint(data, position, end)
                stop = position + value
            else:
                stop = position + (8 if wire_type is WireType.FIXED64 else 4)
                value = int.from_bytes(data[position : min(stop, end)], "little")
            if stop > end:
                raise bad(
                    f"field {number} at byte {at} claims {stop - position} bytes, "
                    f"its message has {end - position} left"
                )
            yield Field(number, wire_type, value, position, stop)
            position = stop

    def only(self, number: int) -> Iterator[Field]:
        """The fields with that number."""
        return (f for f in self.fields() if f.number == number)

    def message(self, field: Field) -> "Message":
        """The message in `field`.

        Raises:
            InvalidRequest: the field holds none, or it is nested too deep.
        """
        if field.wire_type is not WireType.BYTES:
            raise _wrong_type(field, "a message")
        return Message(self._data, field.start, field.end, self._budget, self._depth + 1)

    def text(self, field: Field) -> str:
        """The UTF-8 text in `field`, copied out.

        Raises:
            InvalidRequest: the field holds none, it is too long, or not UTF-8.
        """
        if field.wire_type is not WireType.BYTES:
            raise _wrong_type(field, "a text")
        if field.value > MAX_ONE_TEXT_BYTES:
            raise bad(
                f"field {field.number} at byte {field.start} is a text of {field.value} bytes; "
                f"at most {MAX_ONE_TEXT_BYTES} are taken"
            )
        self._budget.take_text(field.value, field.start)
        try:
            return str(self._data[field.start : field.end], "utf-8")
        except UnicodeDecodeError as error:
            raise bad(
                f"field {field.number} at byte {field.start} is not UTF-8: {error.reason}"
            ) from None
