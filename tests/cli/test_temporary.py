# SPDX-License-Identifier: Apache-2.0
"""What a command makes for a while is gone after it, at whatever moment a signal asks it to end."""

import contextlib
import gc
import os
import signal
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from qnnbroker.broker.interrupts import deferred
from qnnbroker.cli.compiling import work_directory
from qnnbroker.cli.temporary import temporary_directory, whole_file

Use = Callable[[Path], None]

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Asked(BaseException):
    """What the handlers of these tests raise, as SIGTERM's does in a command."""


def ask(number: int, frame: FrameType | None) -> None:
    raise Asked(number)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """SIGINT and SIGTERM raise while a test runs, and are as before after it."""
    before = {number: signal.signal(number, ask) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def use_directory(parent: Path) -> None:
    with temporary_directory(".made.", ".beside", parent) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "content").write_bytes(b"1")


def use_work_directory(parent: Path) -> None:
    with work_directory(parent / "m_ctx.onnx") as folder:
        (folder / "content").write_bytes(b"1")


def use_file(parent: Path) -> None:
    with whole_file(parent / "result") as file:
        file.write(b"whole")


class Moments:
    """A trace function that raises a signal at one line of Python, counted from the start."""

    def __init__(self, wanted: int, number: int) -> None:
        self._wanted, self._number = wanted, number
        self.count = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> "Moments":
        if event == "line":
            self.count += 1
            if self.count == self._wanted:
                signal.raise_signal(self._number)
        return self


def interrupted(use: Use, parent: Path, wanted: int, number: int) -> bool:
    """Whether the use was asked to end at its line `wanted`; else it has fewer lines."""
    moments, before = Moments(wanted, number), sys.gettrace()
    for other in NUMBERS:
        signal.signal(other, ask)  # the last signal may have come while they were replaced
    with contextlib.suppress(Asked):
        sys.settrace(moments)
        try:
            use(parent)
        finally:
            sys.settrace(before)
    if os.listdir(parent):
        gc.collect()
    return moments.count >= wanted


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("use", [use_directory, use_work_directory, use_file])
def test_a_signal_at_any_line_leaves_nothing_behind(use: Use, number: int, tmp_path: Path) -> None:
    whole: set[str] = set()
    tried = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # a finalizer did it
        while interrupted(use, tmp_path, tried + 1, number):
            tried += 1
            left = set(os.listdir(tmp_path))
            assert left <= {"result"}, f"after a signal at line {tried}"
            whole |= left
            for name in left:
                assert (tmp_path / name).read_bytes() == b"whole"
                (tmp_path / name).unlink()
    assert tried > 50, "the lines of the making and of the removal are among them"
    assert whole == ({"result"} if use is use_file else set())


def test_a_signal_right_after_the_making_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = os.mkdir

    def make_and_ask(*arguments: Any, **options: Any) -> None:
        mkdir(*arguments, **options)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(os, "mkdir", make_and_ask)
    for use in (use_directory, use_work_directory, use_file):
        with pytest.raises(Asked):
            use(tmp_path)
        assert os.listdir(tmp_path) == []


def test_a_signal_during_the_removal_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = os.unlink

    def ask_and_unlink(*arguments: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        unlink(*arguments, **options)

    monkeypatch.setattr(os, "unlink", ask_and_unlink)
    for use in (use_directory, use_work_directory):
        with pytest.raises(Asked):
            use(tmp_path)
        assert os.listdir(tmp_path) == []


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with contextlib.suppress(ZeroDivisionError), whole_file(path) as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    with whole_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["f"]


def test_a_file_has_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        use_file(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "result").stat().st_mode) == 0o640


def test_deferred_signals_come_after_the_block_and_the_handlers_are_back() -> None:
    done = []

    def block() -> None:
        with deferred():
            signal.raise_signal(signal.SIGTERM)
            done.append("the block")

    with pytest.raises(Asked) as asked:
        block()
    assert asked.value.args == (signal.SIGTERM,)
    assert done == ["the block"]
    assert [signal.getsignal(number) for number in NUMBERS] == [ask, ask]


def test_deferral_inside_deferral_waits_for_the_outer_block() -> None:
    done = []

    def blocks() -> None:
        with deferred():
            with deferred():
                signal.raise_signal(signal.SIGINT)
            done.append("the outer block")

    with pytest.raises(Asked):
        blocks()
    assert done == ["the outer block"]


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with deferred():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_another_thread_may_make_a_directory(tmp_path: Path) -> None:
    seen: list[bool] = []

    def use() -> None:
        with temporary_directory(".made.", parent=tmp_path) as folder:
            seen.append(folder.is_dir())

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [True]
    assert os.listdir(tmp_path) == []
