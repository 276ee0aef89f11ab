# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker status` and `qnnbroker sessions`: what they tell of a broker that works."""

import os

import numpy as np
import numpy.typing as npt
from tests.broker_process import BrokerProcess
from tests.cli.driver import CommandLine
from tests.fake_models import TENSOR_BYTES, MakeModel, adder, numbers

from qnnbroker.cli.status import memory_of
from qnnbroker.client import connect
from qnnbroker.v1 import control_pb2 as pb
from qnnbroker.v1 import types_pb2


def test_status_tells_everything_as_json(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    with connect(cli.runtime_dir, name="a client") as session, session.load(make_model()) as model:
        buffer = session.alloc(10_000)
        document = cli("status", "--json").document()
        buffer.release()
    assert document["pid"] == broker.pid
    assert document["backend"]["provider"]
    assert document["uptime_seconds"] > 0
    assert document["limits"]["max_sessions"] if "max_sessions" in document["limits"] else True
    assert 0 < document["memory"]["private_bytes"] <= document["memory"]["rss_bytes"]
    assert document["counters"]["sessions"] == 1
    (found,) = document["sessions"]
    assert (found["pid"], found["uid"]) == (os.getpid(), os.getuid())
    assert (found["buffer_count"], found["buffer_bytes"]) == (1, 12288)
    (held,) = document["models"]
    assert (held["content_hash"], held["state"]) == (model.content_hash, "ready")
    assert isinstance(held["run_count"], int)


def test_status_is_one_screen_for_people(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    cli("load", make_model("ocr"), "--keep-alive", "forever").ok()
    text = cli("status").ok()
    for part in (f"pid          {broker.pid}", "PSS", "fake", "No sessions", "ocr", "loads_total"):
        assert part in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_status_shows_what_ran_how_long_it_took_and_what_was_copied(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    with (
        connect(cli.runtime_dir, ring=False, band="high") as session,
        session.load(make_model("ocr", adder("g"))) as model,
    ):
        with model.graph.bind() as binding:
            binding.run()
        before = cli("status", "--json").document()
        a, b = numbers(1)
        request = pb.InferRequest(name=model.name, inputs=[inline("a", a), inline("b", b)])
        session._control.infer(request, 60.0)
        after, text = cli("status", "--json").document(), cli("status").ok()
    size = 3 * TENSOR_BYTES
    for what, numbered in (("graphs", 0), ("sessions", 0)):
        assert "copied_bytes" not in before[what][numbered] or not before[what][0]["copied_bytes"]
        assert after[what][numbered]["copied_bytes"] == size
        assert after[what][numbered]["run_count"] == 2
    assert after["sessions"][0]["band"] == "high"
    (row,) = [line for line in text.splitlines() if line.startswith("g ")]
    assert row.split()[:4] == ["g", "ocr", "2", "0"]
    assert row.count(" / ") == 3
    assert "Queue p50 / p99" in text
    assert row.endswith(f"{size} B")


def inline(name: str, array: "npt.NDArray[np.float32]") -> types_pb2.InlineTensor:
    return types_pb2.InlineTensor(
        name=name, dtype=types_pb2.DATA_TYPE_FLOAT32, shape=array.shape, data=array.tobytes()
    )


def test_memory_is_that_of_the_process_or_not_known() -> None:
    ours = memory_of(os.getpid())
    assert ours is not None
    assert 1 << 20 < ours["pss_bytes"] <= ours["rss_bytes"]
    assert memory_of(2**22 + 1) is None


def test_sessions_are_listed_with_what_they_hold_and_did(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    assert cli("sessions").ok() == "No sessions\n"
    with connect(cli.runtime_dir) as session, session.load(make_model()) as model:
        with model.graph.bind() as binding:
            for _ in range(3):
                binding.run()
            (found,) = cli("sessions", "--json").document()["sessions"]
            text = cli("sessions").ok()
    assert (found["pid"], found["run_count"]) == (os.getpid(), 3)
    assert (found["binding_count"], found["model_count"], found["in_flight"]) == (1, 1, 0)
    assert found["device_ns"] > 0
    assert found["age_seconds"] > 0
    heading, row = text.splitlines()
    assert heading.split()[:4] == ["Session", "Pid", "Uid", "Command"]
    assert str(os.getpid()) in row


def test_a_name_that_would_steer_the_terminal_is_shown_escaped(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    cli("load", make_model(), "--name", "a\x1b]0;x\x07[bold]b", "--keep-alive", "forever").ok()
    assert "a\\x1b]0;x\\x07[bold]b" in cli("ls").ok()
