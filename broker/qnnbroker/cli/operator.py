# SPDX-License-Identifier: Apache-2.0
"""The operator's view of a broker: its control service, reached without attaching a session."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from qnnbroker.protos.errors import BrokerUnavailable, NotAllowed
from qnnbroker.protos.paths import GRPC_SOCKET, check_private, check_socket_path

from .presence import no_broker

# gRPC's own lines would come between ours on standard error; it reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from qnnbroker.client.control import Control  # noqa: E402

#: Deadline of a call that only asks, in seconds.
CALL_SECONDS = 10.0


@contextlib.contextmanager
def broker_control(directory: Path) -> Iterator[Control]:
    """The control service of the broker on `directory`, until the block ends.

    Raises:
        BrokerUnavailable: nobody is there; says how to start one.
        NotAllowed: the directory is somebody else's.
    """
    check_socket_path(directory)
    path = directory / GRPC_SOCKET
    try:
        check_private(directory)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise no_broker(directory) from error
    except PermissionError as error:
        if isinstance(error, NotAllowed):
            raise
        raise NotAllowed(
            f"we may not enter the runtime directory {str(directory)!r}: {error.strerror}"
        ) from error
    if not path.is_socket():
        raise no_broker(directory)
    control = Control(str(path))
    try:
        yield control
    except BrokerUnavailable as error:
        if error.reason == "NO_SOCKET":  # gRPC's own words are about addresses and errno
            raise no_broker(directory) from error
        raise
    finally:
        control.close()
