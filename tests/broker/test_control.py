# SPDX-License-Identifier: Apache-2.0
"""The servicer's plumbing: what a caller is told of an error, and what it says of a deadline."""

import logging
from typing import Any

import grpc
import pytest

from qnnbroker.broker.control import deadline, failure, regions
from qnnbroker.protos import errors
from qnnbroker.protos.errors import BrokerError, LimitExceeded
from qnnbroker.protos.status import ERROR_METADATA_KEY, GRPC_STATUS, from_grpc
from qnnbroker.v1 import control_pb2 as pb
from qnnbroker.v1 import types_pb2


def round_trip(error: Exception) -> BrokerError:
    """What a client makes of the failure."""
    code, text, ((key, detail),) = failure(error, "Method")
    assert key == ERROR_METADATA_KEY
    return from_grpc(code.value[0], text, detail)


@pytest.mark.parametrize("cls", list(GRPC_STATUS))
def test_an_error_arrives_as_it_was(cls: type[BrokerError]) -> None:
    for reason in cls.reasons:
        told = round_trip(cls("what was wanted", reason=reason, id=7))
        assert type(told) is cls
        assert (told.reason, str(told), told.ids) == (reason, "what was wanted", {"id": "7"})


def test_an_unknown_error_is_internal_and_says_nothing_of_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        code, text, ((_, detail),) = failure(KeyError("a secret"), "Method")
    assert code is grpc.StatusCode.INTERNAL
    assert "secret" not in text
    assert b"secret" not in detail
    assert "Method" in text
    assert "a secret" in caplog.text


@pytest.mark.parametrize("character", ["x", "ü", "漢", "\U0001f600", "\n", "\udcff"])
def test_a_long_message_fits_into_the_metadata_of_grpc(character: str) -> None:
    _, text, ((_, detail),) = failure(LimitExceeded(character * 9000, a=character * 9000), "M")
    quoted = sum(1 if 0x20 <= b <= 0x7E and b != 0x25 else 3 for b in text.encode())
    assert quoted + len(detail) * 4 / 3 < 8000
    assert isinstance(round_trip(LimitExceeded(character * 9000)), LimitExceeded)


class Call:
    """What `deadline` needs of a servicer context."""

    def __init__(self, left: float | None) -> None:
        self.left = left

    def time_remaining(self) -> float | None:
        return self.left


@pytest.mark.parametrize(
    ("left", "expected"), [(None, None), (1e12, None), (2.5, 2.5), (0.0, 0.0), (-3.0, 0.0)]
)
def test_a_deadline_is_seconds_left_or_none(left: float | None, expected: float | None) -> None:
    call: Any = Call(left)
    assert deadline(call) == expected


def test_regions_are_plain_values() -> None:
    place = types_pb2.BufferRef(buffer_id=2**64 - 1, offset_bytes=2**63, size_bytes=1)
    ((name, ref),) = regions([pb.TensorRegion(tensor="t", region=place)])
    assert (name, ref.buffer_id, ref.offset_bytes, ref.size_bytes) == ("t", 2**64 - 1, 2**63, 1)
    ((_, empty),) = regions([pb.TensorRegion(tensor="t")])
    assert (empty.buffer_id, empty.offset_bytes, empty.size_bytes) == (0, 0, 0)


def test_every_error_that_can_travel_has_a_status() -> None:
    local = {errors.SessionClosed, errors.BrokerLost, errors.WouldBlock, BrokerError}
    assert set(errors.all_error_types()) - local == set(GRPC_STATUS)
