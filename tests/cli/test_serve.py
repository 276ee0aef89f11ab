# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker serve` becomes the broker; `qnnbroker stop` waits until it is gone."""

import shutil
import socket
from pathlib import Path

import pytest
from tests.broker_process import BrokerProcess
from tests.cli.driver import CommandLine, Serve, finish, interrupt, wait_running
from tests.fake_models import MakeModel, adder
from tests.waiting import wait_until

from qnnbroker.cli.problems import FAILED, NO_BROKER, USAGE
from qnnbroker.native.fake import fake_qnn_dir
from qnnbroker.protos.paths import ATTACH_SOCKET


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def test_the_process_becomes_the_broker_and_keeps_nothing_of_the_command_line(
    cli: CommandLine, serve: Serve
) -> None:
    process = serve()
    assert command_line(process.pid)[1:4] == ["-P", "-m", "qnnbroker.broker"]
    info = cli("status", "--json").document()
    assert info["pid"] == process.pid
    assert info["backend"]["name"] == "fake"
    assert info["runtime_dir"] == str(cli.runtime_dir)


def test_stop_returns_when_the_process_is_gone(cli: CommandLine, serve: Serve) -> None:
    process = serve()
    document = cli("stop", "--json").document()
    assert process.wait(0.5) == 0
    assert (document["pid"], document["stopped"]) == (process.pid, True)
    assert not (cli.runtime_dir / "grpc.sock").exists()
    serve()
    assert "stopped after" in cli("stop").ok()


def test_stop_gives_up_after_its_timeout_and_the_broker_goes_on_stopping(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    slow = make_model("slow", adder(execute_us=4_000_000))
    run = cli.start("run", slow, "--input", "*=zeros")
    wait_running(broker)
    message = cli("stop", "--timeout", "0.1").failed(FAILED)
    assert f"pid {broker.pid}" in message
    assert "0.1 seconds" in message
    assert broker.wait_exit() == 0
    finish(run)


def test_ctrl_c_stops_the_broker_in_order(cli: CommandLine, serve: Serve) -> None:
    ended = interrupt(serve())
    assert (ended.code, ended.out) == (0, "")
    assert "Traceback" not in ended.err
    assert not (cli.runtime_dir / "attach.sock").exists()


def test_a_second_broker_is_refused_and_told_who_is_there(cli: CommandLine, serve: Serve) -> None:
    process = serve()
    message = cli("serve", "--backend", "fake").failed(FAILED)
    assert f"pid {process.pid}" in message
    assert "qnnbroker stop" in message
    error = cli("serve", "--backend", "fake", "--json").error(FAILED)
    assert (error["type"], error["reason"]) == ("AlreadyExists", "BROKER_RUNNING")


def test_json_tells_pid_sockets_and_configuration_before_the_broker_takes_over(
    cli: CommandLine, serve: Serve
) -> None:
    import json

    process = serve("--json", "--max-sessions", "5", "--max-buffer-bytes", "1MiB")
    cli("stop").ok()
    document = json.loads(finish(process).out)
    assert document["pid"] == process.pid
    assert document["attach_socket"] == str(cli.runtime_dir / ATTACH_SOCKET)
    assert document["config"]["max_sessions"] == 5
    assert document["config"]["max_buffer_bytes"] == 1 << 20


def test_flags_environment_and_file_reach_the_broker(cli: CommandLine, serve: Serve) -> None:
    (cli.home / "c.toml").write_text("max_sessions = 3\nmax_buffers = 4\nmax_bindings = 5\n")
    serve(
        *("--config", "c.toml", "--max-sessions", "13"),
        env={"QNNBROKER_MAX_SESSIONS": "23", "QNNBROKER_MAX_BUFFERS": "24"},
    )
    limits = cli("status", "--json").document()["limits"]
    assert (limits["max_buffers"], limits["max_bindings"]) == (24, 5)
    pid = cli("status", "--json").document()["pid"]
    assert '"max_sessions": 13' in command_line(pid)[4]


def test_a_runtime_directory_with_odd_characters_serves(
    cli: CommandLine, serve: Serve, make_model: MakeModel
) -> None:
    odd = cli.runtime_dir / "a b ü%41#?&"
    odd.mkdir(mode=0o700)
    serve("--runtime-dir", str(odd))
    model = make_model("ein Modell ü")
    document = cli(
        "run", model, "--input", "*=zeros", "--json", "--runtime-dir", str(odd)
    ).document()
    assert document["runs"] == 1
    cli("stop", "--runtime-dir", str(odd)).ok()


def test_an_inherited_listener_is_served(cli: CommandLine, serve: Serve) -> None:
    path = cli.runtime_dir / ATTACH_SOCKET
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        fd = listener.fileno()
        serve("--attach-fd", str(fd), pass_fds=(fd,))
        assert cli("sessions", "--json").document() == {"sessions": []}
        cli("stop").ok()
    assert path.is_socket()


@pytest.mark.parametrize("flag", ["--attach-fd", "--ready-fd"])
def test_a_descriptor_that_is_not_open_is_wrong_usage(cli: CommandLine, flag: str) -> None:
    message = cli("serve", "--backend", "fake", flag, "987").failed(USAGE)
    assert flag in message
    assert "987" in message


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--max-sessions", "x"], "max_sessions wants a whole number, found 'x'"),
        (["--max-sessions", "0"], "max_sessions"),
        (["--backend", "gpu"], "'gpu'"),
        (["--band-workers", "1,2"], "3 whole numbers"),
        (["--log-level", "loud"], "'loud'"),
        (["--config", "missing.toml"], "missing.toml"),
        (["--no-such-option", "1"], "--no-such-option"),
    ],
)
def test_bad_options_are_wrong_usage(cli: CommandLine, arguments: list[str], part: str) -> None:
    assert part in cli("serve", "--backend", "fake", *arguments).failed(USAGE)


def test_a_directory_without_qnn_libraries_is_refused_up_front(cli: CommandLine) -> None:
    (cli.home / "lib").mkdir()
    shutil.copy(fake_qnn_dir() / "libQnnHtp.so", cli.home / "lib")
    message = cli("serve", "--qnn-lib-dir", "lib").failed(FAILED)
    assert "has no libQnnSystem.so" in message
    assert cli("serve", "--qnn-lib-dir", "none", "--json").error(FAILED)["reason"] == "NO_LIBRARY"


def test_without_the_server_extra_the_message_says_what_to_install(cli: CommandLine) -> None:
    (cli.home / "fake/onnxruntime_qnn").mkdir(parents=True)
    (cli.home / "fake/onnxruntime_qnn/__init__.py").touch()
    message = cli("serve", env={"PYTHONPATH": str(cli.home / "fake")}).failed(FAILED)
    assert "pip install 'qnnbroker[server]'" in message


def test_a_library_directory_of_ones_own_is_used(cli: CommandLine, serve: Serve) -> None:
    serve("--backend", "qnn", "--qnn-lib-dir", str(fake_qnn_dir()))
    assert cli("status", "--json").document()["backend"]["library_dir"] == str(fake_qnn_dir())


def test_a_broker_that_is_starting_is_not_called_missing(cli: CommandLine) -> None:
    switch = "delay=backendCreate:1:60000000"
    process = cli.start("serve", "--backend", "fake", env={"QNNBROKER_FAKE": switch})
    lock = cli.runtime_dir / "broker.lock"
    wait_until(lambda: lock.exists() and lock.read_text() == f"{process.pid}\n", "it has the lock")
    error = cli("ls", "--json").error(NO_BROKER)
    process.kill()
    finish(process)
    assert (error["reason"], error["ids"]) == ("STARTING", {"pid": str(process.pid)})
    assert cli("ls", "--json").error(NO_BROKER)["reason"] == "NO_SOCKET"


def test_the_current_directory_cannot_stand_in_for_a_package(
    cli: CommandLine, serve: Serve, tmp_path: Path
) -> None:
    place = tmp_path / "trap"
    place.mkdir()
    for name in ("grpc.py", "json.py", "asyncio.py", "qnnbroker.py"):
        (place / name).write_text("raise SystemExit('trapped')\n")
    serve(cwd=place)
    cli("stop", cwd=place).ok()
