# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker reset` and `qnnbroker park` below clients that are attached."""

from tests.broker_process import BrokerProcess
from tests.cli.driver import CommandLine
from tests.conftest import StartBroker
from tests.fake_models import MakeModel, adder

from qnnbroker.client import connect


def test_bindings_are_parked_and_go_on(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    with connect(cli.runtime_dir) as session:
        first = session.load(make_model("first")).graph.bind()
        second = session.load(make_model("second", adder("other"))).graph.bind()
        assert cli("park", "first").ok() == "1 bindings parked\n"
        assert cli("park", "--json").document() == {"parked_count": 1}
        assert cli("park").ok() == "0 bindings parked\n"
        for binding in (first, second):
            binding.run()
        assert cli("park", "nobody", "--json").error(1)["reason"] == "MODEL_UNKNOWN"


def test_a_reset_says_what_it_did(
    cli: CommandLine, broker: BrokerProcess, make_model: MakeModel
) -> None:
    with connect(cli.runtime_dir) as session, session.load(make_model()).graph.bind() as binding:
        binding.run()
        assert cli("reset", "--json").document() == {
            "parked_count": 1,
            "context_count": 1,
            "lost": [],
        }
        text = cli("reset").ok()
        assert text.startswith("1 contexts made anew, 0 bindings parked")
        binding.run()


def test_what_a_reset_loses_is_told_and_is_a_failure(
    cli: CommandLine, start_broker: StartBroker, make_model: MakeModel
) -> None:
    broker = start_broker()
    broker.accidents_expected = True
    with connect(cli.runtime_dir) as session:
        session.load(make_model("precious"), name="precious")
        broker.set_faults("fail=contextCreateFromBinary:1:1002")
        ended = cli("reset")
        assert (ended.code, ended.err) == (1, "")
        assert "lost: context" in ended.out
        assert "(precious)" in ended.out
        assert "1002" in ended.out
        (row,) = [line for line in cli("ls").ok().splitlines() if "precious" in line]
        assert "lost" in row
        assert "NPU_MEMORY" in row
        broker.set_faults()
        assert cli("reset", "--json").document()["lost"] == []
        session.models[0].graph.bind().run()


def test_a_reset_that_cannot_be_says_what_runs(
    cli: CommandLine, start_broker: StartBroker, make_model: MakeModel
) -> None:
    broker = start_broker(reset_timeout_seconds=0.2)
    with connect(cli.runtime_dir) as session, session.load(make_model()).graph.bind() as binding:
        broker.set_faults("hang=graphExecute:1")
        submission = binding.submit()
        broker.wait_hanging(1)
        error = cli("reset", "--json").error(1)
        assert error["reason"] == "RUNNING"
        assert "graph 'add' of context" in error["message"]
        broker.set_faults("unhang")
        submission.result(20)


def test_without_a_broker_there_is_nothing_to_reset(cli: CommandLine) -> None:
    cli("reset").failed(3)
    cli("park").failed(3)
