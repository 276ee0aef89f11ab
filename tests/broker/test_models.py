# SPDX-License-Identifier: Apache-2.0
"""Which model a name means, and for whom."""

import asyncio
import json
import threading
from pathlib import Path

import pytest
from tests.broker.inside import attached, go, running, until
from tests.fake_models import MakeModel, adder
from tests.processes.test_handing_over import sha256

from qnnbroker.broker.layouts import OpenedModel
from qnnbroker.broker.models import Model
from qnnbroker.broker.service import BrokerService
from qnnbroker.broker.sessions import Session
from qnnbroker.protos.errors import AlreadyExists, InvalidRequest, NotAllowed, NotFound
from qnnbroker.v1 import control_pb2 as pb


async def load(service: BrokerService, session: Session | None, path: Path) -> Model:
    request = pb.LoadModelRequest(path=str(path), name="same", keep_alive_seconds=-1)
    model, _ = await service.load(session, request, lambda stage, done, total: None)
    return model


@pytest.mark.parametrize("content", ["equal", "different"])
def test_a_name_means_ones_own_model_whoever_else_has_one_of_that_name(
    make_model: MakeModel, content: str
) -> None:
    async def work() -> None:
        async with running() as service:
            sessions = [attached(service, n) for n in ("one", "two", "three")]
            owners = [*sessions[:2], None]
            graphs = ["g", "g", "g"] if content == "equal" else ["g", "h", "i"]
            models = [
                await load(service, owner, make_model(f"m{n}", adder(graphs[n])))
                for n, owner in enumerate(owners)
            ]
            for owner, model in zip(owners, models, strict=True):
                assert service.model(owner, 0, "same") is model
            # Who has none means nobody's, which no session ends.
            assert service.model(sessions[2], 0, "same") is models[2]
            for owner, model in zip(owners, models, strict=True):
                service.unload(owner, 0, "same")
                assert model.unloaded
            with pytest.raises(NotFound):
                service.unload(None, 0, "same")

    go(work)


def test_anothers_model_is_found_by_its_name_but_not_given_back(make_model: MakeModel) -> None:
    async def work() -> None:
        async with running() as service:
            owner, other = attached(service, "one"), attached(service, "two")
            model = await load(service, owner, make_model())
            for who in (other, None):
                assert service.model(who, 0, "same") is model
                with pytest.raises(NotAllowed, match="alone can give it back"):
                    service.unload(who, 0, "same")
            another = attached(service, "three")
            await load(service, another, make_model("b", adder("b")))
            with pytest.raises(InvalidRequest, match="means 2 different models"):
                service.model(other, 0, "same")

    go(work)


def test_of_two_loads_at_a_time_one_gets_the_name(make_model: MakeModel) -> None:
    async def work() -> None:
        async with running() as service:
            paths = [make_model(n, adder(n), create_us=100_000) for n in ("one", "two")]
            loads = [load(service, None, path) for path in paths]
            found = await asyncio.gather(*loads, return_exceptions=True)
            (refused,) = [f for f in found if isinstance(f, BaseException)]
            assert isinstance(refused, AlreadyExists)
            assert refused.reason == "NAME_TAKEN"
            (model,) = [f for f in found if isinstance(f, Model)]
            assert service.model(None, 0, "same") is model
            await until(lambda: len(service.contexts) == 1, "the other one is given back")

    go(work)


def test_a_wrapper_stays_open_for_as_long_as_it_is_checked_for_somebody_who_gave_up(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, found = threading.Event(), threading.Event(), []

    def late(opened: OpenedModel, digest: str) -> None:
        begun.set()
        go_on.wait(60)
        found.append(opened.binary.file.fd >= 0)

    async def work() -> None:
        path = make_model("m")
        content = {"format": 1, "binary": {"name": path.name, "sha256": sha256(path)}}
        path.with_suffix(".manifest.json").write_text(json.dumps(content))
        async with running() as service:
            task = asyncio.create_task(load(service, None, path))
            await asyncio.to_thread(begun.wait, 60)
            task.cancel()
            await asyncio.sleep(0)
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(service.models._hashes.threads.submit(int).result)
            assert found == [True]

    monkeypatch.setattr(OpenedModel, "check_manifest", late)
    go(work)
