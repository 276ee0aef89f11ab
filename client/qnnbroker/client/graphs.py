# SPDX-License-Identifier: Apache-2.0
"""Graph: one executable of a model; checks tensors before anything leaves the process."""

import contextlib
import threading
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from qnnbroker.protos.errors import BrokerError, InvalidRequest
from qnnbroker.protos.tensors import TensorSpec
from qnnbroker.v1 import control_pb2, types_pb2

from .bindings import Binding
from .spans import Place, Spans

if TYPE_CHECKING:
    from .models import Model
    from .session import Session

#: Bindings that `run` keeps ready between calls, per graph; more run at once if threads ask.
_IDLE_BINDINGS = 4


ZERO_COPY = {
    None: control_pb2.ZERO_COPY_UNSPECIFIED,
    "auto": control_pb2.ZERO_COPY_AUTO,
    "require": control_pb2.ZERO_COPY_REQUIRE,
    "off": control_pb2.ZERO_COPY_OFF,
}


class Graph:
    """One graph of a loaded model.

    Threads: any; each `run` under way has a binding of its own. Fork: not usable in the child.
    """

    def __init__(self, model: "Model", spec: types_pb2.GraphSpec) -> None:
        self._model = model
        self._graph_id = spec.graph_id
        self._name = spec.name
        self._inputs = _by_name(spec.inputs)
        self._outputs = _by_name(spec.outputs)
        self._lock = threading.Lock()
        self._idle: list[Binding] = []
        self._open: set[Binding] = set()

    @property
    def graph_id(self) -> int:
        return self._graph_id

    @property
    def name(self) -> str:
        return self._name

    @property
    def model(self) -> "Model":
        return self._model

    @property
    def session(self) -> "Session":
        return self._model.session

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        """What the graph wants, in the graph's order."""
        return self._inputs

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        """What the graph gives, in the graph's order."""
        return self._outputs

    def run(
        self, inputs: Mapping[str, npt.ArrayLike], *, timeout: float | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        """Runs the graph once; the outputs are fresh arrays.

        The simple way, which copies; `bind` is the way without copies.

        Args:
            inputs: every input by name, with exactly its dtype and shape; any strides.
            timeout: seconds for the run; None means the session's `call_timeout`.

        Raises:
            InvalidRequest: reason TENSOR_MISMATCH; a name, dtype or shape is not the graph's.
            LeaseRevoked: the model is unloaded.
            BrokerLost, SessionClosed, BrokerError: what happened instead.
        """
        self.session.check()
        arrays = self._checked(inputs)
        with self._lock:
            binding = self._idle.pop() if self._idle else None
        if binding is None:
            binding = self.bind()
        try:
            inside, outside = binding.arrays()
            for name, array in arrays.items():
                np.copyto(inside[name], array, casting="no")
            binding.run(timeout=timeout)
            results = {name: view.copy() for name, view in outside.items()}
        except BaseException:
            # After a deadline it may still run, and write, so it is not for the next caller.
            with contextlib.suppress(BrokerError):
                binding.close()
            raise
        with self._lock:
            keep = len(self._idle) < _IDLE_BINDINGS and not self._model.unloaded
            if keep:
                self._idle.append(binding)
        if not keep:
            binding.close()
        return results

    def bind(
        self,
        inputs: Mapping[str, Place] | None = None,
        outputs: Mapping[str, Place] | None = None,
        *,
        zero_copy: Literal["auto", "require", "off"] | None = None,
    ) -> Binding:
        """A binding over shared buffers.

        Tensors that are not named lie in the session's arena until the binding is closed; what is
        in them at first is left over. Naming places lets bindings share buffers: the output of one
        as the input of the next, or state that goes to and fro between two.

        Args:
            inputs: tensor name -> buffer, or (buffer, offset in bytes).
            outputs: the same.
            zero_copy: whether the device is to know the memory, and read and write it itself:
                "auto" where it does that (`Binding.memory` tells), "require" or not at all, "off"
                never; None means the broker's own setting.

        Raises:
            InvalidRequest: an unknown tensor name; reason BAD_OFFSET, BAD_ALIGNMENT or OVERLAP.
            LimitExceeded: too many bindings, or no room for the buffer.
            LeaseRevoked: the model is unloaded, or a buffer released.
            Unsupported: reason BACKEND_LACKS; required, and the device does not know such memory.
        """
        self.session.check()
        self._model.check()
        choice = ZERO_COPY.get(zero_copy)
        if choice is None:
            raise InvalidRequest(f"zero_copy auto, require or off wanted, found {zero_copy!r}")
        spans = Spans(self, inputs or {}, outputs or {})
        spans.request.zero_copy = choice
        try:
            binding = Binding(self, self.session.create_binding(spans.request), spans)
        except BaseException:
            spans.clear()
            raise
        with self._lock:
            self._open.add(binding)
        return binding

    def forget(self, binding: Binding) -> None:
        """For `Binding.close`: it is no longer open."""
        with self._lock:
            self._open.discard(binding)
            if binding in self._idle:
                self._idle.remove(binding)

    def close_bindings(self) -> None:
        """Closes what `bind` and `run` made; waits for runs under way."""
        with self._lock:
            bindings = list(self._open)
        for binding in bindings:
            binding.close()

    def check_names(
        self, what: str, specs: Mapping[str, TensorSpec], names: Collection[str]
    ) -> None:
        """Refuses names that are not among `specs`.

        Raises:
            InvalidRequest: reason TENSOR_MISMATCH.
        """
        for name in names:
            if name not in specs:
                raise self._mismatch(
                    f"graph {self._name!r} has no {what} {name!r}; "
                    f"its {what}s are {_listed(specs)}",
                    name,
                )

    def _checked(self, inputs: Mapping[str, npt.ArrayLike]) -> dict[str, npt.NDArray[Any]]:
        self.check_names("input", self._inputs, inputs)
        missing = [name for name in self._inputs if name not in inputs]
        if missing:
            raise self._mismatch(
                f"graph {self._name!r} misses its input {_listed(missing)}; "
                f"its inputs are {_listed(self._inputs)}",
                missing[0],
            )
        arrays = {}
        for name, spec in self._inputs.items():
            array = np.asarray(inputs[name])
            if array.dtype != spec.dtype or array.shape != spec.shape:
                raise self._mismatch(
                    f"input {name!r} of graph {self._name!r} wants {spec.dtype}"
                    f"{list(spec.shape)}, found {array.dtype}{list(array.shape)}",
                    name,
                    wanted=f"{spec.dtype}{list(spec.shape)}",
                    found=f"{array.dtype}{list(array.shape)}",
                )
            arrays[name] = array
        return arrays

    def _mismatch(self, message: str, tensor: str, **ids: object) -> InvalidRequest:
        return InvalidRequest(
            message, reason="TENSOR_MISMATCH", graph=self._name, tensor=tensor, **ids
        )

    def __repr__(self) -> str:
        def line(specs: Mapping[str, TensorSpec]) -> str:
            return ", ".join(str(s) for s in specs.values())

        return f"<Graph {self._name!r}: {line(self._inputs)} -> {line(self._outputs)}>"


def _by_name(specs: Collection[types_pb2.TensorSpec]) -> Mapping[str, TensorSpec]:
    return MappingProxyType({s.name: TensorSpec.from_proto(s) for s in specs})


def _listed(names: Collection[str]) -> str:
    return ", ".join(repr(n) for n in names) or "none"
