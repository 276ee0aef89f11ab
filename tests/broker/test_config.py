# SPDX-License-Identifier: Apache-2.0
"""What a broker can be started with, and what it cannot."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from qnnbroker.broker.config import BrokerConfig
from qnnbroker.protos.errors import InvalidRequest


def test_a_config_survives_the_way_through_json() -> None:
    config = BrokerConfig(
        runtime_dir="/run/ü",
        backend="fake",
        band_workers=(1, 2, 3),
        keep_alive_seconds=-1.5,
        attach_fd=5,
    )
    assert BrokerConfig.from_json(config.to_json()) == config
    assert config.directory == Path("/run/ü")


def test_every_option_says_what_it_is() -> None:
    for f in dataclasses.fields(BrokerConfig):
        assert f.metadata["help"]
        assert isinstance(f.metadata["unit"], str)


def test_the_default_directory_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QNNBROKER_RUNTIME_DIR", "/somewhere")
    assert BrokerConfig().runtime_dir == "/somewhere"
    assert BrokerConfig.from_json("{}").runtime_dir == "/somewhere"


def test_the_limits_are_those_of_the_config() -> None:
    limits = BrokerConfig(max_buffers=3, max_in_flight=7, max_session_bytes=2**40).limits()
    assert (limits.max_buffers, limits.max_in_flight, limits.max_session_bytes) == (3, 7, 2**40)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("backend", "cuda"),
        ("backend", 1),
        ("runtime_dir", None),
        ("log_level", "loud"),
        ("log_level", ["info"]),
        ("qnn_log_level", 0),
        ("qnn_log_level", 6),
        ("qnn_log_level", True),
        ("max_sessions", 0),
        ("max_buffers", -1),
        ("max_bindings", 1.5),
        ("max_bindings", 2**32),
        ("max_buffer_bytes", "1G"),
        ("max_buffer_bytes", 2**40 + 1),
        ("max_session_bytes", 2**63),
        ("max_message_bytes", 2**31),
        ("load_threads", 0),
        ("band_workers", [1, 1]),
        ("band_workers", [1, 1, 0]),
        ("band_workers", [1, 1, 65]),
        ("band_workers", 1),
        ("band_workers", [1, 1, True]),
        ("band_priorities", [0, 100, 501]),
        ("band_priorities", [-1, 100, 200]),
        ("keep_alive_seconds", "long"),
        ("hello_timeout_seconds", 0),
        ("stop_timeout_seconds", -1),
        ("attach_fd", -2),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=option):
        BrokerConfig.from_json(json.dumps({option: value}))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_a_time_that_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match="keep_alive_seconds"):
        BrokerConfig.from_json(f'{{"keep_alive_seconds": {value}}}')


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"x"', "null"])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="JSON"):
        BrokerConfig.from_json(text)


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="max_session_byte'"):
        BrokerConfig.from_json('{"max_session_byte": 1}')
