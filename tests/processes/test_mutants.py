# SPDX-License-Identifier: Apache-2.0
"""Five hundred damaged models, on the real library: none of them harms the broker or anybody."""

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import StartBroker
from tests.native.qnn_models import compiled
from tests.resident import anonymous_kib

from qnnbroker.benchmarks.mutants import (
    BINARY_NAME,
    KINDS,
    MANIFEST_NAME,
    WRAPPER_NAME,
    Mutant,
    Original,
    mutants,
)
from qnnbroker.broker.layouts import open_path
from qnnbroker.cli.inspection import inspect_file
from qnnbroker.cli.wrapper_writing import Place, Tensor, wrapper_bytes
from qnnbroker.client import InvalidRequest, Model, Session, connect
from qnnbroker.client.control import Control
from qnnbroker.protos.errors import BrokerError
from qnnbroker.v1 import control_pb2 as pb

pytestmark = [pytest.mark.qnn, pytest.mark.slow]

COUNT = 500
#: Damaged binaries may be slow; half a minute each would be too long here.
TRIAL_SECONDS = 5.0
#: What may stay of all of them in the broker.
GROWTH_KIB = 16 * 1024


@pytest.fixture
def original(tmp_path: Path) -> Original:
    """A sound model with its wrapper and manifest."""
    folder = tmp_path / "original"
    folder.mkdir()
    (folder / BINARY_NAME).write_bytes(compiled("dense").binary)
    found = inspect_file(folder / BINARY_NAME)
    (graph,) = found["binary"]["graphs"]
    inputs, outputs = (
        [Tensor(t["name"], t["dtype"], tuple(t["shape"])) for t in graph[kind]]
        for kind in ("inputs", "outputs")
    )
    content = wrapper_bytes(graph["name"], inputs, outputs, Place(BINARY_NAME), "v2.51")
    (folder / WRAPPER_NAME).write_bytes(content)
    wrapper = inspect_file(folder / WRAPPER_NAME)
    manifest = {
        "format": 1,
        "wrapper": {"name": WRAPPER_NAME, "sha256": wrapper["file"]["sha256"]},
        "binary": {"name": BINARY_NAME, "sha256": found["file"]["sha256"]},
    }
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    return Original(folder, compiled("conv_u8").binary)


def right(model: Model) -> Callable[[], None]:
    wanted = compiled("conv_u16")

    def check() -> None:
        (found,) = model.graph.run(wanted.inputs).values()
        np.testing.assert_array_equal(found, next(iter(wanted.outputs.values())))

    return check


def load(control: Control, session: Session, mutant: Mutant, number: int) -> str:
    """What became of it. Every other one by a path that the broker opens."""
    try:
        if number // len(KINDS) % 2:
            session.load(mutant.path).unload()
        else:
            request = pb.LoadModelRequest(path=str(mutant.path), name="mutant")
            for _ in control.load_model(request, 60):
                pass
            control.unload_model(pb.UnloadModelRequest(name="mutant"), 60)
    except BrokerError as error:
        return f"{type(error).__name__} {error.reason}"
    return "loaded"


@pytest.mark.parametrize("manifest", [True, False])
def test_five_hundred_damaged_models_are_refused_or_load_and_harm_nobody(
    start_broker: StartBroker, original: Original, tmp_path: Path, manifest: bool
) -> None:
    broker = start_broker(
        backend="qnn", verdict_dir=str(tmp_path / "verdicts"), trial_seconds=TRIAL_SECONDS
    )
    broker.accidents_expected = True
    bystander_file = tmp_path / "bystander.bin"
    bystander_file.write_bytes(compiled("conv_u16").binary)
    outcomes: Counter[str] = Counter()
    with (
        contextlib.closing(Control(str(broker.grpc_path))) as control,
        connect(broker.runtime_dir) as bystander,
        connect(broker.runtime_dir) as session,
    ):
        check = right(bystander.load(bystander_file))
        with session.load(original.directory / WRAPPER_NAME):
            pass  # the sound one loads, with its manifest
        for _ in range(200):  # each of the library's threads takes memory when it first executes
            check()
        before = 0
        for number, mutant in enumerate(mutants(original, COUNT, tmp_path, manifest=manifest)):
            outcome = load(control, session, mutant, number)
            outcomes[outcome] += 1
            assert not (manifest and outcome == "loaded"), mutant
            if number % 10 == 0:
                check()
            assert broker.process.poll() is None, (mutant, broker.log()[-3000:])
            if number == 100:
                before = anonymous_kib(broker.pid)
        check()
        assert session.server_info().pid == broker.pid
        assert anonymous_kib(broker.pid) - before < GROWTH_KIB
        broker.wait_counters(contexts=1)
    print(dict(outcomes))
    assert sum(outcomes.values()) == COUNT
    assert not [o for o in outcomes if o.endswith("INTERNAL")], outcomes


def test_every_kind_of_mutant_differs_from_the_original(original: Original, tmp_path: Path) -> None:
    for mutant in mutants(original, 2 * len(KINDS), tmp_path):
        folder = mutant.path.parent
        changed = [
            name
            for name in (BINARY_NAME, WRAPPER_NAME)
            if (folder / name).read_bytes() != (original.directory / name).read_bytes()
        ]
        assert changed or "empty" in mutant.kind, mutant


def test_the_manifest_of_the_original_fits(original: Original, tmp_path: Path) -> None:
    shutil.copytree(original.directory, tmp_path / "copy")
    opened = open_path(tmp_path / "copy" / WRAPPER_NAME)
    with opened.binary:
        opened.check_manifest(opened.binary.hash_held())
        with pytest.raises(InvalidRequest, match="context binary is not the one"):
            opened.check_manifest("0" * 64)
