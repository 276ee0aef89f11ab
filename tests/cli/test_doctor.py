# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker doctor`: what it finds, says and ends with, on the fake and on the real library."""

import json
import os
import platform
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.broker_process import BrokerProcess
from tests.native.qnn_models import INSTALLED

from qnnbroker.cli import doctoring
from qnnbroker.cli.doctoring import ERROR, OK, WARNING, Finding, Options, ask_child, job_of
from qnnbroker.native import qnn_library
from qnnbroker.native.fake import SWITCHES_ENV, fake_qnn_dir
from qnnbroker.protos.paths import ATTACH_SOCKET


def doctor(directory: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "qnnbroker.cli.main", "doctor", *arguments]
    done = subprocess.run(
        [*command, "--runtime-dir", str(directory)],
        capture_output=True,
        text=True,
        timeout=80,
        env={**os.environ, **environment},
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def findings(directory: Path, *arguments: str, **environment: str) -> tuple[int, dict[str, Any]]:
    code, output = doctor(directory, "--json", *arguments, **environment)
    document = json.loads(output)
    assert document["ok"] == (code == 0)
    return code, {f["name"]: f for f in document["findings"]}


def test_all_is_well_with_the_fake(runtime_dir: Path) -> None:
    rpcmem = str(fake_qnn_dir() / "rpcmem" / "libcdsprpc.so")
    code, found = findings(
        runtime_dir,
        *("--backend", "fake", "--rpcmem-library", rpcmem),
        **{SWITCHES_ENV: "mem_register=on"},
    )
    assert code == 0
    assert {f["status"] for f in found.values()} == {OK}
    libraries = found["QNN libraries"]["found"]
    assert libraries.startswith(f"{fake_qnn_dir()}: QNNBROKER_FAKE, core API 2.")
    assert "system API" in libraries
    assert "QNNBROKER_FAKE" in found["backend and device"]["found"]
    assert found["tiny graph executed"]["found"] == "y = x + x, off by 0.0e+00 at most"
    assert found["memory registration"]["found"].startswith("yes: memRegister -> custom: 0")
    assert found["rpcmem"]["found"] == f"{rpcmem}, allocates not a DMA buffer"
    assert found["broker"]["found"] == "none is running here"


def test_people_get_a_line_each(runtime_dir: Path) -> None:
    code, output = doctor(runtime_dir, "--backend", "fake")
    assert code == 0
    lines = output.splitlines()
    assert lines[0].startswith("ok       QNN libraries: ")
    assert all(line.startswith(("ok ", "warning ", "  ")) for line in lines[:-1])
    assert lines[-1].startswith("serve can run here: 0 errors, ")
    assert "docs/device.md" in lines[-1]
    assert any("memory registration: this is the fake library, without it" in li for li in lines)


@pytest.mark.parametrize(
    ("switches", "name", "words"),
    [
        ("fail=deviceCreate:1:14002", "backend and device", "14002"),
        ("crash=deviceCreate:1:segv", "backend and device", "died of SIGSEGV"),
        ("crash=graphExecute:1:abort", "tiny graph executed", "died of SIGABRT"),
        ("fail=graphExecute:1:1100", "tiny graph executed", "1100"),
    ],
)
def test_what_fails_or_crashes_is_a_finding_with_advice(
    runtime_dir: Path, switches: str, name: str, words: str
) -> None:
    code, found = findings(runtime_dir, "--backend", "fake", **{SWITCHES_ENV: switches})
    assert code == 1
    assert found[name]["status"] == ERROR
    assert words in found[name]["found"]
    assert found[name]["advice"]
    assert "memory" in found  # it went on


def test_missing_libraries(runtime_dir: Path, tmp_path: Path) -> None:
    code, found = findings(runtime_dir, "--qnn-lib-dir", str(tmp_path))
    assert code == 1
    assert found["QNN libraries"]["status"] == ERROR
    assert "libQnnHtp.so" in found["QNN libraries"]["found"]
    assert found["QNN libraries"]["advice"]


def test_a_child_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctoring, "CHILD_SECONDS", 5.0)
    monkeypatch.setenv(SWITCHES_ENV, "hang=backendCreate:1")
    report = ask_child(job_of(Options(Path("/"), fake=True), "backend"))
    assert report.problem == "no answer within 5 s"
    assert "libraries" in report.steps


def status_of(checks: "Any") -> dict[str, Finding]:
    return {f.name: f for f in checks}


def test_the_runtime_directory_and_who_listens_there(runtime_dir: Path) -> None:
    def look() -> dict[str, Finding]:
        return status_of(doctoring.check_runtime_dir(Options(runtime_dir)))

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(runtime_dir / ATTACH_SOCKET))
        listener.listen()
        found = look()["broker"]
        assert (found.status, "takes clients" in found.found) == (WARNING, True)
        assert found.advice
    assert look()["broker"].status == WARNING
    os.chmod(runtime_dir, 0o755)
    assert look()["runtime directory"].status == ERROR
    os.chmod(runtime_dir, 0o700)
    away = status_of(doctoring.check_runtime_dir(Options(runtime_dir / "away")))
    assert away["runtime directory"].status == OK


def test_a_broker_that_runs_is_asked(
    runtime_dir: Path, broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = [f for f in doctoring.check_runtime_dir(Options(runtime_dir)) if f.name == "broker"]
    assert found.status == OK
    assert f"pid {broker.pid}" in found.found
    monkeypatch.setattr(doctoring, "ANSWER_SECONDS", 0.2)
    broker.process.send_signal(signal.SIGSTOP)
    try:
        (found,) = [
            f for f in doctoring.check_runtime_dir(Options(runtime_dir)) if f.name == "broker"
        ]
    finally:
        broker.process.send_signal(signal.SIGCONT)
    assert found.status in (WARNING, ERROR)
    assert "takes clients" in found.found


def test_one_of_the_two_nodes_is_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runtime_dir: Path
) -> None:
    plain, secure, heap = (tmp_path / n for n in ("plain", "secure", "heap"))
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(doctoring, "FASTRPC_NODES", (str(plain), str(secure)))
    monkeypatch.setattr(doctoring, "HEAP_NODE", str(heap))
    refused: set[str] = set()
    monkeypatch.setattr(os, "access", lambda path, mode: path not in refused)

    def look() -> list[str]:
        return [f.status for f in doctoring.check_nodes(Options(runtime_dir))]

    assert look() == [WARNING, WARNING]
    heap.touch()
    secure.touch()
    assert look() == [OK, OK]
    plain.touch()
    refused.add(str(plain))
    assert look() == [OK, OK]
    refused.add(str(secure))
    assert look() == [ERROR, OK]


def test_the_skel_is_looked_for_beside_the_installed_libraries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runtime_dir: Path
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.delenv("DSP_LIBRARY_PATH", raising=False)
    monkeypatch.delenv("ADSP_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(qnn_library, "default_qnn_dir", lambda: tmp_path)
    skel = tmp_path / "hexagon-v73" / "unsigned" / "libQnnHtpV73Skel.so"
    skel.parent.mkdir(parents=True)
    skel.touch()
    (found,) = doctoring.check_search_path(Options(runtime_dir))
    assert (found.status, str(skel) in found.found) == (OK, True)


def test_a_device_is_held_to_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runtime_dir: Path
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.delenv("DSP_LIBRARY_PATH", raising=False)
    monkeypatch.setenv("ADSP_LIBRARY_PATH", str(tmp_path))
    options = Options(runtime_dir, qnn_lib_dir=str(tmp_path))
    assert {f.status for f in doctoring.check_nodes(options)} <= {OK, WARNING, ERROR}
    (found,) = doctoring.check_search_path(options)
    assert (found.status, bool(found.advice)) == (WARNING, True)
    (tmp_path / "libQnnHtpV73Skel.so").touch()
    (found,) = doctoring.check_search_path(options)
    assert found.status == OK
    (rpcmem,) = doctoring.check_rpcmem(Options(runtime_dir, rpcmem_library="/nowhere.so"))
    assert (rpcmem.status, "libcdsprpc" in rpcmem.advice) == (WARNING, True)


@pytest.mark.qnn
@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="onnxruntime-qnn is not installed")
def test_the_real_library_compiles_and_runs_a_tiny_graph(runtime_dir: Path) -> None:
    code, found = findings(runtime_dir)
    assert code == 0
    assert found["tiny graph compiled"]["status"] == found["tiny graph executed"]["status"] == OK
    registration = found["memory registration"]["found"]
    assert registration.startswith("this is the emulation, without it; expected on a device")
    assert "memRegister -> 1000 (not supported)" in registration
