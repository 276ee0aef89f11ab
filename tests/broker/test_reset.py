# SPDX-License-Identifier: Apache-2.0
"""A reset of the backend beside everything else: loads, unloads, the dying, errors and delays."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.broker.inside import alive, attached, bound, go, hanging, loaded, running, until
from tests.fake_models import MakeModel, adder, inline_inputs

from qnnbroker.broker.models import Model
from qnnbroker.broker.service import BrokerService
from qnnbroker.broker.sessions import Session
from qnnbroker.native.fake import control_loaded, read_ring
from qnnbroker.protos.errors import (
    BrokerUnavailable,
    DeadlineExpired,
    InvalidRequest,
    LeaseRevoked,
    LimitExceeded,
)
from qnnbroker.v1 import control_pb2 as pb


async def run(service: BrokerService, session: Session, binding_id: int) -> None:
    """One execute as a ring would submit it: it waits while the backend is reset."""
    await service.executor.run(session.bindings.get(binding_id).bound.native)


def accidents() -> int:
    """What the fake saw us do that the rules forbid, so far."""
    return sum(c.name == "error" for c in read_ring())


@contextlib.asynccontextmanager
async def held_at(service: BrokerService, call: str) -> AsyncIterator["asyncio.Task[object]"]:
    """A reset that stands in its first call of that name, until the block ends."""
    before = hanging()
    control_loaded(f"hang={call}:1")
    task: asyncio.Task[object] = asyncio.create_task(service.reset_backend())
    await until(lambda: hanging() > before, f"the reset is at {call}")
    try:
        yield task
    finally:
        control_loaded("clear", "unhang")


async def gone(service: BrokerService) -> None:
    await until(
        lambda: not len(service.contexts) and not service.contexts.closing_count,
        "all contexts are gone",
    )


@pytest.mark.parametrize("call", ["contextFree", "backendCreate", "contextCreateFromBinary"])
@pytest.mark.parametrize("how", ["unloaded", "session ended", "binding released"])
def test_whoever_goes_while_the_backend_is_reset_leaves_nothing_behind(
    make_model: MakeModel, call: str, how: str
) -> None:
    async def work() -> None:
        wrong = accidents()
        before = alive()
        async with running() as service:
            session = attached(service)
            binding_id = await bound(service, session, make_model())
            (model,) = service.models
            async with held_at(service, call) as reset:
                if how == "unloaded":
                    service.unload(session, model.model_id, "")
                elif how == "binding released":
                    session.bindings.release(binding_id)
                else:
                    service.sessions.close(session, "test")
            await reset
            if how == "unloaded":
                await run(service, session, binding_id)  # a binding keeps its context
                session.bindings.release(binding_id)
            elif how == "binding released":
                service.unload(session, model.model_id, "")
            await gone(service)
        assert alive() == before
        assert accidents() == wrong

    go(work)


def test_a_load_that_was_on_its_way_meets_the_new_device(make_model: MakeModel) -> None:
    async def work() -> None:
        wrong = accidents()
        async with running() as service:
            session = attached(service)
            binding_id = await bound(service, session, make_model("first"))
            stages: list[int] = []
            path = make_model("second", adder("other"))
            load = asyncio.create_task(
                service.load(
                    session,
                    pb.LoadModelRequest(path=str(path)),
                    lambda stage, done, total: stages.append(stage),
                )
            )
            await asyncio.sleep(0)  # it was let in
            async with held_at(service, "contextFree") as reset:
                await until(lambda: stages, "it is being hashed")
                again = asyncio.create_task(loaded(service, session, make_model("third")))
                with pytest.raises(BrokerUnavailable, match="is being reset: freeing context"):
                    await again
                assert pb.LOAD_STAGE_CREATING not in stages
            await reset
            model, shared = await load
            assert not shared
            request = pb.InferRequest(
                model_id=model.model_id, inputs=inline_inputs(1), graph="other"
            )
            await service.infer(session, request, None)
            await run(service, session, binding_id)
        assert accidents() == wrong

    go(work)


def test_a_load_of_what_is_resident_waits_for_the_reset_too(make_model: MakeModel) -> None:
    async def work() -> None:
        async with running() as service:
            session = attached(service)
            path = make_model()
            first = await loaded(service, session, path)
            load = asyncio.create_task(loaded(service, session, path))
            await asyncio.sleep(0)
            async with held_at(service, "contextCreateFromBinary") as reset:
                service.unload(session, first.model_id, "")
            await reset
            second = await load
            assert second.context.native is not None
            await service.infer(session, infer(second), None)

    go(work)


def infer(model: Model) -> pb.InferRequest:
    return pb.InferRequest(model_id=model.model_id, inputs=inline_inputs(1))


async def two(service: BrokerService, make_model: MakeModel) -> tuple[Session, list[int]]:
    """A session with bindings of two models."""
    session = attached(service)
    paths = [make_model("first"), make_model("second", adder("other"))]
    return session, [await bound(service, session, path) for path in paths]


def test_a_context_that_cannot_be_made_again_is_lost_alone_and_comes_back_with_the_next_reset(
    make_model: MakeModel,
) -> None:
    async def work() -> None:
        before = alive()
        async with running() as service:
            session, bindings = await two(service, make_model)
            control_loaded("fail=contextCreateFromBinary:1:1002")
            answer = await service.reset_backend()
            control_loaded("clear")
            assert (answer.context_count, len(answer.lost)) == (1, 1)
            assert "1002" in answer.lost[0]
            (info,) = [i for i in service.context_infos() if i.state == "lost"]
            assert (info.state_reason, info.holder_count) == ("NPU_MEMORY", 1)
            lost, well = bindings if info.graph_names == ["add"] else bindings[::-1]
            await run(service, session, well)
            for _ in range(2):
                with pytest.raises(LeaseRevoked):
                    await run(service, session, lost)
            (model,) = [m for m in service.models if m.context.lost]
            with pytest.raises(LeaseRevoked, match="is lost.*1002"):
                await service.infer(session, infer(model), None)
            answer = await service.reset_backend()
            assert (answer.context_count, list(answer.lost)) == (2, [])
            for binding_id in bindings:
                await run(service, session, binding_id)
            await service.infer(session, infer(model), None)
        assert alive() == before

    go(work)


def test_a_lost_model_can_be_loaded_anew_and_goes_with_its_holders(make_model: MakeModel) -> None:
    async def work() -> None:
        before = alive()
        async with running() as service:
            session, other = attached(service), attached(service)
            path = make_model()
            first = await loaded(service, session, path)
            control_loaded("fail=contextCreateFromBinary:1:1002")
            await service.reset_backend()
            control_loaded("clear")
            second = await loaded(service, other, path)
            assert second.context is not first.context
            await service.infer(other, infer(second), None)
            answer = await service.reset_backend()
            assert list(answer.lost) == []
            for session_, model in ((session, first), (other, second)):
                await service.infer(session_, infer(model), None)
            service.sessions.close(session, "test")
            service.sessions.close(other, "test")
            await gone(service)
        assert alive() == before

    go(work)


def test_a_file_that_changed_costs_its_own_context_only(make_model: MakeModel) -> None:
    async def work() -> None:
        async with running() as service:
            session, (first, second) = await two(service, make_model)
            with open(make_model("another"), "rb") as file:
                Path(next(iter(service.models)).source).write_bytes(file.read() + b"\n")
            answer = await service.reset_backend()
            (lost,) = answer.lost
            assert "changed" in lost
            await run(service, session, second)
            with pytest.raises(LeaseRevoked):
                await run(service, session, first)
            assert len((await service.reset_backend()).lost) == 1

    go(work)


@pytest.mark.parametrize("call", ["backendCreate", "deviceCreate"])
def test_a_library_that_does_not_start_again_can_be_reset_once_more(
    make_model: MakeModel, call: str
) -> None:
    async def work() -> None:
        before = alive()
        async with running() as service:
            session, bindings = await two(service, make_model)
            control_loaded(f"fail={call}:1:1002")
            with pytest.raises(LimitExceeded, match="starting the QNN library again"):
                await service.reset_backend()
            control_loaded("clear")
            assert {i.state for i in service.context_infos()} == {"lost"}
            with pytest.raises(BrokerUnavailable) as dead:
                await loaded(service, session, make_model("third", adder("third")))
            assert dead.value.reason == "NPU_LOST"
            answer = await service.reset_backend()
            assert (answer.context_count, list(answer.lost)) == (2, [])
            for binding_id in bindings:
                await run(service, session, binding_id)
        assert alive() == before

    go(work)


@pytest.mark.parametrize("call", ["graphExecute", "contextFree", "contextCreateFromBinary"])
def test_a_caller_that_gives_up_does_not_leave_half_a_reset(
    make_model: MakeModel, call: str
) -> None:
    async def work() -> None:
        async with running() as service:
            session, bindings = await two(service, make_model)
            before = hanging()
            control_loaded(f"hang={call}:1")
            first = None
            if call == "graphExecute":
                first = asyncio.create_task(run(service, session, bindings[0]))
                await until(lambda: hanging() > before, "a run hangs")
            reset = asyncio.create_task(service.reset_backend())
            await until(lambda: service.reset.running, "it has begun")
            if call != "graphExecute":
                await until(lambda: hanging() > before, "the library hangs")
            reset.cancel()
            await asyncio.gather(reset, return_exceptions=True)
            waiting = asyncio.create_task(run(service, session, bindings[1]))
            control_loaded("clear", "unhang")
            await waiting
            await until(lambda: not service.reset.running, "it is over")
            if first is not None:
                await first
            for binding_id in bindings:
                await run(service, session, binding_id)
            assert {i.state for i in service.context_infos()} == {"ready"}

    go(work)


def test_a_run_that_does_not_end_is_named_and_nothing_is_reset(make_model: MakeModel) -> None:
    async def work() -> None:
        async with running(reset_timeout_seconds=0.2) as service:
            session, bindings = await two(service, make_model)
            before, frees = hanging(), calls("contextFree")
            control_loaded("hang=graphExecute:1")
            hung = asyncio.create_task(run(service, session, bindings[0]))
            await until(lambda: hanging() > before, "a run hangs")
            with pytest.raises(DeadlineExpired) as late:
                await service.reset_backend()
            assert late.value.reason == "RUNNING"
            assert f"for session {session.session_id}" in str(late.value)
            assert "graph 'add' of context" in str(late.value)
            assert calls("contextFree") == frees
            control_loaded("clear", "unhang")
            await hung
            for binding_id in bindings:
                await run(service, session, binding_id)
            assert (await service.reset_backend()).context_count == 2

    go(work)


def test_a_load_that_does_not_end_is_named_and_nothing_is_reset(make_model: MakeModel) -> None:
    async def work() -> None:
        async with running(reset_timeout_seconds=0.2) as service:
            session = attached(service)
            binding_id = await bound(service, session, make_model())
            before = hanging()
            control_loaded("hang=contextCreateFromBinary:1")
            load = asyncio.create_task(loaded(service, session, make_model("slow", adder("slow"))))
            await until(lambda: hanging() > before, "a load hangs")
            with pytest.raises(DeadlineExpired, match=r"context \d+ is being created"):
                await service.reset_backend()
            await run(service, session, binding_id)
            control_loaded("clear", "unhang")
            await load
            assert (await service.reset_backend()).context_count == 2

    go(work)


def test_a_library_that_does_not_return_is_named_and_the_reset_goes_on(
    make_model: MakeModel,
) -> None:
    async def work() -> None:
        async with running(reset_timeout_seconds=0.1) as service:
            session = attached(service)
            binding_id = await bound(service, session, make_model())
            async with held_at(service, "contextFree") as reset:
                with pytest.raises(DeadlineExpired, match=r"goes on.*freeing context \d+"):
                    await reset
                with pytest.raises(BrokerUnavailable, match=r"being reset.*freeing context"):
                    await service.reset_backend()
                waiting = asyncio.create_task(run(service, session, binding_id))
            await waiting
            await until(lambda: not service.reset.running, "it is over")
            assert (await service.reset_backend()).context_count == 1

    go(work)


def test_a_stop_gives_up_a_reset_that_waits(make_model: MakeModel) -> None:
    async def work() -> None:
        before = alive()
        async with running() as service:
            session = attached(service)
            binding_id = await bound(service, session, make_model())
            hung_before = hanging()
            control_loaded("hang=graphExecute:1")
            hung = asyncio.create_task(run(service, session, binding_id))
            await until(lambda: hanging() > hung_before, "a run hangs")
            reset = asyncio.create_task(service.reset_backend())
            await until(lambda: service.reset.running, "it has begun")
            service.stopping = True
            await service.reset.end()
            with pytest.raises(BrokerUnavailable, match="stopping"):
                await reset
            control_loaded("clear", "unhang")
            await hung
        assert alive() == before

    go(work)


def test_a_stop_before_the_reset_has_done_anything(make_model: MakeModel) -> None:
    async def work() -> None:
        async with running() as service:
            reset = asyncio.create_task(service.reset.run())
            await asyncio.sleep(0)
            await service.reset.end()
            assert not service.reset.running
            with pytest.raises(BrokerUnavailable, match="stopping"):
                await reset

    go(work)


def calls(name: str) -> int:
    return sum(c.name == name for c in read_ring())


def test_a_wrong_time_limit_is_refused() -> None:
    async def work() -> None:
        async with running(reset_timeout_seconds=0.0):
            pass

    with pytest.raises(InvalidRequest, match="reset_timeout_seconds"):
        go(work)
