# SPDX-License-Identifier: Apache-2.0
"""The fake QNN library from Python: where it is, its context binaries, its switches, its record.

The library itself is C (csrc/qnn_fake*.c) and is driven by the same binding as the real one. Use it
for tests, and for applications on a machine without an NPU. docs/fake-backend.md describes the
format of the binaries and every switch. Nothing here loads the library, but `control_loaded` and
`read_ring`, which talk to the one that this process has loaded.
"""

import ctypes
import importlib.util
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

#: The environment variable that holds the switches; read when the library is loaded.
SWITCHES_ENV: Final = "QNNBROKER_FAKE"
#: A context binary is larger than this: the context blob is what remains of the file.
FILE_OVERHEAD_BYTES: Final = 4096
MAGIC: Final = "qnnbroker-fake 1"
_SIZE_DIGITS = 12

#: The names of the data types, and the numbers QNN has for them.
DTYPES: Final = {
    "int8": 0x0008,
    "int16": 0x0016,
    "int32": 0x0032,
    "int64": 0x0064,
    "uint8": 0x0108,
    "uint16": 0x0116,
    "uint32": 0x0132,
    "uint64": 0x0164,
    "float16": 0x0216,
    "float32": 0x0232,
    "float64": 0x0264,
    "sfixed4": 0x0304,
    "sfixed8": 0x0308,
    "sfixed16": 0x0316,
    "sfixed32": 0x0332,
    "ufixed4": 0x0404,
    "ufixed8": 0x0408,
    "ufixed16": 0x0416,
    "ufixed32": 0x0432,
    "bool8": 0x0508,
}

#: An op: its kind, or its kind with the names of its tensors or its microseconds.
FakeOp = str | tuple[str | int, ...]


def fake_qnn_dir() -> Path:
    """The directory with the fake libQnnHtp.so and libQnnSystem.so.

    Raises:
        FileNotFoundError: it was not built.
    """
    places = [Path(__file__).parent]
    spec = importlib.util.find_spec("qnnbroker.native.runnable")
    if spec is not None and spec.origin is not None:
        places.append(Path(spec.origin).parent)  # an editable install keeps what is compiled apart
    for place in places:
        if (place / "fake_qnn" / "libQnnHtp.so").is_file():
            return place / "fake_qnn"
    raise FileNotFoundError(
        f"no fake_qnn directory in {' or '.join(map(str, places))}: build with `make native`"
    )


def escape_name(name: str) -> str:
    """A name as one word of the format: every byte that is not a plain character as %41."""
    return "".join(
        chr(byte) if 0x20 < byte < 0x7F and byte != 0x25 else f"%{byte:02X}"
        for byte in name.encode()
    )


@dataclass(frozen=True)
class FakeTensor:
    """An input or output of a fake graph.

    Quantised types (sfixed*, ufixed*) need `scale` (with `offset`), or `axis` and `scales` (with
    `offsets`), one for each index of that axis; real value = (stored + offset) * scale. `bits`
    selects the bit-width encodings. `tensor_id` is chosen by the library when it is None.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    scale: float | None = None
    offset: int | None = None
    axis: int | None = None
    scales: tuple[float, ...] | None = None
    offsets: tuple[int, ...] | None = None
    bits: int | None = None
    tensor_id: int | None = None

    def line(self, direction: str) -> str:
        dims = "x".join(map(str, self.shape)) or "-"
        words = [direction, escape_name(self.name), self.dtype, dims]
        for key, value in (
            ("id", self.tensor_id),
            ("scale", None if self.scale is None else repr(float(self.scale))),
            ("offset", self.offset),
            ("axis", self.axis),
            ("scales", _joined(self.scales)),
            ("offsets", _joined(self.offsets)),
            ("bits", self.bits),
        ):
            if value is not None:
                words.append(f"{key}={value}")
        return " ".join(words)


def _joined(values: Sequence[float] | None) -> str | None:
    return None if values is None else ",".join(repr(value) for value in values)


@dataclass(frozen=True)
class FakeGraph:
    """A graph of a fake context binary. All sizes in bytes, times in microseconds.

    Ops run in order: "null", "copy", "add", "matmul", "sum", "sum_bytes" (alone, or as a tuple with
    the names of their tensors, inputs first), ("sleep", us), ("spin", us).
    """

    name: str
    inputs: tuple[FakeTensor, ...]
    outputs: tuple[FakeTensor, ...]
    ops: tuple[FakeOp, ...] = ("null",)
    execute_us: int = 0
    weight_bytes: int = 0
    shared_weight_bytes: int = 0
    spill_fill_bytes: int = 0
    vtcm_bytes: int = 4 << 20

    def lines(self) -> list[str]:
        return [
            f"graph {escape_name(self.name)}",
            f"execute_us {self.execute_us}",
            f"weights {self.weight_bytes}",
            f"shared_weights {self.shared_weight_bytes}",
            f"spill_fill {self.spill_fill_bytes}",
            f"vtcm {self.vtcm_bytes}",
            *(tensor.line("input") for tensor in self.inputs),
            *(tensor.line("output") for tensor in self.outputs),
            *(_op_line(op) for op in self.ops),
        ]


def _op_line(op: FakeOp) -> str:
    if isinstance(op, str):
        return f"op {op}"
    words = [escape_name(word) if isinstance(word, str) else str(word) for word in op]
    return " ".join(["op", *words])


def binary_bytes(
    graphs: Iterable[FakeGraph],
    *,
    arch: int = 68,
    soc: int = 0,
    build_id: str | None = None,
    binary_class: str | None = None,
    backend_id: int | None = None,
    core_api: str | None = None,
    backend_api: str | None = None,
    create_us: int = 0,
    file_bytes: int = 0,
) -> bytes:
    """A fake context binary.

    Args:
        graphs: at least one, each with a name of its own.
        arch, soc: what the binary says it was compiled for; 0 for anything.
        build_id: of the SDK that compiled it; None for that of the library that reads it.
        binary_class: binaries of two classes cannot be in one process, like the emulation's.
        backend_id, core_api, backend_api: what it was compiled for, versions as "2.40.0"; None for
            what the library that reads it is.
        create_us: how long making a context takes, besides touching its weights.
        file_bytes: the least size of the file; it is filled up with newlines.

    Nothing is checked here: tests want to write wrong ones, and the library checks all.
    """
    lines = [MAGIC, f"size {'0' * _SIZE_DIGITS}", f"arch {arch}", f"soc {soc}"]
    for key, value in (
        ("build", build_id),
        ("class", binary_class),
        ("backend_id", backend_id),
        ("core_api", core_api),
        ("backend_api", backend_api),
    ):
        if value is not None:
            lines.append(f"{key} {value}")
    lines.append(f"create_us {create_us}")
    for graph in graphs:
        lines.extend(graph.lines())
    text = "\n".join([*lines, "end", ""])
    size = max(len(text), file_bytes, FILE_OVERHEAD_BYTES + 1)
    text = text.replace("0" * _SIZE_DIGITS, f"{size:0{_SIZE_DIGITS}d}", 1)
    return text.encode("ascii").ljust(size, b"\n")


def write_binary(
    path: str | os.PathLike[str],
    graphs: Iterable[FakeGraph],
    *,
    arch: int = 68,
    soc: int = 0,
    build_id: str | None = None,
    binary_class: str | None = None,
    backend_id: int | None = None,
    core_api: str | None = None,
    backend_api: str | None = None,
    create_us: int = 0,
    file_bytes: int = 0,
) -> Path:
    """Writes `binary_bytes(...)` to a file and returns its path."""
    target = Path(path)
    target.write_bytes(
        binary_bytes(
            graphs,
            arch=arch,
            soc=soc,
            build_id=build_id,
            binary_class=binary_class,
            backend_id=backend_id,
            core_api=core_api,
            backend_api=backend_api,
            create_us=create_us,
            file_bytes=file_bytes,
        )
    )
    return target


def switches(*words: str, **values: str | int | bool) -> str:
    """The text of QNNBROKER_FAKE, of a control file, or for `control_loaded`.

    `switches("fail=graphExecute:3:1007", mem_register=True, soc=43)`; a bool becomes on or off.
    """
    items = list(words)
    for key, value in values.items():
        text = ("on" if value else "off") if isinstance(value, bool) else str(value)
        items.append(f"{key}={text}")
    for item in items:
        if "," in item or "\n" in item:
            raise ValueError(f"a switch cannot hold a comma or a newline: {item!r}")
    return ",".join(items)


class FakeControl:
    """A control file: changes the faults of a process that was started with `control=PATH`.

    What `set` says replaces what it said before, and holds for every call that begins after it
    returned; a call that hangs or sleeps sees it within 20 ms.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.set()

    def set(self, *words: str, **values: str | int | bool) -> None:
        """See `switches`. Without arguments: no fault any more."""
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_text(switches(*words, **values) + "\n")
        fresh.replace(self.path)  # a new inode: seen even when time and size are the same


@dataclass(frozen=True)
class FakeCall:
    """A line of the record: a call, a `fault` that was injected, or an `error` of the caller."""

    sequence: int
    time_us: int
    process: int
    thread: int
    name: str
    arguments: dict[str, str]
    result: int

    def number(self, key: str) -> int:
        """An argument as a number.

        Raises:
            KeyError: the call has no such argument.
        """
        return int(self.arguments[key])


def parse_record(text: str) -> list[FakeCall]:
    """The calls of a record's text; an argument that is there more than once keeps its last value.

    Raises:
        ValueError: a line is not one of a record.
    """
    calls = []
    for line in text.splitlines():
        head, arrow, result = line.rpartition(" -> ")
        words = head.split(" ")
        if not arrow or len(words) < 5:
            raise ValueError(f"not a line of a call record: {line!r}")
        sequence, time_us, process, thread = map(int, words[:4])
        pairs = (word.split("=", 1) for word in words[5:] if "=" in word)
        arguments = {key: unquote(value) for key, value in pairs}
        calls.append(FakeCall(sequence, time_us, process, thread, words[4], arguments, int(result)))
    return calls


def read_record(path: str | os.PathLike[str]) -> list[FakeCall]:
    """The calls in the file that the switch `record=PATH` names, in the order of their ends."""
    try:
        return parse_record(Path(path).read_text())
    except FileNotFoundError:
        return []


def _loaded(directory: str | os.PathLike[str] | None) -> ctypes.CDLL:
    folder = fake_qnn_dir() if directory is None else Path(directory)
    return ctypes.CDLL(str(folder.resolve() / "libQnnHtp.so"))


def control_loaded(
    *words: str, directory: str | os.PathLike[str] | None = None, **values: str | int | bool
) -> None:
    """Changes the switches of the fake backend library that this process has loaded.

    Args as for `switches`; they add to what holds already. "clear" drops all fault rules, "restart"
    restarts the subsystem, "unhang" lets every call that hangs go on. `directory` is for a copy of
    the library that is not in `fake_qnn_dir()`.

    Raises:
        ValueError: the library does not understand it.
    """
    control = _loaded(directory).qnn_fake_control
    control.argtypes, control.restype = [ctypes.c_char_p], ctypes.c_uint64
    text = switches(*words, **values)
    if control(text.encode()) != 0:
        raise ValueError(f"the fake QNN library does not understand {text!r}")


def read_ring(directory: str | os.PathLike[str] | None = None) -> list[FakeCall]:
    """The calls, up to the last 4,000, of the fake backend library that this process has loaded."""
    record = _loaded(directory).qnn_fake_record
    record.argtypes = [ctypes.c_uint64, ctypes.c_char_p, ctypes.c_uint64]
    record.restype = ctypes.c_uint64
    buffer = ctypes.create_string_buffer(1 << 16)
    calls: list[FakeCall] = []
    start = 1
    while True:
        start = record(start, buffer, len(buffer))
        if not buffer.value:
            return calls
        calls.extend(parse_record(buffer.value.decode("ascii")))


def waiting_count(directory: str | os.PathLike[str] | None = None) -> int:
    """How many executes wait for the device, in the library that this process has loaded."""
    waiting = _loaded(directory).qnn_fake_waiting
    waiting.argtypes, waiting.restype = [], ctypes.c_uint64
    return int(waiting())
