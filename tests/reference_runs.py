# SPDX-License-Identifier: Apache-2.0
"""The same inference without any broker, in a process of its own.

    python reference_runs.py ort|native WRAPPER FEEDS.npz OUTPUTS.npz

"ort" runs the wrapper with ONNX Runtime, "native" runs the graph of its context binary with
`qnnbroker.native` alone. Arrays are stored under "<case>|<tensor name>".
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Tensors = Mapping[str, Array]


def reference(
    how: str, wrapper: Path, feeds: Sequence[Tensors], folder: Path
) -> list[dict[str, bytes]]:
    """The outputs of each case, as bytes by tensor name."""
    given, taken = folder / "feeds.npz", folder / f"{how}.npz"
    arrays: dict[str, Any] = {f"{n}|{k}": v for n, c in enumerate(feeds) for k, v in c.items()}
    np.savez(given, **arrays)
    command = [sys.executable, __file__, how, str(wrapper), str(given), str(taken)]
    root = Path(__file__).parents[1]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": f"{root / 'examples'}:{root}"},
    )
    assert done.returncode == 0, done.stderr
    outputs: list[dict[str, bytes]] = [{} for _ in feeds]
    with np.load(taken) as loaded:
        for key in loaded.files:
            number, _, name = key.partition("|")
            outputs[int(number)][name] = loaded[key].tobytes()
    return outputs


def ort(wrapper: Path) -> Callable[[Tensors], Tensors]:
    from zoo.inprocess import InProcessSession

    return InProcessSession(wrapper).run


def native(wrapper: Path) -> Callable[[Tensors], Tensors]:
    from qnnbroker.broker.backends.qnn_specs import graph_spec
    from qnnbroker.broker.epcontext import binary_path, names_for, read_wrapper
    from qnnbroker.native.qnn_backend import QnnBackend, QnnDevice
    from qnnbroker.native.qnn_context import QnnContext
    from qnnbroker.native.qnn_library import QnnLibrary, default_qnn_dir

    node = read_wrapper(memoryview(wrapper.read_bytes())).main_nodes[0]
    device = QnnDevice(QnnBackend(QnnLibrary(default_qnn_dir())))
    context = QnnContext(device, binary_path(wrapper, node).read_bytes())
    graph = context.graph(node.partition_name)
    spec, names = graph_spec(graph.info), names_for(node)

    def run(feeds: Tensors) -> Tensors:
        inputs = [np.ascontiguousarray(feeds[names[s.name]]) for s in spec.inputs]
        outputs = [np.zeros(s.shape, s.dtype) for s in spec.outputs]
        spans: list[list[tuple[Any, int, int]]] = [
            [(a, 0, a.nbytes) for a in arrays] for arrays in (inputs, outputs)
        ]
        with graph.bind(spans[0], spans[1]) as runnable:
            runnable.execute()
        return {names[s.name]: a for s, a in zip(spec.outputs, outputs, strict=True)}

    return run


def main() -> None:
    how, wrapper, given, taken = sys.argv[1], *map(Path, sys.argv[2:])
    cases: dict[str, dict[str, Array]] = {}
    with np.load(given) as arrays:
        for key in arrays.files:
            number, _, name = key.partition("|")
            cases.setdefault(number, {})[name] = arrays[key]
    run = {"ort": ort, "native": native}[how](wrapper)
    outputs: dict[str, Any] = {
        f"{n}|{k}": v for n, feeds in cases.items() for k, v in run(feeds).items()
    }
    np.savez(taken, **outputs)
    os._exit(0)  # the library may crash in its exit handlers


if __name__ == "__main__":
    main()
