# SPDX-License-Identifier: Apache-2.0
"""The reference of the command line is what the program says of itself."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from tests.docs.pages import ROOT

from qnnbroker.cli.group import COMMANDS

PRINT = "import sys; sys.path.insert(0, 'docs'); import generate_cli; print(generate_cli.page())"


@pytest.fixture
def make_page() -> Callable[[], str]:
    """Makes the page in a process of its own: click keeps what it made for other tests here."""

    def made() -> str:
        done = subprocess.run(
            [sys.executable, "-c", PRINT],
            cwd=ROOT,
            env=os.environ,
            stdout=subprocess.PIPE,
            check=True,
            timeout=60,
        )
        return done.stdout.decode().removesuffix("\n")

    return made


@pytest.fixture
def page(make_page: Callable[[], str]) -> str:
    return make_page()


def test_the_committed_reference_is_current(page: str) -> None:
    committed = (ROOT / "docs/cli.md").read_text()
    assert committed == page, "the command line has changed: run `make cli-reference`"


def test_every_command_has_its_section_with_examples(page: str) -> None:
    for name in COMMANDS:
        section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert f"`qnnbroker {name}" in section
        assert "| `-h, --help` |" in section
        assert f"\nqnnbroker {name}" in section or f" qnnbroker {name}" in section


def test_the_reference_does_not_depend_on_who_writes_it(
    make_page: Callable[[], str], page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("COLUMNS", "40"), ("QNNBROKER_MAX_SESSIONS", "7"), ("LANG", "C")):
        monkeypatch.setenv(name, value)
    assert make_page() == page
