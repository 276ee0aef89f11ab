# SPDX-License-Identifier: Apache-2.0
"""The process in which `qnnbroker doctor` touches libraries: `... doctor_child JOB_JSON`.

A library that does not fit can crash or hang, and prints on standard output. So it is loaded here;
each thing found is one JSON line on what standard output was at the start: {"step", "content"}, or
{"step", "error"} as the last one.
"""

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Processor time after which the kernel ends this process, whatever its parent does.
CPU_SECONDS = 120

Job = dict[str, Any]
Tell = Callable[[str, object], None]


def directory_of(job: Job) -> Path:
    """Where the QNN libraries are."""
    from qnnbroker.native.qnn_library import default_qnn_dir

    if job["fake"]:
        from qnnbroker.native.fake import fake_qnn_dir

        return fake_qnn_dir()
    return Path(job["qnn_lib_dir"]) if job["qnn_lib_dir"] else default_qnn_dir()


def backend_steps(job: Job, tell: Tell) -> None:
    """Library, backend, device, capabilities; with a binary also a run of its graph."""
    from qnnbroker.broker.backends.qnn import QnnBackendAdapter
    from qnnbroker.broker.backends.qnn_specs import dotted
    from qnnbroker.native.qnn_library import QnnLibrary
    from qnnbroker.native.region import Region

    directory = directory_of(job)
    library = QnnLibrary(directory)
    tell(
        "libraries",
        {
            "directory": str(directory),
            "provider": library.provider_name,
            "core_api_version": dotted(library.core_api_version),
            "backend_api_version": dotted(library.backend_api_version),
            "system_api_version": dotted(library.system_api_version),
        },
    )
    backend = QnnBackendAdapter(directory, name="fake" if job["fake"] else "qnn", log_level=1)
    info = backend.info
    tell(
        "device",
        {
            "provider": info.provider,
            "build_id": info.build_id,
            "core_api_version": info.core_api_version,
            "soc_model": info.soc_model,
            "dsp_arch": info.dsp_arch,
            "vtcm_mb": info.vtcm_mb,
            "emulated": info.emulated,
        },
    )
    if job["binary"]:
        file = os.open(job["binary"], os.O_RDONLY)
        with Region.map_file(file) as region:
            spec = backend.read_spec(region)
            context = backend.create_context(region, spec)
        tell("run", run_tiny(context))
        context.close()
    tell(
        "capabilities",
        [[c.name, c.supported, c.evidence] for c in backend.info.capabilities],
    )
    backend.close()


def run_tiny(context: Any) -> float:
    """How far the graph y = x + x is off, at most and relatively; it may compute in 16 bits."""
    import numpy as np

    from qnnbroker.native.region import Region

    (graph,) = context.graphs.values()
    (x,), (y,) = graph.spec.inputs, graph.spec.outputs
    values = np.arange(1, x.size_bytes // 4 + 1, dtype=np.float32)
    with Region.create(8192) as region:
        with region.view(0, x.size_bytes) as view:
            view[:] = values.tobytes()
        inputs, outputs = [(region, 0, x.size_bytes)], [(region, 4096, y.size_bytes)]
        with graph.native.bind(inputs, outputs) as runnable:
            runnable.execute()
        with region.view(4096, y.size_bytes) as view:
            result = np.frombuffer(bytes(view), np.float32)
    return float(np.max(np.abs(result / (values + values) - 1)))


def rpcmem_steps(job: Job, tell: Tell) -> None:
    """An allocation by libcdsprpc.so, and whether it is a DMA buffer."""
    from qnnbroker.native.dmabuf import is_dma_buf
    from qnnbroker.native.rpcmem import DEFAULT_LIBRARY, RpcMem

    rpcmem = RpcMem(job["rpcmem_library"] or DEFAULT_LIBRARY)
    tell("library", {"path": rpcmem.path, "alloc2": rpcmem.has_alloc2})
    with rpcmem.create(4096) as region:
        tell("memory", {"dma_buf": is_dma_buf(region.fileno())})


def main() -> None:
    """Do the one job of this process."""
    answer = os.dup(1)
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    job = json.loads(sys.argv[1])

    def tell(step: str, content: object, key: str = "content") -> None:
        os.write(answer, json.dumps({"step": step, key: content}).encode() + b"\n")

    try:
        {"backend": backend_steps, "rpcmem": rpcmem_steps}[job["kind"]](job, tell)
    except Exception as error:  # whatever it is, the parent tells it
        tell("end", str(error) or type(error).__name__, "error")
    # Not the interpreter's exit: the library's own threads and destructors race with it.
    os._exit(0)


if __name__ == "__main__":
    main()
