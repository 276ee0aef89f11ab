# SPDX-License-Identifier: Apache-2.0
"""The registrations of one context: asked for once, shared, and gone in every order."""

from collections.abc import Iterator

import pytest
from tests.fake_models import TENSOR_BYTES, adder

from qnnbroker.broker.backends.opening import open_backend
from qnnbroker.broker.backends.qnn import QnnBackendAdapter, QnnContextAdapter
from qnnbroker.broker.config import BrokerConfig
from qnnbroker.broker.registrations import Lease
from qnnbroker.native.fake import binary_bytes, control_loaded
from qnnbroker.native.region import Region
from qnnbroker.protos.errors import Unsupported

PLACES = [(i * TENSOR_BYTES, TENSOR_BYTES) for i in range(3)]


class Probe:
    """Memory to ask contexts with, as long as there is some."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __call__(self) -> Region:
        if self.error is not None:
            raise self.error
        return Region.create(4096)


@pytest.fixture
def probe() -> Probe:
    return Probe()


@pytest.fixture
def backend(probe: Probe, no_leaks: None) -> Iterator[QnnBackendAdapter]:
    opened = open_backend(BrokerConfig(runtime_dir="/unused", backend="fake"), probe)
    assert isinstance(opened, QnnBackendAdapter)
    control_loaded("clear", mem_register=True)
    yield opened
    control_loaded("clear", mem_register=False)
    opened.close()


@pytest.fixture
def region() -> Iterator[Region]:
    with Region.create(4096) as region:
        yield region


def create(backend: QnnBackendAdapter) -> QnnContextAdapter:
    binary = binary_bytes([adder()])
    return backend.create_context(binary, backend.read_spec(binary))


def lease(context: QnnContextAdapter, region: Region, zero_copy: str = "auto") -> Lease:
    spans = [(region, *place) for place in PLACES]
    return context.graphs["add"].lease_memory(spans, zero_copy)


def test_a_context_that_goes_first_takes_its_registrations_along(
    backend: QnnBackendAdapter, region: Region
) -> None:
    context, other = create(backend), create(backend)
    first, second, kept = lease(context, region), lease(context, region), lease(other, region)
    assert first.complete
    assert backend.memory.live == 6
    graph = context.graphs["add"]
    context.close()
    assert backend.memory.live == 3
    for given in (first, second, first):  # in any order, and twice
        graph.drop_memory(graph.let_go_memory(given))
    context.close()
    other.memory.release(kept)
    other.close()
    assert (backend.memory.live, backend.memory.lost_total) == (0, 0)


def test_a_context_with_a_runnable_keeps_what_that_uses(
    backend: QnnBackendAdapter, region: Region
) -> None:
    context = create(backend)
    graph = context.graphs["add"]
    given = lease(context, region)
    spans = [(region, *place) for place in PLACES]
    runnable = graph.bind(spans[:2], spans[2:], given)
    with pytest.raises(BufferError):
        context.close()
    assert backend.memory.live == 3
    runnable.close()
    context.close()
    assert backend.memory.live == 0


def test_without_memory_to_ask_with_a_context_is_there_and_is_asked_later(
    backend: QnnBackendAdapter, probe: Probe, region: Region
) -> None:
    probe.error = OSError(12, "no memory")
    context = create(backend)
    by_address = lease(context, region)
    assert by_address.registrations == [None] * 3
    assert by_address.detail.startswith("not known: no memory to ask with")
    with pytest.raises(Unsupported, match="no memory to ask with"):
        lease(context, region, "require")
    probe.error = None
    given = lease(context, region, "require")
    assert given.complete
    context.memory.release(given)
    context.close()


def test_a_context_that_cannot_be_asked_is_there_all_the_same(
    backend: QnnBackendAdapter, probe: Probe
) -> None:
    probe.error = RuntimeError("whatever it is")
    context = create(backend)
    assert list(context.graphs) == ["add"]
    context.close()
