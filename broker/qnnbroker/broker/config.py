# SPDX-License-Identifier: Apache-2.0
"""BrokerConfig: every limit and option of the broker with its unit and default."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qnnbroker.protos.attach import ABI_VERSION  # noqa: F401  (re-exported for status)
from qnnbroker.protos.errors import InvalidRequest
from qnnbroker.protos.paths import runtime_dir
from qnnbroker.v1 import attach_pb2

MIB = 1024 * 1024


def option(default: Any, help: str, *, unit: str = "") -> Any:
    """A field with its explanation; `qnnbroker config` prints them."""
    return field(default=default, metadata={"help": help, "unit": unit})


#: (options, least, most). Counts and sizes travel as u32 and u64, gRPC's message limit as int.
_RANGES: tuple[tuple[tuple[str, ...], float, float], ...] = (
    (("qnn_log_level",), 1, 5),
    (("max_sessions", "max_buffers", "max_bindings"), 1, 2**32 - 1),
    (("max_in_flight",), 1, 2**15),  # half of the largest ring
    (("max_buffer_bytes",), 1, 2**40),  # the largest Region
    (("max_session_bytes",), 1, 2**63 - 1),
    (("max_message_bytes",), 1, 2**31 - 1),
    (("load_threads", "band_workers"), 1, 64),
    (("band_priorities",), 0, 500),
    (("spin_us",), 0, 1000),
    (("spin_limit_us",), 0, 1_000_000),
    (("keep_alive_seconds",), -1e9, 1e9),
    (("hello_timeout_seconds", "stop_timeout_seconds", "trial_seconds"), 0.001, 1e9),
    (("reset_timeout_seconds",), 0.001, 1e9),
    (("attach_fd", "ready_fd"), -1, 2**31 - 1),
    (("rpcmem_heap",), 0, 2**31 - 1),
    (("perf_hold_seconds", "perf_idle_seconds"), 0, 1e6),
    (("rpc_latency_us",), 0, 2**31 - 1),
    (("rpc_polling_us",), 0, 9999),
    (("rpcmem_flags",), 0, 2**32 - 1),
)
#: From the slowest to the fastest; "default" is no vote at all.
PERF_MODES = (
    "default",
    "extreme_power_saver",
    "low_power_saver",
    "power_saver",
    "high_power_saver",
    "low_balanced",
    "balanced",
    "high_performance",
    "sustained_high_performance",
    "burst",
)
#: The options that are one of a few words.
_CHOICES = {
    "verify": ("auto", "always", "never"),
    "file_mapped_weights": ("auto", "require", "off"),
    "zero_copy": ("auto", "require", "off"),
    "perf_mode": PERF_MODES,
    "session_perf_mode": PERF_MODES,
    "buffer_memory": ("auto", "memfd", "rpcmem"),
}


def check_type(name: str, wanted: Any, value: Any) -> None:
    """Refuses a value of another type; JSON brings any.

    Raises:
        InvalidRequest: names the option.
    """
    if wanted is float:
        right = isinstance(value, (int, float))
    elif wanted is bool:
        right = isinstance(value, bool)
    elif wanted in (int, str):
        right = isinstance(value, wanted)
    else:
        right = isinstance(value, tuple) and [type(v) for v in value] == [int, int, int]
    if not right or isinstance(value, bool) != (wanted is bool):
        kinds = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}
        raise InvalidRequest(
            f"{name}: {kinds.get(wanted, 'three whole numbers')} wanted, found {value!r}"
        )


@dataclass(frozen=True, kw_only=True)
class BrokerConfig:
    """What a broker is started with. Immutable; JSON in and out for the exec of the worker."""

    runtime_dir: str = field(
        default_factory=runtime_dir,
        metadata={"help": "directory of the sockets; must be ours alone", "unit": ""},
    )
    backend: str = option("qnn", "qnn (a QNN directory) or fake (the fault-injecting stand-in)")
    qnn_lib_dir: str = option("", "directory of libQnnHtp.so; empty: the installed onnxruntime-qnn")
    qnn_log_level: int = option(2, "1 error, 2 warning, 3 info, 4 verbose, 5 debug")
    log_level: str = option("info", "debug, info, warning or error")

    max_sessions: int = option(256, "attached clients")
    max_buffer_bytes: int = option(2048 * MIB, "one shared buffer", unit="bytes")
    max_session_bytes: int = option(8192 * MIB, "shared buffers of one session", unit="bytes")
    max_buffers: int = option(4096, "shared buffers of one session")
    max_bindings: int = option(4096, "bindings of one session")
    max_in_flight: int = option(64, "submissions of one session queued or running")
    max_message_bytes: int = option(256 * MIB, "one gRPC message", unit="bytes")
    load_threads: int = option(2, "models hashed or created at a time")
    verify: str = option(
        "auto",
        "try new binaries in a process of their own first: auto (of a real library), always, never",
    )
    trust: bool = option(False, "load binaries without trying them first, whatever verify says")
    trial_seconds: float = option(60.0, "time limit of one trial", unit="seconds")
    verdict_dir: str = option("", "where outcomes of trials are kept; empty: in the user's cache")
    zero_copy: str = option(
        "auto", "auto, require or off: whether bindings register their memory with the device"
    )
    perf_mode: str = option(
        "burst", "the fastest clocks that sessions may vote for, from default (none) to burst"
    )
    session_perf_mode: str = option(
        "balanced", "clocks that a session votes for when it does not say"
    )
    perf_hold_seconds: float = option(
        0.5, "a faster mode stays so long after it was wanted last", unit="seconds"
    )
    perf_idle_seconds: float = option(
        2.0, "the vote is dropped after so long without work", unit="seconds"
    )
    rpc_latency_us: int = option(
        100, "sleep that calls to the device may take, with any vote; 0: not voted for"
    )
    rpc_polling_us: int = option(
        9999, "polling before it, with the three fastest modes; 0: not voted for"
    )
    buffer_memory: str = option("auto", "auto, memfd or rpcmem: what shared buffers are made of")
    rpcmem_library: str = option("", "path of libcdsprpc.so; empty: as the linker finds it")
    rpcmem_heap: int = option(25, "heap that rpcmem allocates from")
    rpcmem_flags: int = option(1, "flags of rpcmem allocations; 1: cached")
    file_mapped_weights: str = option(
        "auto", "auto, require (the backend reads the file's mapping) or off (a heap copy)"
    )
    band_workers: tuple[int, int, int] = option((1, 1, 1), "executes at a time: low, normal, high")
    band_priorities: tuple[int, int, int] = option(
        (0, 100, 200), "QNN priority of the low, normal and high band"
    )
    spin_us: int = option(
        10, "how long a worker looks for more before it sleeps, after short runs", unit="us"
    )
    spin_limit_us: int = option(
        50, "no such looking after runs of a graph whose median execute is longer", unit="us"
    )

    keep_alive_seconds: float = option(
        300.0, "how long a model loaded without a session stays after its last use", unit="seconds"
    )
    hello_timeout_seconds: float = option(10.0, "time for a new client's HELLO", unit="seconds")
    stop_timeout_seconds: float = option(
        30.0, "how long an orderly stop waits for what runs", unit="seconds"
    )
    reset_timeout_seconds: float = option(
        30.0,
        "how long a reset of the backend waits for what runs before it gives up",
        unit="seconds",
    )

    attach_fd: int = option(-1, "inherited listening attach socket; -1: bind our own")
    ready_fd: int = option(-1, "fd that gets one line when the broker is ready; -1: none")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            check_type(f.name, f.type, getattr(self, f.name))
        if self.backend not in ("qnn", "fake"):
            raise InvalidRequest(f"backend 'qnn' or 'fake' wanted, found {self.backend!r}")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise InvalidRequest(
                f"log_level debug, info, warning or error wanted, found {self.log_level!r}"
            )
        for name, allowed in _CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                raise InvalidRequest(f"{name} {' or '.join(allowed)} wanted, found {value!r}")
        for names, low, high in _RANGES:
            for name in names:
                values = getattr(self, name)
                for value in values if isinstance(values, tuple) else (values,):
                    if not low <= value <= high:
                        raise InvalidRequest(f"{name} {low} to {high} wanted, found {value}")

    @property
    def directory(self) -> Path:
        """The runtime directory."""
        return Path(self.runtime_dir)

    @property
    def verifies(self) -> bool:
        """Whether binaries are tried first. The stand-in library checks its own thoroughly."""
        if self.trust or self.verify == "never":
            return False
        return self.verify == "always" or self.backend == "qnn"

    def limits(self) -> attach_pb2.Limits:
        """What a session may hold, as HELLO tells it."""
        return attach_pb2.Limits(
            max_buffer_bytes=self.max_buffer_bytes,
            max_session_bytes=self.max_session_bytes,
            max_buffers=self.max_buffers,
            max_bindings=self.max_bindings,
            max_in_flight=self.max_in_flight,
            max_message_bytes=self.max_message_bytes,
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "BrokerConfig":
        """The config in `text`.

        Raises:
            InvalidRequest: not JSON, an unknown option, or a value out of range.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise InvalidRequest(f"the broker's config is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise InvalidRequest(f"the broker's config is a JSON object, found {text[:40]!r}")
        known = {f.name: f for f in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - set(known)):
            raise InvalidRequest(f"unknown broker option {unknown[0]!r}")
        given: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**given)
