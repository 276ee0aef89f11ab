# SPDX-License-Identifier: Apache-2.0
"""One broker for one runtime directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qnnbroker.broker.lock import BrokerLock
from qnnbroker.protos.errors import AlreadyExists

pytestmark = pytest.mark.usefixtures("no_leaks")


def test_a_second_lock_is_refused_and_names_the_holder(tmp_path: Path) -> None:
    lock = BrokerLock(tmp_path / "broker.lock")
    with pytest.raises(AlreadyExists) as taken:
        BrokerLock(tmp_path / "broker.lock")
    assert taken.value.reason == "BROKER_RUNNING"
    assert taken.value.ids["pid"] == str(os.getpid())
    assert f"pid {os.getpid()}" in str(taken.value)
    assert str(tmp_path) in str(taken.value)
    lock.close()


def test_a_closed_lock_can_be_taken_again_and_its_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "broker.lock"
    lock = BrokerLock(path)
    lock.close()
    lock.close()
    inode = path.stat().st_ino
    again = BrokerLock(path)
    assert path.stat().st_ino == inode
    assert path.read_text() == f"{os.getpid()}\n"
    again.close()


def test_a_killed_holder_leaves_a_free_lock(tmp_path: Path) -> None:
    path = tmp_path / "broker.lock"
    code = (
        "import sys\nfrom pathlib import Path\nfrom qnnbroker.broker.lock import BrokerLock\n"
        "lock = BrokerLock(Path(sys.argv[1]))\nprint('held', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(AlreadyExists, match=f"pid {holder.pid}"):
            BrokerLock(path)
        holder.kill()
        holder.wait()
    BrokerLock(path).close()


def test_a_shorter_pid_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    path = tmp_path / "broker.lock"
    path.write_text("4194304123456789\n")
    lock = BrokerLock(path)
    assert path.read_text() == f"{os.getpid()}\n"
    lock.close()


def test_the_lock_is_private_and_not_inherited(tmp_path: Path) -> None:
    lock = BrokerLock(tmp_path / "broker.lock")
    assert (tmp_path / "broker.lock").stat().st_mode & 0o777 == 0o600
    here = f"{os.stat(tmp_path / 'broker.lock').st_ino}"
    code = (
        "import os\nfor n in os.listdir('/proc/self/fd'):\n"
        "    try: print(os.fstat(int(n)).st_ino)\n    except OSError: pass"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert here not in seen.stdout.split()
    lock.close()


def test_a_symbolic_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / "broker.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        BrokerLock(tmp_path / "broker.lock")
    assert (tmp_path / "elsewhere").read_text() == "precious"
