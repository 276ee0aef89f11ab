# SPDX-License-Identifier: Apache-2.0
"""Every example is one command that is right, ends with a code, and leaves nothing running."""

import ast
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.broker_process import BrokerProcess
from tests.conftest import StartBroker

import speech_stream
import zoo
from qnnbroker.client import connect
from zoo.silero import STREAM_CHUNKS, check_stream, chunks

EXAMPLES = Path(speech_stream.__file__).parent
ON_THE_NPU = [pytest.mark.slow, pytest.mark.processes, pytest.mark.qnn]
#: Making a model of the zoo, on a machine that has other things to do.
_SECONDS = 300
_MARK = "QNNBROKER_TEST_EXAMPLE"


class Example:
    """Runs examples, and knows what they started."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex

    def start(self, name: str, *arguments: str | Path) -> "subprocess.Popen[str]":
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("QNNBROKER_RUNTIME")}
        return subprocess.Popen(
            [sys.executable, EXAMPLES / f"{name}.py", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=inherited | {_MARK: self.mark, "PYTHONWARNINGS": "default"},
        )

    def __call__(self, name: str, *arguments: str | Path, code: int = 0) -> tuple[str, str]:
        """What it said on both streams; it must have ended with `code`."""
        with self.start(name, *arguments) as process:
            out, err = process.communicate(timeout=_SECONDS)
        assert process.returncode == code, (out, err)
        return out, err

    def running(self) -> list[str]:
        """Command lines of what they started and still runs."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{_MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_text().replace("\0", " "))
            except OSError:  # it ended, or is not ours
                continue
        return found


@pytest.fixture
def example() -> Iterator[Example]:
    runner = Example()
    yield runner
    assert runner.running() == []


@pytest.fixture
def npu_broker(start_broker: StartBroker) -> BrokerProcess:
    """A broker on the real QNN library."""
    return start_broker(backend="qnn")


@pytest.fixture(
    params=[pytest.param(own, marks=ON_THE_NPU, id=own) for own in ("private", "named")]
)
def options(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """For an example that starts a broker, and for one that is told of one, which stays."""
    if request.param == "private":
        yield []
    else:
        broker: BrokerProcess = request.getfixturevalue("npu_broker")
        yield ["--runtime-dir", str(broker.runtime_dir)]
        broker.wait_counters(sessions=0)


def test_two_applications_get_one_context(example: Example, options: list[str]) -> None:
    out, err = example("two_apps", *options)
    assert err == ""
    assert "first: loaded it" in out
    assert "second: found it in memory" in out
    assert out.count("speech with probability") == 4
    assert "contexts in the broker: 1\n" in out


def test_speech_is_drawn_on_a_line_of_time(example: Example, options: list[str]) -> None:
    out, err = example("speech_stream", "--seconds", "3.5", *options)
    assert err == ""
    lines = out.splitlines()
    assert len(lines) == 6, out
    assert lines[2].endswith(f"|{'#' * 31}|"), "the second one is all speech"
    assert lines[3].count(" ") > 15, "the third one begins with a pause"


def test_files_are_known_by_their_content(
    example: Example, options: list[str], tmp_path: Path
) -> None:
    script, missing = tmp_path / "picture.png", tmp_path / "missing"
    script.write_text("import os\n\n\ndef main() -> None:\n    print(os.getcwd())\n" * 9)
    out, err = example("what_is_this_file", *options, missing, tmp_path, script, code=1)
    assert out.startswith(f"{script}: python (")
    assert err.splitlines() == [
        f"{missing}: a regular file wanted, found none",
        f"{tmp_path}: a regular file wanted, found none",
    ]


def test_the_protos_alone_are_enough(example: Example, options: list[str]) -> None:
    out, err = example("grpc_only", *options)
    assert err == ""
    assert "LOAD_STAGE_READY" in out
    assert "a word (chunk 31): speech with probability" in out
    # 4 * (576 + 256) bytes go in, 4 * (1 + 256) come back.
    assert out.count(" 4356 bytes copied") == 2
    assert "WRONG" not in out


def test_a_client_from_the_protos_alone_imports_nothing_else_of_ours() -> None:
    tree = ast.parse((EXAMPLES / "grpc_only.py").read_text())
    imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)} | {
        a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names
    }
    assert {m for m in imported if m and m.startswith("qnnbroker")} == {
        "qnnbroker.v1",
        "qnnbroker.v1.control_pb2_grpc",
    }


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.qnn
def test_a_state_carried_in_shared_memory_gives_the_known_answers(
    npu_broker: BrokerProcess, no_leaks: None
) -> None:
    with (
        connect(npu_broker.runtime_dir) as session,
        session.load(zoo.compiled("silero_vad")) as model,
    ):
        heard = list(speech_stream.probabilities(model.graph, chunks()[:STREAM_CHUNKS]))
    right, answer = check_stream(heard)
    assert right, answer


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.qnn
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_ended_example_ends_what_it_started(example: Example, number: signal.Signals) -> None:
    with example.start("speech_stream", "--seconds", "60") as process:
        assert process.stdout is not None
        while "0.0 s |" not in (line := process.stdout.readline()):
            assert line, process.communicate()
        assert len(example.running()) == 2
        process.send_signal(number)
        _, err = process.communicate(timeout=_SECONDS)
    assert process.returncode == 128 + number
    assert err == ""


@pytest.mark.slow
@pytest.mark.qnn
@pytest.mark.parametrize("name", ["two_apps", "speech_stream", "grpc_only"])
def test_without_the_named_broker_an_example_says_so_in_a_line(
    example: Example, name: str, tmp_path: Path
) -> None:
    out, err = example(name, "--runtime-dir", tmp_path, code=1)
    assert set(err.splitlines()) == {err.splitlines()[-1]}
    assert err.startswith(f"{name}.py: ")
    assert str(tmp_path) in err
    assert "context" not in out


@pytest.mark.slow
def test_a_file_that_is_no_recording_is_refused_before_anything_starts(
    example: Example, tmp_path: Path
) -> None:
    empty = tmp_path / "empty.wav"
    empty.write_bytes(b"")
    for path, said in [(empty, "it is no WAVE file"), (tmp_path / "gone.wav", "No such file")]:
        out, err = example("speech_stream", path, code=1)
        assert out == ""
        assert err.count("\n") == 1
        assert said in err


@pytest.mark.slow
def test_a_broker_that_cannot_start_is_reported_in_its_own_words(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QNNBROKER_MAX_SESSIONS", "none")
    _, err = example("what_is_this_file", __file__, code=1)
    assert err.count("\n") == 1
    assert err.startswith("what_is_this_file.py: the broker did not start: ")
    assert "QNNBROKER_MAX_SESSIONS" in err
