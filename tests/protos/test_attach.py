# SPDX-License-Identifier: Apache-2.0
"""attach: frames come back as they went, and nothing else passes for one."""

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qnnbroker.protos import attach
from qnnbroker.protos.attach import Frame, Kind, pack, unpack
from qnnbroker.protos.errors import ProtocolError

U16 = st.integers(0, 2**16 - 1)
U32 = st.integers(0, 2**32 - 1)
FRAME = pack(Kind.ALLOC, 7, b"body", attach.FLAG_ANSWER)


def refused(data: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says) as caught:
        unpack(data)
    assert caught.value.reason == "BAD_FRAME"


@given(U16, U32, st.binary(max_size=1000), U16)
def test_a_frame_comes_back_as_it_went(kind: int, request: int, body: bytes, flags: int) -> None:
    assert unpack(pack(kind, request, body, flags)) == Frame(kind, flags, request, body)


def test_the_bytes_are_those_of_the_contract() -> None:
    # WIRE.md draws this layout; peers in other languages write it by hand.
    assert FRAME == b"QNBK\x02\x00\x01\x00\x07\x00\x00\x00\x04\x00\x00\x00body"
    assert attach.HEADER_BYTES == 16
    assert {k.name: int(k) for k in Kind} == {
        "HELLO": 1,
        "ALLOC": 2,
        "RELEASE": 3,
        "ADOPT": 4,
        "LOADFD": 5,
    }


def test_the_contract_on_paper_gives_the_numbers_of_the_code() -> None:
    text = (Path(attach.__file__).parents[2] / "WIRE.md").read_text()
    for kind in Kind:
        assert f"| {int(kind)} | {kind.name} |" in text
    for name in ("MAX_FRAME_BYTES", "MAX_FRAME_FDS", "TOKEN_BYTES"):
        assert f"| `{name}` | {getattr(attach, name)} |" in text
    for name in ("PROTOCOL_MIN", "PROTOCOL_MAX", "ABI_VERSION"):
        assert f"| `{name}` | {getattr(attach, name)} |" in text


def test_the_flags_say_answer_and_error() -> None:
    assert (unpack(FRAME).is_answer, unpack(FRAME).is_error) == (True, False)
    error = unpack(pack(Kind.HELLO, 1, b"", attach.FLAG_ANSWER | attach.FLAG_ERROR))
    assert (error.is_answer, error.is_error) == (True, True)
    assert (unpack(pack(1, 1, b"")).is_answer, unpack(pack(1, 1, b"")).is_error) == (False, False)


@pytest.mark.parametrize("length", range(len(FRAME)))
def test_a_frame_cut_off_anywhere_is_refused(length: int) -> None:
    refused(FRAME[:length], "header alone" if length < attach.HEADER_BYTES else "claims a body")


def test_a_frame_with_bytes_behind_it_is_refused() -> None:
    refused(FRAME + b"x", "claims a body of 4 bytes has 5")


@pytest.mark.parametrize("length", [0, 3, 5, 2**31, 2**32 - 1])
def test_a_length_that_is_not_the_rest_of_the_datagram_is_refused(length: int) -> None:
    refused(FRAME[:12] + struct.pack("<I", length) + FRAME[16:], f"claims a body of {length}")


@pytest.mark.parametrize("magic", [b"QNBX", b"\0\0\0\0", b"KBNQ", b"qnbk"])
def test_another_magic_is_refused_and_shown(magic: bytes) -> None:
    refused(magic + FRAME[4:], "instead of b'QNBK'")


def test_the_longest_frame_passes_and_a_longer_one_does_not() -> None:
    body = bytes(attach.MAX_FRAME_BYTES - attach.HEADER_BYTES)
    longest = pack(Kind.HELLO, 1, body)
    assert len(longest) == attach.MAX_FRAME_BYTES
    assert unpack(longest).body == body
    with pytest.raises(ProtocolError, match="65537 bytes; at most 65536"):
        pack(Kind.HELLO, 1, body + b"x")
    header = FRAME[:12] + struct.pack("<I", len(body) + 1)
    refused(header + body + b"x", "65537 bytes; at most 65536")


@given(st.binary(max_size=64))
def test_random_bytes_are_refused(data: bytes) -> None:
    if not data.startswith(b"QNBK"):
        refused(data, "a frame")


@given(st.integers(0, len(FRAME) * 8 - 1))
def test_a_flipped_bit_is_refused_or_lands_in_a_field_that_the_receiver_checks(bit: int) -> None:
    data = bytearray(FRAME)
    data[bit // 8] ^= 1 << bit % 8
    place = bit // 8
    if place < 4 or 12 <= place < 16:
        refused(bytes(data), "a frame that")
    else:
        changed = unpack(bytes(data))
        assert changed != unpack(FRAME)
        assert pack(changed.kind, changed.request, changed.body, changed.flags) == data
