# SPDX-License-Identifier: Apache-2.0
"""The process that compiles one model: `python -m qnnbroker.cli.compile_child FD`.

It reads one job (a JSON line) from standard input, and writes events (JSON lines) to the pipe FD:
stages, then one result or one error. The QNN libraries print on standard output and keep device
settings for the whole process, hence a process per model, and a pipe of its own for the answer.
It ends when its standard input ends, so it does not outlive whoever started it.
"""

import json
import os
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

from qnnbroker.protos.errors import BackendError, BrokerError, Unsupported

_PROVIDER = "QNNExecutionProvider"
_LOG_WARNINGS = 2


class Child:
    """One job: the paths, the pipe to the parent and the log that everything else goes to."""

    def __init__(self, job: dict[str, Any], events_fd: int) -> None:
        self.source = Path(job["source"])
        self.wrapper = Path(job["wrapper"])
        self.log = Path(job["log"])
        self.fp16: bool | None = job["fp16"]
        self.soc_model: int = job["soc_model"]
        self.embed: bool = job["embed"]
        self._events_fd = events_fd

    def emit(self, kind: str, content: object) -> None:
        """Send one event to the parent."""
        data = json.dumps({kind: content}).encode() + b"\n"
        while data:
            data = data[os.write(self._events_fd, data) :]

    def run(self) -> dict[str, Any]:
        """Check, compile and look at what came out. Raises BrokerError types."""
        self.emit("stage", "checking")
        try:
            import onnx  # noqa: F401
            import onnxruntime  # noqa: F401
            import onnxruntime_qnn  # noqa: F401
        except ImportError as exc:
            raise Unsupported(
                f"compiling needs the packages onnx, onnxruntime and onnxruntime-qnn ({exc}): "
                "pip install 'qnnbroker[server]'"
            ) from exc
        from qnnbroker.cli.compile_checks import is_quantised, open_model

        model = open_model(self.source)
        quantised = is_quantised(model)
        if self.fp16 is None:
            self.fp16 = not quantised
        node_count = len(model.graph.node)
        del model
        self.emit("stage", "compiling")
        self._compile()
        self.emit("stage", "verifying")
        precision = "fp16" if self.fp16 else "quantised" if quantised else "as written"
        return {"precision": precision, "node_count": node_count, **self.report()}

    def _compile(self) -> None:
        from qnnbroker.cli.compile_refusals import (
            is_about_operators,
            operators_error,
            operators_in_log,
            other_error,
            plain_log,
            setup_error,
        )

        try:
            self.session(
                {
                    "session.disable_cpu_ep_fallback": "1",
                    "ep.context_enable": "1",
                    "ep.context_file_path": str(self.wrapper),
                    "ep.context_embed_mode": "1" if self.embed else "0",
                }
            )
        except Exception as exc:  # ONNX Runtime has one class per status, without a common base
            message, name = str(exc), self.source.name
            log = plain_log(self.log.read_text(errors="replace"))
            if (refused_setup := setup_error(log, self.soc_model)) is not None:
                raise refused_setup from exc
            if not is_about_operators(message):
                raise other_error(name, message, log, self.soc_model) from exc
            # Asking for the names compiles once more, which may crash: first say what is known.
            logged = operators_in_log(log)
            known = operators_error(name, logged, None, log)
            self.emit("refused", describe(known))
            self.emit("stage", "naming what is not supported")
            refused, total = self._operators_on_cpu()
            log = plain_log(self.log.read_text(errors="replace"))
            raise operators_error(name, refused or logged, total, log) from exc

    def _operators_on_cpu(self) -> tuple[list[Any], int | None]:
        """The operators that ONNX Runtime would place on the CPU, and how many there are in all."""
        from qnnbroker.cli.compile_refusals import Operator

        try:
            session = self.session({"session.record_ep_graph_assignment_info": "1"})
            parts = session.get_provider_graph_assignment_info()
        except Exception as exc:
            print(f"could not ask for the partitioning: {exc}", file=sys.stderr, flush=True)
            return [], None
        on_cpu = [
            Operator(node.op_type, node.name)
            for part in parts
            if part.ep_name != _PROVIDER
            for node in part.get_nodes()
        ]
        return on_cpu, sum(len(part.get_nodes()) for part in parts)

    def session(self, entries: dict[str, str]) -> Any:
        """An ONNX Runtime session of the model, with these session options. Raises its errors."""
        import onnxruntime as ort
        import onnxruntime_qnn

        options = ort.SessionOptions()
        options.log_severity_level = _LOG_WARNINGS
        for key, value in entries.items():
            options.add_session_config_entry(key, value)
        options.add_provider_for_devices(
            _qnn_devices(),
            {
                "backend_path": onnxruntime_qnn.get_qnn_htp_path(),
                # Never without: binaries of both kinds cannot live in one process.
                "soc_model": str(self.soc_model),
                "enable_htp_fp16_precision": "1" if self.fp16 else "0",
                # Quantising a graph's inputs and outputs is part of the graph, not the CPU's job.
                "offload_graph_io_quantization": "0",
            },
        )
        return ort.InferenceSession(str(self.source), options)

    def report(self) -> dict[str, Any]:
        """What the wrapper says about itself; the last check that all of it is on the HTP."""
        import onnx

        from qnnbroker.cli.compile_refusals import Operator, operators_error

        if not self.wrapper.is_file():
            raise BackendError(
                f"ONNX Runtime compiled '{self.source.name}' but wrote no wrapper",
                reason="INTERNAL",
            )
        graph = onnx.load(str(self.wrapper), load_external_data=False).graph
        left = [Operator(n.op_type, n.name) for n in graph.node if n.op_type != "EPContext"]
        if left:
            raise operators_error(self.source.name, left, None, "")
        attributes = [
            {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            for node in graph.node
        ]
        main = next(a for a in attributes if a.get("main_context", 1))
        cache = main["ep_cache_context"]
        binary = None if main["embed_mode"] else cache.decode()
        return {
            "binary": binary,
            "size_bytes": len(cache) if binary is None else self._binary_size(binary),
            "graphs": [a["partition_name"].decode() for a in attributes],
            "inputs": [_tensor(value) for value in graph.input],
            "outputs": [_tensor(value) for value in graph.output],
            "sdk_version": main.get("ep_sdk_version", b"").decode(),
            "onnxruntime": version("onnxruntime"),
            "onnxruntime_qnn": version("onnxruntime-qnn"),
        }

    def _binary_size(self, name: str) -> int:
        return (self.wrapper.parent / name).stat().st_size


def describe(error: BrokerError) -> dict[str, Any]:
    """An error as it travels to the parent."""
    return {
        "type": type(error).__name__,
        "reason": error.reason,
        "message": error.message,
        "ids": dict(error.ids),
    }


def _qnn_devices() -> list[Any]:
    import onnxruntime as ort
    import onnxruntime_qnn

    def found() -> list[Any]:
        return [d for d in ort.get_ep_devices() if d.ep_name == _PROVIDER][:1]

    if not found():
        ort.register_execution_provider_library(_PROVIDER, onnxruntime_qnn.get_library_path())
    devices = found()
    if not devices:
        raise BackendError("the onnxruntime-qnn package offers no device here", reason="INTERNAL")
    return devices


def _tensor(value: Any) -> dict[str, Any]:
    import onnx

    tensor = value.type.tensor_type
    return {
        "name": value.name,
        "dtype": onnx.TensorProto.DataType.Name(tensor.elem_type).lower(),
        "shape": [dim.dim_value for dim in tensor.shape.dim],
    }


def end_with_parent() -> None:
    """Exit once standard input ends: the parent is gone."""
    sys.stdin.buffer.read()
    os._exit(3)


def main() -> None:
    """Do the one job of this process."""
    events_fd = int(sys.argv[1])
    job = json.loads(sys.stdin.buffer.readline())
    log_fd = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    threading.Thread(target=end_with_parent, daemon=True).start()
    child = Child(job, events_fd)
    try:
        result = child.run()
    except BrokerError as error:
        child.emit("error", describe(error))
    else:
        child.emit("result", result)
    # Not the interpreter's exit: the libraries' own threads and destructors race with it.
    os._exit(0)


if __name__ == "__main__":
    main()
