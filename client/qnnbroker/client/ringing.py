# SPDX-License-Identifier: Apache-2.0
"""Opens the rings that came with the handshake."""

import os

from qnnbroker.native.ring import ClientRing
from qnnbroker.protos.errors import ProtocolError

from .attach import Hello
from .hotpath import SPIN_LIMIT_NS, SPIN_NS


def open_ring(hello: Hello) -> ClientRing:
    """The client's end of the rings; the fds are taken over, on failure too.

    Raises:
        ProtocolError: the broker sent something that is no ring of our layout.
    """
    client_file, broker_file, doorbell, pipe = hello.ring_fds
    spin_ns = int(os.environ.get("QNNBROKER_SPIN_NS", SPIN_NS))
    try:
        return ClientRing(
            client_file,
            broker_file,
            doorbell,
            pipe,
            limit=hello.limits.max_in_flight,
            spin_ns=spin_ns,
            spin_limit_ns=SPIN_LIMIT_NS,
        )
    except (OSError, ValueError) as exc:
        raise ProtocolError(f"the broker sent no good ring: {exc}") from exc
