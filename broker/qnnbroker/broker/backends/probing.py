# SPDX-License-Identifier: Apache-2.0
"""What a QNN library can do, found by calling, in the words that status shows.

What it answers when asked is no promise: the emulation says yes to much that it then refuses. So
each capability is one harmless call: what it makes is freed at once.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from qnnbroker.native.qnn_backend import QnnBackend, QnnDevice
from qnnbroker.native.qnn_error import NOT_SUPPORTED, QnnError, name_of
from qnnbroker.native.qnn_graph import QnnGraph
from qnnbroker.native.qnn_library import QnnLibrary, drain_log
from qnnbroker.native.qnn_power import QnnPower
from qnnbroker.native.qnn_probe import probe_async, probe_callback, probe_profile, probe_signal
from qnnbroker.v1 import control_pb2 as pb

log = logging.getLogger("qnnbroker.qnn")

MEMORY, ASYNC = "memory_registration", "async_execute"
NOT_ASKED = "not asked yet: that takes a context, and none was loaded so far"


def capability(name: str, call: str, code: int) -> pb.Capability:
    """A capability by the code of the call that was to tell."""
    supported = code != NOT_SUPPORTED
    text = "0 (works)" if code == 0 else f"{code} ({name_of(code).partition(': ')[2]})"
    if supported and code:
        text += ", so the call is there"
    return pb.Capability(name=name, supported=supported, evidence=f"{call} -> {text}")


class Asking:
    """Whether some thread asks the library something: its errors are answers then."""

    _lock = threading.Lock()
    _count = 0

    @classmethod
    @contextmanager
    def quietly(cls) -> Iterator[None]:
        """What the library logs meanwhile goes to the debug log, whoever drains it."""
        with cls._lock:
            cls._count += 1
        try:
            yield
        finally:
            for _, text in drain_log():
                log.debug("while asking: %s", text)
            with cls._lock:
                cls._count -= 1

    @classmethod
    def level(cls, level: int) -> int:
        """The level at which to log a line of the library."""
        return logging.DEBUG if cls._count else level


def probe_backend(backend: QnnBackend, device: QnnDevice) -> list[pb.Capability]:
    """What can be asked without a context; the rest says so."""
    with Asking.quietly():
        return [
            pb.Capability(name=MEMORY, evidence=NOT_ASKED),
            pb.Capability(name=ASYNC, evidence=NOT_ASKED),
            capability("signals", "signalCreate", probe_signal(backend)),
            capability(
                "callback_creation",
                "contextCreateFromBinaryWithCallback",
                probe_callback(device),
            ),
            capability("performance_votes", "createPowerConfigId", probe_power(backend.library)),
            capability("profiling", "profileCreate", probe_profile(backend)),
        ]


def probe_power(library: QnnLibrary) -> int:
    """Whether votes are taken; what they do is another matter."""
    try:
        QnnPower(library).close()
    except QnnError as error:
        return error.code
    return 0


def probe_context(
    graph: QnnGraph, memory_evidence: Callable[[], tuple[bool, str]]
) -> list[pb.Capability]:
    """What takes a context to ask. `memory_evidence` registers a little memory."""
    with Asking.quietly():
        supported, evidence = memory_evidence()
        return [
            pb.Capability(name=MEMORY, supported=supported, evidence=evidence),
            capability(ASYNC, "graphExecuteAsync", probe_async(graph)),
        ]


def replaced(known: Iterable[pb.Capability], found: Iterable[pb.Capability]) -> list[pb.Capability]:
    """`known` with those that `found` knows better."""
    better = {c.name: c for c in found}
    return [better.get(c.name, c) for c in known]
