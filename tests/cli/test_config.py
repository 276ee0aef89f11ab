# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker config`: what it shows, and the file that it writes."""

import tomllib

from tests.cli.driver import CommandLine

from qnnbroker.cli.config import commented, toml_value
from qnnbroker.cli.options import all_options
from qnnbroker.cli.problems import FAILED, USAGE


def test_the_sources_of_values_are_told(cli: CommandLine) -> None:
    (cli.home / "c.toml").write_text("max_sessions = 7\n")
    document = cli(
        "config", "--json", "--config", "c.toml", env={"QNNBROKER_LOG_LEVEL": "debug"}
    ).document()
    options = document["options"]
    assert document["file"] == str(cli.home / "c.toml")
    assert list(options) == list(all_options())
    assert (options["max_sessions"]["value"], options["max_sessions"]["source"]) == (7, "file")
    assert options["log_level"]["source"] == "environment"
    assert options["log_level"]["place"] == "QNNBROKER_LOG_LEVEL"
    assert options["max_buffers"]["source"] == "default"
    assert options["max_buffer_bytes"]["unit"] == "bytes"
    text = cli("config", "--show", "--config", "c.toml").ok()
    assert "max_sessions" in text
    assert f"file {cli.home / 'c.toml'}" in text


def test_the_written_file_changes_nothing_and_every_line_of_it_can_be_used(
    cli: CommandLine,
) -> None:
    path = cli.home / "config/qnnbroker/config.toml"
    assert cli("config", "--init", "--json").document() == {"written": str(path)}
    assert path.stat().st_mode & 0o777 == 0o600
    assert tomllib.loads(path.read_text()) == {}
    options = cli("config", "--json").document()["options"]
    assert {o["source"] for n, o in options.items() if n != "runtime_dir"} == {"default"}
    used = "\n".join(
        line[1:] for line in path.read_text().splitlines() if line.startswith("#") and " = " in line
    )
    assert set(tomllib.loads(used)) == set(options)
    path.write_text("\n".join(x for x in used.splitlines() if not x.startswith("runtime_dir")))
    again = cli("config", "--json").document()["options"]
    assert {n: o["value"] for n, o in again.items()} == {n: o["value"] for n, o in options.items()}


def test_an_existing_file_is_left_alone(cli: CommandLine) -> None:
    (cli.home / "c.toml").write_text("load_threads = 1\n")
    assert "already" in cli("config", "--init", "--config", "c.toml").failed(FAILED)
    assert (cli.home / "c.toml").read_text() == "load_threads = 1\n"


def test_a_bad_file_fails_in_one_line_with_code_2(cli: CommandLine) -> None:
    (cli.home / "c.toml").write_text('max_sessions = "x"\n')
    message = cli("config", "--config", "c.toml").failed(USAGE)
    assert "c.toml" in message
    assert "max_sessions wants a whole number, found 'x'" in message
    (cli.home / "c.toml").write_text("max_sessions = 0\n")
    assert "max_sessions" in cli("config", "--config", "c.toml").failed(USAGE)
    assert cli("config", "--init", "--show").failed(USAGE)
    assert "no directory" not in cli("config", "--config", "missing.toml").failed(USAGE)


def test_the_runtime_directory_of_the_file_is_where_commands_look(cli: CommandLine) -> None:
    (cli.home / "c.toml").write_text('runtime_dir = "/nowhere/else"\n')
    unset = {"QNNBROKER_RUNTIME_DIR": None}
    assert "/nowhere/else" in cli("ls", "--config", "c.toml", env=unset).failed(3)
    assert "/nowhere/else" not in cli("ls", "--config", "c.toml").failed(3)


def test_a_directory_that_cannot_be_made_is_one_line(cli: CommandLine) -> None:
    (cli.home / "file").touch()
    cli("config", "--init", "--config", "file/c.toml").failed(FAILED)


def test_values_are_written_as_toml_reads_them() -> None:
    for value in ('a"b\\c', 3, 1.5, True, (1, 2, 3)):
        read = tomllib.loads(f"x = {toml_value(value)}")["x"]
        assert (tuple(read) if isinstance(read, list) else read) == value
    assert commented().count("#") >= 2 * len(all_options())
