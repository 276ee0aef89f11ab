# SPDX-License-Identifier: Apache-2.0
"""Frames of the attach socket: pack, unpack, limits, version numbers. Described in WIRE.md.

A frame is one SOCK_SEQPACKET datagram: a header of 16 bytes and a protobuf body.

    offset 0   4 bytes  magic "QNBK"
    offset 4   u16      kind
    offset 6   u16      flags: 1 answer, 2 error (the body is an ErrorDetail)
    offset 8   u32      request number, chosen by the client (not 0), echoed in the answer; 0 in an
                        error about the connection itself, which ends after it
    offset 12  u32      body length; header + body is exactly the datagram
"""

import enum
import struct
from dataclasses import dataclass

from .errors import ProtocolError

#: The attach protocol numbers that this build speaks.
PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
#: Number of the shared-memory layout (qb_ring.h).
ABI_VERSION = 1
#: Length of a session token.
TOKEN_BYTES = 16
#: A whole frame, header included.
MAX_FRAME_BYTES = 64 * 1024
#: File descriptors in one frame.
MAX_FRAME_FDS = 16

#: Capability bits of HELLO. RING: the answer carries the four fds of a ring. LOAD_FD: the broker
#: takes opened model files.
CAPABILITY_RING = 1
CAPABILITY_LOAD_FD = 2

FLAG_ANSWER = 1
FLAG_ERROR = 2
_MAGIC = b"QNBK"
_HEADER = struct.Struct("<4sHHII")
HEADER_BYTES = _HEADER.size


class Kind(enum.IntEnum):
    """What a frame asks for or answers."""

    HELLO = 1
    ALLOC = 2
    RELEASE = 3
    ADOPT = 4
    LOADFD = 5


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame, unpacked. `kind` may be a number that this build does not know."""

    kind: int
    flags: int
    request: int
    body: bytes

    @property
    def is_answer(self) -> bool:
        return bool(self.flags & FLAG_ANSWER)

    @property
    def is_error(self) -> bool:
        return bool(self.flags & FLAG_ERROR)


def pack(kind: int, request: int, body: bytes, flags: int = 0) -> bytes:
    """The bytes of one frame.

    Raises:
        ProtocolError: the frame would be longer than MAX_FRAME_BYTES.
    """
    if HEADER_BYTES + len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a frame of {HEADER_BYTES + len(body)} bytes; at most {MAX_FRAME_BYTES} are allowed"
        )
    return _HEADER.pack(_MAGIC, kind, flags, request, len(body)) + body


def unpack(data: bytes) -> Frame:
    """The frame in one datagram.

    Raises:
        ProtocolError: reason BAD_FRAME; not exactly one well-formed frame.
    """
    if len(data) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(data)} bytes; at most {MAX_FRAME_BYTES} are allowed")
    if len(data) < HEADER_BYTES:
        raise ProtocolError(f"a frame of {len(data)} bytes; the header alone has {HEADER_BYTES}")
    magic, kind, flags, request, length = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ProtocolError(f"a frame that starts with {magic!r} instead of {_MAGIC!r}")
    if length != len(data) - HEADER_BYTES:
        raise ProtocolError(
            f"a frame that claims a body of {length} bytes has {len(data) - HEADER_BYTES}"
        )
    return Frame(kind, flags, request, data[HEADER_BYTES:])
