# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a command starts: at any import of it and of the broker that it becomes."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.broker_process import BrokerProcess
from tests.cli.driver import CommandLine, Serve, interrupt

#: Python imports this before all else, in the command and in the broker that it becomes. SIGINT
#: comes at the moment that $QB_MOMENT names: "PROGRAM NUMBER" is an import, counted from where the
#: program's own first line follows; they are listed in $QB_LIST. "before" and "after" are outside.
SITE = """
import posix, sys

program = "broker" if "qnnbroker.broker" in sys.orig_argv else "command"
chosen, _, wanted = posix.environ[b"QB_MOMENT"].decode().partition(" ")
listed = posix.environ[b"QB_LIST"]

def come_to(moment):
    if (chosen, wanted) == (program, moment):
        posix.kill(posix.getpid(), 2)

class Moments:
    count = -1

    def find_spec(self, name, path=None, target=None):
        if self.count < 0 and name not in ("qnnbroker.cli.main", "qnnbroker.broker.__main__"):
            return
        self.count += 1
        if self.count and listed:
            fd = posix.open(listed, posix.O_WRONLY | posix.O_CREAT | posix.O_APPEND)
            posix.write(fd, f"{program} {self.count}\\n".encode())
            posix.close(fd)
        if self.count:
            come_to(str(self.count))

if wanted == "after":
    import asyncio

    run = asyncio.run

    def run_then_come(*arguments):
        code = run(*arguments)
        come_to("after")
        return code

    asyncio.run = run_then_come
sys.meta_path.insert(0, Moments())
come_to("before")
"""
#: The imports that are tried: the first ones, and a choice of the others.
FIRST, OTHERS = 6, 12

Environment = Callable[..., dict[str, str]]


@pytest.fixture
def meeting(tmp_path: Path) -> Environment:
    """The environment of a program that SIGINT meets at a moment."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)

    def environment(moment: str = "", listed: str | Path = "") -> dict[str, str]:
        return {
            "PYTHONPATH": str(tmp_path / "site"),
            "QB_MOMENT": moment,
            "QB_LIST": str(listed),
        }

    return environment


def moments(listed: Path, program: str) -> list[str]:
    """A choice of those that were listed."""
    lines = [line for line in listed.read_text().splitlines() if line.startswith(program)]
    assert len(lines) > FIRST + OTHERS
    return lines[:FIRST] + lines[FIRST :: (len(lines) - FIRST) // OTHERS]


def test_at_any_import_of_a_command_it_ends_without_a_traceback(
    cli: CommandLine, meeting: Environment, broker: BrokerProcess, tmp_path: Path
) -> None:
    listed = tmp_path / "moments"
    assert "fake" in cli("status", env=meeting(listed=listed)).ok()
    for moment in moments(listed, "command"):
        ended = cli("status", env=meeting(moment))
        assert ended.code in (130, -signal.SIGINT), (moment, ended)
        assert ended.out == "", moment
        assert ended.err in ("", "qnnbroker: interrupted\n"), moment


def test_before_and_at_any_import_of_the_broker_it_ends_without_a_traceback(
    cli: CommandLine, meeting: Environment, serve: Serve, tmp_path: Path
) -> None:
    listed = tmp_path / "moments"
    assert interrupt(serve(env=meeting(listed=listed))).code == 0
    for moment in ["broker before", *moments(listed, "broker")]:
        ended = cli("serve", "--backend", "fake", env=meeting(moment))
        # 0: it came when the broker took signals already, and stopped in order.
        assert ended.code in (0, 130, -signal.SIGINT), (moment, ended)
        assert "Traceback" not in ended.err, (moment, ended)
        assert ended.code == 0 or ended.err == "", (moment, ended)
        assert list(cli.runtime_dir.glob("*.sock")) == []


def test_when_the_broker_has_stopped_it_ends_without_a_traceback(
    cli: CommandLine, meeting: Environment, serve: Serve
) -> None:
    ended = interrupt(serve(env=meeting("broker after")))
    assert ended.code == 130
    assert "Traceback" not in ended.err
    assert ended.err.splitlines()[-1].endswith("stopped")
    assert list(cli.runtime_dir.glob("*.sock")) == []


def test_who_has_it_ignored_is_not_ended_by_it(cli: CommandLine, meeting: Environment) -> None:
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ended = cli("--version", env=meeting("command 3"))
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert ended.ok().startswith("qnnbroker ")
