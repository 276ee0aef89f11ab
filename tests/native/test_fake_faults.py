# SPDX-License-Identifier: Apache-2.0
"""Every switch and fault of the fake library does what docs/fake-backend.md says."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.native.fake_client import Adder, RawFake, Refused, adder, floats, pointer

from qnnbroker.native.fake import FakeControl, FakeGraph, binary_bytes, switches

OK, RESTARTED, FATAL = 0, 1007, 1011
ROOT = Path(__file__).parents[2]


def loaded(tmp_path: Path, text: str = "") -> tuple[RawFake, int, Adder]:
    """A library with one context of an adder."""
    raw = RawFake(tmp_path / "fake", text).open()
    context = raw.context(binary_bytes([adder()]))
    return raw, context, Adder(raw, raw.graph(context, "add"))


def codes(execute: Adder, count: int) -> list[int]:
    return [execute() for _ in range(count)]


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ("3", [0, 0, 1002, 0, 0]),
        ("3+", [0, 0, 1002, 1002, 1002]),
        ("2-3", [0, 1002, 1002, 0, 0]),
        ("*", [1002, 1002, 1002, 1002, 1002]),
    ],
)
def test_chosen_calls_fail(tmp_path: Path, when: str, expected: list[int]) -> None:
    _, _, execute = loaded(tmp_path, f"fail=graphExecute:{when}:1002")
    assert codes(execute, 5) == expected


def test_a_failed_execute_writes_no_output(tmp_path: Path) -> None:
    _, _, execute = loaded(tmp_path, "fail=graphExecute:1:1100")
    execute.c[:] = 5
    assert execute() == 1100
    assert (execute.c == 5).all()
    assert execute() == OK
    assert np.array_equal(execute.c, execute.a + execute.b)


def test_a_rule_can_name_its_graph(tmp_path: Path) -> None:
    raw = RawFake(tmp_path / "fake", "fail=graphExecute@two%20words:1:1100").open()
    context = raw.context(binary_bytes([adder("one"), adder("two words")]))
    one, two = (Adder(raw, raw.graph(context, name)) for name in ("one", "two words"))
    assert [one(), two(), two(), one()] == [OK, 1100, OK, OK]
    raw.control("fail=contextCreateFromBinary@two%20words:1:1002")
    raw.context(binary_bytes([adder("one")]))
    with pytest.raises(Refused) as caught:
        raw.context(binary_bytes([adder("two words")]))
    assert caught.value.code == 1002


@pytest.mark.parametrize(
    ("call", "code"),
    [("backendCreate", 4003), ("deviceCreate", 14002), ("*", 1003)],
)
def test_every_call_can_fail(tmp_path: Path, call: str, code: int) -> None:
    raw = RawFake(tmp_path / "fake", f"fail={call}:1:{code}")
    with pytest.raises(Refused) as caught:
        raw.open()
    assert caught.value.code == code


def test_the_second_context_finds_no_memory(tmp_path: Path) -> None:
    raw = RawFake(tmp_path / "fake", "fail=contextCreateFromBinary:2:1002").open()
    first = raw.context(binary_bytes([adder()]))
    with pytest.raises(Refused) as caught:
        raw.context(binary_bytes([adder()]))
    assert caught.value.code == 1002
    assert raw.context(binary_bytes([adder()])) != first


def test_the_memory_limit_counts_what_lives(tmp_path: Path) -> None:
    raw = RawFake(tmp_path / "fake", switches(memory_limit=3_000_000)).open()
    data = binary_bytes([adder(weight_bytes=1_000_000, spill_fill_bytes=400_000)])
    first, _ = raw.context(data), raw.context(data)
    with pytest.raises(Refused) as caught:
        raw.context(data)
    assert caught.value.code == 1002
    assert raw.free_context(first) == OK
    raw.context(data)


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def test_weights_are_really_in_memory_until_the_context_is_freed(tmp_path: Path) -> None:
    raw = RawFake(tmp_path / "fake").open()
    before = resident_bytes()
    context = raw.context(binary_bytes([adder(weight_bytes=64 << 20)]))
    assert resident_bytes() - before > 60 << 20
    assert raw.free_context(context) == OK
    assert resident_bytes() - before < 20 << 20


def test_after_a_restart_everything_has_to_be_made_anew(tmp_path: Path) -> None:
    raw, context, execute = loaded(tmp_path, "fail=graphExecute:2:1007")
    assert codes(execute, 4) == [OK, RESTARTED, 6001, 6001]
    data = binary_bytes([adder()])
    with pytest.raises(Refused) as caught:  # on the backend from before
        raw.context(data)
    assert caught.value.code == RESTARTED
    assert raw.free_context(context) == 5002
    assert raw.core(43, pointer(raw.device)) == OK
    assert raw.core(8, pointer(raw.backend)) == OK
    raw.open()
    again = Adder(raw, raw.graph(raw.context(data), "add"))
    assert again() == OK
    assert raw.errors() == []


def test_a_void_handle_is_not_taken_by_another_object(tmp_path: Path) -> None:
    raw, context, execute = loaded(tmp_path, "fail=graphExecute:1:1007")
    old_backend = raw.backend
    assert execute() == RESTARTED
    raw.open()
    assert raw.backend != old_backend
    fresh = raw.context(binary_bytes([adder()]))
    assert fresh != context
    assert raw.graph(fresh, "add") != execute.graph
    assert execute() == 6001


def test_a_restart_that_comes_by_itself_ends_what_runs(tmp_path: Path) -> None:
    raw, _, execute = loaded(tmp_path, "hang=graphExecute:1")
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(execute()))
    thread.start()
    raw.wait_faults(1)
    raw.control("restart")
    thread.join(20)
    assert got == [RESTARTED]
    assert execute() == 6001


def test_the_first_call_after_an_idle_restart_tells_of_it(tmp_path: Path) -> None:
    raw, _, execute = loaded(tmp_path)
    raw.control("restart")
    assert codes(execute, 2) == [RESTARTED, 6001]


def test_fatal_is_for_the_rest_of_the_process(tmp_path: Path) -> None:
    raw, context, execute = loaded(tmp_path, "fail=graphExecute:1:1011")
    assert codes(execute, 2) == [FATAL, FATAL]
    assert raw.free_context(context) == OK
    assert raw.core(43, pointer(raw.device)) == OK
    assert raw.core(8, pointer(raw.backend)) == OK
    with pytest.raises(Refused) as caught:
        raw.open()
    assert caught.value.code == FATAL


def test_a_hang_lasts_until_it_is_told_to_end(tmp_path: Path) -> None:
    raw, _, execute = loaded(tmp_path, "hang=graphExecute:1")
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(execute()))
    thread.start()
    raw.wait_faults(1)
    thread.join(0.1)
    assert thread.is_alive()
    raw.control("unhang")
    thread.join(20)
    assert got == [OK]
    assert np.array_equal(execute.c, execute.a + execute.b)


@pytest.mark.parametrize(
    ("how", "number"),
    [("", signal.SIGSEGV), (":segv", signal.SIGSEGV), (":abort", signal.SIGABRT), (":kill", 9)],
)
@pytest.mark.parametrize("call", ["contextCreateFromBinary", "graphExecute"])
def test_a_crash_kills_the_process_and_is_in_the_record(
    tmp_path: Path, call: str, how: str, number: int
) -> None:
    text = f"crash={call}:1{how},record={tmp_path / 'calls'}"
    code = """
import sys
from pathlib import Path
from tests.native.test_fake_faults import loaded
loaded(Path(sys.argv[1]), sys.argv[2])[2]()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), text], cwd=ROOT, timeout=60, capture_output=True
    )
    assert done.returncode == -number, done.stderr
    assert f"fault call={call} kind=crash" in (tmp_path / "calls").read_text().splitlines()[-1]


@pytest.mark.parametrize("where", ["switch", "binary", "rule"])
def test_creating_can_be_slow(tmp_path: Path, where: str) -> None:
    text = {"switch": "create_us=30000", "rule": "delay=contextCreateFromBinary:1:30000"}
    raw = RawFake(tmp_path / "fake", text.get(where, "")).open()
    started = time.monotonic()
    raw.context(binary_bytes([adder()], create_us=30_000 if where == "binary" else 0))
    assert time.monotonic() - started >= 0.03


@pytest.mark.parametrize("where", ["switch", "binary", "rule"])
def test_executing_can_be_slow(tmp_path: Path, where: str) -> None:
    text = {"switch": "execute_us=30000", "rule": "delay=graphExecute:1:30000"}
    raw = RawFake(tmp_path / "fake", text.get(where, "")).open()
    data = binary_bytes([adder(execute_us=30_000 if where == "binary" else 0)])
    execute = Adder(raw, raw.graph(raw.context(data), "add"))
    started = time.monotonic()
    assert execute() == OK
    assert time.monotonic() - started >= 0.03


def platform_of(raw: RawFake) -> tuple[int, int, int]:
    """SoC, arch and VTCM of the first device."""
    info = raw.new(42, pointer(raw.device))
    device = ctypes.c_uint64.from_address(info + 16).value
    extension = ctypes.c_uint64.from_address(device + 32).value
    soc = ctypes.c_uint32.from_address(extension + 16).value
    arch = ctypes.c_uint32.from_address(extension + 24).value
    return soc, arch, ctypes.c_uint64.from_address(extension + 8).value


def test_the_device_says_what_the_switches_say(tmp_path: Path) -> None:
    assert platform_of(RawFake(tmp_path / "a").open()) == (30, 68, 4)
    text = "soc=43,device_arch=73,vtcm_mb=8"
    assert platform_of(RawFake(tmp_path / "b", text).open()) == (43, 73, 8)


def test_hardware_refuses_binaries_of_another_arch(tmp_path: Path) -> None:
    raw = RawFake(tmp_path / "fake", "device_arch=73").open()
    raw.context(binary_bytes([adder()], arch=68))
    raw.control(hardware=True)
    for arch in (73, 0):
        raw.context(binary_bytes([adder()], arch=arch))
    with pytest.raises(Refused) as caught:
        raw.context(binary_bytes([adder()], arch=68))
    assert caught.value.code == 5008


def test_shared_weights_crash_when_asked_to(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from tests.native.fake_client import RawFake, adder
from qnnbroker.native.fake import binary_bytes
raw = RawFake(Path(sys.argv[1]), "shared_weights_crash=" + sys.argv[2]).open()
raw.context(binary_bytes([adder(shared_weight_bytes=4096)]))
"""
    for switch, status in (("off", 0), ("on", -signal.SIGSEGV)):
        command = [sys.executable, "-c", code, str(tmp_path / "fake"), switch]
        assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == status


def test_two_classes_of_binaries_spoil_each_other(tmp_path: Path) -> None:
    raw = RawFake(tmp_path / "fake").open()
    first = raw.context(binary_bytes([adder()], binary_class="soc"))
    old = Adder(raw, raw.graph(first, "add"))
    raw.context(binary_bytes([adder()], binary_class="soc"))
    raw.context(binary_bytes([adder()]))
    assert old() == OK
    other = raw.context(binary_bytes([adder()], binary_class="arch"))
    assert old() == 1100
    assert Adder(raw, raw.graph(other, "add"))() == OK
    assert raw.free_context(other) == OK
    assert old() == 1100


def test_the_versions_and_the_build_are_what_is_asked_for(tmp_path: Path) -> None:
    raw = RawFake(tmp_path / "fake", "core_api=2.19.3,build=v1.2.3")
    version = (ctypes.c_uint32 * 6)()
    build = ctypes.c_char_p()
    assert raw.core(3, ctypes.pointer(version)) == OK
    assert raw.core(4, ctypes.pointer(build)) == OK
    assert list(version) == [2, 19, 3, 5, 51, 0]
    assert build.value == b"v1.2.3"


def test_a_library_can_lack_a_provider_or_a_slot(tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        RawFake(tmp_path / "a", "no_provider=on")
    assert caught.value.code == OK
    raw = RawFake(tmp_path / "b", "null_slot=21")
    assert ctypes.c_uint64.from_address(raw._core + 40 + 8 * 21).value == 0
    assert ctypes.c_uint64.from_address(raw._core + 40 + 8 * 20).value != 0


def test_the_capabilities_are_true(tmp_path: Path) -> None:
    raw = RawFake(tmp_path / "fake")
    keys = [202, 206, 306, 304, 1101, 1102, 502, 1502, 9999]

    def answers() -> list[int]:
        return [raw.core(0, ctypes.c_uint32(key)) for key in keys]

    assert answers() == [0, 0, 0, 1000, 1000, 1000, 1000, 0, 2000]
    raw.control(mem_register=True)
    assert answers() == [0, 0, 0, 1000, 0, 0, 0, 0, 2000]


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "colour=blue",
        "soc=x",
        "soc=0",
        "mem_register=maybe",
        "concurrency=0",
        "fail=graphExecute",
        "fail=graphExecute:1",
        "fail=graphExecute:0:1002",
        "fail=graphExecute:5-3:1002",
        "fail=graphExecute:1:0",
        "hang=graphExecute:1:2",
        "crash=graphExecute:1:loudly",
        "core_api=2.40",
        "soc=43,fail=",
    ],
)
def test_a_switch_that_is_not_understood_is_no_silent_default(tmp_path: Path, text: str) -> None:
    with pytest.raises(Refused) as caught:
        RawFake(tmp_path / "bad", text)
    assert caught.value.code == 1004
    good = RawFake(tmp_path / "good").open()
    with pytest.raises(ValueError, match="does not understand"):
        good.control(*text.split(","))
    assert platform_of(good) == (30, 68, 4)


def test_a_control_file_works_from_outside(tmp_path: Path) -> None:
    control = FakeControl(tmp_path / "control")
    raw, _, execute = loaded(tmp_path, switches(f"control={control.path}", soc=43))
    assert execute() == OK
    control.set("fail=graphExecute:2:1002", soc=60)
    assert codes(execute, 3) == [OK, 1002, OK]
    control.set("fail=graphExecute:1:1100")
    assert codes(execute, 2) == [1100, OK]
    assert platform_of(raw.open())[0] == 43  # the file says nothing of it any more
    control.set("fail=graphExecute:1:1002", "gibberish")
    assert execute() == OK
    assert raw.errors() == ["control_file_refused"]
    control.set("restart")
    assert codes(execute, 2) == [RESTARTED, 6001]
    control.set()
    assert Adder(raw, raw.graph(raw.open().context(binary_bytes([adder()])), "add"))() == OK


def test_a_control_file_ends_a_hang(tmp_path: Path) -> None:
    control = FakeControl(tmp_path / "control")
    raw, _, execute = loaded(tmp_path, f"control={control.path}")
    control.set("hang=graphExecute:1")
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(execute()))
    thread.start()
    raw.wait_faults(1)
    control.set("unhang")
    thread.join(20)
    assert got == [OK]


def test_clear_drops_every_rule(tmp_path: Path) -> None:
    raw, _, execute = loaded(tmp_path, "fail=graphExecute:*:1002,execute_us=1")
    assert execute() == 1002
    raw.control("clear")
    assert execute() == OK


def test_a_graph_can_sleep_and_the_subsystem_restart_meanwhile(tmp_path: Path) -> None:
    raw = RawFake(tmp_path / "fake").open()
    graph = FakeGraph(
        "add", (floats("a", 4), floats("b", 4)), (floats("c", 4),), (("sleep", 60_000_000),)
    )
    execute = Adder(raw, raw.graph(raw.context(binary_bytes([graph])), "add"))
    raw.control("delay=graphExecute:1:1000")  # its line in the record says that it has begun
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(execute()))
    thread.start()
    raw.wait_faults(1)
    raw.control("restart")
    thread.join(20)
    assert got == [RESTARTED]
