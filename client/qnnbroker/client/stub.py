# SPDX-License-Identifier: Apache-2.0
"""The calls of the control service on a channel, each made when it is first asked for.

The generated module makes all of them at once, and holds the servicer and what else a broker
needs: memory that every client would pay for. Its types are these calls' all the same.
"""

from typing import TYPE_CHECKING, Any, cast

import grpc
from google.protobuf.message_factory import GetMessageClass

from qnnbroker.v1 import control_pb2

if TYPE_CHECKING:
    from qnnbroker.v1.control_pb2_grpc import ControlServiceStub

_SERVICE = control_pb2.DESCRIPTOR.services_by_name["ControlService"]


def control_stub(channel: grpc.Channel) -> "ControlServiceStub":
    """The control service over that channel."""
    return cast("ControlServiceStub", _Stub(channel))


class _Stub:
    """Has a call for each method of the service, by its name. Threads: any."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        method = _SERVICE.methods_by_name.get(name)
        if method is None:
            raise AttributeError(f"the control service has no method {name!r}")
        make = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
        call = make(
            f"/{_SERVICE.full_name}/{name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        setattr(self, name, call)  # the next one is found without us
        return call
