# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole: help, exit codes, one-line errors, standard streams and signals."""

import contextlib
import importlib
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.broker_process import BrokerProcess
from tests.cli.driver import PROGRAM, CommandLine, Serve, finish, interrupt, wait_running
from tests.fake_models import MakeModel, adder

from qnnbroker.cli.group import COMMANDS
from qnnbroker.cli.group import cli as group
from qnnbroker.cli.invocation import Command
from qnnbroker.cli.problems import FAILED, NO_BROKER, USAGE, Failure, WrongUsage, describe, one_line
from qnnbroker.protos.errors import BrokerUnavailable, NotFound

NAMES = list(COMMANDS)


def command_of(name: str) -> Command:
    entry = COMMANDS[name]
    found = getattr(importlib.import_module(f"qnnbroker.cli.{entry.module}"), entry.attribute)
    assert isinstance(found, Command)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_examples_json_and_the_help_line_of_the_overview(name: str) -> None:
    command = command_of(name)
    assert len(command.examples) >= 1
    assert all(
        line.startswith("qnnbroker ") or "qnnbroker " in line for line, _ in command.examples
    )
    assert any("--json" in p.opts for p in command.params)
    assert command.get_short_help_str(200) == COMMANDS[name].help
    assert command.name == name


@pytest.mark.parametrize("name", ["", *NAMES])
def test_help_is_printed_on_standard_output(cli: CommandLine, name: str) -> None:
    text = cli(*filter(None, [name]), "--help").ok()
    assert "Examples:" in text
    assert "--json" in text


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_are_command_lines_that_parse(name: str) -> None:
    for line, _ in command_of(name).examples:
        words = shlex.split(line.split("|")[0].split(" 3>")[0].split(" > ")[0])
        if words[0] != "qnnbroker":
            continue
        assert words[1] == name
        command_of(name).make_context(name, words[2:])


def test_the_help_imports_none_of_the_heavy_packages() -> None:
    script = (
        "import sys\nsys.argv = ['qnnbroker', '--help']\nfrom qnnbroker.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n"
        "    heavy = {'rich', 'grpc', 'numpy', 'google', 'onnx', 'onnxruntime'}\n"
        "    print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr == "[]\n"
    assert done.stdout.startswith("Usage: qnnbroker ")


def test_the_version_is_that_of_the_distribution(cli: CommandLine) -> None:
    from importlib.metadata import version

    assert cli("--version").ok() == f"qnnbroker {version('qnnbroker')}\n"


def test_no_command_prints_the_help_and_is_wrong_usage(cli: CommandLine) -> None:
    done = cli()
    assert done.code == USAGE
    assert "Commands:" in done.err


def test_an_unknown_command_names_the_nearest(cli: CommandLine) -> None:
    assert "'status' is near it" in cli("statsu").failed(USAGE)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["ls", "--none"], "--none"),
        (["load"], "PATH"),
        (["run", "m", "--repeat", "0"], "--repeat"),
        (["run", "m", "--repeat", "many"], "--repeat"),
        (["stop", "--timeout", "-1"], "--timeout"),
        (["completion", "tcsh"], "tcsh"),
        (["ls", "extra"], "extra"),
        (["load", "m", "--keep-alive", "long"], "'long'"),
        (["load", "m", "--keep-alive", "nan"], "'nan'"),
        (["run", "m", "--input", "x"], "NAME=SOURCE"),
        (["run", "m", "--output", "x.txt"], "x.txt"),
        (["run", "m", "--output", "none/x.npz"], "no directory"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(
    cli: CommandLine, arguments: list[str], part: str
) -> None:
    assert part in cli(*arguments).failed(USAGE)
    assert cli(*arguments, "--json").error(USAGE)["type"] == "WrongUsage"


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["sessions"],
        ["ls"],
        ["load", "m"],
        ["unload", "m"],
        ["describe", "m"],
        ["run", "m"],
        ["stop"],
    ],
)
def test_without_a_broker_the_code_is_3_and_the_message_says_how_to_start_one(
    cli: CommandLine, arguments: list[str]
) -> None:
    assert "qnnbroker serve" in cli(*arguments).failed(NO_BROKER)
    error = cli("--json", *arguments).error(NO_BROKER)
    assert (error["type"], error["reason"]) == ("BrokerUnavailable", "NO_SOCKET")


def test_a_runtime_directory_that_is_not_there_or_no_directory_is_no_broker(
    cli: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert "nothing/here" in cli("ls", "--runtime-dir", "nothing/here").failed(NO_BROKER)
    assert "not a directory" in cli("ls", "--runtime-dir", "file").failed(FAILED)
    cli("ls", "--runtime-dir", "file/below").failed(NO_BROKER)
    assert "bytes" in cli("ls", "--runtime-dir", "x" * 200).failed(FAILED)
    assert "comma" in cli("ls", "--runtime-dir", "a,b").failed(FAILED)


def test_somebody_elses_directory_is_refused(cli: CommandLine, tmp_path: Path) -> None:
    open_one = tmp_path / "open"
    open_one.mkdir(mode=0o755)
    open_one.chmod(0o755)
    assert "0700" in cli("status", "--runtime-dir", open_one).failed(FAILED)


def test_a_socket_that_nobody_listens_on_is_no_broker(cli: CommandLine, serve: Serve) -> None:
    process = serve()
    process.kill()
    process.wait()
    assert (cli.runtime_dir / "grpc.sock").is_socket()
    for command in (["status"], ["stop"], ["run", "m"]):
        cli(*command).failed(NO_BROKER)


def test_arguments_that_are_no_text_fail_in_one_line(cli: CommandLine, serve: Serve) -> None:
    serve()
    for arguments in (["describe"], ["unload"], ["run"], ["load"], ["inspect"], ["compile"]):
        done = cli(*arguments, b"\xff\xfe")
        assert done.code in (FAILED, USAGE)
        done.failed(done.code)
        cli(*arguments, b"\xff\xfe", "--json").error(done.code)


@pytest.mark.parametrize(
    ("error", "code", "kind", "message"),
    [
        (BrokerUnavailable("x"), NO_BROKER, "BrokerUnavailable", "x"),
        (BrokerUnavailable("x", reason="STOPPING"), NO_BROKER, "BrokerUnavailable", "x"),
        (BrokerUnavailable("x", reason="NPU_LOST"), FAILED, "BrokerUnavailable", "x"),
        (NotFound("no\nthing\tthere"), FAILED, "NotFound", "no thing there"),
        (WrongUsage("x"), USAGE, "WrongUsage", "x"),
        (Failure("x", reason="INPUT"), FAILED, "Failure", "x"),
        (FileNotFoundError(2, "No such file", "f\n"), FAILED, "FileNotFoundError", None),
        (KeyboardInterrupt(), 130, "Interrupted", "interrupted"),
        (MemoryError(), FAILED, "MemoryError", "not enough memory for this"),
        (ZeroDivisionError("q"), FAILED, "ZeroDivisionError", None),
    ],
)
def test_every_exception_has_a_code_and_one_line(
    error: BaseException, code: int, kind: str, message: str | None
) -> None:
    problem = describe(error)
    assert (problem.exit_code, problem.type) == (code, kind)
    assert "\n" not in problem.message
    assert message is None or problem.message == message


def test_what_would_steer_a_terminal_is_escaped() -> None:
    assert one_line("a\x1b[31mb\udcff\u202ec") == "a\\x1b[31mb\\udcff\\u202ec"


def test_a_reader_that_goes_away_is_no_error_message(cli: CommandLine) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    process = cli.start("config", "--json", stdout=write_fd)
    os.close(write_fd)
    ended = finish(process)
    assert (ended.code, ended.err) == (141, "")


def test_an_error_whose_reader_went_away_keeps_its_code(cli: CommandLine) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    process = cli.start("ls", "--json", stdout=write_fd)
    os.close(write_fd)
    finish(process).failed(NO_BROKER)


def test_a_full_disk_is_one_line(cli: CommandLine) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    process = cli.start("config", "--json", stdout=full)
    os.close(full)
    assert "No space left" in finish(process).failed(FAILED)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_do_no_harm(cli: CommandLine, closed: str) -> None:
    script = f'exec "$@" {closed}'
    for arguments, code in ((["config"], 0), (["ls"], NO_BROKER)):
        done = subprocess.run(
            ["sh", "-c", script, "sh", *PROGRAM, *arguments],
            capture_output=True,
            env=cli.environment(),
            check=False,
        )
        assert done.returncode == code
        assert b"Traceback" not in done.stderr


def test_colours_are_for_terminals_without_no_color(cli: CommandLine) -> None:
    assert "\x1b[" not in cli("config").ok()
    terminal = cli.environment(TERM="xterm-256color", COLUMNS="100")
    assert b"\x1b[" in on_terminal(["config"], terminal, cli.home)
    assert b"\x1b[3" not in on_terminal(["config"], {**terminal, "NO_COLOR": "1"}, cli.home)


def on_terminal(arguments: list[str], environment: dict[str, str], cwd: Path) -> bytes:
    """What the command prints on a terminal of its own."""
    main, other = os.openpty()
    process = subprocess.Popen(
        [*PROGRAM, *arguments], stdin=other, stdout=other, stderr=other, env=environment, cwd=cwd
    )
    os.close(other)
    data = read_terminal(main)
    assert process.wait() == 0, data
    return data


def read_terminal(fd: int) -> bytes:
    """What comes out of a terminal until nobody has it open; closes it."""
    data = b""
    with contextlib.suppress(OSError):  # how a terminal ends
        while chunk := os.read(fd, 65536):
            data += chunk
    os.close(fd)
    return data


def test_ctrl_c_is_code_130_and_one_line(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    slow = make_model("slow", adder(execute_us=60_000_000))
    process = cli.start("run", slow, "--input", "*=zeros", "--output", "out.npz")
    wait_running(broker)
    assert interrupt(process).failed(130) == "interrupted"
    assert not (cli.home / "out.npz").exists()
    broker.wait_counters(sessions=0)
    broker.kill()  # it would wait for the execute


def test_ctrl_c_on_a_terminal_leaves_it_as_it_was(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    slow = make_model("slow", adder(execute_us=60_000_000))
    main, other = os.openpty()
    process = subprocess.Popen(
        [*PROGRAM, "run", slow, "--input", "*=zeros"],
        stdin=other,
        stdout=other,
        stderr=other,
        env=cli.environment(TERM="xterm-256color"),
    )
    os.close(other)
    wait_running(broker)
    process.send_signal(signal.SIGINT)
    data = read_terminal(main)
    assert process.wait() == 130
    assert b"loading" in data
    hidden, shown = data.rfind(b"\x1b[?25l"), data.rfind(b"\x1b[?25h")
    assert 0 <= hidden < shown
    assert data.rstrip().endswith(b"qnnbroker: interrupted")
    broker.kill()  # it would wait for the execute


def test_ctrl_c_during_a_load_gives_it_up(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    process = cli.start("load", make_model("big", create_us=3_000_000), "--json")
    broker.wait_counters(contexts=1, models=0)
    assert interrupt(process).error(130)["reason"] == "INTERRUPTED"
    broker.wait_counters(contexts=0, models=0)


def test_sigterm_unwinds_like_an_exception(cli: CommandLine, tmp_path: Path) -> None:
    # The group is what runs; a command of the test's own shows that cleanup happens.
    script = (
        "import os, sys, time, click\n"
        "from qnnbroker.cli import group, main\n"
        "@click.command()\n"
        "def wait():\n"
        "    try:\n"
        "        print('waiting', flush=True)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        print('cleaned', flush=True)\n"
        "group.cli.get_command = lambda context, name: wait\n"
        "sys.argv = ['qnnbroker', 'ls']\n"
        "main.main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"waiting\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert (out, err, process.returncode) == (b"cleaned\n", b"", 128 + signal.SIGTERM)


def test_options_may_stand_before_or_after_the_command(cli: CommandLine, tmp_path: Path) -> None:
    before = cli("--json", "--runtime-dir", "/nowhere/a", "ls").error(NO_BROKER)
    after = cli("ls", "--runtime-dir", "/nowhere/a", "--json").error(NO_BROKER)
    assert before == after
    assert before["ids"] == {"runtime_dir": "/nowhere/a"}


def test_the_group_lists_its_commands_in_the_order_of_the_overview() -> None:
    with group.make_context("qnnbroker", ["ls"]) as context:
        assert group.list_commands(context) == NAMES
        assert group.get_command(context, "nothing") is None
