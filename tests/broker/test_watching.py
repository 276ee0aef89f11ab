# SPDX-License-Identifier: Apache-2.0
"""Files that a context goes on reading, when somebody wants to write them and no copy is made."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.broker.inside import AdderPlaces, attached, bound, go, hanging, loaded, running, until
from tests.fake_models import MakeModel, adder, inline_inputs
from tests.waiting import PATIENCE_SECONDS

from qnnbroker.broker import watching
from qnnbroker.broker.service import BrokerService
from qnnbroker.broker.steady import SteadyFile
from qnnbroker.native.fake import control_loaded
from qnnbroker.protos.errors import LeaseRevoked, LimitExceeded
from qnnbroker.v1 import control_pb2 as pb

BIG = {"file_bytes": 1 << 20}


@pytest.fixture(autouse=True)
def file_mapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library of this process reads binaries through callbacks; files are looked at often."""
    monkeypatch.setattr(watching, "WATCH_SECONDS", 0.02)
    control_loaded(file_mapped=True)
    yield
    control_loaded(file_mapped=False)


def no_memory(count: float, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The next `count` copies find no memory; returns where the tries are counted."""
    plain, tries = SteadyFile.copy, [0]

    def copy(self: SteadyFile, *args: object, **options: object) -> str:
        tries[0] += 1
        if tries[0] <= count:
            raise LimitExceeded("no memory for a copy", reason="MEMORY")
        return plain(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(SteadyFile, "copy", copy)
    return tries


def writer(path: Path) -> threading.Thread:
    """Somebody who wants to rewrite the file, and waits until it is let go."""
    thread = threading.Thread(target=lambda: path.write_bytes(b"gone"))
    thread.start()
    return thread


async def infer(service: BrokerService) -> None:
    request = pb.InferRequest(name="adder", inputs=inline_inputs(1))
    await service.infer(None, request, PATIENCE_SECONDS)


def test_a_copy_that_found_no_memory_is_tried_again(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        path = make_model("adder", **BIG)
        async with running() as service:
            model = await loaded(service, attached(service), path)
            tries = no_memory(3, monkeypatch)
            thread = writer(path)
            await until(lambda: model.context.file.copied, "it reads a copy")
            assert tries == [4]
            await asyncio.to_thread(thread.join, PATIENCE_SECONDS)
            assert path.read_bytes() == b"gone"
            await infer(service)

    go(work)


def test_a_context_that_is_freed_while_its_file_is_copied_leaves_nothing(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, copying, go_on = SteadyFile._copy_to, threading.Event(), threading.Event()

    def slowly(self: SteadyFile, *args: Any) -> str:
        digest = plain(self, *args)
        copying.set()
        assert go_on.wait(PATIENCE_SECONDS)
        return digest

    async def work() -> None:
        path = make_model("adder", **BIG)
        async with running() as service:
            session, before = attached(service), open_files(path)
            model = await loaded(service, session, path)
            monkeypatch.setattr(SteadyFile, "_copy_to", slowly)
            thread = writer(path)
            await asyncio.to_thread(copying.wait, PATIENCE_SECONDS)
            service.models.unload(model)
            await until(lambda: not service.contexts.closing_count, "it is freed")
            assert len(service.contexts) == 0
            go_on.set()
            await until(lambda: open_files(path) == before, "nothing of it is open")
            await asyncio.to_thread(thread.join, PATIENCE_SECONDS)
            assert path.read_bytes() == b"gone"

    go(work)


def test_a_context_that_cannot_come_back_keeps_nobody_out(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """New binaries are tried beside those that are loaded, or may be again after a reset."""

    async def work() -> None:
        path, other = make_model("adder", **BIG), make_model("other", adder("other"))
        options = {"verify": "always", "verdict_dir": str(tmp_path / "verdicts")}
        async with running(**options) as service:
            session = attached(service)
            model = await loaded(service, session, path)
            with monkeypatch.context() as patched:
                no_memory(float("inf"), patched)
                patched.setattr(watching, "break_seconds", lambda: 0.2)
                thread = writer(path)
                await until(lambda: model.context.lost, "the context is lost")
                await asyncio.to_thread(thread.join, PATIENCE_SECONDS)
            assert model.context.state == "lost"
            await loaded(service, session, other)

    go(work)


def open_files(path: Path) -> int:
    """How often this process has that file open for reading it, or a copy of a binary."""
    count = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            name = os.readlink(fd)
            count += name == str(path) or "qnnbroker-binary" in name
    return count


def test_a_context_whose_file_cannot_be_copied_fails_and_nobody_else(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        path, other = make_model("adder", **BIG), make_model("other", adder("other"))
        content = path.read_bytes()
        async with running() as service:
            session, started = attached(service), hanging()
            model = await loaded(service, session, path)
            binding = await bound(service, session, path)
            beside = await bound(service, session, other)
            no_memory(float("inf"), monkeypatch)
            monkeypatch.setattr(watching, "break_seconds", lambda: 0.2)
            control_loaded("hang=graphExecute@add:1")
            running_one = asyncio.create_task(service.execute(session, binding, None))
            await until(lambda: hanging() > started, "it executes")
            waiting = asyncio.create_task(service.execute(session, binding, None))
            thread = writer(path)
            await until(lambda: model.context.lost, "the context is lost")
            assert thread.is_alive()  # nothing was let go as long as something executes
            control_loaded("clear", "unhang")
            await running_one
            with pytest.raises(LeaseRevoked):
                await waiting
            await asyncio.to_thread(thread.join, PATIENCE_SECONDS)
            assert path.read_bytes() == b"gone"
            with pytest.raises(LeaseRevoked):
                await service.execute(session, binding, None)
            with pytest.raises(LeaseRevoked, match="could not be copied"):
                await infer(service)
            buffer = await session.buffers.allocate(4096)
            inputs, outputs = AdderPlaces(buffer.buffer_id).places()
            with pytest.raises(LeaseRevoked, match="could not be copied"):
                await session.bindings.create(model.graphs[0], inputs, outputs, session.buffers)
            await service.execute(session, beside, None)
            (info,) = (i for i in service.context_infos() if i.state == "lost")
            assert "could not be copied" in info.state_detail
            assert info.state_reason == "LEASE_REVOKED"
            service.sessions.close(session, "the test wants it gone")
            await until(lambda: len(service.contexts) == 0, "all contexts are gone")
            monkeypatch.undo()
            path.write_bytes(content)
            await loaded(service, None, path)  # anew
            await infer(service)

    go(work)
