# SPDX-License-Identifier: Apache-2.0
"""`make demo`: it is right, it says so by its exit code, and it leaves nothing running."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import demo
import zoo
from demo import Measured, Sample
from demo_processes import Answer, DemoError, Worker, WorkerResult
from qnnbroker.benchmarks.usage import with_descendants

DEMO = Path(demo.__file__)


def started(*arguments: str) -> subprocess.Popen[str]:
    """The demo in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-u", str(DEMO), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"COLUMNS": "120"},
    )


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.qnn
def test_two_applications_get_right_answers_from_one_context(tmp_path: Path) -> None:
    own = tmp_path / "own file.txt"
    own.write_text("#!/bin/sh\necho hello\n")
    process = started("--runs", "9", str(own))
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "The broker held 1 context for 2 sessions." in said
    assert said.count(" right ") == 8
    assert "own file.txt" in said
    assert "With imports aside" in said
    assert re.search(r"in all +│ +\d+ │ +\d+", said)
    broker = int(re.search(r"The broker is process (\d+)", said)[1])  # type: ignore[index]
    assert not Path(f"/proc/{broker}").exists()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.qnn
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_ended_demo_leaves_nothing_running(number: signal.Signals) -> None:
    zoo.compiled("magika_fused")
    with started() as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "The broker is process" in line:
                break
        family = with_descendants(process.pid)
        assert len(family) > 1
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert [pid for pid in family if Path(f"/proc/{pid}").exists()] == []


def result(label: str) -> WorkerResult:
    """An application that said `label` about the one file, twice."""
    answers = {Path("/file"): [Answer("png", 1.0), Answer(label, 0.9)]}
    return WorkerResult(0.05, 0.1, 0.2, answers)


def test_times_are_told_with_imports_and_without(capsys: pytest.CaptureFixture[str]) -> None:
    demo.show_times(*measured(["png"] * 4), emulated=True)
    aside, whole = capsys.readouterr().out.split("With imports, ")
    assert re.findall(r"\d\.\d+", aside) == ["0.050", "0.150"] * 4
    assert re.findall(r"\d\.\d+", whole) == ["0.100", "0.200"] * 4


@pytest.mark.parametrize("wrong", range(4))
def test_one_wrong_answer_of_anyone_makes_it_wrong(wrong: int) -> None:
    labels = ["png"] * 4
    assert demo.show_answers([Sample(Path("/file"), "png")], *measured(labels))
    labels[wrong] = "pdf"
    assert not demo.show_answers([Sample(Path("/file"), "png")], *measured(labels))
    # Of a file whose type nobody knows, all must say the same.
    assert not demo.show_answers([Sample(Path("/file"), None)], *measured(labels))


def measured(labels: list[str]) -> tuple[Measured, Measured]:
    """Both ways, from the last labels of the four applications."""
    said = [result(label) for label in labels]
    return Measured(said[0], said[1], {"broker": 1}), Measured(said[2], said[3], {})


def test_an_application_that_cannot_start_is_reported_in_its_own_words(tmp_path: Path) -> None:
    missing = tmp_path / "nothing_ctx.onnx"
    with Worker("broker", "application", missing, [DEMO], 1, tmp_path / "nowhere") as worker:
        worker.start()
        with pytest.raises(DemoError, match=r"(?s)ended before its time: .*BrokerUnavailable"):
            worker.wait_first_answer()
