# SPDX-License-Identifier: Apache-2.0
"""Where the sockets lie: the runtime directory and the names in it.

`QNNBROKER_RUNTIME_DIR`, else `$XDG_RUNTIME_DIR/qnnbroker`, else a folder per uid under the
temporary directory. Whichever it is, it is checked to be ours alone.
"""

import contextlib
import os
import stat
from typing import TYPE_CHECKING

from .errors import InvalidRequest, NotAllowed

if TYPE_CHECKING:
    # Clients pass strings: pathlib, with what it imports, is 0.8 MiB that they do without.
    from pathlib import Path

    AnyPath = str | os.PathLike[str]

RUNTIME_DIR_ENV = "QNNBROKER_RUNTIME_DIR"
ATTACH_SOCKET = "attach.sock"
GRPC_SOCKET = "grpc.sock"
LOCK_FILE = "broker.lock"

#: sockaddr_un holds 108 bytes with the closing NUL (unix(7)).
MAX_SOCKET_PATH_BYTES = 107
#: Longest name we put in the directory, `grpc-<n>.sock` with room for the number.
_LONGEST_NAME = "grpc-0000000000.sock"
#: Bytes that mean themselves in a URI's path.
_PLAIN = frozenset(b"/-._~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")


def absolute(path: "AnyPath") -> str:
    """The path from the root, without empty parts and ".": a link with a slash behind it would be
    followed. ".." stays, since what is before it may be a link."""
    text = os.fspath(path)
    if not os.path.isabs(text):
        text = os.path.join(os.getcwd(), text)
    return "/" + "/".join(part for part in text.split("/") if part not in ("", "."))


def runtime_dir() -> str:
    """The directory that a broker or client of this user uses by default. Creates nothing."""
    if named := os.environ.get(RUNTIME_DIR_ENV):
        return absolute(named)
    xdg = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(xdg):  # the XDG specification wants a relative one ignored
        return os.path.join(absolute(xdg), "qnnbroker")
    import tempfile  # seldom needed, and half a megabyte of modules in every client

    return os.path.join(absolute(tempfile.gettempdir()), f"qnnbroker-{os.getuid()}")


def check_socket_path(directory: "AnyPath") -> None:
    """Refuses a directory whose socket paths the kernel or gRPC could not take.

    Raises:
        InvalidRequest: the path is too long, or has a comma.
    """
    length = len(os.fsencode(os.path.join(directory, _LONGEST_NAME)))
    if length > MAX_SOCKET_PATH_BYTES:
        raise InvalidRequest(
            f"the runtime directory {str(directory)!r} makes socket paths of {length} bytes; "
            f"the kernel takes {MAX_SOCKET_PATH_BYTES}. Set {RUNTIME_DIR_ENV} to a shorter one"
        )
    if "," in str(directory):
        raise InvalidRequest(
            f"the runtime directory {str(directory)!r} has a comma in its path, at which gRPC "
            "would cut it; choose one without"
        )


def grpc_target(socket_path: "AnyPath") -> str:
    """How gRPC is told of a Unix socket: as a URI, in which '%', '?' and '#' mean something."""
    path = os.fsencode(socket_path)
    return "unix:" + "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in path)


def check_private(directory: "AnyPath") -> None:
    """Refuses a directory that somebody else owns or can enter.

    Raises:
        NotAllowed: wrong owner, mode or kind.
        FileNotFoundError: it is not there.
    """
    info = os.lstat(directory)
    if stat.S_ISLNK(info.st_mode):
        raise NotAllowed(f"the runtime directory {str(directory)!r} is a symbolic link")
    if not stat.S_ISDIR(info.st_mode):
        raise NotAllowed(f"the runtime directory {str(directory)!r} is not a directory")
    if info.st_uid != os.getuid():
        raise NotAllowed(
            f"the runtime directory {str(directory)!r} belongs to uid {info.st_uid}, "
            f"not to us (uid {os.getuid()})",
            reason="PEER_UID",
        )
    if info.st_mode & 0o077:
        raise NotAllowed(
            f"the runtime directory {str(directory)!r} has mode {stat.S_IMODE(info.st_mode):04o}; "
            "it must be 0700"
        )


def make_runtime_dir(directory: "Path") -> None:
    """Creates the directory and its missing parents (0700), and checks it.

    Raises:
        InvalidRequest: the path is too long for sockets.
        NotAllowed: it exists and is not ours alone.
        OSError: it cannot be made.
    """
    check_socket_path(directory)
    missing = [p for p in (directory, *directory.parents) if not p.exists()]
    for path in reversed(missing):  # parents too: who can rename it could put another in its place
        with contextlib.suppress(FileExistsError):  # check_private says what is there
            path.mkdir(mode=0o700)
    check_private(directory)
