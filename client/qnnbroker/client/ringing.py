# SPDX-License-Identifier: Apache-2.0
"""Opens the rings that came with the handshake."""

import os

from qnnbroker.native.ring import ClientRing
from qnnbroker.protos.errors import InvalidRequest, ProtocolError

from .attach import Hello
from .hotpath import SPIN_LIMIT_NS, SPIN_NS

#: A longer spin only takes the core from whoever computes.
MAX_SPIN_NS = 1_000_000_000
#: How long a wait looks at the ring before it sleeps, and up to which median execute it does so.
SPIN, SPIN_LIMIT = "QNNBROKER_SPIN_NS", "QNNBROKER_SPIN_LIMIT_NS"


def open_ring(hello: Hello) -> ClientRing:
    """The client's end of the rings; the fds are taken over, on failure too.

    Raises:
        ProtocolError: the broker sent something that is no ring of our layout.
        InvalidRequest: $QNNBROKER_SPIN_NS or _SPIN_LIMIT_NS is not a number of nanoseconds.
    """
    client_file, broker_file, doorbell, bell = hello.ring_fds
    try:
        spin_ns = from_environment(SPIN, SPIN_NS)
        spin_limit_ns = from_environment(SPIN_LIMIT, SPIN_LIMIT_NS)
    except InvalidRequest:
        for fd in hello.ring_fds:
            os.close(fd)
        raise
    try:
        return ClientRing(
            client_file,
            broker_file,
            doorbell,
            bell,
            limit=hello.limits.max_in_flight,
            spin_ns=spin_ns,
            spin_limit_ns=spin_limit_ns,
        )
    except (OSError, ValueError) as exc:
        raise ProtocolError(f"the broker sent no good ring: {exc}") from exc


def from_environment(name: str, default: int) -> int:
    """A number of nanoseconds."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) > MAX_SPIN_NS:
        raise InvalidRequest(f"{name} wants nanoseconds from 0 to {MAX_SPIN_NS}, found {text!r}")
    return int(text)
