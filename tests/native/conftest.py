# SPDX-License-Identifier: Apache-2.0
"""Executors for tests, over one context of the fake QNN library."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.native.executor_stage import GRAPHS, MakeStage, Stage, alive
from tests.native.ring_stage import RingStage

from qnnbroker.native.fake import binary_bytes, control_loaded, fake_qnn_dir
from qnnbroker.native.qnn_backend import QnnBackend, QnnDevice
from qnnbroker.native.qnn_context import QnnContext
from qnnbroker.native.qnn_library import QnnLibrary


@pytest.fixture(scope="module")
def executor_context() -> Iterator[QnnContext]:
    with (
        QnnBackend(QnnLibrary(fake_qnn_dir())) as backend,
        QnnDevice(backend) as device,
        QnnContext(device, binary_bytes(GRAPHS)) as context,
    ):
        yield context


@pytest.fixture
def make_stage(executor_context: QnnContext) -> Iterator[MakeStage]:
    before = alive()
    made: list[Stage] = []

    def make(**options: Any) -> Stage:
        made.append(Stage(executor_context, **options))
        return made[-1]

    yield make
    control_loaded("clear", "unhang", concurrency=1)  # every hang and rule goes with its test
    for stage in made:
        stage.close()
    assert alive() == before


@pytest.fixture
def stage(make_stage: MakeStage) -> Stage:
    return make_stage()


@pytest.fixture
def rings(stage: Stage) -> RingStage:
    return RingStage(stage)
