# SPDX-License-Identifier: Apache-2.0
"""Which clocks are voted for, when; and that the library is told exactly that."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.broker_process import BrokerProcess
from tests.fake_models import MakeModel, inline_inputs
from tests.waiting import wait_until

from qnnbroker.broker.config import PERF_MODES, BrokerConfig
from qnnbroker.broker.power import (
    SUSPENDED_SECONDS,
    VOTES,
    PowerGovernor,
    PowerPolicy,
    check_mode,
    rank,
    suspended_seconds,
)
from qnnbroker.client import InvalidRequest, NpuRestarted, connect
from qnnbroker.native.fake import read_record
from qnnbroker.v1 import control_pb2 as pb


def policy(ceiling: str = "burst") -> PowerPolicy:
    return PowerPolicy(ceiling, hold_seconds=1.0, idle_seconds=5.0)


def test_the_highest_mode_that_is_wanted_applies_at_once() -> None:
    p = policy()
    assert p.decide([], 0.0) == ""
    assert p.decide(["balanced"], 0.1) == "balanced"
    assert p.decide(["power_saver", "burst", "balanced"], 0.2) == "burst"


def test_nothing_goes_beyond_the_ceiling() -> None:
    assert policy("balanced").decide(["burst"], 0.0) == "balanced"
    assert policy("balanced").decide(["power_saver"], 0.0) == "power_saver"
    assert policy("default").decide(["burst"], 0.0) == ""


def test_a_lower_mode_waits_until_the_higher_was_not_wanted_for_a_while() -> None:
    p = policy()
    p.decide(["burst"], 0.0)
    assert p.decide(["balanced"], 0.5) == "burst"
    assert p.decide(["burst"], 0.8) == "burst"
    assert p.decide(["balanced"], 1.7) == "burst"
    assert p.decide(["balanced"], 1.9) == "balanced"


def test_work_that_comes_and_goes_does_not_make_it_flap() -> None:
    p = policy()
    modes = [p.decide(["burst"] if i % 2 else ["balanced"], i * 0.4) for i in range(20)]
    assert modes[0] == "balanced"
    assert set(modes[1:]) == {"burst"}


def test_without_work_the_vote_stands_for_the_idle_time_and_no_longer() -> None:
    p = policy()
    p.decide(["high_performance"], 0.0)
    assert p.decide([], 4.9) == "high_performance"
    assert p.decide([], 5.1) == ""
    assert p.decide([], 6.0) == ""
    assert p.decide(["balanced"], 6.1) == "balanced"


def test_default_is_no_vote() -> None:
    assert policy().decide(["default"], 0.0) == ""
    assert rank("default") == rank("") == 0


def test_the_modes_are_those_of_the_execution_provider() -> None:
    assert len(PERF_MODES) == 10
    assert set(VOTES) == set(PERF_MODES) - {"default"}
    assert check_mode("") == ""
    with pytest.raises(InvalidRequest, match="turbo"):
        check_mode("turbo")


class Port:
    def __init__(self, log: list[Any]) -> None:
        self.log = log
        log.append("open")

    def vote(self, **numbers: int) -> None:
        self.log.append(numbers["corner"])

    def close(self) -> None:
        self.log.append("close")


def run_governor(
    steps: list[tuple[list[str], Callable[[PowerGovernor], bool]]],
    open_port: Callable[[], Any],
    suspended: Callable[[], float] = suspended_seconds,
    **options: Any,
) -> pb.PowerInfo:
    """Runs a governor; each step wants some modes until something is true of it.

    A look beside which nobody asks for the next submission is one that may miss it.
    """

    async def scenario() -> pb.PowerInfo:
        wanted: list[str] = []
        submission: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def next_submission() -> asyncio.Future[None]:
            nonlocal submission
            if submission.done():
                submission = asyncio.get_running_loop().create_future()
            return submission

        config = BrokerConfig(perf_hold_seconds=0.0, perf_idle_seconds=0.05, **options)
        governor = PowerGovernor(
            config,
            open_port,
            lambda: wanted,
            next_submission,
            emulated=False,
            suspended=suspended,
        )
        governor.start()
        for modes, reached in steps:
            wanted[:] = modes
            if modes and not submission.done():
                submission.set_result(None)
            async with asyncio.timeout(20):
                while not reached(governor):
                    await asyncio.sleep(0.001)
        info = governor.info()
        await governor.close()
        return info

    return asyncio.run(scenario())


def test_the_governor_opens_votes_and_takes_the_vote_back() -> None:
    log: list[Any] = []
    info = run_governor(
        [
            (["balanced"], lambda g: g.info().mode == "balanced"),
            (["burst"], lambda g: g.info().mode == "burst"),
            ([], lambda g: g.info().mode == ""),
        ],
        lambda: Port(log),
    )
    assert log == ["open", 0x70, 0xA0, "close"]
    assert info.votes_total == 3
    assert set(info.seconds) == {"none", "balanced", "burst"}
    assert (info.ceiling, info.detail) == ("burst", "")


def test_without_work_it_does_not_look_again() -> None:
    looks = 0

    def wanted() -> list[str]:
        nonlocal looks
        looks += 1
        return []

    async def scenario() -> None:
        submission: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        governor = PowerGovernor(
            BrokerConfig(), lambda: Port([]), wanted, lambda: submission, emulated=False
        )
        governor.start()
        for _ in range(100):  # turns of the loop: whatever is due has run
            await asyncio.sleep(0)
        assert looks == 1
        await governor.close()

    asyncio.run(scenario())


def test_without_an_infrastructure_it_says_so_and_goes_on_without() -> None:
    def refuse() -> Any:
        raise RuntimeError("createPowerConfigId gives 1000")

    info = run_governor([(["burst"], lambda g: bool(g.info().detail))], refuse)
    assert info.detail.startswith("no vote: createPowerConfigId gives 1000; tried again")
    assert (info.mode, info.votes_total) == ("", 0)


def test_after_a_failure_it_votes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qnnbroker.broker.power.RETRY_SECONDS", 0.01)
    log: list[Any] = []
    failing = 3

    def open_port() -> Port:
        nonlocal failing
        if failing:
            failing -= 1
            raise RuntimeError("setPowerConfig gives 1007")
        return Port(log)

    info = run_governor([(["burst"], lambda g: g.info().mode == "burst")], open_port)
    assert log == ["open", 0xA0, "close"]
    assert info.detail == ""


def test_a_client_that_is_refused_is_replaced_at_once() -> None:
    log: list[Any] = []

    class Restarted(Port):
        def vote(self, **numbers: int) -> None:
            if log.count("open") == 1 and 0x70 in log:
                raise RuntimeError("setPowerConfig gives 13001")
            super().vote(**numbers)

        def close(self) -> None:
            super().close()
            if log.count("open") == 1:
                raise RuntimeError("destroyPowerConfigId gives 13001")

    info = run_governor(
        [
            (["balanced"], lambda g: g.info().mode == "balanced"),
            (["burst"], lambda g: g.info().mode == "burst"),
        ],
        lambda: Restarted(log),
    )
    assert log == ["open", 0x70, "close", "open", 0xA0, "close"]
    assert info.detail == ""


def test_a_vote_that_cannot_be_taken_back_is_no_reason_to_vote_no_more() -> None:
    log: list[Any] = []

    class Gone(Port):
        def close(self) -> None:
            super().close()
            raise RuntimeError("destroyPowerConfigId gives 1007")

    def voted(g: PowerGovernor) -> bool:
        return g.info().mode == "burst"

    def dropped(g: PowerGovernor) -> bool:
        return g.info().mode == ""

    run_governor([(["burst"], voted), ([], dropped), (["burst"], voted)], lambda: Gone(log))
    assert log == ["open", 0xA0, "close"] * 2


def test_a_vote_is_made_anew_after_the_machine_was_suspended() -> None:
    log: list[Any] = []
    suspended = [0.0]

    def asleep(g: PowerGovernor) -> bool:
        suspended[0] = 7.0
        return True

    run_governor(
        [
            (["burst"], lambda g: g.info().mode == "burst"),
            (["burst"], asleep),
            (["burst"], lambda g: g.info().votes_total == 2),
        ],
        lambda: Port(log),
        suspended=lambda: suspended[0],
    )
    assert log == ["open", 0xA0, 0xA0, "close"]


def test_pausing_forgets_what_failed() -> None:
    failing = [True]

    def open_port() -> Port:
        if failing[0]:
            raise RuntimeError("no device")
        return Port([])

    async def scenario() -> None:
        submission: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        governor = PowerGovernor(
            BrokerConfig(), open_port, lambda: ["burst"], lambda: submission, emulated=False
        )
        governor.start()
        governor.start()  # is no second one
        async with asyncio.timeout(20):
            while not governor.info().detail:
                await asyncio.sleep(0.001)
            await governor.pause()
            failing[0] = False
            governor.start()
            while governor.info().mode != "burst":
                await asyncio.sleep(0.001)
        await governor.close()

    asyncio.run(scenario())


def test_the_machine_has_not_been_suspended_between_two_looks() -> None:
    assert abs(suspended_seconds() - suspended_seconds()) < SUSPENDED_SECONDS


def test_a_vote_survives_a_restart_of_the_npu_and_a_reset(
    start_broker: Callable[..., BrokerProcess], make_model: MakeModel, runtime_dir: Path
) -> None:
    broker = start_broker(perf_hold_seconds=0.05, perf_idle_seconds=30.0)

    def power() -> pb.PowerInfo:
        return broker.stub.GetServerInfo(pb.GetServerInfoRequest()).power

    with connect(runtime_dir) as session, session.load(make_model()).graph.bind() as binding:
        binding.run()
        wait_until(lambda: power().mode == "balanced", "it votes")
        broker.set_faults("fail=graphExecute:1:1007")
        with pytest.raises(NpuRestarted):
            binding.run()
        broker.set_faults()
        broker.stub.ResetBackend(pb.ResetBackendRequest(), timeout=20)
        binding.run()
        wait_until(lambda: power().mode == "balanced", "it votes again")
        assert "no vote" not in power().detail
    made = broker.calls("createPowerConfigId")
    votes = broker.calls("setPowerConfig")
    assert votes[-1].arguments["power"] == made[-1].arguments["power"]
    assert votes[-1].result == 0


def test_clients_without_a_session_have_clocks_too(
    start_broker: Callable[..., BrokerProcess], make_model: MakeModel
) -> None:
    broker = start_broker(session_perf_mode="high_performance", perf_idle_seconds=30.0)
    list(broker.stub.LoadModel(pb.LoadModelRequest(path=str(make_model()), name="adder")))
    broker.stub.Infer(pb.InferRequest(name="adder", inputs=inline_inputs(0)))
    wait_until(
        lambda: (
            broker.stub.GetServerInfo(pb.GetServerInfoRequest()).power.mode == "high_performance"
        ),
        "it votes for what works without a session",
    )


def test_the_library_is_told_exactly_the_votes(
    start_broker: Callable[..., BrokerProcess],
    make_model: MakeModel,
    runtime_dir: Path,
    tmp_path: Path,
) -> None:
    record = tmp_path / "calls"
    broker = start_broker(
        switch_words=[f"record={record}"],
        perf_mode="high_performance",
        perf_hold_seconds=0.05,
        perf_idle_seconds=0.2,
        rpc_latency_us=50,
        rpc_polling_us=1000,
    )

    def power() -> pb.PowerInfo:
        return broker.stub.GetServerInfo(pb.GetServerInfoRequest()).power

    with connect(runtime_dir, perf_mode="burst") as session:
        (info,) = broker.stub.ListSessions(pb.ListSessionsRequest()).sessions
        assert info.perf_mode == "burst"
        with session.load(make_model()).graph.bind() as binding:
            binding.run()
            wait_until(lambda: power().mode == "high_performance", "the ceiling is voted for")
        wait_until(lambda: power().mode == "", "the vote is dropped")
    with connect(runtime_dir) as session, session.load(make_model()).graph.bind() as binding:
        binding.run()
        wait_until(lambda: power().mode == "balanced", "a session that does not say")
    with pytest.raises(InvalidRequest, match="perf_mode"):
        connect(runtime_dir, perf_mode="turbo")
    assert broker.stop() == 0
    calls = [c for c in read_record(record) if "owerConfig" in c.name]
    assert [c.name for c in calls][:2] == ["createPowerConfigId", "destroyPowerConfigId"]  # asking
    assert [c.name for c in calls][2:] == [
        *("createPowerConfigId", "setPowerConfig", "destroyPowerConfigId"),
        *("createPowerConfigId", "setPowerConfig", "destroyPowerConfigId"),
    ]
    votes = [c.arguments for c in calls if c.name == "setPowerConfig"]
    fast, balanced = votes
    corners = ":".join(["1", *["128"] * 3] * 2)
    assert fast["dcvs"] == f"{fast['power']}:1:0:16:1:100:0:0:{corners}"
    assert fast["option"] in ("2:50", "3:1000")
    corners = ":".join(["1", *["112"] * 3] * 2)
    assert balanced["dcvs"] == f"{balanced['power']}:1:1:16:1:1000:0:0:{corners}"
    assert balanced["option"] == "2:50"
