# SPDX-License-Identifier: Apache-2.0
"""Verdicts: kept whole or not at all; nothing that is not ours, or not sound, counts."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from qnnbroker.broker.verdicts import Verdict, VerdictStore, default_directory
from qnnbroker.protos.errors import InvalidRequest, VersionMismatch

HASH = "ab" * 32
GOOD = Verdict(HASH, "v2.51", "chip", True, "abababab", ("class1",))
BAD = Verdict(HASH, "v2.51", "chip", False, "", (), "VersionMismatch", "WRONG_CHIP", "no good")


@pytest.fixture
def store(tmp_path: Path) -> VerdictStore:
    return VerdictStore(tmp_path / "deep" / "verdicts")


@pytest.mark.parametrize("verdict", [GOOD, BAD, replace(BAD, limit_seconds=2.5)])
def test_a_verdict_comes_back_with_its_date(store: VerdictStore, verdict: Verdict) -> None:
    assert store.get(HASH, "v2.51", "chip") is None
    kept = store.put(verdict)
    assert kept.date
    assert store.get(HASH, "v2.51", "chip") == kept == replace(verdict, date=kept.date)
    assert VerdictStore(store.directory).get(HASH, "v2.51", "chip") == kept
    assert store.directory.stat().st_mode & 0o777 == 0o700
    assert [p.suffix for p in store.directory.iterdir()] == [".json"]


def test_another_build_or_device_asks_again(store: VerdictStore) -> None:
    store.put(GOOD)
    assert store.get(HASH, "v2.52", "chip") is None
    assert store.get(HASH, "v2.51", "chip soc 43") is None
    assert store.get("cd" * 32, "v2.51", "chip") is None


def test_a_refusal_is_the_error_it_was_and_says_when(store: VerdictStore) -> None:
    error = store.put(BAD).refusal()
    assert isinstance(error, VersionMismatch)
    assert error.reason == "WRONG_CHIP"
    assert "no good (found out on 20" in str(error)
    assert isinstance(replace(BAD, error="Nonsense").refusal(), InvalidRequest)


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def of_another_format(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))


def with_another_type(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "accepted": 1}))


def with_more_fields(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "more": 1}))


def about_something_else(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "content_hash": "ef" * 32}))


def writable_by_others(path: Path) -> None:
    path.chmod(0o666)


def a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def huge(path: Path) -> None:
    os.truncate(path, 1 << 30)


@pytest.mark.parametrize(
    "spoil",
    [
        damaged,
        of_another_format,
        with_another_type,
        with_more_fields,
        about_something_else,
        writable_by_others,
        a_link,
        a_fifo,
        huge,
    ],
)
def test_what_is_not_a_sound_file_of_ours_is_no_verdict(
    store: VerdictStore, spoil: Callable[[Path], None]
) -> None:
    store.put(GOOD)
    spoil(store.path(HASH, "v2.51", "chip"))
    assert store.get(HASH, "v2.51", "chip") is None
    kept = store.put(BAD)
    assert store.get(HASH, "v2.51", "chip") == kept


def test_what_cannot_be_written_is_remembered_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = VerdictStore(tmp_path / "file" / "verdicts")
    kept = store.put(GOOD)
    assert store.get(HASH, "v2.51", "chip") == kept


def test_the_usual_place_is_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory(Path("/run/x")) == tmp_path / "qnnbroker" / "verdicts"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_directory(Path("/run/x")) == tmp_path / ".cache" / "qnnbroker" / "verdicts"
    monkeypatch.setenv("HOME", "/nonexistent")
    assert default_directory(Path("/run/x")) == Path("/run/x/verdicts")
