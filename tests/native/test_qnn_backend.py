# SPDX-License-Identifier: Apache-2.0
"""QnnBackend and QnnDevice on the real library: what they say, and the order in which they end."""

import gc
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
from tests.native.qnn_models import INSTALLED

from qnnbroker.native.counters import live_counts
from qnnbroker.native.qnn_backend import QnnBackend, QnnDevice
from qnnbroker.native.qnn_library import QnnLibrary, default_qnn_dir

pytestmark = [
    pytest.mark.qnn,
    pytest.mark.skipif(not INSTALLED, reason="onnxruntime-qnn is not installed"),
]


@pytest.fixture
def library() -> Iterator[QnnLibrary]:
    library = QnnLibrary(default_qnn_dir())
    before = live_counts()
    yield library
    gc.collect()
    assert live_counts() == before


def test_a_backend_and_its_device_say_what_they_are(library: QnnLibrary) -> None:
    with QnnBackend(library) as backend, QnnDevice(backend) as device:
        assert backend.build_id.startswith("v2.")
        assert (backend.library, device.backend) == (library, backend)
        assert device.core_count >= 1
        assert (device.dsp_arch > 0, device.soc_model > 0, device.vtcm_mb > 0) == (True,) * 3
        assert (backend.closed, device.closed) == (False, False)
        assert (live_counts()["backends"], live_counts()["devices"]) == (1, 1)
    assert (backend.closed, device.closed) == (True, True)


@pytest.mark.parametrize("level", [0, 6, -1])
def test_an_unknown_log_level_is_refused(library: QnnLibrary, level: int) -> None:
    with pytest.raises(ValueError, match="log_level must be from 1 to 5"):
        QnnBackend(library, log_level=level)


def test_a_backend_with_an_open_device_refuses_to_close(library: QnnLibrary) -> None:
    backend = QnnBackend(library)
    device = QnnDevice(backend)
    with pytest.raises(BufferError, match="1 open object"):
        backend.close()
    assert not backend.closed
    device.close()
    backend.close()


def test_closing_twice_does_nothing_and_a_closed_one_is_refused(library: QnnLibrary) -> None:
    backend = QnnBackend(library)
    device = QnnDevice(backend)
    for handle in (device, device, backend, backend):
        handle.close()
    with pytest.raises(ValueError, match="QnnBackend is closed"):
        QnnDevice(backend)
    with pytest.raises(ValueError, match="QnnBackend is closed"):
        assert backend.build_id
    with pytest.raises(ValueError, match="QnnDevice is closed"), device:
        pass
    assert "closed" in repr(device)


def test_a_forgotten_device_keeps_its_backend_and_warns(library: QnnLibrary) -> None:
    device = QnnDevice(QnnBackend(library))
    gc.collect()
    assert live_counts()["backends"] == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del device
        (first,) = [str(w.message) for w in caught]
        assert live_counts()["devices"] == 0
        caught.clear()  # a warning holds the object that it is about, and so the backend
        (second,) = [str(w.message) for w in caught]
        assert {w.category for w in caught} == {ResourceWarning}
    assert "never closed: <QnnDevice" in first
    assert "never closed: <QnnBackend" in second


def test_a_forgotten_one_is_freed_even_if_the_warning_is_an_error(
    library: QnnLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda u: ignored.append(u.exc_value))
    QnnBackend(library)
    assert [type(error) for error in ignored] == [ResourceWarning]
    assert live_counts()["backends"] == 0


def test_objects_forgotten_in_a_cycle_end_in_order(library: QnnLibrary) -> None:
    class Holder:
        pass

    for first in ("backend", "device"):
        holder = Holder()
        backend = QnnBackend(library)
        made = {"backend": backend, "device": QnnDevice(backend)}
        del backend
        holder.__dict__[first] = made.pop(first)
        holder.__dict__.update(made, me=holder)
        made.clear()
        del holder
        with pytest.warns(ResourceWarning):
            gc.collect()
        assert (live_counts()["backends"], live_counts()["devices"]) == (0, 0)


def test_backends_come_and_go(library: QnnLibrary) -> None:
    for _ in range(4):
        with QnnBackend(library) as backend, QnnDevice(backend), QnnDevice(backend):
            assert live_counts()["devices"] == 2
    with QnnBackend(library) as one, QnnBackend(library) as other, QnnDevice(one):
        assert one.build_id == other.build_id


def run_child(code: str) -> subprocess.CompletedProcess[str]:
    prelude = """
import os, sys
from qnnbroker.native.qnn_backend import QnnBackend, QnnDevice
from qnnbroker.native.qnn_library import QnnLibrary, default_qnn_dir
device = QnnDevice(QnnBackend(QnnLibrary(default_qnn_dir())))
"""
    command = [sys.executable, "-X", "dev", "-c", prelude + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_interpreter_exit_with_open_objects_is_silent() -> None:
    done = run_child("")
    assert (done.returncode, done.stdout) == (0, "")
    assert "LIBNATIVE" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_forked_child_may_not_use_and_does_not_free_what_its_parent_has() -> None:
    done = run_child("""
pid = os.fork()
if pid == 0:
    status = 1
    try:
        device.backend.build_id
    except ValueError as error:
        status = 0 if "belongs to process" in str(error) else 2
    device.close()
    device.backend.close()
    os._exit(status if device.closed else 3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert device.backend.build_id
device.close()
device.backend.close()
""")
    assert done.returncode == 0, done.stderr


def test_handles_cannot_be_pickled(library: QnnLibrary) -> None:
    with QnnBackend(library) as backend, pytest.raises(TypeError, match="cannot be pickled"):
        backend.__reduce__()
    assert backend.closed
