# SPDX-License-Identifier: Apache-2.0
"""Leaving the code of loaded libraries out of memory until it is used again."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.implementations import FAKE_AND_REAL

from qnnbroker.native import library_code
from qnnbroker.native.fake import fake_qnn_dir
from qnnbroker.native.qnn_library import default_qnn_dir

#: In a process of its own: a library is never unloaded.
PROGRAM = """
import sys, threading
from pathlib import Path
from tests.resident import resident_bytes
from qnnbroker.native import library_code
from qnnbroker.native.qnn_backend import QnnBackend, QnnDevice
from qnnbroker.native.qnn_library import QnnLibrary

library = QnnLibrary(sys.argv[1])
file = library.directory / "libQnnHtp.so"

def use():
    with QnnBackend(library) as backend, QnnDevice(backend):
        pass

use()
of_others = Path("/proc/self/exe").resolve()
before = [resident_bytes("self", f, writable=w) for f, w in [(file, 0), (file, 1), (of_others, 0)]]
done = library_code.unmap(library.directory)
after = [resident_bytes("self", f, writable=w) for f, w in [(file, 0), (file, 1), (of_others, 0)]]
print(before[0] > 0, after[0] < before[0] // 2, after[1] == before[1], after[2] >= before[2] > 0)
print(done >= before[0] - after[0])
use()
print(resident_bytes("self", file, writable=0) > after[0])

stop = threading.Event()
def again():
    while not stop.is_set():
        library_code.unmap(library.directory)
thread = threading.Thread(target=again)
thread.start()
for _ in range(20):
    use()
stop.set()
thread.join()
print(True)
"""


@pytest.mark.parametrize(
    "which",
    FAKE_AND_REAL,
)
def test_code_goes_out_of_memory_and_comes_back_when_it_is_used(which: str, tmp_path: Path) -> None:
    if which == "fake":  # a copy: nobody else has its pages
        directory = Path(shutil.copytree(fake_qnn_dir(), tmp_path / "fake"))
    else:
        directory = default_qnn_dir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 7


def test_a_directory_from_which_nothing_was_loaded_has_nothing_to_leave(tmp_path: Path) -> None:
    assert library_code.unmap(tmp_path) == 0


def test_a_directory_is_not_taken_for_another_whose_name_begins_like_it() -> None:
    loaded_from = Path(library_code.__file__).parent
    assert library_code.unmap(loaded_from) > 0
    assert library_code.unmap(loaded_from.with_name(loaded_from.name[:-1])) == 0
