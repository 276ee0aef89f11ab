# SPDX-License-Identifier: Apache-2.0
"""What docs/fake-backend.md shows works as it is printed."""

import re
from pathlib import Path

import pytest
from tests.native.fake_client import RawFake

from qnnbroker.native.fake import fake_qnn_dir, parse_record
from qnnbroker.native.qnn_info import parse_binary
from qnnbroker.native.qnn_library import QnnLibrary

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "docs" / "fake-backend.md").read_text()
BLOCKS = re.findall(r"^```\w*\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def block(start: str) -> str:
    (found,) = (text for text in BLOCKS if text.startswith(start))
    return str(found)


def test_the_binary_of_the_page_is_one() -> None:
    info = parse_binary(QnnLibrary(fake_qnn_dir()), block("qnnbroker-fake 1").encode())
    assert [graph.name for graph in info.graphs] == ["image net", "tick"]
    assert info.graphs[0].weight_bytes == 1048576


def test_the_switches_of_the_page_are_understood(tmp_path: Path) -> None:
    words = block("QNNBROKER_FAKE=").strip().partition("=")[2].strip('"')
    RawFake(tmp_path / "a", words.replace("/tmp/", f"{tmp_path}/")).open()
    raw = RawFake(tmp_path / "b")
    for line in block("fail=").splitlines():
        raw.control(line.split()[0])


def test_the_line_of_the_record_is_one() -> None:
    (call,) = parse_record(block("17 "))
    assert (call.name, call.number("order"), call.arguments["t2"]) == (
        *("graphExecute", 5),
        "handle:3:16",
    )


def test_the_python_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(block("from qnnbroker"), {})
    assert capsys.readouterr().out.strip() == str(fake_qnn_dir())
    info = parse_binary(QnnLibrary(fake_qnn_dir()), Path("add.bin").read_bytes())
    assert info.graphs[0].name == "add"


def test_every_switch_is_on_the_page() -> None:
    source = (REPOSITORY / "native/qnnbroker/native/csrc/qnn_fake_switches.c").read_text()
    keys = set(re.findall(r'\{"(\w+)", offsetof|strcmp\(key, "(\w+)"\)', source))
    names = {first or second for first, second in keys}
    words = set(re.findall(r'strcmp\(text, "(\w+)"\)', source))
    assert len(names) >= 17
    for name in names:
        assert re.search(rf"`{name}=", TEXT), name
    for word in words:
        assert f"`{word}`" in TEXT, word
