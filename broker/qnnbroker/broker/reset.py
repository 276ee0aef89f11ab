# SPDX-License-Identifier: Apache-2.0
"""Resetting the backend: every binding parked, backend, device and contexts made anew.

Bindings, buffers, sessions and ids stay what they are. Submissions that come meanwhile wait, and
run once the contexts are back. What executes at the time ends first.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from qnnbroker.protos.errors import BrokerError, BrokerUnavailable
from qnnbroker.v1 import control_pb2 as pb

from .backends.base import BackendContext
from .bound import BoundGraph
from .contexts import Context

if TYPE_CHECKING:
    from .service import BrokerService

log = logging.getLogger(__name__)


async def reset_backend(service: "BrokerService") -> pb.ResetBackendResponse:
    """Does it; one at a time.

    Raises:
        BrokerUnavailable: reason STARTING; a reset is under way.
        BrokerError: the library does not start again, or does not take a binary again.
    """
    if service.resetting:
        raise BrokerUnavailable("the backend is being reset already", reason="STARTING")
    service.resetting = True
    held: list[BoundGraph] = []
    try:
        contexts = [c for c in service.contexts.all() if c.task is not None]
        await asyncio.gather(*(c.task for c in contexts if c.task), return_exceptions=True)
        contexts = [c for c in service.contexts.all() if c.native is not None]
        held = [b for c in contexts for b in list(c.bound)]
        parked = sum(b.hold() for b in held)
        while any(not b.parked for b in held) or service.contexts.closing_count:
            await service.executor.wait_event()
        await service.power.pause()
        await free_all(service, contexts)
        await service.contexts.on_thread(service.backend.reset)
        for context in contexts:
            await make_again(service, context)
        log.warning("the backend was reset: %d contexts, %d bindings", len(contexts), parked)
        return pb.ResetBackendResponse(parked_count=parked, context_count=len(contexts))
    finally:
        service.resetting = False
        for bound in held:
            bound.let_go()
        service.power.start()


async def free_all(service: "BrokerService", contexts: list[Context]) -> None:
    """Frees the native contexts. After a restart of the NPU they are gone already."""
    for context in contexts:
        native, context.native = context.native, None
        assert native is not None
        try:
            await service.contexts.on_thread(native.close)
        except BrokerError as error:
            log.info("context %d was gone already: %s", context.context_id, error)


async def make_again(service: "BrokerService", context: Context) -> None:
    """Creates the native context again from the file that it holds."""
    creator, spec, file = service.contexts.creator, context.spec, context.file
    assert spec is not None

    def create() -> BackendContext:
        file.ensure(context.content_hash)
        return creator.create(file, spec, context.key.enabled_graphs)

    native = await service.contexts.on_thread(create)
    context.native = native
    service.contexts.settle(context)
    views = [graph for model in service.models for graph in model.graphs]
    views += [bound.graph for bound in context.bound]  # of models that are unloaded, maybe
    for view in views:
        if view.context is context:
            view.native = native.graphs[view.native.spec.name]
