# SPDX-License-Identifier: Apache-2.0
"""Files and directories that go again, or get their name when they are whole.

However a command ends, and whenever a signal asks it to, none of them stays. Signals are Python's
(an exception in the main thread); against SIGKILL nothing helps.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from qnnbroker.broker.interrupts import deferred


@contextlib.contextmanager
def temporary_directory(
    prefix: str, suffix: str = "", parent: Path | None = None
) -> Iterator[Path]:
    """A directory of mode 0700 in `parent` (by default the system's); it goes with its content.

    Raises:
        OSError: it cannot be made.
    """
    made: tempfile.TemporaryDirectory[str] | None = None
    try:
        with deferred():  # no exception between its making and our knowing its name
            made = tempfile.TemporaryDirectory(suffix, prefix, parent)
        yield Path(made.name)
    finally:
        # An exception before the next line leaves it to the object's finalizer.
        if made is not None:
            with deferred():
                made.cleanup()


@contextlib.contextmanager
def whole_file(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """A file that appears at `path` when the block ends well, and not at all otherwise.

    Raises:
        OSError: it cannot be written.
    """
    with temporary_directory(f".{path.name}.", parent=path.parent) as folder:
        written = folder / "written"
        with open(written, mode) as file:
            yield file
        os.replace(written, path)
