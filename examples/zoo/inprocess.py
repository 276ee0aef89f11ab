# SPDX-License-Identifier: Apache-2.0
"""The way without a broker: an ONNX Runtime session on the QNN library in this process.

What qnnbroker is compared with, in tests, benchmarks and the demo.
"""

import threading
from pathlib import Path
from typing import Any

from zoo.errors import ZooError
from zoo.model import Array, Feeds

_PROVIDER = "QNNExecutionProvider"
_lock = threading.Lock()


class InProcessSession:
    """A compiled model loaded by ONNX Runtime; every session holds a copy of the weights.

    The QNN library prints on standard output when the first session of a process is made.
    Use from any thread; do not use after a fork.
    """

    def __init__(self, wrapper: Path) -> None:
        import onnxruntime as ort
        import onnxruntime_qnn

        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        options.add_provider_for_devices(
            _devices(), {"backend_path": onnxruntime_qnn.get_qnn_htp_path()}
        )
        self._session: Any = ort.InferenceSession(str(wrapper), options)
        self.input_names: list[str] = [i.name for i in self._session.get_inputs()]
        self.output_names: list[str] = [o.name for o in self._session.get_outputs()]

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Every output by name, for inputs by name."""
        outputs = self._session.run(self.output_names, dict(feeds))
        return dict(zip(self.output_names, outputs, strict=True))


def _devices() -> list[Any]:
    import onnxruntime as ort
    import onnxruntime_qnn

    with _lock:
        found = [d for d in ort.get_ep_devices() if d.ep_name == _PROVIDER]
        if not found:
            ort.register_execution_provider_library(_PROVIDER, onnxruntime_qnn.get_library_path())
            found = [d for d in ort.get_ep_devices() if d.ep_name == _PROVIDER]
    if not found:
        raise ZooError("the onnxruntime-qnn package offers no device here")
    return found[:1]
