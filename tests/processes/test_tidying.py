# SPDX-License-Identifier: Apache-2.0
"""What a broker leaves out of its memory when loading is over."""

from pathlib import Path

import pytest
from tests.conftest import StartBroker
from tests.native.qnn_models import compiled
from tests.resident import anonymous_kib, resident_bytes
from tests.waiting import wait_until

from qnnbroker.client import connect
from qnnbroker.native.qnn_library import default_qnn_dir

#: Some threads of a load may still be there at either time, with 5.3 MiB each; heaps that keep such
#: blocks keep 170 MiB.
GROWTH_KIB = 32 * 1024


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


@pytest.mark.qnn
def test_loads_leave_nothing_behind_for_the_threads_that_they_had(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker(backend="qnn")
    resident, passing = compiled("conv_u16"), compiled("dense")
    for model in (resident, passing):
        (tmp_path / f"{model.name}.bin").write_bytes(model.binary)
    with connect(broker.runtime_dir) as session:
        graph = session.load(tmp_path / "conv_u16.bin").graph
        for _ in range(200):  # each of the library's threads takes memory when it first executes
            graph.run(resident.inputs)
        session.load(tmp_path / "dense.bin").unload()
        before = anonymous_kib(broker.pid)
        for _ in range(30):
            session.load(tmp_path / "dense.bin").unload()
        assert anonymous_kib(broker.pid) - before < GROWTH_KIB
