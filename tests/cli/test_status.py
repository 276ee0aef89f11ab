# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker status` and `qnnbroker sessions`: what they tell of a broker that works."""

import os

from tests.broker_process import BrokerProcess
from tests.cli.driver import CommandLine
from tests.fake_models import MakeModel

from qnnbroker.cli.status import memory_of
from qnnbroker.client import connect


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
