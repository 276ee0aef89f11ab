# SPDX-License-Identifier: Apache-2.0
"""CPU access to DMA buffers is bracketed: which calls the kernel gets, and when."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import StartBroker
from tests.fake_models import MakeModel, adder

from qnnbroker.native.fake import fake_qnn_dir

COMPILER = shutil.which("cc") or shutil.which("gcc")
#: The kernel's flags: what is accessed, and that the access ends.
READ, WRITE, END = 1, 2, 4
BOTH = READ | WRITE
#: What each step of the client does to caches.
WANTED = {
    "load": [],
    "bind": [BOTH],  # a new buffer is the CPU's first
    "run": [BOTH | END, BOTH],
    "submit": [BOTH | END, BOTH],
    "alloc": [BOTH],
    "bind over two": [],
    "run over two": [BOTH | END] * 2 + [BOTH] * 2,
    "access": [BOTH, BOTH | END],
    "read": [READ, READ | END],
    "write": [WRITE, WRITE | END],
    "run without": [],
    "failed run": [BOTH | END, BOTH],
}


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the preloaded library of every process started from now on writes."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    if os.environ.get("LD_PRELOAD"):
        pytest.skip("something else is preloaded")
    library, record = tmp_path / "dmabuf_stub.so", tmp_path / "dmabuf"
    source = Path(__file__).with_name("dmabuf_stub.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", source, "-o", library], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("QNNBROKER_DMABUF_RECORD", str(record))
    record.touch()
    return record


def test_caches_are_written_back_before_a_run_and_dropped_after_it(
    stub: Path, start_broker: StartBroker, make_model: MakeModel, runtime_dir: Path
) -> None:
    broker = start_broker(
        rpcmem_library=str(fake_qnn_dir() / "rpcmem" / "libcdsprpc.so"),
        switch_words=["mem_register=on"],
    )
    program = Path(__file__).with_name("dmabuf_client.py")
    model = make_model("slow", adder(execute_us=2000))
    steps: list[tuple[str, int]] = []
    with subprocess.Popen(
        [sys.executable, program, str(runtime_dir), str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as client:
        assert client.stdout is not None
        for line in client.stdout:
            name, _, at = line.rpartition(" ")
            steps.append((name, int(at)))
            if name == "run without":
                broker.set_faults("fail=graphExecute:1:1100")
                assert client.stdin is not None
                client.stdin.write("\n")
                client.stdin.flush()
    assert client.returncode == 0
    lines = [tuple(map(int, line.split())) for line in stub.read_text().splitlines()]
    mine = [(at, flags) for pid, at, flags in lines if pid == client.pid]
    found, before = {}, 0
    for name, until in steps:
        found[name] = [flags for at, flags in mine if before < at <= until]
        before = until
    assert found == WANTED
    # The broker wipes what it gives out, and that is CPU access as well.
    theirs = [flags for pid, _, flags in lines if pid == broker.pid]
    assert theirs == [BOTH, BOTH | END] * (len(theirs) // 2)
    assert len(theirs) >= 4
    # On the device's side of the bracket, and nowhere else, the graph executes.
    runs = [c for c in broker.calls("graphExecute") if c.result == 0]
    ends = dict(steps)
    for step, run in zip(("run", "submit"), runs, strict=False):
        (handed_over, taken_back) = [at for at, _ in mine if at <= ends[step]][-2:]
        assert handed_over <= run.time_us - run.number("us")
        assert run.time_us <= taken_back
