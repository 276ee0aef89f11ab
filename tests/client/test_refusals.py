# SPDX-License-Identifier: Apache-2.0
"""attach: the reason with which a broker ends a connection reaches the caller."""

import socket
import threading
from pathlib import Path

import pytest

from qnnbroker.client.attach import Wishes, open_connection
from qnnbroker.protos import attach as frames
from qnnbroker.protos import paths, status
from qnnbroker.protos.errors import BrokerError, BrokerLost, LimitExceeded, VersionMismatch


@pytest.mark.parametrize(
    "error",
    [
        VersionMismatch("the broker speaks attach protocol 7 to 8, the client 1 to 1"),
        LimitExceeded("256 sessions are attached", reason="SESSIONS"),
    ],
)
@pytest.mark.parametrize("request_number", [0, 1])
def test_a_refused_hello_raises_what_the_broker_said(
    tmp_path: Path, error: BrokerError, request_number: int
) -> None:
    directory = tmp_path / "run"
    paths.make_runtime_dir(directory)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(directory / paths.ATTACH_SOCKET))
        listener.listen()

        def refuse() -> None:
            peer, _ = listener.accept()
            with peer:
                hello = frames.unpack(peer.recv(frames.MAX_FRAME_BYTES))
                assert hello.request == 1
                body = status.to_detail(error).SerializeToString()
                kind = frames.Kind.HELLO if request_number else 0
                flags = frames.FLAG_ANSWER | frames.FLAG_ERROR
                peer.send(frames.pack(kind, request_number, body, flags))

        broker = threading.Thread(target=refuse)
        broker.start()
        connection = open_connection(directory, deadline=0.0)
        try:
            with pytest.raises(type(error)) as caught:
                connection.hello(Wishes("test"), timeout=30)
            assert (str(caught.value), caught.value.reason) == (str(error), error.reason)
            broker.join()
            with pytest.raises(BrokerLost):
                connection.hello(Wishes("test"), timeout=30)
        finally:
            connection.close()
