# SPDX-License-Identifier: Apache-2.0
"""The gRPC channel of one client: opened by a call, closed when nobody has called for a while.

A channel costs an idle process half a dozen threads that wake up ten times a second. Runs over the
rings need none, so a client that only runs is without.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import grpc

from qnnbroker.protos import paths

from .stub import control_stub

if TYPE_CHECKING:
    from qnnbroker.v1.control_pb2_grpc import ControlServiceStub

#: Opening costs some 3 ms: long enough that calls which belong together share a channel.
REST_SECONDS = 1.0
_RECONNECT_MS = 50
_MAX_RECONNECT_MS = 1000
_END_SECONDS = 1.0


class RestingChannel:
    """Lends its stub to calls. Threads: any. Fork: unusable in the child, see `held`.

    Args:
        grpc_path: of the broker's socket.
        limit_bytes: of one message; -1 for none.
        rest_seconds: without a call until the channel is closed; None: REST_SECONDS.
        pinned: it is this socket for good, wherever it is moved, or removed, and whoever listens
            at its path then; else whatever is at the path when the channel opens.
    """

    def __init__(
        self,
        grpc_path: str,
        limit_bytes: int,
        *,
        rest_seconds: float | None = None,
        pinned: bool = False,
    ) -> None:
        pin = _pin(grpc_path) if pinned else None
        self._target = paths.grpc_target(grpc_path if pin is None else f"/proc/self/fd/{pin}")
        self._unpin: weakref.finalize[[int], RestingChannel] | None = None
        if pin is not None:
            self._unpin = weakref.finalize(self, os.close, pin)
            self._unpin.atexit = False
        self._limit_bytes = limit_bytes
        self._rest_seconds = REST_SECONDS if rest_seconds is None else rest_seconds
        self._changed = threading.Condition()
        self._channel: grpc.Channel | None = None
        self._stub: ControlServiceStub | None = None
        self._calls = 0
        self._last_call = 0.0
        self._watcher: threading.Thread | None = None
        self._closed = False
        _channels.add(self)

    @property
    def held(self) -> grpc.Channel | None:
        """The channel, if there is one; without a lock, for the child of a fork, where gRPC must
        not even free it."""
        return self._channel

    @contextlib.contextmanager
    def stub(self) -> "Iterator[ControlServiceStub]":
        """The stub, for as long as the block lasts.

        Raises:
            ValueError: closed.
        """
        with self._changed:
            if self._closed:
                raise ValueError("the channel is closed")
            if self._stub is None:
                self._channel = self._open()
                self._stub = control_stub(self._channel)
            stub = self._stub
            self._calls += 1
        try:
            yield stub
        finally:
            watcher = None
            with self._changed:
                self._calls -= 1
                self._last_call = time.monotonic()
                if not self._calls and self._watcher is None and not self._closed:
                    watcher = self._watcher = self._new_watcher()
            if watcher is not None:
                self._start(watcher)

    def _open(self) -> grpc.Channel:
        return grpc.insecure_channel(
            self._target,
            options=[
                # The minimum stays gRPC's own: it is also how long a connection may take to be
                # made, and a busy broker needs more than 50 ms for that at times.
                ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS),
                ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_MS),
                ("grpc.max_send_message_length", self._limit_bytes),
                ("grpc.max_receive_message_length", self._limit_bytes),
                # A call is made once: another broker in this one's place knows nothing of the
                # session. It is also a little less work for each call.
                ("grpc.enable_retries", 0),
                # Sessions share no connection: one must not inherit the other's backoff.
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )

    def _new_watcher(self) -> threading.Thread:
        """A thread that closes the channel in time, and ends with that."""
        return threading.Thread(
            target=_close_when_resting,
            args=(weakref.ref(self), self._changed),
            name="qnnbroker-channel",
            daemon=True,
        )

    def _start(self, watcher: threading.Thread) -> None:
        try:
            watcher.start()
        except RuntimeError:  # there is no thread to be had, or Python ends: the channel just stays
            with self._changed:
                self._watcher = None

    def _rest(self) -> tuple[float, grpc.Channel | None]:
        """Seconds until it is time, the lock held; or 0 and the channel to close."""
        left = self._last_call + self._rest_seconds - time.monotonic()
        if self._calls or (left > 0 and not self._closed):
            return max(left, self._rest_seconds / 10), None
        channel, self._channel, self._stub = self._channel, None, None
        self._watcher = None
        return 0.0, channel

    def close(self) -> None:
        """Closes; calls under way fail as cancelled. Idempotent."""
        if sys.is_finalizing():
            return  # a daemon thread may have been ended with the lock in its hand
        with self._changed:
            self._closed = True
            channel, self._channel, self._stub = self._channel, None, None
            self._changed.notify_all()
        if channel is not None:
            channel.close()
        if self._unpin is not None:
            self._unpin()

    def end(self) -> None:
        """Closes before Python ends, and waits for the thread that watches."""
        watcher = self._watcher
        self.close()
        if watcher is not None and watcher.is_alive():
            watcher.join(_END_SECONDS)


def _pin(path: str) -> int | None:
    """An fd of the socket's inode, which can be connected to by way of /proc; None without."""
    try:
        pin = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # it is gone already, or there is no fd to be had: then by its path
        return None
    if os.path.exists(f"/proc/self/fd/{pin}"):
        return pin
    os.close(pin)
    return None


#: Those that exist, for the end of the process: gRPC's threads must not outlive Python's.
_channels: "weakref.WeakSet[RestingChannel]" = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for channel in list(_channels):
        channel.end()


def _close_when_resting(ref: "weakref.ref[RestingChannel]", changed: threading.Condition) -> None:
    """Keeps nothing alive while it waits."""
    while True:
        with changed:
            resting = ref()
            if resting is None:
                return
            left, channel = resting._rest()
            resting = None
            if left:
                changed.wait(left)
                continue
        if channel is not None:
            channel.close()
        return
