# SPDX-License-Identifier: Apache-2.0
"""`connect`: the way to a Session."""

import os
import sys
import time
from typing import Literal

from qnnbroker.protos.errors import BrokerLost, BrokerUnavailable, InvalidRequest
from qnnbroker.v1 import control_pb2

from .attach import RETRY_SECONDS, Wishes, open_connection
from .session import Session

#: Names of the bands and their numbers on the wire.
BANDS = {
    "low": control_pb2.BAND_LOW,
    "normal": control_pb2.BAND_NORMAL,
    "high": control_pb2.BAND_HIGH,
}


def connect(
    runtime_dir: str | os.PathLike[str] | None = None,
    *,
    timeout: float = 10.0,
    name: str | None = None,
    wait: bool = False,
    band: Literal["low", "normal", "high"] = "normal",
    weight: int = 1,
    ring: bool = True,
    perf_mode: str | None = None,
) -> Session:
    """Attaches to the broker.

    Args:
        runtime_dir: where its sockets are; None means `$QNNBROKER_RUNTIME_DIR`, else
            `$XDG_RUNTIME_DIR/qnnbroker`, else a folder of this user under the temporary directory.
        timeout: seconds for the whole of it.
        name: shown to people in the broker's status; the program's name by default.
        band: who goes first: the session's runs go before those of lower bands.
        weight: share of device time against other sessions of the band, 1 to 100.
        ring: False runs everything through gRPC, for comparison; about 0.5 ms a run.
        perf_mode: clocks of the NPU to vote for while this session has work: "burst",
            "high_performance", "balanced", "power_saver", ...; None leaves it to the broker.
        wait: True keeps trying until `timeout` while no broker is there, or it is on its way out.

    Raises:
        BrokerUnavailable: nobody listens there (NO_SOCKET), or the broker stops (STOPPING).
        BrokerLost: the broker ended during the handshake.
        VersionMismatch: the broker is too old or too new.
        NotAllowed: the directory or the broker is another user's, or it does not serve us.
        LimitExceeded: too many sessions.
        DeadlineExpired: it listens but does not answer.
    """
    deadline = time.monotonic() + timeout
    client_name = os.path.basename(sys.argv[0] or "python") if name is None else name
    if band not in BANDS or not 1 <= weight <= 100:
        raise InvalidRequest(
            f"a band of {', '.join(BANDS)} and a weight of 1 to 100 wanted, "
            f"found {band!r} and {weight}"
        )
    wishes = Wishes(client_name, weight, BANDS[band], ring, perf_mode or "")
    while True:
        try:
            return _attach(runtime_dir, wishes, deadline)
        except (BrokerUnavailable, BrokerLost):
            if not wait or time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_SECONDS)


def _attach(directory: str | os.PathLike[str] | None, wishes: Wishes, deadline: float) -> Session:
    attach = open_connection(directory, deadline)
    try:
        hello = attach.hello(wishes, max(0.0, deadline - time.monotonic()))
        return Session(attach, hello)
    except BaseException:
        attach.close()
        raise
