# SPDX-License-Identifier: Apache-2.0
"""The ways without a broker, for a Child to call: ONNX Runtime's QNN provider, and QNN directly.

A process has one ONNX Runtime session; what is made is kept here between calls.
"""

import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_PROVIDER = "QNNExecutionProvider"
_held: dict[str, Any] = {}


def imports() -> float:
    """ms for importing ONNX Runtime and its QNN package, numpy aside."""
    started = time.perf_counter()
    import onnxruntime  # noqa: F401
    import onnxruntime_qnn  # noqa: F401

    return (time.perf_counter() - started) * 1000


def create(wrapper: str) -> float:
    """ms until there is a session on that wrapper; the first one registers the provider as well."""
    import onnxruntime as ort
    import onnxruntime_qnn

    started = time.perf_counter()
    devices = [d for d in ort.get_ep_devices() if d.ep_name == _PROVIDER]
    if not devices:
        ort.register_execution_provider_library(_PROVIDER, onnxruntime_qnn.get_library_path())
        devices = [d for d in ort.get_ep_devices() if d.ep_name == _PROVIDER]
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.add_provider_for_devices(
        devices[:1], {"backend_path": onnxruntime_qnn.get_qnn_htp_path()}
    )
    _held["session"] = ort.InferenceSession(wrapper, options)
    elapsed = (time.perf_counter() - started) * 1000
    _held["feeds"] = {i.name: zeros(i.shape, i.type) for i in _held["session"].get_inputs()}
    return elapsed


def run(count: int) -> list[int]:
    """ns of each of `count` calls of `session.run`."""
    session_run = _held["session"].run
    feeds = _held["feeds"]
    times = []
    for _ in range(count):
        started = time.perf_counter_ns()
        session_run(None, feeds)
        times.append(time.perf_counter_ns() - started)
    return times


def run_call() -> Callable[[], object]:
    """One `session.run`, to be called often."""
    session, feeds = _held["session"], _held["feeds"]
    return lambda: session.run(None, feeds)


def bound_call() -> Callable[[], object]:
    """One `session.run_with_iobinding`, inputs and outputs bound beforehand."""
    session = _held["session"]
    binding = session.io_binding()
    for name, array in _held["feeds"].items():
        binding.bind_cpu_input(name, array)
    for output in session.get_outputs():
        array = _held.setdefault(f"output {output.name}", zeros(output.shape, output.type))
        binding.bind_output(
            output.name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data
        )
    return lambda: session.run_with_iobinding(binding)


def zeros(shape: list[int], kind: str) -> "np.ndarray[Any, Any]":
    """An array for a tensor as ONNX Runtime describes it: [1, 3], "tensor(float)"."""
    names = {"float": "float32", "double": "float64", "float16": "float16", "bool": "bool"}
    word = kind.removeprefix("tensor(").removesuffix(")")
    return np.zeros(shape, np.dtype(names.get(word, word)))


class DirectGraph:
    """The only graph of a context binary, on QNN libraries in this process, by our own binding.

    The real library cannot be unloaded, and its objects must go in order: close it.
    """

    def __init__(self, directory: Path, binary: Path) -> None:
        from qnnbroker.native.qnn_backend import QnnBackend, QnnDevice
        from qnnbroker.native.qnn_context import QnnContext
        from qnnbroker.native.qnn_library import QnnLibrary

        self._backend = QnnBackend(QnnLibrary(directory))
        self._device = QnnDevice(self._backend)
        with open(binary, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._context = QnnContext(self._device, data)
        (info,) = self._context.info.graphs
        graph = self._context.graph(info.name)
        self._arrays: list[list[Any]] = [
            [np.zeros(t.size_bytes, np.uint8) for t in tensors]
            for tensors in (graph.inputs, graph.outputs)
        ]
        inputs, outputs = ([(a, 0, a.nbytes) for a in arrays] for arrays in self._arrays)
        self._runnable = graph.bind(inputs, outputs)
        #: One execute, to be called often.
        self.execute = self._runnable.execute

    def close(self) -> None:
        """Gives everything back."""
        for thing in (self._runnable, self._context, self._device, self._backend):
            thing.close()


def direct_rate(binary: str, seconds: float) -> dict[str, float]:
    """Executes of a fake graph a second, back to back in this process; and the ns of the median."""
    from qnnbroker.native.fake import fake_qnn_dir

    graph = DirectGraph(fake_qnn_dir(), Path(binary))
    times = []
    started = now = time.perf_counter_ns()
    end = started + int(seconds * 1e9)
    while now < end:
        before = now
        graph.execute()
        now = time.perf_counter_ns()
        times.append(now - before)
    graph.close()
    return {
        "per_second": len(times) / ((now - started) / 1e9),
        "median_ns": sorted(times)[len(times) // 2],
    }
