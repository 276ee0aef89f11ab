# SPDX-License-Identifier: Apache-2.0
"""The process that parses one context binary: `python -m qnnbroker.cli.inspect_child JOB_JSON`.

The library's parser can crash on a damaged file, or never return, and it prints on standard output.
So it runs here, and the answer, one JSON line, goes to what standard output was at the start.
It ends when its standard input ends, so it does not outlive whoever started it.
"""

import json
import os
import resource
import sys
import threading
from pathlib import Path
from typing import Any

#: Processor time after which the kernel ends this process, whatever its parent does.
CPU_SECONDS = 120

Job = dict[str, Any]


def parse(job: Job) -> dict[str, Any]:
    """The description of the binary in `job["length"]` bytes from `job["offset"]` of `job["fd"]`.

    Raises:
        ValueError: an unsound binary. QnnError: the library refuses it. OSError: no library.
    """
    from qnnbroker.native.qnn_info import parse_binary
    from qnnbroker.native.qnn_library import QnnLibrary, default_qnn_dir
    from qnnbroker.native.region import Region

    if job["fake"]:
        from qnnbroker.native.fake import fake_qnn_dir

        directory = fake_qnn_dir()
    elif job["qnn_lib_dir"]:
        directory = Path(job["qnn_lib_dir"])
    else:
        directory = default_qnn_dir()
    library = QnnLibrary(directory)
    with Region.map_file(job["fd"], job["offset"], job["length"]) as region:
        info = parse_binary(library, region.view(0, region.size_bytes))
    described = info._asdict()
    described["graphs"] = [graph_json(graph) for graph in info.graphs]
    for key in ("core_api_version", "backend_api_version", "blob_version"):
        described[key] = ".".join(map(str, described[key]))
    return described


def graph_json(graph: Any) -> dict[str, Any]:
    """A GraphInfo in types that JSON knows."""
    described: dict[str, Any] = graph._asdict()
    for kind in ("inputs", "outputs"):
        described[kind] = [tensor_json(tensor) for tensor in described[kind]]
    return described


def tensor_json(tensor: Any) -> dict[str, Any]:
    """A TensorInfo with its dtype by name; a type that numpy has not is named by QNN's number."""
    from qnnbroker.broker.backends.qnn_specs import DTYPES

    quantization = tensor.quantization
    return {
        "name": tensor.name,
        "dtype": DTYPES.get(tensor.dtype, f"QNN type {tensor.dtype:#06x}"),
        "shape": list(tensor.shape),
        "size_bytes": tensor.size_bytes,
        "quantization": None if quantization is None else quantization._asdict(),
    }


def end_with_parent() -> None:
    """Exits once standard input ends: the parent is gone, or wants no answer any more."""
    sys.stdin.buffer.read()
    os._exit(3)


def main() -> None:
    """Do the one job of this process."""
    answer = os.dup(1)
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 1)
    threading.Thread(target=end_with_parent, daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    try:
        content: dict[str, Any] = {"binary": parse(json.loads(sys.argv[1]))}
    except FileNotFoundError as error:
        content = {"missing": error.strerror or str(error)}
    except Exception as error:  # whatever it is, the parent tells it
        content = {"refused": str(error) or type(error).__name__}
    data = json.dumps(content).encode() + b"\n"
    while data:
        data = data[os.write(answer, data) :]
    # Not the interpreter's exit: the library's own threads and destructors race with it.
    os._exit(0)


if __name__ == "__main__":
    main()
