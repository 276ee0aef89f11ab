# SPDX-License-Identifier: Apache-2.0
"""For the examples: a broker to attach to, private and ended with the block unless one is named."""

import argparse
import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import zoo
from qnnbroker.protos.errors import BrokerError

#: A backend may take its time to start; a machine may be busy.
_START_SECONDS = 120.0
_END_SECONDS = 60.0


class NoBroker(Exception):
    """The broker did not start; the text is what it said."""


def run(main: Callable[[], int]) -> int:
    """The exit code of an example: that of `main`, 1 with one line for an error, 130 for Ctrl-C."""
    try:
        return main()
    except (BrokerError, NoBroker, zoo.ZooError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every example."""
    parser.add_argument(
        "--runtime-dir",
        type=Path,
        metavar="DIR",
        help="of a broker that runs; without it the example starts one of its own, and ends it",
    )


@contextlib.contextmanager
def broker(runtime_dir: Path | None) -> Iterator[Path]:
    """The runtime directory of a broker: the one given, or that of a private one.

    Main thread only: a SIGTERM meanwhile unwinds the block, as Ctrl-C does.

    Raises:
        NoBroker: a private broker did not start.
    """
    if runtime_dir is not None:
        yield runtime_dir
        return
    before = signal.signal(signal.SIGTERM, _unwind)
    try:
        # Short: the path of a socket has at most 107 bytes.
        with tempfile.TemporaryDirectory(prefix="qb-", dir="/tmp") as name:
            directory = Path(name)
            with _private(directory):
                yield directory
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _private(directory: Path) -> Iterator[None]:
    ready, theirs = os.pipe()
    with open(ready, "rb") as told, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "qnnbroker.cli.main", "serve"]
                + ["--runtime-dir", str(directory), "--ready-fd", str(theirs)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[theirs],
                start_new_session=True,  # Ctrl-C is for the example, which ends the broker then
            )
        finally:
            os.close(theirs)
        try:
            # Readable when it is ready, and when it has ended.
            if not select.select([told], [], [], _START_SECONDS)[0] or not told.read(1):
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip().splitlines()
                raise NoBroker("the broker did not start: " + (said[-1] if said else "no word"))
            yield
        finally:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _unwind(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
