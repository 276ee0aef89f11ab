# SPDX-License-Identifier: Apache-2.0
"""Peers whose requests are no messages at all."""

from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from tests.broker_process import BrokerProcess
from tests.raw_peer import refusal
from tests.waiting import PATIENCE_SECONDS, wait_until

from qnnbroker.protos.errors import InvalidRequest
from qnnbroker.v1 import control_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["ControlService"]
METHODS = {method.name: method for method in SERVICE.methods}
#: An unfinished tag, a length past the end, groups without an end, a wire type that is none.
GARBAGE = (b"\xff", b"\x0a\x7fabc", b"\x0b\x0b\x0b", b"\x0f", b"\xff" * 100_000)


def send(broker: BrokerProcess, method: MethodDescriptor, raw: bytes) -> None:
    """A call with this as its request."""
    path = f"/{SERVICE.full_name}/{method.name}"
    with grpc.insecure_channel(f"unix:{broker.grpc_path}") as channel:
        if method.server_streaming:
            streamed: Any = channel.unary_stream(path)
            list(streamed(raw, timeout=PATIENCE_SECONDS))
        else:
            unary: Any = channel.unary_unary(path)
            unary(raw, timeout=PATIENCE_SECONDS)


def lines(broker: BrokerProcess, method: str) -> list[str]:
    """What the log says of requests of that method that are none."""
    return [line for line in broker.log().splitlines() if f" {method}: " in line]


@pytest.mark.parametrize("name", METHODS)
def test_bytes_that_are_no_request_are_refused_with_a_status_and_one_line_for_many(
    shared_broker: BrokerProcess, name: str
) -> None:
    method = METHODS[name]
    for raw in GARBAGE * 5:
        error = refusal(lambda raw=raw: send(shared_broker, method, raw))  # type: ignore[misc]
        assert type(error) is InvalidRequest
        assert str(error) == (
            f"{name}: a {method.input_type.full_name} wanted, found {len(raw)} bytes that are none"
        )
    wait_until(lambda: lines(shared_broker, name), "the log says so")
    assert len(lines(shared_broker, name)) == 1, shared_broker.log()
    assert "WARNING" in lines(shared_broker, name)[0]
    assert shared_broker.counters()["sessions"] == 0  # it serves


def test_an_empty_request_and_unknown_fields_are_requests(shared_broker: BrokerProcess) -> None:
    for raw in (b"", b"\xf8\x07\x01"):
        for name in ("GetServerInfo", "ListModels", "ListSessions"):
            send(shared_broker, METHODS[name], raw)


def test_a_method_that_there_is_not_is_unimplemented(shared_broker: BrokerProcess) -> None:
    with grpc.insecure_channel(f"unix:{shared_broker.grpc_path}") as channel:
        call: Any = channel.unary_unary(f"/{SERVICE.full_name}/GuessWeights")
        with pytest.raises(grpc.RpcError) as failed:
            call(b"\xff", timeout=PATIENCE_SECONDS)
    error = failed.value
    assert isinstance(error, grpc.Call)
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
