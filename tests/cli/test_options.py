# SPDX-License-Identifier: Apache-2.0
"""The broker's options: every field of BrokerConfig, from file, environment and flags, checked."""

import dataclasses
from pathlib import Path

import pytest

from qnnbroker.broker.config import BrokerConfig
from qnnbroker.cli.options import (
    CONFIG_FILE_ENV,
    all_options,
    broker_config,
    config_path,
    effective,
    read_config_file,
)
from qnnbroker.cli.problems import WrongUsage

OPTIONS = all_options()


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for option in OPTIONS.values():
        monkeypatch.delenv(option.variable, raising=False)
    monkeypatch.delenv(CONFIG_FILE_ENV, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_every_field_of_the_config_is_an_option_with_a_help_text() -> None:
    assert list(OPTIONS) == [f.name for f in dataclasses.fields(BrokerConfig)]
    assert all(o.help for o in OPTIONS.values())


def test_the_defaults_are_those_of_the_broker() -> None:
    _, settings = effective(None, {})
    assert broker_config(settings) == BrokerConfig()
    assert {s.source for s in settings.values()} == {"default"}


@pytest.mark.parametrize("name", list(OPTIONS))
def test_the_text_of_a_default_reads_back_as_the_default(name: str) -> None:
    option = OPTIONS[name]
    values = option.default if option.length else (option.default,)
    assert option.from_text(",".join(map(str, values)), "test") == option.default


def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.toml"
    file.write_text("max_sessions = 3\nmax_buffers = 4\nload_threads = 5\n")
    monkeypatch.setenv("QNNBROKER_MAX_SESSIONS", "13")
    monkeypatch.setenv("QNNBROKER_MAX_BUFFERS", "14")
    path, settings = effective(str(file), {"max_sessions": "23", "max_buffers": None})
    assert path == file
    found = {n: (settings[n].value, settings[n].source) for n in ("max_sessions", "max_buffers")}
    assert found == {"max_sessions": (23, "flag"), "max_buffers": (14, "environment")}
    assert settings["load_threads"].value == 5
    assert settings["load_threads"].place == str(file)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_buffer_bytes", "4096", 4096),
        ("max_buffer_bytes", "512MiB", 512 << 20),
        ("max_buffer_bytes", "2 GiB", 2 << 30),
        ("keep_alive_seconds", "1.5", 1.5),
        ("keep_alive_seconds", "-1", -1.0),
        ("band_workers", "1,2,3", (1, 2, 3)),
        ("log_level", "debug", "debug"),
    ],
)
def test_texts_become_values(name: str, text: str, value: object) -> None:
    assert OPTIONS[name].from_text(text, "flag") == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("max_sessions", "many"),
        ("max_sessions", "1.5"),
        ("max_sessions", ""),
        ("max_buffer_bytes", "1MB"),
        ("max_buffer_bytes", "-5"),
        ("keep_alive_seconds", "soon"),
        ("band_workers", "1,2"),
        ("band_workers", "1,2,x"),
    ],
)
def test_texts_of_another_kind_are_refused_with_place_option_wanted_and_found(
    name: str, text: str
) -> None:
    with pytest.raises(WrongUsage) as caught:
        OPTIONS[name].from_text(text, "flag --x")
    message = str(caught.value)
    assert message.startswith(f"flag --x: {name} wants ")
    assert repr(text) in message


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('max_sessions = "3"', "'3'"),
        ("max_sessions = 3.5", "3.5"),
        ("max_sessions = true", "True"),
        ("log_level = 3", "3"),
        ('keep_alive_seconds = "1"', "'1'"),
        ("keep_alive_seconds = true", "True"),
        ("band_workers = [1, 2]", "[1, 2]"),
        ('band_workers = [1, 2, "3"]', "[1, 2, '3']"),
        ("band_workers = 3", "3"),
        ("max_buffer_bytes = [1]", "[1]"),
    ],
)
def test_a_value_of_another_type_names_file_key_wanted_and_found(
    tmp_path: Path, line: str, found: str
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(line)
    with pytest.raises(WrongUsage) as caught:
        read_config_file(str(file))
    assert str(file) in str(caught.value)
    assert f"{line.split()[0]} wants " in str(caught.value)
    assert str(caught.value).endswith(f"found {found}")


def test_sizes_in_the_file_may_have_units(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('max_buffer_bytes = "64 MiB"\nkeep_alive_seconds = 5\n')
    _, values = read_config_file(str(tmp_path / "c.toml"))
    assert values == {"max_buffer_bytes": 64 << 20, "keep_alive_seconds": 5.0}


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"max_session = 3", "no option is called 'max_session'"),
        (b"[broker]\nmax_sessions = 3", "no option is called 'broker'"),
        (b"max_sessions = ", "not TOML"),
        (b"max_sessions = 3\nmax_sessions = 4", "not TOML"),
        (b"\xff\xfe\x00", "not TOML"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path: Path, content: bytes, part: str) -> None:
    (tmp_path / "c.toml").write_bytes(content)
    with pytest.raises(WrongUsage, match=part) as caught:
        read_config_file(str(tmp_path / "c.toml"))
    assert caught.value.reason == "CONFIG"


def test_a_file_at_the_usual_place_may_be_missing_a_named_one_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_config_file(None) == (None, {})
    with pytest.raises(WrongUsage, match="found nothing there"):
        read_config_file(str(tmp_path / "none.toml"))
    with pytest.raises(WrongUsage, match="found something else there"):
        read_config_file(str(tmp_path))
    monkeypatch.setenv(CONFIG_FILE_ENV, str(tmp_path / "none.toml"))
    with pytest.raises(WrongUsage, match="found nothing there"):
        read_config_file(None)


def test_the_usual_place_follows_the_xdg_specification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config_path(None) == (tmp_path / "qnnbroker/config.toml", False)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CONFIG_HOME", unusable)
        assert config_path(None)[0] == tmp_path / "me/.config/qnnbroker/config.toml"


def test_a_value_out_of_range_is_wrong_usage() -> None:
    _, settings = effective(None, {"max_sessions": "0"})
    with pytest.raises(WrongUsage, match="max_sessions"):
        broker_config(settings)
    _, settings = effective(None, {"backend": "gpu"})
    with pytest.raises(WrongUsage, match="'gpu'"):
        broker_config(settings)


def test_directories_are_made_absolute_because_the_broker_goes_to_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, settings = effective(None, {"runtime_dir": "r", "qnn_lib_dir": "lib"})
    made = broker_config(settings)
    assert (made.runtime_dir, made.qnn_lib_dir) == (str(tmp_path / "r"), str(tmp_path / "lib"))
