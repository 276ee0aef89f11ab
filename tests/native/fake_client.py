# SPDX-License-Identifier: Apache-2.0
"""Drives a private copy of the fake QNN library through its tables, by ctypes, for its tests.

The binding refuses what is wrong before the library sees it; here everything can be said.
"""

import ctypes
import os
import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.waiting import wait_until

from qnnbroker.native import fake

TENSOR_BYTES = 144
Array = np.ndarray[Any, Any]


class Refused(Exception):
    """The library answered with a code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


@dataclass(frozen=True)
class Tensor:
    """One argument of graphExecute: memory by address, or by registered handle."""

    tensor_id: int
    data: Array | None = None
    handle: int = 0
    size: int | None = None

    def record(self, version: int = 1, dtype: int = 0, dims: Sequence[int] = ()) -> bytes:
        record = bytearray(TENSOR_BYTES)
        struct.pack_into("<I", record, 0, version)
        struct.pack_into("<I", record, 8, self.tensor_id)
        struct.pack_into("<I", record, 8 + 24, dtype)
        if self.data is not None:
            size = self.data.nbytes if self.size is None else self.size
            struct.pack_into("<IxxxxQQI", record, 8 + 80 + 8, 0, self.data.ctypes.data, size, 0)
            struct.pack_into("<I", record, 8 + 88, 0)
            struct.pack_into("<QI", record, 8 + 96, self.data.ctypes.data, size)
        else:
            struct.pack_into("<I", record, 8 + 88, 1 if self.handle else 0)
            struct.pack_into("<Q", record, 8 + 96, self.handle)
        return bytes(record)


class RawFake:
    """A fresh fake library: to the loader a copy of the file is another one, with its own state."""

    def __init__(self, directory: Path, switches: str = "") -> None:
        directory.mkdir(exist_ok=True)
        for name in ("libQnnHtp.so", "libQnnSystem.so"):
            shutil.copy(fake.fake_qnn_dir() / name, directory / name)
        before = os.environ.get(fake.SWITCHES_ENV)
        os.environ[fake.SWITCHES_ENV] = switches
        try:
            self.library = ctypes.CDLL(str(directory / "libQnnHtp.so"))
        finally:
            if before is None:
                del os.environ[fake.SWITCHES_ENV]
            else:
                os.environ[fake.SWITCHES_ENV] = before
        self.directory = directory
        self._core = self._provider("QnnInterface_getProviders")
        self._system = self._provider("QnnSystemInterface_getProviders")
        self.backend = 0
        self.device = 0

    def _provider(self, name: str) -> int:
        entry = getattr(self.library, name)
        entry.restype = ctypes.c_uint64
        providers = ctypes.c_void_p()
        count = ctypes.c_uint32()
        code = entry(ctypes.byref(providers), ctypes.byref(count))
        if code != 0 or count.value == 0:
            raise Refused(code)
        assert providers.value is not None
        return int(ctypes.c_uint64.from_address(providers.value).value)

    def core(self, slot: int, *arguments: Any) -> int:
        """Calls a slot of the core table and returns the code."""
        return self._call(self._core + 40 + 8 * slot, arguments)

    def system(self, slot: int, *arguments: Any) -> int:
        return self._call(self._system + 32 + 8 * slot, arguments)

    def _call(self, at: int, arguments: Sequence[Any]) -> int:
        address = ctypes.c_uint64.from_address(at).value
        kinds = [type(argument) for argument in arguments]
        return int(ctypes.CFUNCTYPE(ctypes.c_uint64, *kinds)(address)(*arguments))

    def new(self, slot: int, *arguments: Any) -> int:
        """Calls a slot whose last argument is where a handle goes, and returns the handle."""
        out = ctypes.c_void_p()
        check(self.core(slot, *arguments, ctypes.pointer(out)))
        return out.value or 0

    def open(self) -> "RawFake":
        self.backend = self.new(1, pointer(0), pointer(0))
        self.device = self.new(40, pointer(0), pointer(0))
        return self

    def context(self, data: bytes, config: Any = None, backend: int | None = None) -> int:
        out = ctypes.c_void_p()
        owner = self.backend if backend is None else backend
        check(
            self.core(
                13,
                pointer(owner),
                pointer(self.device),
                pointer(0) if config is None else config,
                ctypes.c_char_p(data),
                ctypes.c_uint64(len(data)),
                ctypes.pointer(out),
                pointer(0),
            )
        )
        return out.value or 0

    def free_context(self, context: int) -> int:
        return self.core(14, pointer(context), pointer(0))

    def graph(self, context: int, name: str) -> int:
        return self.new(20, pointer(context), ctypes.c_char_p(name.encode()))

    def set_priority(self, graph: int, priority: int) -> int:
        entry = ctypes.create_string_buffer(struct.pack("<IxxxxQ", 3, priority), 16)
        return self.core(17, pointer(graph), config_list(entry))

    def execute(self, graph: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
        return self.execute_records(
            graph, [t.record() for t in inputs], [t.record() for t in outputs]
        )

    def execute_records(self, graph: int, inputs: Sequence[bytes], outputs: Sequence[bytes]) -> int:
        return self.core(
            21,
            pointer(graph),
            ctypes.c_char_p(b"".join(inputs) or None),
            ctypes.c_uint32(len(inputs)),
            ctypes.c_char_p(b"".join(outputs) or None),
            ctypes.c_uint32(len(outputs)),
            pointer(0),
            pointer(0),
        )

    def control(self, *words: str, **values: str | int | bool) -> None:
        fake.control_loaded(*words, directory=self.directory, **values)

    def calls(self, name: str | None = None) -> list[fake.FakeCall]:
        ring = fake.read_ring(self.directory)
        return [call for call in ring if name is None or call.name == name]

    def errors(self) -> list[str]:
        return [call.arguments["what"] for call in self.calls("error")]

    def wait_faults(self, count: int) -> None:
        wait_until(lambda: len(self.calls("fault")) >= count, f"{count} faults")

    def wait_queued(self, count: int) -> None:
        wait_until(lambda: fake.waiting_count(self.directory) == count, f"{count} wait")


def pointer(number: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(number)


def config_list(*entries: Any) -> Any:
    """A list of config entries that NULL ends."""
    listed = (ctypes.c_void_p * (len(entries) + 1))(*map(ctypes.addressof, entries), None)
    listed.entries = entries  # type: ignore[attr-defined]  # they live as long as the list
    return listed


def check(code: int) -> None:
    if code != 0:
        raise Refused(code)


def floats(name: str, *shape: int, tensor_id: int | None = None) -> fake.FakeTensor:
    return fake.FakeTensor(name, "float32", shape, tensor_id=tensor_id)


def adder(name: str = "add", **more: Any) -> fake.FakeGraph:
    """Ids 1 and 2 in, 3 out, four float32 each."""
    tensors = floats("a", 4, tensor_id=1), floats("b", 4, tensor_id=2)
    return fake.FakeGraph(name, tensors, (floats("c", 4, tensor_id=3),), ("add",), **more)


class Adder:
    """Memory for one execute of an adder graph."""

    def __init__(self, library: RawFake, graph: int) -> None:
        self.library, self.graph = library, graph
        self.a = np.arange(4, dtype=np.float32)
        self.b = np.full(4, 10, dtype=np.float32)
        self.c = np.zeros(4, dtype=np.float32)

    def __call__(self) -> int:
        inputs = [Tensor(1, self.a), Tensor(2, self.b)]
        return self.library.execute(self.graph, inputs, [Tensor(3, self.c)])
