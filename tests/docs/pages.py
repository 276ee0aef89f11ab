# SPDX-License-Identifier: Apache-2.0
"""Runs a page of documentation: its code blocks in order, against a broker of the page's own."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
#: Compiling, on a machine that has other things to do.
_COMMAND_SECONDS = 300.0
_BLOCK = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\S+\.py)$")


@dataclass(frozen=True)
class Block:
    """A fenced block and the line of the page that it begins on."""

    language: str
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    """All blocks of a page."""
    return [
        Block(match[1], match[2], page.count("\n", 0, match.start()) + 1)
        for match in _BLOCK.finditer(page)
    ]


def commands(block: Block) -> list[tuple[str, str]]:
    """The command lines of a console block, each with the output that the page shows after it."""
    found: list[tuple[str, str]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], ""))
        elif found and found[-1][0].endswith("\\"):
            found[-1] = (f"{found[-1][0]}\n{line}", "")
        else:
            assert found, f"output before a command: {line!r}"
            found[-1] = (found[-1][0], found[-1][1] + line + "\n")
    return found


def is_like(found: str, wanted: str) -> bool:
    """Whether output is as the page shows it; `...` stands for anything."""
    pattern = ".*".join(map(re.escape, wanted.strip().split("...")))
    return re.fullmatch(pattern, found.strip(), re.DOTALL) is not None


class Page:
    """One page being run, in a directory of its own. A context manager.

    `python` blocks share their names, as in one long program; one that begins with `# name.py` is
    written to that file instead. A `text` block is what the python block before it printed. In
    `console` blocks lines with `$` are commands. A `toml` block is a configuration file.
    """

    def __init__(self, folder: Path, runtime_dir: Path) -> None:
        self.folder = folder
        self._names: dict[str, Any] = {"__name__": "__page__"}
        self._printed = ""
        self._servers: list[subprocess.Popen[bytes]] = []
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("QNNBROKER_")}
        self.environment = inherited | {
            "QNNBROKER_RUNTIME_DIR": str(runtime_dir),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "100",
        }

    def __enter__(self) -> "Page":
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            if server.poll() is None:
                server.send_signal(signal.SIGTERM)
            server.wait(_COMMAND_SECONDS)

    def run_all(self, page: str) -> int:
        """Runs the blocks of a page in order; how many there were."""
        found = blocks(page)
        for block in found:
            try:
                self.run(block)
            except BaseException as error:
                error.add_note(f"in the block that begins on line {block.line}")
                raise
        return len(found)

    def run(self, block: Block) -> None:
        """Runs one block; an AssertionError tells what differs."""
        if block.language == "python":
            self._python(block)
        elif block.language == "console":
            for command, wanted in commands(block):
                self._command(command, wanted)
        elif block.language == "text":
            assert is_like(self._printed, block.text), self._printed
        elif block.language == "toml":
            tomllib.loads(block.text)
            (self.folder / "config.toml").write_text(block.text)
            self._command("qnnbroker config --config config.toml", "")
        else:
            raise AssertionError(f"nobody runs a block of kind {block.language!r}")

    def _python(self, block: Block) -> None:
        first = block.text.splitlines()[0]
        if named := _FILE.match(first):
            (self.folder / named[1]).write_text(block.text)
            return
        code = compile("\n" * block.line + block.text, "the page", "exec", dont_inherit=True)
        output = io.StringIO()
        with _inside(self.folder, self.environment), contextlib.redirect_stdout(output):
            exec(code, self._names)
        self._printed = output.getvalue()

    def _command(self, command: str, wanted: str) -> None:
        if command.startswith("make "):
            # They install, or run the tests, this one too: that there is such a target is enough.
            subprocess.run(
                ["make", "--dry-run", *command.split()[1:]],
                cwd=ROOT,
                check=True,
                stdout=subprocess.DEVNULL,
            )
        elif command.startswith("source "):
            pass  # our PATH has this environment's programs first
        elif command.startswith("qnnbroker serve"):
            self._serve(command)
        else:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_COMMAND_SECONDS,
            )
            assert done.returncode == 0, f"$ {command}\n{done.stdout}"
            assert not wanted or is_like(done.stdout, wanted), f"$ {command}\n{done.stdout}"

    def _serve(self, command: str) -> None:
        log = self.folder / f"serve-{len(self._servers)}.log"
        with open(log, "wb") as output:
            server = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._servers.append(server)

        def ready() -> bool:
            assert server.poll() is None, log.read_text()
            return " ready on " in log.read_text()

        wait_until(ready, f"the broker of `{command}` is ready", _COMMAND_SECONDS)


@contextlib.contextmanager
def _inside(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """This process in another directory and environment."""
    before = dict(os.environ)
    with contextlib.chdir(folder):
        os.environ.clear()
        os.environ.update(environment)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)
