# SPDX-License-Identifier: Apache-2.0
"""Opens the files of a model in this process and hands them over, for a load.

So the broker, which may run with other rights, opens nothing that this process could not.
"""

import os
import stat
import time

from qnnbroker.protos import attach as frames
from qnnbroker.protos.errors import InvalidRequest, NotAllowed, NotFound, ProtocolError
from qnnbroker.v1 import attach_pb2

from .attach import AttachConnection, parse

#: Nobody's model has more files.
_MAX_FILES = 16


def hand_over(attach: AttachConnection, path: str, timeout: float) -> int:
    """The file id for LoadModelRequest of the model at an absolute path.

    Raises:
        NotFound, NotAllowed: reason FILE_MISSING, FILE_UNREADABLE.
        InvalidRequest: reason BAD_FILE.
        BrokerError: what the broker says about the files.
    """
    deadline = time.monotonic() + timeout
    answer = _send(attach, 0, path, open_model(path), deadline)
    for _ in range(_MAX_FILES):
        if not answer.wanted:
            return answer.file_id
        wanted = answer.wanted[0]
        answer = _send(
            attach,
            answer.file_id,
            wanted.name,
            open_beside(path, wanted.name),
            deadline,
        )
    raise ProtocolError(f"the broker wants more and more files for {path!r}")


def open_model(path: str) -> int:
    """An fd on a regular file. Never blocks on a FIFO, and opens no device.

    Raises:
        NotFound, NotAllowed, InvalidRequest
    """
    try:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):
            raise InvalidRequest(
                f"a model file wanted, {path!r} is {_kind(info.st_mode)}", reason="BAD_FILE"
            )
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"there is no file {path!r}", reason="FILE_MISSING", path=path) from None
    except PermissionError:
        raise NotAllowed(
            f"this process may not read {path!r}", reason="FILE_UNREADABLE", path=path
        ) from None
    except InvalidRequest:
        raise
    except (OSError, ValueError) as exc:
        raise InvalidRequest(f"cannot open {path!r}: {exc}", reason="BAD_FILE") from exc


def open_beside(path: str, name: str) -> int | None:
    """An fd on a file that belongs to the model; None when there is none, which the broker judges.

    Raises:
        ProtocolError: the broker asks for a file elsewhere.
        NotAllowed, InvalidRequest: as `open_model`.
    """
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise ProtocolError(f"the broker asks for the file {name!r}, which is not beside the model")
    try:
        return open_model(os.path.join(os.path.dirname(path), *parts))
    except NotFound:
        return None


def _send(
    attach: AttachConnection, file_id: int, path: str, fd: int | None, deadline: float
) -> attach_pb2.LoadFdResponse:
    try:
        request = attach_pb2.LoadFdRequest(file_id=file_id, path=path)
        body, _ = attach.request(
            frames.Kind.LOADFD,
            request.SerializeToString(),
            max(0.0, deadline - time.monotonic()),
            fd_count=0,
            send_fds=[] if fd is None else [fd],
        )
    finally:
        if fd is not None:
            os.close(fd)
    return parse(attach_pb2.LoadFdResponse, body)


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
