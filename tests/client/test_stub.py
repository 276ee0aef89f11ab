# SPDX-License-Identifier: Apache-2.0
"""The client's own stub: the calls of the generated one, made when they are asked for."""

import subprocess
import sys

import grpc
import pytest

from qnnbroker.client.stub import control_stub
from qnnbroker.v1 import control_pb2
from qnnbroker.v1.control_pb2_grpc import ControlServiceStub

METHODS = [m.name for m in control_pb2.DESCRIPTOR.services_by_name["ControlService"].methods]


@pytest.mark.parametrize("name", METHODS)
def test_each_call_is_of_the_generated_ones_kind_and_goes_to_the_same_place(name: str) -> None:
    with grpc.insecure_channel("unix:/nowhere") as channel:
        ours = getattr(control_stub(channel), name)
        theirs = getattr(ControlServiceStub(channel), name)
        assert type(ours) is type(theirs)
        assert ours._method == theirs._method
        assert ours._request_serializer == theirs._request_serializer
        assert ours._response_deserializer == theirs._response_deserializer


def test_a_call_is_made_once_and_an_unknown_one_is_an_error() -> None:
    with grpc.insecure_channel("unix:/nowhere") as channel:
        stub = control_stub(channel)
        assert stub.GetStatistics is stub.GetStatistics
        with pytest.raises(AttributeError, match="no method 'Guess'"):
            stub.__getattr__("Guess")  # type: ignore[attr-defined]


def test_the_client_needs_no_module_that_costs_every_process_memory_for_little() -> None:
    program = (
        "import sys, numpy, grpc, google.protobuf.internal.builder\n"
        "before = set(sys.modules)\n"
        "import qnnbroker.client\n"
        "print(*set(sys.modules) - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100
    )
    brought = set(done.stdout.split())
    assert "qnnbroker.v1.control_pb2_grpc" not in brought
    known = {"qnnbroker", "numpy", "grpc", "google", "dataclasses"}
    assert not {m for m in brought if m.split(".")[0] not in known and "cython" not in m}
