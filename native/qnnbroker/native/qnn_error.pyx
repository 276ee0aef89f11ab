# SPDX-License-Identifier: Apache-2.0
"""QnnError, and what QNN's error codes mean: the only place that knows them."""

#: Codes that callers tell apart.
NOT_SUPPORTED = 1000
OUT_OF_MEMORY = 1002
INVALID_ARGUMENT = 1004
NOT_PERMITTED = 1005
PLATFORM_NOT_SUPPORTED = 1006
DSP_RESTARTED = 1007
INCOMPATIBLE_LIBRARIES = 1008
RESOURCE_UNAVAILABLE = 1010
DSP_LOST = 1011
GENERAL = 1100
CONTEXT_INVALID_HANDLE = 5002
BINARY_VERSION = 5004
BINARY_CONFIGURATION = 5008
BINARY_SUBOPTIMAL = 5011
CONTEXT_ABORTED = 5012
CONTEXT_TIMED_OUT = 5013
GRAPH_INVALID_HANDLE = 6001
GRAPH_ABORTED = 6031
GRAPH_TIMED_OUT = 6033
DEVICE_UNAVAILABLE = 14002
BINARY_MALFORMED = 30010

_NAMES = {
    0: "success",
    1000: "common: not supported",
    1002: "common: memory allocation failed",
    1003: "common: system call failed",
    1004: "common: invalid argument",
    1005: "common: operation not permitted",
    1006: "common: platform not supported",
    1007: "common: the NPU service restarted and is back",
    1008: "common: incompatible libraries",
    1009: "common: library already loaded",
    1010: "common: resource unavailable",
    1011: "common: the NPU service is lost to this process",
    1100: "common: general failure",
    2000: "property: unknown key",
    4000: "backend: cannot initialise",
    4002: "backend: cannot terminate",
    4003: "backend: not supported",
    4004: "backend: invalid argument",
    4005: "backend: op package not found",
    4006: "backend: op package interface provider",
    4007: "backend: op package registration failed",
    4008: "backend: op package configuration",
    4009: "backend: op package duplicated",
    4010: "backend: inconsistent configuration",
    4011: "backend: invalid handle",
    4012: "backend: invalid configuration",
    4013: "backend: op package",
    5000: "context: invalid argument",
    5001: "context: does not exist",
    5002: "context: invalid handle",
    5003: "context: not finalised",
    5004: "context: binary has another version",
    5005: "context: cannot be created from the binary",
    5006: "context: binary size cannot be got",
    5007: "context: binary cannot be got",
    5008: "context: binary has another configuration",
    5009: "context: profile cannot be set",
    5010: "context: invalid configuration",
    5011: "context: binary is not made for this chip",
    5012: "context: aborted",
    5013: "context: timed out",
    5014: "context: bad buffer of an incremental binary",
    6000: "graph: invalid argument",
    6001: "graph: invalid handle",
    6002: "graph: does not exist",
    6003: "graph: invalid name",
    6004: "graph: invalid tensor",
    6005: "graph: invalid operator configuration",
    6006: "graph: profile cannot be set",
    6007: "graph: unconnected node",
    6020: "graph: cannot be created",
    6021: "graph: cannot be optimised",
    6022: "graph: cannot be finalised",
    6023: "graph: not finalised",
    6024: "graph: already finalised",
    6025: "graph: queue of asynchronous executes is full",
    6030: "graph: signal is in use",
    6031: "graph: aborted",
    6032: "graph: profile is in use",
    6033: "graph: timed out",
    6034: "graph: subgraph",
    6035: "graph: disabled",
    6036: "graph: dynamic shape",
    6037: "graph: sparsity",
    6038: "graph: terminated early",
    6039: "graph: invalid context",
    6040: "graph: cycle",
    7001: "tensor: invalid handle",
    7002: "tensor: does not exist",
    7003: "tensor: already exists",
    7004: "tensor: invalid parameter",
    7005: "tensor: unsupported parameter",
    7006: "tensor: name collision",
    7007: "tensor: incompatible update",
    8000: "memory: invalid argument",
    8001: "memory: invalid handle",
    8002: "memory: already registered",
    8003: "memory: cannot be mapped",
    8004: "memory: invalid shape",
    8005: "memory: unsupported type",
    9000: "signal: in use",
    9001: "signal: idle",
    9002: "signal: invalid argument",
    9003: "signal: invalid handle",
    9004: "signal: timed out",
    9005: "signal: incompatible",
    10000: "error: invalid argument",
    10001: "error: unknown code",
    11002: "log: cannot be initialised",
    11003: "log: invalid argument",
    11004: "log: invalid handle",
    12000: "profile: invalid handle",
    12001: "profile: in use",
    12002: "profile: incompatible event",
    13001: "performance: invalid input",
    13004: "performance: not supported",
    14000: "device: invalid handle",
    14001: "device: invalid configuration",
    14002: "device: hardware unavailable",
    14003: "device: still has contexts",
    14004: "device: access denied",
    30000: "system: invalid handle",
    30001: "system: invalid argument",
    30010: "system: malformed or truncated context binary",
}

#: Where a code that has no name of its own comes from: (from, up to but without, component).
_COMPONENTS = (
    (1000, 2000, "common"),
    (2000, 3000, "property"),
    (3000, 4000, "op package"),
    (4000, 5000, "backend"),
    (5000, 6000, "context"),
    (6000, 7000, "graph"),
    (7000, 8000, "tensor"),
    (8000, 9000, "memory"),
    (9000, 10000, "signal"),
    (10000, 11000, "error"),
    (11000, 12000, "log"),
    (12000, 13000, "profile"),
    (13000, 14000, "performance"),
    (14000, 15000, "device"),
    (30000, 50000, "system"),
    (60000, 65536, "interface"),
)


def name_of(code):
    """What a QNN code means, as "component: meaning"; every int has a name. Any thread."""
    if (known := _NAMES.get(code)) is not None:
        return known
    for first, end, component in _COMPONENTS:
        if first <= code < end:
            return f"{component}: error {code}"
    return f"unknown error {code}"


class QnnError(Exception):
    """A QNN call failed.

    Attributes:
        code: QNN's number, see the constants of this module.
        name: what it means, as `name_of` says.
        operation: the QNN function.
        message: the error that the library logged meanwhile, or what the caller adds; may be "".
    """

    def __init__(self, code, operation, message=""):
        super().__init__(code, operation, message)
        self.code = code
        self.operation = operation
        self.message = message

    @property
    def name(self):
        return name_of(self.code)

    def __str__(self):
        detail = f": {self.message}" if self.message else ""
        return f"{self.operation} failed with QNN code {self.code} ({self.name}){detail}"


cdef int check(uint64_t code, str operation) except -1:
    """Raises QnnError unless `code` is 0. Call it on the thread that made the QNN call."""
    if code == 0:
        return 0
    logged = qb_log_last_error().decode("utf-8", "replace")
    # Codes live in the low 16 bits; what the upper ones might say is not known.
    raise QnnError(code & 0xFFFF or code, operation, logged)
