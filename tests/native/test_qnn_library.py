# SPDX-License-Identifier: Apache-2.0
"""Loading QNN libraries: what is refused, and what does not leak into the process."""

import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.native.qnn_models import INSTALLED

from qnnbroker.native import qnn_library
from qnnbroker.native.counters import live_counts
from qnnbroker.native.qnn_backend import QnnBackend, QnnDevice
from qnnbroker.native.qnn_error import QnnError
from qnnbroker.native.qnn_info import parse_binary
from qnnbroker.native.qnn_library import QnnLibrary, default_qnn_dir

COMPILER = shutil.which("cc") or shutil.which("gcc")
real = pytest.mark.skipif(not INSTALLED, reason="onnxruntime-qnn is not installed")


def stub_directory(tmp_path: Path, **defines: int) -> Path:
    """A directory with two stub libraries that are wrong in the way that `defines` says."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    source = Path(__file__).with_name("qnn_stub.c")
    options = [f"-D{name}={value}" for name, value in defines.items()]
    target = tmp_path / "libQnnHtp.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", *options, source, "-o", target], check=True)
    shutil.copy(target, tmp_path / "libQnnSystem.so")
    return tmp_path


def run_child(code: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, str(default_qnn_dir())]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=60
    )


def test_the_environment_names_the_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QNNBROKER_QNN_LIB_DIR", str(tmp_path))
    assert default_qnn_dir() == tmp_path


def test_without_a_directory_the_error_says_what_to_install(tmp_path: Path) -> None:
    code = """
import sys
sys.path[:] = [p for p in sys.path if "onnxruntime" not in p]
import importlib.util
from qnnbroker.native.qnn_library import default_qnn_dir
real = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "onnxruntime_qnn" else real(name)
try:
    default_qnn_dir()
except FileNotFoundError as error:
    print(error)
"""
    env = {k: v for k, v in os.environ.items() if k != "QNNBROKER_QNN_LIB_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert "install onnxruntime-qnn" in done.stdout, done.stderr


@pytest.mark.parametrize("present", [[], ["libQnnHtp.so"], ["libQnnSystem.so"]])
def test_missing_files_are_named(tmp_path: Path, present: list[str]) -> None:
    for name in present:
        (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError) as caught:
        QnnLibrary(tmp_path)
    for name in {"libQnnHtp.so", "libQnnSystem.so"} - set(present):
        assert f"no {name}" in str(caught.value)


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    for name in ("libQnnHtp.so", "libQnnSystem.so"):
        (tmp_path / name).write_text("not a library")
    with pytest.raises(OSError, match=r"cannot be loaded: .*libQnnHtp\.so"):
        QnnLibrary(tmp_path)


def test_a_library_of_another_kind_is_refused(tmp_path: Path) -> None:
    for name in ("libQnnHtp.so", "libQnnSystem.so"):
        shutil.copy(Path(qnn_library.__file__).with_name("libqbcore.so"), tmp_path / name)
    with pytest.raises(OSError, match="is not a QNN library"):
        QnnLibrary(tmp_path)


@pytest.mark.parametrize(
    ("defines", "message"),
    [
        ({"CODE": 1003}, r"offers no interface \(code 1003"),
        ({"COUNT": 0}, r"offers no interface \(code 0, 0 providers\)"),
        ({"CORE_MAJOR": 1}, r"has QNN core API 1\.30\.0; 2\.15 or a later 2\.x is wanted"),
        ({"CORE_MAJOR": 3}, r"has QNN core API 3\.30\.0; 2\.15 or a later 2\.x is wanted"),
        ({"CORE_MINOR": 14}, r"has QNN core API 2\.14\.0; 2\.15 or a later 2\.x is wanted"),
        ({"SYSTEM_MAJOR": 2}, r"has QNN system API 2\.0\.0; 1\.x is wanted"),
        ({"EMPTY_SLOT": 13}, r"libQnnHtp\.so lacks contextCreateFromBinary"),
        ({"EMPTY_SLOT": 43}, r"libQnnHtp\.so lacks deviceFree"),
        ({"EMPTY_SYSTEM_SLOT": 1}, r"libQnnSystem\.so lacks systemContextGetBinaryInfo"),
    ],
)
def test_an_unfit_library_is_refused(tmp_path: Path, defines: dict[str, int], message: str) -> None:
    before = live_counts()
    with pytest.raises(OSError, match=message):
        QnnLibrary(stub_directory(tmp_path, **defines))
    assert live_counts() == before


@pytest.mark.parametrize("slot", [0, 4, 17, 37, 38, 48])
def test_a_slot_that_is_not_needed_may_be_empty(tmp_path: Path, slot: int) -> None:
    library = QnnLibrary(stub_directory(tmp_path, EMPTY_SLOT=slot))
    assert library.provider_name == "STUB"
    assert library.core_api_version == (2, 30, 0)
    assert library.has_capability(201) == (1000 if slot == 0 else 1100)


@pytest.mark.parametrize(("slot", "operation"), [(25, "backendCreate"), (75, "logCreate")])
def test_a_library_without_a_log_does_without(tmp_path: Path, slot: int, operation: str) -> None:
    library = QnnLibrary(stub_directory(tmp_path, EMPTY_SLOT=slot))
    before = live_counts()
    with pytest.raises(QnnError, match="general failure") as caught:
        QnnBackend(library)
    assert caught.value.operation == operation
    assert live_counts() == before


def test_a_parser_that_fails_is_reported(tmp_path: Path) -> None:
    library = QnnLibrary(stub_directory(tmp_path))
    with pytest.raises(QnnError, match="systemContextCreate"):
        parse_binary(library, b"anything")


@real
@pytest.mark.qnn
def test_the_real_library_says_what_it_is() -> None:
    library = QnnLibrary(str(default_qnn_dir()))
    assert library.provider_name == "HTP_QTI_AISW"
    assert library.backend_id == 6
    assert library.core_api_version[0] == 2
    assert library.backend_api_version[0] == 5
    assert library.system_api_version[0] == 1
    assert library.directory == default_qnn_dir().resolve()
    assert (library.has_capability(306), library.has_capability(9999)) == (0, 2000)
    with pytest.raises(TypeError, match="cannot be pickled"):
        library.__reduce__()


@real
@pytest.mark.qnn
def test_a_directory_is_loaded_and_counted_once(tmp_path: Path) -> None:
    first = QnnLibrary(default_qnn_dir())
    before = live_counts()
    link = tmp_path / "elsewhere"
    link.symlink_to(default_qnn_dir())
    assert QnnLibrary(link).directory == first.directory
    assert live_counts() == before


@real
@pytest.mark.qnn
def test_the_package_is_found_without_being_imported(tmp_path: Path) -> None:
    code = """
import sys
from qnnbroker.native.qnn_library import QnnLibrary, default_qnn_dir
QnnLibrary(default_qnn_dir())
assert not [m for m in sys.modules if m.startswith("onnxruntime")]
"""
    done = run_child(code, tmp_path)
    assert done.returncode == 0, done.stderr


LOAD = """
import os, sys
from qnnbroker.native.qnn_library import QnnLibrary
before = (os.getcwd(), os.fstat(1), sorted(os.listdir("/proc/self/fd")))
QnnLibrary(sys.argv[1])
assert (os.getcwd(), os.fstat(1), sorted(os.listdir("/proc/self/fd"))) == before
assert "LIBNATIVE_CONFIG" not in os.environ
"""

BARE = 'import ctypes, sys; ctypes.CDLL(sys.argv[1] + "/libQnnHtp.so")'


@real
@pytest.mark.qnn
def test_loading_prints_nothing_on_stdout_and_changes_nothing(tmp_path: Path) -> None:
    assert run_child(BARE, tmp_path).stdout != "", "the bare library prints no more: drop the care"
    done = run_child(LOAD, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "LIBNATIVE" in done.stderr


@real
@pytest.mark.qnn
def test_a_configuration_in_the_working_directory_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "libnative_tls.conf").write_text("some = 1\n")
    assert "config file detected" in run_child(BARE, tmp_path).stdout
    done = run_child(LOAD, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "config file detected" not in done.stderr


@real
@pytest.mark.qnn
def test_a_configuration_named_by_the_environment_is_not_read(tmp_path: Path) -> None:
    config = tmp_path / "some.conf"
    config.write_text("some = 1\n")
    assert "config file detected" in run_child(BARE, tmp_path, LIBNATIVE_CONFIG=str(config)).stdout
    done = run_child(LOAD, tmp_path, LIBNATIVE_CONFIG=str(config))
    assert done.returncode == 0, done.stderr
    assert "config file detected" not in done.stderr


@real
@pytest.mark.qnn
@pytest.mark.parametrize("closed", [[1], [2], [1, 2], [0, 1, 2]])
def test_loading_works_with_standard_streams_closed(tmp_path: Path, closed: list[int]) -> None:
    code = f"""
import os, sys
from qnnbroker.native.qnn_library import QnnLibrary
report = os.open("report", os.O_CREAT | os.O_WRONLY)
os.dup2(report, 20)
os.close(report)
for fd in {closed}:
    os.close(fd)
before = sorted(os.listdir("/proc/self/fd"))
QnnLibrary(sys.argv[1])
os.write(20, b"same" if sorted(os.listdir("/proc/self/fd")) == before else b"changed")
os._exit(0)
"""
    assert run_child(code, tmp_path).returncode == 0
    assert (tmp_path / "report").read_text() == "same"


@real
@pytest.mark.qnn
def test_loading_works_from_a_deleted_directory(tmp_path: Path) -> None:
    code = """
import os, sys
from qnnbroker.native.qnn_library import QnnLibrary
os.mkdir("gone"); os.chdir("gone"); os.rmdir("../gone")
before = os.stat(".").st_ino
QnnLibrary(sys.argv[1])
assert os.stat(".").st_ino == before
"""
    done = run_child(code, tmp_path)
    assert done.returncode == 0, done.stderr


@real
@pytest.mark.qnn
def test_log_lines_wait_behind_a_readable_fd() -> None:
    library = QnnLibrary(default_qnn_dir())
    fd = qnn_library.log_fileno()
    assert qnn_library.log_fileno() == fd
    qnn_library.drain_log()
    assert select.select([fd], [], [], 0)[0] == []
    with QnnBackend(library, log_level=5) as backend, QnnDevice(backend):
        assert select.select([fd], [], [], 0)[0] == [fd]
    lines = qnn_library.drain_log()
    assert select.select([fd], [], [], 0)[0] == []
    assert {level for level, _ in lines} <= {1, 2, 3, 4, 5}
    for _, text in lines:
        assert text == text.strip()
        assert not text.startswith("<")
        assert "\n" not in text


@real
@pytest.mark.qnn
def test_a_full_log_drops_the_newest_lines_and_counts_them() -> None:
    library = QnnLibrary(default_qnn_dir())
    qnn_library.drain_log()
    dropped = qnn_library.log_dropped()
    with QnnBackend(library, log_level=5) as backend:
        for _ in range(1000):
            if qnn_library.log_dropped() > dropped:
                break
            with QnnDevice(backend):
                pass
    assert qnn_library.log_dropped() > dropped
    assert len(qnn_library.drain_log()) == 512
