# SPDX-License-Identifier: Apache-2.0
"""paths: which directory it is, and that it is ours alone."""

import os
import socket
import tempfile
from pathlib import Path
from urllib.parse import unquote_to_bytes

import pytest

from qnnbroker.protos import paths
from qnnbroker.protos.errors import InvalidRequest, NotAllowed


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that names no runtime directory."""
    monkeypatch.delenv(paths.RUNTIME_DIR_ENV, raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return monkeypatch


def test_our_variable_wins_over_xdg(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("XDG_RUNTIME_DIR", "/run/user/4711")
    assert paths.runtime_dir() == "/run/user/4711/qnnbroker"
    environment.setenv(paths.RUNTIME_DIR_ENV, "/somewhere")
    assert paths.runtime_dir() == "/somewhere"


def test_a_relative_directory_of_ours_is_seen_from_here(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.chdir(tmp_path)
    environment.setenv(paths.RUNTIME_DIR_ENV, "run")
    assert paths.runtime_dir() == str(tmp_path / "run")


@pytest.mark.parametrize(
    "path", ["", ".", "run", "run/", "./run//x/.", "/", "/run/", "/run/./x//", "/a/../b", "a/.."]
)
def test_an_absolute_path_is_what_pathlib_makes_of_it(
    environment: pytest.MonkeyPatch, tmp_path: Path, path: str
) -> None:
    environment.chdir(tmp_path)
    assert paths.absolute(path) == paths.absolute(Path(path)) == str(Path(path).absolute())


@pytest.mark.parametrize("path", ["/run/plain-1_2.~x", "/a b/%2f/?#", "/é/\n/\udcff"])
def test_a_target_is_a_uri_of_exactly_that_path(path: str) -> None:
    target = paths.grpc_target(path)
    assert target.startswith("unix:/")
    assert target.isascii()
    assert not set(target) & set(" ?#\n")
    assert unquote_to_bytes(target.removeprefix("unix:")) == os.fsencode(path)


@pytest.mark.parametrize("xdg", ["", "run/user", "."])
def test_an_xdg_directory_that_is_not_absolute_is_ignored(
    environment: pytest.MonkeyPatch, xdg: str
) -> None:
    environment.setenv("XDG_RUNTIME_DIR", xdg)
    assert Path(paths.runtime_dir()).parent == Path(tempfile.gettempdir())


def test_the_fallback_is_one_directory_per_user(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setattr(tempfile, "tempdir", str(tmp_path))
    assert paths.runtime_dir() == str(tmp_path / f"qnnbroker-{os.getuid()}")
    assert not Path(paths.runtime_dir()).exists()


def test_a_made_directory_is_for_us_alone_whatever_the_umask(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "run"
    old = os.umask(0)
    try:
        paths.make_runtime_dir(directory)
    finally:
        os.umask(old)
    assert directory.stat().st_mode & 0o7777 == 0o700
    assert directory.parent.stat().st_mode & 0o7777 == 0o700
    paths.make_runtime_dir(directory)
    paths.check_private(directory)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o702, 0o704, 0o710, 0o777])
def test_a_directory_that_others_can_enter_or_read_is_refused(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(NotAllowed, match=f"has mode {mode:04o}; it must be 0700"):
        paths.make_runtime_dir(directory)
    assert directory.stat().st_mode & 0o7777 == mode


def test_a_directory_of_somebody_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.stat("/proc/1").st_uid  # init's; changing who we are works without being root
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(NotAllowed, match=f"belongs to uid {owner}, not to us") as caught:
        paths.check_private(Path("/"))
    assert caught.value.reason == "PEER_UID"


def test_a_symbolic_link_is_refused_even_to_a_directory_of_ours(tmp_path: Path) -> None:
    paths.make_runtime_dir(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("link", "dangling"):
        with pytest.raises(NotAllowed, match="is a symbolic link"):
            paths.make_runtime_dir(tmp_path / name)
    assert not (tmp_path / "nowhere").exists()


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").touch(0o600)
    with pytest.raises(NotAllowed, match="is not a directory"):
        paths.make_runtime_dir(tmp_path / "run")


def test_a_missing_directory_is_not_made_by_a_check(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        paths.check_private(tmp_path / "run")


def test_a_path_too_long_for_a_socket_is_refused_with_the_way_out(tmp_path: Path) -> None:
    directory = tmp_path / ("x" * 120)
    with pytest.raises(InvalidRequest, match="Set QNNBROKER_RUNTIME_DIR to a shorter one"):
        paths.make_runtime_dir(directory)
    assert not directory.exists()


def test_the_longest_directory_that_is_taken_really_holds_a_socket() -> None:
    with tempfile.TemporaryDirectory(prefix="q") as short:
        longest = paths.MAX_SOCKET_PATH_BYTES - len("/grpc-0000000000.sock")
        directory = Path(short, "é" * 10)
        directory = Path(f"{directory}{'x' * (longest - len(os.fsencode(directory)))}")
        paths.make_runtime_dir(directory)
        with pytest.raises(InvalidRequest):
            paths.check_socket_path(Path(f"{directory}x"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(directory / "grpc-0000000000.sock"))
