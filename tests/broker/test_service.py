# SPDX-License-Identifier: Apache-2.0
"""The operations behind the calls: who sees what, and what is counted."""

import asyncio
import math
import os
import socket
import struct
import time
from pathlib import Path

import pytest
from tests.broker.inside import attached, bound, go, loaded, running, until
from tests.fake_models import TENSOR_BYTES, MakeModel, adder, numbers
from tests.raw_peer import hello_request

from qnnbroker.broker.service import monotonic_deadline
from qnnbroker.native.fake import FakeGraph, FakeTensor, control_loaded
from qnnbroker.protos.attach import MAX_FRAME_BYTES, Kind, pack
from qnnbroker.protos.errors import BackendError, BrokerUnavailable, DeadlineExpired, InvalidRequest
from qnnbroker.v1 import control_pb2 as pb
from qnnbroker.v1 import types_pb2


def inline() -> list[types_pb2.InlineTensor]:
    """Good inputs for the adder."""
    return [
        types_pb2.InlineTensor(
            name=n, dtype=types_pb2.DATA_TYPE_FLOAT32, shape=x.shape, data=x.tobytes()
        )
        for n, x in zip("ab", numbers(4), strict=True)
    ]


def test_a_deadline_is_a_time_of_the_monotonic_clock() -> None:
    assert monotonic_deadline(None) == 0
    before = time.monotonic_ns()
    assert before + 2 * 10**9 <= monotonic_deadline(2.0) <= time.monotonic_ns() + 2 * 10**9
    assert monotonic_deadline(0.0) <= time.monotonic_ns()


def test_executes_and_infers_are_counted_where_they_belong(make_model: MakeModel) -> None:
    async def work() -> None:
        async with running() as service:
            session, other = attached(service, "one"), attached(service, "two")
            binding = await bound(service, session, make_model())
            for _ in range(3):
                timing = await service.execute(session, binding, 5.0)
                assert timing.copied_bytes == 0
            request = pb.InferRequest(name="adder", inputs=inline())
            for who in (None, other):
                answer = await service.infer(who, request, None)
                a, b = numbers(4)
                assert answer.outputs[0].data == (a + b).tobytes()
            infos = {i.client_name: i for i in service.session_infos()}
            assert (infos["one"].run_count, infos["two"].run_count) == (3, 1)
            assert infos["one"].pid == os.getpid()
            assert (infos["one"].buffer_count, infos["one"].binding_count) == (1, 1)
            assert (infos["one"].model_count, infos["two"].model_count) == (1, 0)
            assert infos["one"].buffer_bytes == 4096
            assert infos["one"].age_seconds >= 0
            (context,) = service.context_infos()
            assert (context.run_count, context.session_count, context.state) == (5, 1, "ready")
            assert 0 <= context.idle_seconds < 60
            statistics = service.statistics()
            assert statistics.counters["inline_copied_bytes_total"] == 2 * 3 * TENSOR_BYTES
            assert [(g.graph, g.run_count) for g in statistics.graphs] == [("add", 5)]

    go(work)


def test_an_infer_takes_tensors_without_dimensions(make_model: MakeModel) -> None:
    async def work() -> None:
        async with running() as service:
            x, y = (FakeTensor(n, "float32", ()) for n in "xy")
            graph = FakeGraph("scalar", (x,), (y,), (("add", "x", "x", "y"),))
            model = await loaded(service, attached(service), make_model("scalar", graph))
            value = types_pb2.InlineTensor(
                name="x", dtype=types_pb2.DATA_TYPE_FLOAT32, data=struct.pack("<f", 21.0)
            )
            answer = await service.infer(
                None, pb.InferRequest(name=model.name, inputs=[value]), None
            )
            assert answer.outputs[0].data == struct.pack("<f", 42.0)
            assert list(answer.outputs[0].shape) == []

    go(work)


def test_an_infer_leaves_nothing_bound(make_model: MakeModel) -> None:
    async def work() -> None:
        async with running() as service:
            session = attached(service)
            model = await loaded(service, session, make_model())
            request = pb.InferRequest(name="adder", inputs=inline())
            await service.infer(session, request, None)
            control_loaded("fail=graphExecute:1:1100")
            with pytest.raises(BackendError, match="1100"):
                await service.infer(session, request, None)
            await until(lambda: model.context.binding_count == 0, "nothing is bound")
            assert service.execute_errors == 1

    go(work)


def test_a_deadline_that_has_passed_runs_nothing(make_model: MakeModel) -> None:
    async def work() -> None:
        async with running() as service:
            session = attached(service)
            binding = await bound(service, session, make_model())
            with pytest.raises(DeadlineExpired) as late:
                await service.execute(session, binding, 0.0)
            assert late.value.reason == "QUEUED"
            (context,) = service.context_infos()
            assert context.run_count == 0

    go(work)


def test_nothing_new_begins_while_it_stops(make_model: MakeModel) -> None:
    async def work() -> None:
        async with running() as service:
            session = attached(service)
            path = make_model()
            binding = await bound(service, session, path)
            service.stopping = True
            request = pb.InferRequest(name="adder", inputs=inline())
            load = pb.LoadModelRequest(path=str(path))
            for call in (
                service.execute(session, binding, None),
                service.infer(session, request, None),
                service.load(session, load, lambda stage, done, total: None),
            ):
                with pytest.raises(BrokerUnavailable) as stopping:
                    await call
                assert stopping.value.reason == "STOPPING"

    go(work)


def test_a_keep_alive_is_the_default_when_none_is_given_and_never_no_number(
    make_model: MakeModel,
) -> None:
    async def work() -> None:
        async with running(keep_alive_seconds=77.0) as service:
            request = pb.LoadModelRequest(path=str(make_model()))
            model, _ = await service.load(None, request, lambda stage, done, total: None)
            assert model.keep_alive_seconds == 77.0
            request.keep_alive_seconds = math.nan
            with pytest.raises(InvalidRequest, match="keep_alive_seconds"):
                await service.load(None, request, lambda stage, done, total: None)

    go(work)


def test_a_load_whose_session_ends_is_given_back(make_model: MakeModel) -> None:
    async def work() -> None:
        async with running() as service:
            session = attached(service)
            request = pb.LoadModelRequest(path=str(make_model("adder", adder())))
            task = asyncio.create_task(
                service.load(session, request, lambda stage, done, total: None)
            )
            await asyncio.sleep(0)
            service.sessions.close(session, "test")
            with pytest.raises(Exception, match="has ended"):
                await task
            assert len(service.models) == 0
            service.abandon_load(task)  # what the handler does then, too

    go(work)


def test_an_abandoned_load_whose_session_has_ended_meanwhile_is_no_accident(
    make_model: MakeModel,
) -> None:
    async def work() -> None:
        async with running() as service:
            session = attached(service)
            request = pb.LoadModelRequest(path=str(make_model()))
            task = asyncio.create_task(
                service.load(session, request, lambda stage, done, total: None)
            )
            await task
            service.sessions.close(session, "test")
            service.abandon_load(task)
            await asyncio.sleep(0)
            assert len(service.models) == 0

    go(work)  # fails when a callback does


def test_a_flood_of_frames_leaves_the_loop_to_others() -> None:
    """Whatever waits in one connection, the loop comes round between two of its frames."""

    async def work() -> None:
        async with running() as service:
            path = Path(service.config.runtime_dir) / "attach.sock"
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                client.connect(str(path))
                client.send(pack(Kind.HELLO, 1, hello_request().SerializeToString()))
                frames = 100
                for number in range(2, frames + 2):
                    client.send(pack(99, number, b""))
                rounds = 0
                answers = 0
                client.setblocking(False)
                while answers < frames + 1:
                    rounds += 1
                    await asyncio.sleep(0)
                    try:
                        while client.recv(MAX_FRAME_BYTES):
                            answers += 1
                    except BlockingIOError:
                        continue
                assert rounds > frames / 2

    go(work)
