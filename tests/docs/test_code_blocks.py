# SPDX-License-Identifier: Apache-2.0
"""Every code block of the README and of the guide runs, in order, and prints what the page says."""

import subprocess
from pathlib import Path

import pytest
from tests.docs.pages import ROOT, Block, Page, blocks, commands, is_like

PAGES = {
    "README.md": [pytest.mark.qnn],
    "docs/guide.md": [],
}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("page", [pytest.param(p, marks=m) for p, m in PAGES.items()])
def test_every_code_block_runs(
    page: str, tmp_path: Path, runtime_dir: Path, no_leaks: None
) -> None:
    with Page(tmp_path, runtime_dir) as running:
        assert running.run_all((ROOT / page).read_text()) > 3
    if page == "README.md":  # which is followed in a clone
        made = {path.name for path in tmp_path.iterdir() if path.suffix != ".log"}
        assert {f"/{name}" for name in made} <= set((ROOT / ".gitignore").read_text().split())
        assert "model_ctx.onnx" in made


def test_blocks_are_found_with_their_lines() -> None:
    page = "text\n\n```python\na = 1\n```\n\n```console title\n$ ls\n```\n"
    assert blocks(page) == [Block("python", "a = 1\n", 3), Block("console", "$ ls\n", 7)]


def test_commands_have_their_continuations_and_output() -> None:
    block = Block("console", "$ a \\\n  b\nout\nput\n$ c\n", 1)
    assert commands(block) == [("a \\\n  b", "out\nput\n"), ("c", "")]


@pytest.mark.parametrize(
    ("found", "wanted", "alike"),
    [
        ("a\nb\n", "a\nb", True),
        ("a 17 b\n", "a ... b", True),
        ("a\nb\nc\n", "a\n...\nc", True),
        ("a\nb\n", "a", False),
        ("a+b\n", "a.b", False),
    ],
)
def test_output_is_compared_but_for_dots(found: str, wanted: str, alike: bool) -> None:
    assert is_like(found, wanted) is alike


@pytest.mark.parametrize(
    "text",
    [
        "```python\nassert 1 == 2\n```",
        "```python\nprint(1)\n```\n```text\n2\n```",
        "```console\n$ echo 1\n2\n```",
        "```console\n$ false\n```",
        "```toml\nmax_sessions = 'many'\n```",
        "```sh\necho\n```",
    ],
)
def test_a_wrong_block_fails(text: str, tmp_path: Path, runtime_dir: Path) -> None:
    with Page(tmp_path, runtime_dir) as running, pytest.raises(AssertionError):
        running.run_all(f"{text}\n")


def test_an_unknown_make_target_fails(tmp_path: Path, runtime_dir: Path) -> None:
    with Page(tmp_path, runtime_dir) as running, pytest.raises(subprocess.CalledProcessError):
        running.run(Block("console", "$ make nothing\n", 1))
