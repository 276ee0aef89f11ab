# SPDX-License-Identifier: Apache-2.0
"""protowire: what protobuf itself writes is read back, and nothing else is believed."""

import struct

import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny_wrappers import varint

from qnnbroker.broker.protowire import (
    MAX_DEPTH,
    MAX_ONE_TEXT_BYTES,
    Budget,
    Field,
    Message,
    WireType,
    quote,
)
from qnnbroker.protos.errors import InvalidRequest


def message(data: bytes, budget: Budget | None = None) -> Message:
    return Message(memoryview(data), 0, len(data), budget or Budget())


def refusal(data: bytes, budget: Budget | None = None) -> str:
    with pytest.raises(InvalidRequest) as caught:
        list(message(data, budget).fields())
    assert caught.value.reason == "BAD_FILE"
    return str(caught.value)


def test_all_wire_types_are_read_in_the_order_of_the_file() -> None:
    data = b"\x08\x96\x01" + b"\x11" + struct.pack("<Q", 7) + b"\x1a\x03abc"
    data += b"\x25" + struct.pack("<I", 9)
    assert list(message(data).fields()) == [
        Field(1, WireType.VARINT, 150, 1, 3),
        Field(2, WireType.FIXED64, 7, 4, 12),
        Field(3, WireType.BYTES, 3, 14, 17),
        Field(4, WireType.FIXED32, 9, 18, 22),
    ]


@given(st.integers(-(2**63), 2**63 - 1), st.text(max_size=50), st.lists(st.text(max_size=9)))
def test_what_protobuf_writes_is_read_back(number: int, text: str, names: list[str]) -> None:
    option = descriptor_pb2.UninterpretedOption(
        negative_int_value=number, identifier_value=text, string_value=text.encode()
    )
    option.name.extend(
        descriptor_pb2.UninterpretedOption.NamePart(name_part=n, is_extension=False) for n in names
    )
    data = option.SerializeToString()
    root = message(data)
    fields = {f.number: f for f in root.fields()}
    assert fields[5].signed() == number
    assert root.text(fields[3]) == text
    assert data[fields[7].start : fields[7].end] == text.encode()
    parts = [root.message(f) for f in root.only(2)]
    assert [p.text(next(p.only(1))) for p in parts] == names


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x80", "cut off"),
        (b"\x08", "cut off"),
        (b"\x08" + b"\xff" * 10, "64 bits"),
        (b"\x08" + b"\xff" * 9 + b"\x02", "64 bits"),
        (b"\x12\x05abcd", "claims 5 bytes, its message has 4 left"),
        (b"\x12" + varint(2**64 - 1), "claims 18446744073709551615 bytes"),
        (b"\x12" + varint(2**63), "claims 9223372036854775808 bytes"),
        (b"\x11abcdefg", "claims 8 bytes, its message has 7 left"),
        (b"\x15abc", "claims 4 bytes, its message has 3 left"),
        (b"\x0b\x0c", "wire type 3"),
        (b"\x0c", "wire type 4"),
        (b"\x0e", "wire type 6"),
        (b"\x0f", "wire type 7"),
        (b"\x00\x01", "field number 0"),
        (varint(2**32 | 8) + b"\x01", "field number"),
    ],
)
def test_what_is_not_well_formed_is_refused_with_the_place(data: bytes, says: str) -> None:
    assert says in refusal(data)


def test_a_field_may_not_reach_beyond_the_message_that_holds_it() -> None:
    # The inner message has 2 bytes and claims 5; the outer one has them.
    root = message(b"\x0a\x02\x0a\x05abcde")
    inner = root.message(next(root.fields()))
    with pytest.raises(InvalidRequest, match="claims 5 bytes, its message has 0 left"):
        list(inner.fields())


def test_nesting_has_a_limit() -> None:
    data = b""
    for _ in range(MAX_DEPTH + 1):
        data = b"\x0a" + varint(len(data)) + data
    current = message(data)
    for _ in range(MAX_DEPTH):
        current = current.message(next(current.fields()))
    with pytest.raises(InvalidRequest, match="nested deeper"):
        current.message(next(current.fields()))


def test_the_number_of_fields_has_a_limit_over_all_messages() -> None:
    budget = Budget(fields=3)
    root = message(b"\x0a\x04\x08\x01\x08\x01", budget)
    inner = root.message(next(root.fields()))
    assert len(list(inner.fields())) == 2
    assert "more protobuf fields" in refusal(b"\x08\x01", budget)


def test_text_has_a_limit_each_and_in_all() -> None:
    root = message(b"\x0a\x03abc", Budget(text_bytes=5))
    field = next(root.fields())
    assert root.text(field) == "abc"
    with pytest.raises(InvalidRequest, match="2 bytes of text are left"):
        root.text(field)
    long = message(b"\x0a" + varint(MAX_ONE_TEXT_BYTES + 1) + bytes(MAX_ONE_TEXT_BYTES + 1))
    with pytest.raises(InvalidRequest, match="at most"):
        long.text(next(long.fields()))


def test_text_that_is_not_utf8_is_refused() -> None:
    root = message(b"\x0a\x02\xff\xfe")
    with pytest.raises(InvalidRequest, match="UTF-8"):
        root.text(next(root.fields()))


def test_a_field_of_another_type_than_the_schema_wants_is_refused() -> None:
    root = message(b"\x08\x01\x12\x00")
    integer, span = root.fields()
    for take in (lambda: root.text(integer), lambda: root.message(integer), span.signed):
        with pytest.raises(InvalidRequest, match="wire type"):
            take()


def test_a_message_outside_the_buffer_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="in a file of 3 bytes"):
        Message(memoryview(b"abc"), 1, 4, Budget())


@given(st.binary(max_size=300))
def test_random_bytes_give_fields_that_tile_the_message_or_a_refusal(data: bytes) -> None:
    seen = 0
    try:
        for field in message(data, Budget(fields=1000)).fields():
            assert seen < field.start <= field.end <= len(data)
            seen = field.end
    except InvalidRequest as error:
        refused = error
    else:
        assert seen == len(data)
        return
    assert refused.reason == "BAD_FILE"


def test_a_quoted_text_is_short_and_printable() -> None:
    assert quote("a\n") == "'a\\n'"
    assert len(quote("x" * 10**6)) < 150
