# SPDX-License-Identifier: Apache-2.0
"""What a broker leaves out of its memory when loading is over."""

from pathlib import Path

import pytest
from tests.conftest import StartBroker
from tests.native.qnn_models import compiled
from tests.resident import resident_bytes
from tests.waiting import wait_until

from qnnbroker.client import connect
from qnnbroker.native.qnn_library import default_qnn_dir


@pytest.mark.qnn
def test_code_that_only_loading_used_leaves_memory_and_runs_go_on(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker(backend="qnn")
    library = default_qnn_dir().resolve() / "libQnnHtp.so"
    model = compiled("dense")
    path = tmp_path / "model.bin"
    path.write_bytes(model.binary)
    with connect(broker.runtime_dir) as session:
        graph = session.load(path).graph
        right = graph.run(model.inputs)
        loading_uses = library.stat().st_size // 5  # a third of it at least, once it is there
        wait_until(
            lambda: resident_bytes(broker.pid, library, writable=False) < loading_uses,
            "most of the library's code has left the broker's memory",
        )
        again = graph.run(model.inputs)
    assert {n: a.tobytes() for n, a in again.items()} == {n: a.tobytes() for n, a in right.items()}
