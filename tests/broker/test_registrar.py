# SPDX-License-Identifier: Apache-2.0
"""A library that is slow to register memory, or to let go of it, keeps nobody waiting but who needs
that; and whatever happens meanwhile leaves nothing behind."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable

import pytest
from tests.broker.inside import (
    AdderPlaces,
    alive,
    attached,
    bound,
    go,
    hanging,
    loaded,
    running,
    until,
)
from tests.fake_models import MakeModel, adder

from qnnbroker.broker.bindings import Binding
from qnnbroker.broker.models import Model
from qnnbroker.broker.service import BrokerService
from qnnbroker.broker.sessions import Session
from qnnbroker.native.fake import control_loaded, read_ring
from qnnbroker.protos.errors import BrokerError, DeadlineExpired, LimitExceeded, NotFound

MAKING, GOING = "memRegister", "memDeRegister"


@contextlib.asynccontextmanager
async def registering() -> AsyncIterator[BrokerService]:
    """A broker whose device takes memory; afterwards nothing is left, and no rule was broken."""
    before, wrong = alive(), accidents()
    async with running(reset_timeout_seconds=0.3) as service:
        control_loaded("clear", mem_register=True)
        try:
            yield service
            for session in list(service.sessions):
                service.sessions.close(session, "the test ends")
            await until(
                lambda: not len(service.contexts) and not service.contexts.closing_count,
                "all contexts are gone",
            )
            assert service.backend.memory.live == 0
            assert service.sessions.closing_count == 0
        finally:
            control_loaded("clear", "unhang")
    control_loaded(mem_register=False)
    assert alive() == before
    assert accidents() == wrong


def accidents() -> int:
    return sum(c.name == "error" for c in read_ring())


async def hung(call: str, work: Callable[[], object]) -> object:
    """Does `work`, and waits until the next call of that name hangs."""
    before = hanging()
    control_loaded(f"hang={call}:1")
    result = work()
    await until(lambda: hanging() > before, f"{call} hangs")
    return result


def unhang() -> None:
    control_loaded("clear", "unhang")


async def run(service: BrokerService, session: Session, binding_id: int) -> None:
    await service.executor.run(session.bindings.get(binding_id).bound.native)


async def bind(session: Session, model: Model) -> Binding:
    """A binding of a model of the adder, over a buffer of its own."""
    buffer = await session.buffers.allocate(4096)
    inputs, outputs = AdderPlaces(buffer.buffer_id).places()
    return await session.bindings.create(model.graphs[0], inputs, outputs, session.buffers)


async def start_binding(
    service: BrokerService, session: Session, make_model: MakeModel, name: str = "adder"
) -> "asyncio.Task[Binding]":
    """A binding of the adder that hangs while its memory is registered."""
    model = await loaded(service, session, make_model(name, adder(name)))
    buffer = await session.buffers.allocate(4096)
    inputs, outputs = AdderPlaces(buffer.buffer_id).places()
    task = await hung(
        MAKING,
        lambda: asyncio.create_task(
            session.bindings.create(model.graphs[0], inputs, outputs, session.buffers)
        ),
    )
    assert isinstance(task, asyncio.Task)
    return task


async def bound_over(
    service: BrokerService, session: Session, make_model: MakeModel
) -> tuple[int, int]:
    """A binding of the adder, and the buffer of its tensors, by their ids."""
    model = await loaded(service, session, make_model("own", adder("own")))
    buffer = await session.buffers.allocate(4096)
    inputs, outputs = AdderPlaces(buffer.buffer_id).places()
    binding = await session.bindings.create(model.graphs[0], inputs, outputs, session.buffers)
    return binding.binding_id, buffer.buffer_id


def test_others_go_on_while_memory_is_registered(make_model: MakeModel) -> None:
    async def work() -> None:
        async with registering() as service:
            session, other = attached(service), attached(service)
            there = await bound(service, other, make_model("there"))
            making = await start_binding(service, session, make_model)
            await run(service, other, there)
            await loaded(service, other, make_model("new", adder("new")))
            assert service.session_infos()[0].binding_count == 0
            assert not making.done()
            unhang()
            binding = await making
            assert binding.bound.registered
            await run(service, session, binding.binding_id)

    go(work)


def test_others_go_on_while_memory_is_let_go_of(make_model: MakeModel) -> None:
    async def work() -> None:
        async with registering() as service:
            session, other = attached(service), attached(service)
            there = await bound(service, other, make_model("there"))
            gone, buffer_id = await bound_over(service, session, make_model)
            going = session.bindings.get(gone).bound
            await hung(GOING, lambda: session.bindings.release(gone))
            assert not await going.wait_gone(0.01)
            session.buffers.release(buffer_id)
            await run(service, other, there)
            assert going.graph.context.binding_count == 1  # which keeps the context, too
            unhang()
            assert await going.wait_gone(20)
            assert going.graph.context.binding_count == 0

    go(work)


def test_what_is_registered_already_does_not_wait(make_model: MakeModel) -> None:
    async def work() -> None:
        async with registering() as service:
            session = attached(service)
            first, buffer_id = await bound_over(service, session, make_model)
            (model,) = service.models
            making = await start_binding(service, session, make_model, "other")
            inputs, outputs = AdderPlaces(buffer_id).places()
            second = await session.bindings.create(
                model.graphs[0], inputs, outputs, session.buffers
            )
            assert second.bound.registered
            for binding_id in (first, second.binding_id):
                await run(service, session, binding_id)
            unhang()
            await making

    go(work)


def test_a_session_that_ends_while_its_binding_is_made_leaves_nothing(
    make_model: MakeModel,
) -> None:
    async def work() -> None:
        async with registering() as service:
            session = attached(service)
            making = await start_binding(service, session, make_model)
            service.sessions.close(session, "test")
            assert len(service.contexts) == 1
            unhang()
            with pytest.raises(NotFound) as ended:
                await making
            assert ended.value.reason == "SESSION_UNKNOWN"

    go(work)


def test_a_model_unloaded_before_its_binding_is_made(make_model: MakeModel) -> None:
    async def work() -> None:
        async with registering() as service:
            session = attached(service)
            model = await loaded(service, session, make_model())
            buffer = await session.buffers.allocate(4096)
            inputs, outputs = AdderPlaces(buffer.buffer_id).places()
            making = asyncio.create_task(
                session.bindings.create(model.graphs[0], inputs, outputs, session.buffers)
            )
            await asyncio.sleep(0)  # it was let in, and has done nothing yet
            service.unload(session, model.model_id, "")
            session.buffers.release(buffer.buffer_id)
            binding = await making
            await run(service, session, binding.binding_id)

    go(work)


def test_a_caller_that_gives_up_leaves_a_binding_to_its_session(make_model: MakeModel) -> None:
    async def work() -> None:
        async with registering() as service:
            session = attached(service)
            making = await start_binding(service, session, make_model)
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)
            unhang()
            await until(lambda: len(session.bindings) == 1, "it was made all the same")

    go(work)


def test_a_caller_that_gives_up_during_a_reset_leaves_nothing(make_model: MakeModel) -> None:
    async def work() -> None:
        async with registering() as service:
            session = attached(service)
            model = await loaded(service, session, make_model())
            service.contexts.gate.shut()
            making = asyncio.create_task(bind(session, model))
            await until(lambda: model.context.waiters > 0, "it waits")
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)
            assert (model.context.waiters, len(session.bindings)) == (0, 0)
            service.contexts.gate.open()
            service.unload(session, model.model_id, "")
            await until(lambda: not len(service.contexts), "nothing held the context")

    go(work)


def test_without_a_thread_to_be_had_a_binding_fails_and_the_next_one_is_made(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def work() -> None:
        async with registering() as service:
            session = attached(service)
            model = await loaded(service, session, make_model())
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", start)
                with pytest.raises(RuntimeError, match="new thread"):
                    await bind(session, model)
            assert not service.contexts.registrar.busy
            binding = await bind(session, model)
            await run(service, session, binding.binding_id)

    go(work)


def test_bindings_that_are_being_made_count(make_model: MakeModel) -> None:
    async def work() -> None:
        async with running(max_bindings=1) as service:
            control_loaded("clear", mem_register=True)
            session = attached(service)
            making = await start_binding(service, session, make_model)
            with pytest.raises(LimitExceeded, match="holds 1 bindings"):
                await bound(service, session, make_model("second"))
            unhang()
            await making
            control_loaded(mem_register=True)
            session.bindings.close()
            await until(lambda: service.backend.memory.live == 0, "all is given back")
        control_loaded("clear", mem_register=False)

    go(work)


def test_memory_that_cannot_be_registered_after_all(make_model: MakeModel) -> None:
    async def work() -> None:
        async with registering() as service:
            session = attached(service)
            model = await loaded(service, session, make_model())
            control_loaded("fail=memRegister:2:1007")
            with pytest.raises(BrokerError, match="1007"):
                await bind(session, model)
            assert (len(session.bindings), service.backend.memory.live) == (0, 0)

    go(work)


async def parked(service: BrokerService, session: Session, binding_id: int) -> None:
    one = session.bindings.get(binding_id).bound
    one.park()
    await until(lambda: one.parked, "it is parked")


@pytest.mark.parametrize("then", ["nothing", "released", "session ended", "parked"])
def test_a_binding_that_comes_back_waits_for_its_memory(make_model: MakeModel, then: str) -> None:
    async def work() -> None:
        async with registering() as service:
            session, other = attached(service), attached(service)
            there = await bound(service, other, make_model("there"))
            binding_id = await bound(service, session, make_model())
            await parked(service, session, binding_id)
            waiting = await hung(
                MAKING, lambda: asyncio.create_task(run(service, session, binding_id))
            )
            assert isinstance(waiting, asyncio.Task)
            await run(service, other, there)
            one = session.bindings.get(binding_id).bound
            assert not one.parked
            if then == "released":
                session.bindings.release(binding_id)
            elif then == "session ended":
                service.sessions.close(session, "test")
            elif then == "parked":
                assert not one.park()
            unhang()
            if then in ("nothing", "parked"):
                await waiting
                assert one.registered
            else:
                with pytest.raises(BrokerError):
                    await waiting
                assert await one.wait_gone(20)

    go(work)


def test_a_binding_parked_and_wanted_at_once_comes_back_when_it_is_gone(
    make_model: MakeModel,
) -> None:
    async def work() -> None:
        async with registering() as service:
            session = attached(service)
            binding_id = await bound(service, session, make_model())
            one = session.bindings.get(binding_id).bound
            await hung(GOING, one.park)
            assert not one.parked
            waiting = asyncio.create_task(run(service, session, binding_id))
            await asyncio.sleep(0)
            assert not waiting.done()
            unhang()
            await waiting
            assert (one.registered, service.backend.memory.live) == (True, 3)

    go(work)


def test_a_reset_waits_for_memory_and_says_so(make_model: MakeModel) -> None:
    async def work() -> None:
        async with registering() as service:
            session = attached(service)
            there = await bound(service, session, make_model("there"))
            making = await start_binding(service, session, make_model)
            with pytest.raises(DeadlineExpired, match="memory of graph 'adder' of context"):
                await service.reset_backend()
            reset = asyncio.create_task(service.reset_backend())
            await until(lambda: service.reset.running, "it has begun")
            unhang()
            binding = await making
            assert (await reset).context_count == 2
            assert binding.bound.parked
            for binding_id in (there, binding.binding_id):
                await run(service, session, binding_id)

    go(work)


def test_a_binding_asked_for_just_before_a_reset_is_made_after_it(make_model: MakeModel) -> None:
    async def work() -> None:
        async with registering() as service:
            session = attached(service)
            model = await loaded(service, session, make_model())
            buffer = await session.buffers.allocate(4096)
            inputs, outputs = AdderPlaces(buffer.buffer_id).places()
            reset = asyncio.create_task(service.reset_backend())
            making = asyncio.create_task(
                session.bindings.create(model.graphs[0], inputs, outputs, session.buffers)
            )
            assert (await reset).context_count == 1
            binding = await making
            await run(service, session, binding.binding_id)
            assert binding.bound.registered

    go(work)


def test_a_stop_waits_for_memory_that_is_let_go_of(make_model: MakeModel) -> None:
    async def work() -> None:
        before = alive()
        async with running() as service:
            control_loaded("clear", mem_register=True)
            session = attached(service)
            await bound(service, session, make_model())
            await hung(GOING, lambda: service.sessions.close(session, "test"))
        control_loaded(mem_register=False)
        assert alive() == before

    go(work)
