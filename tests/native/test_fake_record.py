# SPDX-License-Identifier: Apache-2.0
"""The record of calls, and what the Python side of the fake makes of it."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.native.fake_client import Adder, RawFake, Refused, adder, pointer

from qnnbroker.native.fake import (
    FakeControl,
    binary_bytes,
    escape_name,
    fake_qnn_dir,
    parse_record,
    read_record,
    switches,
)

CHILD = """
import sys
import numpy as np
from qnnbroker.native.fake import binary_bytes
from qnnbroker.native.qnn_backend import QnnBackend, QnnDevice
from qnnbroker.native.qnn_context import QnnContext
from qnnbroker.native.qnn_library import QnnLibrary
from tests.native.fake_client import adder
with QnnBackend(QnnLibrary(sys.argv[1])) as backend, QnnDevice(backend) as device:
    with QnnContext(device, binary_bytes([adder("a name")]), priority=150) as context:
        graph = context.graph("a name")
        arrays = [np.zeros(4, np.float32) for _ in range(3)]
        spans = [(array, 0, 16) for array in arrays]
        with graph.bind(spans[:2], spans[2:]) as runnable:
            runnable.execute()
            graph.set_priority(7)
            runnable.execute()
"""


def run_child(**env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(fake_qnn_dir())],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_file_has_every_call_of_the_binding(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    done = run_child(QNNBROKER_FAKE=switches(f"record={path}"))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    calls = read_record(path)
    names = [call.name for call in calls if not call.name.startswith("propertyHas")]
    expected = [
        *("logCreate", "backendCreate", "deviceCreate"),
        *("systemContextCreate", "systemContextGetBinaryInfo", "systemContextFree"),
        *("contextCreateFromBinary", "graphRetrieve", "graphExecute", "graphSetConfig"),
        *("graphExecute", "contextFree", "deviceFree", "backendFree", "logFree"),
    ]
    assert [name for name in names if name in expected] == expected
    assert all(call.result == 0 for call in calls if call.name in expected)
    executes = [call for call in calls if call.name == "graphExecute"]
    assert [call.number("priority") for call in executes] == [150, 7]
    assert {call.arguments["name"] for call in executes} == {"a name"}
    assert executes[0].arguments["t1"].startswith("raw:")
    assert executes[0].arguments["t3"].endswith(":16")
    assert {call.process for call in calls} == {calls[0].process} != {os.getpid()}
    assert "error" not in names


def test_the_ring_has_calls_in_order_with_arguments_and_results(tmp_path: Path) -> None:
    raw = RawFake(tmp_path / "fake").open()
    context = raw.context(binary_bytes([adder()]))
    Adder(raw, raw.graph(context, "add"))()
    with pytest.raises(Refused):
        raw.context(b"junk")
    raw.free_context(context)
    names = [(call.name, call.result) for call in raw.calls()]
    assert names == [
        ("backendCreate", 0),
        ("deviceCreate", 0),
        ("contextCreateFromBinary", 0),
        ("graphRetrieve", 0),
        ("graphExecute", 0),
        ("contextCreateFromBinary", 30010),
        ("contextFree", 0),
    ]
    assert [call.sequence for call in raw.calls()] == list(range(1, 8))
    assert raw.calls()[3].arguments["name"] == "add"
    assert raw.calls()[4].thread == threading.get_native_id()
    times = [call.time_us for call in raw.calls()]
    assert times == sorted(times)


def test_the_ring_keeps_the_last_calls_and_the_file_all(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    raw = RawFake(tmp_path / "fake", f"record={path}")
    for _ in range(5000):
        raw.core(14, pointer(0), pointer(0))
    ring = raw.calls()
    assert ring[-1].sequence == 5000
    assert len(ring) >= 4000
    assert [call.sequence for call in read_record(path)] == list(range(1, 5001))


def test_several_processes_share_one_file(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    command = [sys.executable, "-c", CHILD, str(fake_qnn_dir())]
    env = {**os.environ, "QNNBROKER_FAKE": f"record={path}"}
    children = [subprocess.Popen(command, cwd=Path(__file__).parents[2], env=env) for _ in range(3)]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    calls = read_record(path)
    assert {call.process for call in calls} == {child.pid for child in children}
    assert sum(call.name == "graphExecute" for call in calls) == 6


def test_the_record_can_be_off(tmp_path: Path) -> None:
    raw = RawFake(tmp_path / "fake", "record=off").open()
    assert raw.calls() == []
    raw.control(f"record={tmp_path / 'calls'}")
    raw.context(binary_bytes([adder()]))
    assert [call.name for call in read_record(tmp_path / "calls")] == ["contextCreateFromBinary"]


def test_a_missing_record_is_empty_and_a_wrong_one_an_error(tmp_path: Path) -> None:
    assert read_record(tmp_path / "nothing") == []
    with pytest.raises(ValueError, match="not a line"):
        parse_record("something else\n")


def test_names_survive_the_escape(tmp_path: Path) -> None:
    raw = RawFake(tmp_path / "fake").open()
    for name in ("plain", "a b", "per%cent", "é→", "new\nline", "a=b,c"):
        assert " " not in escape_name(name)
        context = raw.context(binary_bytes([adder(name)]))
        raw.graph(context, name)
        assert raw.calls("graphRetrieve")[-1].arguments["name"] == name


def test_noise_is_what_the_real_library_does_to_stdout(tmp_path: Path) -> None:
    RawFake(tmp_path / "fake")
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path / "fake" / "libQnnHtp.so")]
    for switch, expected in (("noise=on", " # fake QNN: loaded\n"), ("noise=off", "")):
        env = {**os.environ, "QNNBROKER_FAKE": switch}
        assert subprocess.run(command, env=env, capture_output=True, text=True).stdout == expected
    quiet = run_child(QNNBROKER_FAKE="noise=on")
    assert (quiet.returncode, quiet.stdout) == (0, ""), quiet.stderr


def test_switches_are_written_as_they_are_read() -> None:
    text = switches("fail=a:1:2", "restart", soc=43, mem_register=True, hardware=False)
    assert text == "fail=a:1:2,restart,soc=43,mem_register=on,hardware=off"
    for wrong in ("a,b", "a\nb"):
        with pytest.raises(ValueError, match="comma"):
            switches(wrong)


def test_a_control_file_is_replaced_and_not_written_over(tmp_path: Path) -> None:
    control = FakeControl(tmp_path / "control")
    first = control.path.stat().st_ino
    with control.path.open() as still_open:
        control.set(soc=43)
        assert still_open.read() == "\n"
    assert control.path.read_text() == "soc=43\n"
    assert control.path.stat().st_ino != first
