# SPDX-License-Identifier: Apache-2.0
"""A raw client that has something to run."""

from collections.abc import Callable
from pathlib import Path

from tests.broker_process import BrokerProcess
from tests.fake_models import TENSOR_BYTES, numbers
from tests.raw_ring import RawRing

MakeBound = Callable[[], "Bound"]


class Bound(RawRing):
    """A raw client with a binding of an adder."""

    def __init__(self, broker: BrokerProcess, model: Path) -> None:
        super().__init__(broker.attach_path, broker.stub)
        self.graph = self.load(model).model.graphs[0].graph_id
        self.buffer, self.memory = self.alloc(4096)
        places = [(n, self.buffer, i * TENSOR_BYTES, TENSOR_BYTES) for i, n in enumerate("aby")]
        self.places = places[:2], places[2:]
        self.binding = self.bind(self.graph, *self.places)

    def check_run(self, seed: int = 1) -> None:
        """One run, and whether its result is right."""
        a, b = numbers(seed)
        self.memory[: 2 * TENSOR_BYTES] = a.tobytes() + b.tobytes()
        ticket = self.submit(self.binding)
        ((found, status, *_),) = self.take()
        assert (found, status) == (ticket, 0)
        assert self.memory[2 * TENSOR_BYTES : 3 * TENSOR_BYTES] == (a + b).tobytes()

    def close(self) -> None:
        super().close()
        self.memory.close()
