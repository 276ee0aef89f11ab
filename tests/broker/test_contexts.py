# SPDX-License-Identifier: Apache-2.0
"""Loads that are joined, when the file of whoever came first is not what it was."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.broker.inside import attached, go, hanging, loaded, running, until
from tests.fake_models import MakeModel, adder
from tests.few_fds import few_fds
from tests.waiting import PATIENCE_SECONDS

from qnnbroker.broker.files import SETTLED_NS, ModelFile
from qnnbroker.broker.models import Model
from qnnbroker.native.fake import control_loaded
from qnnbroker.protos.errors import BrokerError, InvalidRequest


@pytest.mark.parametrize("joining", [1, 3])
def test_who_joined_a_load_whose_file_changed_loads_its_own(
    make_model: MakeModel, joining: int
) -> None:
    async def work() -> None:
        slow, first = make_model("slow", adder("slow")), make_model("first")
        others = [Path(shutil.copy(first, first.with_name(f"{n}.bin"))) for n in range(joining)]
        async with running(load_threads=1) as service:
            session, before = attached(service), hanging()
            control_loaded("hang=contextCreateFromBinary:1")
            blocking = asyncio.create_task(loaded(service, session, slow))
            await until(lambda: hanging() > before, "a load occupies the only thread")
            loads = [asyncio.create_task(loaded(service, session, first))]
            await until(lambda: len(service.contexts) == 2, "the next one waits for it")
            loads += [asyncio.create_task(loaded(service, session, path)) for path in others]
            await until(
                lambda: service.contexts.joined_loads_total == joining, "the others have joined"
            )
            (context,) = (c for c in service.contexts.all() if c.file.path == first)
            # What the kernel does when the time of a lease is over.
            fcntl.fcntl(context.file.file.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            first.write_bytes(slow.read_bytes())
            control_loaded("clear", "unhang")
            await blocking
            failed, *made = await asyncio.gather(*loads, return_exceptions=True)
            assert isinstance(failed, InvalidRequest)
            assert "was changed while it was loaded" in str(failed)
            models = [m for m in made if isinstance(m, Model)]
            assert len(models) == joining, made
            assert len({m.context.context_id for m in models}) == 1
            assert len(service.contexts) == 2

    go(work)


def test_files_that_are_slow_to_read_keep_nobody_from_what_is_resident(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        path, slow = make_model("first"), make_model("slow", adder("slow"))
        plain, reading, go_on = ModelFile.pieces, threading.Event(), threading.Event()

        def pieces(self: ModelFile) -> Iterator[tuple[int, memoryview]]:
            if self.path == slow:
                reading.set()
                assert go_on.wait(PATIENCE_SECONDS)
            yield from plain(self)

        monkeypatch.setattr(ModelFile, "pieces", pieces)
        async with running(load_threads=1) as service:
            session = attached(service)
            settled = path.stat().st_ctime_ns + SETTLED_NS
            await until(lambda: time.time_ns() > settled, "its times tell this version")
            await loaded(service, session, path)
            loading = asyncio.create_task(loaded(service, session, slow))
            await asyncio.to_thread(reading.wait, PATIENCE_SECONDS)
            model = await loaded(service, session, path)
            assert not loading.done()
            assert len(service.contexts) == 1
            go_on.set()
            assert (await loading).context is not model.context

    go(work)


def test_a_failure_of_the_library_is_everybodys(make_model: MakeModel) -> None:
    async def work() -> None:
        first = make_model("first")
        other = Path(shutil.copy(first, first.with_name("other.bin")))
        async with running() as service:
            session, before = attached(service), hanging()
            control_loaded("hang=contextCreateFromBinary:1", "fail=contextCreateFromBinary:1:1002")
            loads = [asyncio.create_task(loaded(service, session, first))]
            await until(lambda: hanging() > before, "it is created")
            loads.append(asyncio.create_task(loaded(service, session, other)))
            await until(lambda: service.contexts.joined_loads_total == 1, "the other has joined")
            control_loaded("unhang")
            results = await asyncio.gather(*loads, return_exceptions=True)
            assert [type(r).__name__ for r in results] == ["LimitExceeded"] * 2
            assert len(service.contexts) == 0

    go(work)


@pytest.mark.parametrize("left", range(5))
def test_a_file_that_cannot_be_held_for_want_of_fds_is_not_kept_open(
    make_model: MakeModel, left: int
) -> None:
    async def work() -> None:
        path = make_model()
        async with running() as service:
            model = await loaded(service, attached(service), path)
            with open(path, "r+b"):  # somebody writes it: no lease, so it is copied
                before, held = sorted(os.listdir("/proc/self/fd")), None
                with few_fds(left), contextlib.suppress(OSError, BrokerError):
                    held = model.context.binary()
                if held is not None:
                    held.close()
                assert sorted(os.listdir("/proc/self/fd")) == before
            assert (held is not None) == (left >= 3)

    go(work)
