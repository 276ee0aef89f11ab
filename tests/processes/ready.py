# SPDX-License-Identifier: Apache-2.0
"""A client that is ready to run: the adder, a buffer, and good places for its tensors."""

from dataclasses import dataclass, field
from typing import Any

from tests.fake_models import TENSOR_BYTES, numbers
from tests.raw_peer import RawPeer, binding_request

from qnnbroker.v1 import control_pb2 as pb

Place = tuple[str, int, int, int]


@dataclass
class Ready:
    """A client with a model, a buffer and good places in it."""

    peer: RawPeer
    graph_id: int
    model_id: int
    buffer: int
    memory: Any
    inputs: list[Place] = field(init=False)
    outputs: list[Place] = field(init=False)

    def __post_init__(self) -> None:
        self.inputs = [
            ("a", self.buffer, 0, TENSOR_BYTES),
            ("b", self.buffer, TENSOR_BYTES, TENSOR_BYTES),
        ]
        self.outputs = [("y", self.buffer, 2 * TENSOR_BYTES, TENSOR_BYTES)]

    def request(self) -> pb.CreateBindingRequest:
        return binding_request(self.graph_id, self.inputs, self.outputs)

    def bind(self) -> int:
        return self.peer.bind(self.graph_id, self.inputs, self.outputs)

    def fill(self, seed: int) -> bytes:
        """Writes inputs; the output they must give."""
        a, b = numbers(seed)
        self.memory[: 2 * TENSOR_BYTES] = a.tobytes() + b.tobytes()
        return bytes((a + b).tobytes())

    def output(self) -> bytes:
        return bytes(self.memory[2 * TENSOR_BYTES : 3 * TENSOR_BYTES])
