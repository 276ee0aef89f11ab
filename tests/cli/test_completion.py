# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker completion`: a script per shell, and what the script gets for an answer."""

import subprocess

import pytest
from tests.cli.driver import CommandLine


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_script_for_each_shell(cli: CommandLine, shell: str) -> None:
    script = cli("completion", shell).ok()
    assert f"{shell}_complete" in script
    assert "_QNNBROKER_COMPLETE" in script
    document = cli("completion", shell, "--json").document()
    assert (
        document == {"shell": shell, "script": script.rstrip("\n")}
        or document["script"].rstrip() == script.rstrip()
    )


def test_the_bash_script_is_bash(cli: CommandLine) -> None:
    script = cli("completion", "bash").ok()
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "current", "offered"),
    [
        ("qnnbroker st", "1", {"stop", "status"}),
        ("qnnbroker run --to", "2", {"--tolerance"}),
        ("qnnbroker completion z", "2", {"zsh"}),
    ],
)
def test_the_program_answers_the_script(
    cli: CommandLine, words: str, current: str, offered: set[str]
) -> None:
    env = {"_QNNBROKER_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": current}
    answer = cli(env=dict(env)).ok()
    assert {line.split(",")[1] for line in answer.splitlines()} == offered
