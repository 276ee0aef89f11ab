# SPDX-License-Identifier: Apache-2.0
"""status: the one table, walked both ways, and what a real gRPC call makes of it."""

import re
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qnnbroker import native
from qnnbroker.protos import errors, status
from qnnbroker.protos.errors import BrokerError, all_error_types
from qnnbroker.v1 import types_pb2

LOCAL = {errors.SessionClosed, errors.BrokerLost, errors.WouldBlock}
PAIRS = [(cls, reason) for cls in all_error_types() for reason in cls.reasons]

#: The completion codes that were ever given out. Appending is right, changing a line never is:
#: a client of another version reads these numbers from shared memory.
GIVEN_OUT = [
    (1, "InvalidRequest", "INVALID_ARGUMENT"),
    (2, "NotFound", "BINDING_UNKNOWN"),
    (3, "LeaseRevoked", "STALE_GENERATION"),
    (4, "LeaseRevoked", "LEASE_REVOKED"),
    (5, "LimitExceeded", "CREDITS"),
    (6, "LimitExceeded", "NPU_MEMORY"),
    (7, "DeadlineExpired", "QUEUED"),
    (8, "DeadlineExpired", "RUNNING"),
    (9, "SubmissionCancelled", "BY_CALLER"),
    (10, "SubmissionCancelled", "SESSION_CLOSED"),
    (11, "NpuRestarted", "NPU_RESTARTED"),
    (12, "BrokerUnavailable", "STOPPING"),
    (13, "BrokerUnavailable", "NPU_LOST"),
    (14, "Unsupported", "BACKEND_LACKS"),
    (15, "BackendError", "QNN_ERROR"),
    (16, "ProtocolError", "BAD_SLOT"),
    (17, "VersionMismatch", "CONTEXT_BINARY_VERSION"),
    (18, "BackendError", "INTERNAL"),
]


@pytest.mark.parametrize(("cls", "reason"), PAIRS)
def test_every_error_and_reason_comes_back_from_its_detail(
    cls: type[BrokerError], reason: str
) -> None:
    error = cls("wanted 4, found 5", reason=reason, buffer_id=12)
    data = status.to_detail(error).SerializeToString()
    again = status.from_grpc(status.grpc_status(error), "the status text", data)
    assert type(again) is cls
    assert again.reason == reason
    assert str(again) == "wanted 4, found 5"
    assert again.ids == {"buffer_id": "12"}


def test_every_error_that_travels_has_a_status_that_grpc_knows() -> None:
    known = {code.value[0] for code in grpc.StatusCode}
    assert set(status.GRPC_STATUS) == set(all_error_types()) - LOCAL - {BrokerError}
    assert set(status.GRPC_STATUS.values()) <= known - {0}


@pytest.mark.parametrize("code", [c.value[0] for c in grpc.StatusCode if c.value[0]])
def test_a_status_without_detail_becomes_an_error_of_that_status(code: int) -> None:
    error = status.from_grpc(code, "text", None)
    assert str(error) == "text"
    assert error.reason in type(error).reasons
    if code in status.GRPC_STATUS.values():
        assert status.grpc_status(error) == code
    else:
        assert type(error) is BrokerError
    assert status.from_grpc(code, "", None).message


def test_grpcs_own_internal_error_is_not_taken_for_one_of_qnn() -> None:
    assert status.from_grpc(13, "text", None).reason == "INTERNAL"
    assert status.from_grpc(4, "text", None).reason == "CALL"


def test_a_subclass_travels_as_the_class_it_extends() -> None:
    class Narrower(errors.NotFound):
        pass

    assert status.grpc_status(Narrower("text")) == 5
    assert status.completion_number(Narrower("text", reason="BINDING_UNKNOWN")) == 2
    assert status.grpc_status(BrokerError("text")) == 13


def test_a_detail_of_an_unknown_type_or_reason_is_kept_as_far_as_possible() -> None:
    newer = types_pb2.ErrorDetail(type="FromTheFuture", reason="NEW", message="text")
    error = status.from_detail(newer)
    assert type(error) is BrokerError
    assert (error.reason, str(error)) == ("NEW", "text")
    assert status.from_detail(types_pb2.ErrorDetail(type="NotFound")).reason == "NOT_FOUND"


@given(st.binary(max_size=200))
def test_a_detail_that_is_rubbish_leaves_the_status(data: bytes) -> None:
    error = status.from_grpc(5, "text", data)
    assert isinstance(error, BrokerError)
    assert error.reason


def test_completion_codes_are_those_ever_given_out_and_new_ones_after_them() -> None:
    table = [(n, cls.__name__, reason) for n, (cls, reason) in status.COMPLETION.items()]
    assert table[: len(GIVEN_OUT)] == GIVEN_OUT
    assert [n for n, _, _ in table] == list(range(1, len(table) + 1))
    assert len(status.COMPLETION_NUMBER) == len(table)


@pytest.mark.parametrize("code", list(status.COMPLETION))
def test_every_completion_code_comes_back_as_its_error(code: int) -> None:
    cls, reason = status.COMPLETION[code]
    assert reason in cls.reasons
    error = status.from_completion(code, "text")
    assert type(error) is cls
    assert error.reason == reason
    assert status.completion_number(error) == code
    assert reason in str(status.from_completion(code, ""))


def test_an_unknown_completion_code_is_an_internal_error_that_shows_it() -> None:
    error = status.from_completion(4711, "text")
    assert type(error) is errors.BackendError
    assert error.reason == "INTERNAL"
    assert error.ids == {"completion": "4711"}


@pytest.mark.parametrize(("cls", "reason"), PAIRS)
def test_every_error_has_a_completion_code_of_its_class(
    cls: type[BrokerError], reason: str
) -> None:
    number = status.completion_number(cls("text", reason=reason))
    completed = status.COMPLETION[number]
    if (cls, reason) in status.COMPLETION_NUMBER:
        assert completed == (cls, reason)
    elif cls in {c for c, _ in status.COMPLETION.values()}:
        assert completed[0] is cls
    else:
        assert completed == (errors.BackendError, "INTERNAL")


@given(
    message=st.text(st.characters(), max_size=5000),
    ids=st.dictionaries(st.text(max_size=9), st.text(st.characters(), max_size=900), max_size=30),
)
def test_a_detail_is_small_and_valid_whatever_the_error_holds(
    message: str, ids: dict[str, str]
) -> None:
    error = errors.InvalidRequest(message)
    error.ids = ids
    detail = status.to_detail(error)
    data = detail.SerializeToString()
    assert len(data) <= status.MAX_DETAIL_BYTES
    assert status.from_grpc(3, "", data).reason == "INVALID_ARGUMENT"
    assert len(status.grpc_text(error).encode()) <= 600


def test_file_names_that_are_not_utf8_can_be_reported() -> None:
    odd = b"model-\xff.bin".decode("utf-8", "surrogateescape")
    detail = status.to_detail(errors.NotFound(f"no file {odd}", path=odd))
    assert detail.message == "no file model-\\udcff.bin"
    assert detail.ids["path"] == "model-\\udcff.bin"


class _Raises(grpc.GenericRpcHandler):
    """A service whose every call fails with `error`, the way the broker's servicer does it."""

    def __init__(self) -> None:
        self.error = BrokerError("none")

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        def call(request: bytes, context: grpc.ServicerContext) -> bytes:
            data = status.to_detail(self.error).SerializeToString()
            context.set_trailing_metadata(((status.ERROR_METADATA_KEY, data),))
            code = next(c for c in grpc.StatusCode if c.value[0] == status.grpc_status(self.error))
            context.abort(code, status.grpc_text(self.error))

        return grpc.unary_unary_rpc_method_handler(call)


@pytest.mark.processes
def test_every_error_crosses_a_real_grpc_call_at_any_length(tmp_path: Path) -> None:
    handler = _Raises()
    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[handler])
    address = f"unix:{tmp_path}/grpc.sock"
    server.add_insecure_port(address)
    server.start()
    try:
        with grpc.insecure_channel(address) as channel:
            call: Any = channel.unary_unary("/service/Method")
            for cls, reason in PAIRS:
                for message in ("short", "語" * 20_000):
                    handler.error = cls(message, reason=reason, path="語" * 20_000, other="x")
                    with pytest.raises(grpc.RpcError) as caught:
                        call(b"", timeout=30)
                    failed: Any = caught.value
                    metadata = dict(failed.trailing_metadata())
                    assert failed.code().value[0] == status.grpc_status(handler.error)
                    again = status.from_grpc(
                        failed.code().value[0],
                        failed.details(),
                        metadata[status.ERROR_METADATA_KEY],
                    )
                    assert (type(again), again.reason) == (cls, reason)
                    assert again.ids["other"] == "x"
    finally:
        server.stop(None).wait()


def test_the_contract_on_paper_has_the_same_table() -> None:
    text = (Path(status.__file__).parents[2] / "WIRE.md").read_text()
    for cls, number in status.GRPC_STATUS.items():
        name = next(c.name for c in grpc.StatusCode if c.value[0] == number)
        assert f"| {cls.__name__} | {name} |" in text
    for key in (status.ERROR_METADATA_KEY, status.SESSION_METADATA_KEY):
        assert f"| `{key}` |" in text
    assert f"at most {status.MAX_DETAIL_BYTES} bytes" in text
    for code, (cls, reason) in status.COMPLETION.items():
        assert f"| {code} | {cls.__name__} | `{reason}`" in text


def test_the_native_executor_has_the_same_completion_codes() -> None:
    header = Path(native.__file__).parent / "csrc" / "qb_executor.h"
    named = re.findall(r"^    QB_(\w+) = (\d+),$", header.read_text(), re.MULTILINE)
    codes = {int(number): name for name, number in named}
    assert codes.pop(0) == "OK"
    assert codes.keys() == status.COMPLETION.keys()
    other_names = {9: "CANCELLED", 14: "UNSUPPORTED", 17: "BINARY_VERSION"}
    for number, (_, reason) in status.COMPLETION.items():
        assert codes[number].endswith(other_names.get(number, reason))
