# SPDX-License-Identifier: Apache-2.0
"""The soak in its short form: clients come and go, some are killed, and nothing is left of them."""

from pathlib import Path

import pytest
from tests.broker_process import BrokerProcess
from tests.conftest import StartBroker
from tests.soak import (
    CLIENTS,
    GROWTH_LIMIT_BYTES,
    ZOO_MODELS,
    Memory,
    Result,
    SoakError,
    Weight,
    check_growth,
    fake_models,
    plot,
    soak,
)

import zoo


@pytest.mark.slow
@pytest.mark.processes
def test_clients_that_come_go_and_are_killed_leave_nothing_behind(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    result = soak(broker, fake_models(tmp_path), rounds=60, seed=7)
    check_growth(result)
    assert result.clients == 60
    assert 5 < result.killed < 40
    assert len(result.killed_after) > 2, "they were killed at different stages"
    assert result.gauges_after == result.gauges_before
    assert len(result.memory.idle) == 60 // CLIENTS
    assert len(result.memory.samples) > len(result.memory.idle)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.qnn
def test_the_real_library_keeps_nothing_of_clients_that_are_killed(
    start_broker: StartBroker,
) -> None:
    models = []
    for name in ZOO_MODELS:
        try:
            models.append(zoo.compiled(name))
        except zoo.MissingTool as error:
            pytest.skip(str(error))
    result = soak(start_broker(backend="qnn"), models, rounds=40, seed=8)
    assert result.killed > 3
    assert result.gauges_after == result.gauges_before


@pytest.mark.slow
@pytest.mark.processes
def test_a_client_that_fails_is_told_with_its_own_words(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    with pytest.raises(SoakError, match=r"(?s)a client ended with 1: .*NotFound: there is no file"):
        soak(broker, [tmp_path / "missing.bin"], rounds=1, seed=3)


def result_of(idle: list[int], threads: list[int]) -> Result:
    """A soak in which the idle broker had these bytes and threads."""
    memory = Memory(0, idle=[Weight(float(i), 2 * own, own) for i, own in enumerate(idle)])
    result = Result(1, memory, threads=threads)
    result.growth_bytes = memory.growth_bytes()
    return result


def test_growth_is_told_from_warming_up() -> None:
    limit, threads = GROWTH_LIMIT_BYTES, [20] * 12
    warming_up = [0, 5 * limit, 9 * limit, *[10 * limit] * 9]
    check_growth(result_of(warming_up, threads))
    growing = [step * limit for step in range(12)]
    with pytest.raises(SoakError, match="grew by"):
        check_growth(result_of(growing, threads))
    with pytest.raises(SoakError, match="threads"):
        check_growth(result_of(warming_up, [20 + 10 * batch for batch in range(12)]))


def test_the_memory_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(result_of([1, 2, 3], [1, 1, 1]), tmp_path / "pss.png")
    assert (tmp_path / "pss.png").read_bytes().startswith(b"\x89PNG")
