# SPDX-License-Identifier: Apache-2.0
"""The command line of a test, and brokers that it started itself."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.driver import CommandLine, Serve
from tests.waiting import PATIENCE_SECONDS, wait_readable


@pytest.fixture
def cli(runtime_dir: Path, tmp_path: Path) -> CommandLine:
    return CommandLine(runtime_dir, tmp_path)


@pytest.fixture
def serve(cli: CommandLine) -> Iterator[Serve]:
    """Runs `qnnbroker serve` over the fake library and waits until it is ready."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, **options: Any) -> "subprocess.Popen[bytes]":
        read_fd, write_fd = os.pipe()
        try:
            process = cli.start(
                "serve",
                *("--backend", "fake", "--ready-fd", str(write_fd)),
                *arguments,
                pass_fds=(write_fd, *options.pop("pass_fds", ())),
                **options,
            )
            started.append(process)
            os.close(write_fd)
            write_fd = -1
            wait_readable(read_fd, "the broker is ready or has ended")
            if os.read(read_fd, 64) != b"ready\n":
                pytest.fail(f"no broker: {process.communicate()[1].decode()}")
        finally:
            os.close(read_fd)
            if write_fd >= 0:
                os.close(write_fd)
        return process

    yield start
    for process in started:
        process.terminate()
        try:
            process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
