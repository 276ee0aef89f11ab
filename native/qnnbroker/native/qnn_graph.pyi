# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Final, Never, Self

from typing_extensions import Buffer, disjoint_base

from qnnbroker.native.qnn_handle import QnnHandle
from qnnbroker.native.qnn_info import GraphInfo, TensorInfo
from qnnbroker.native.qnn_memory import QnnRegistration
from qnnbroker.native.qnn_spans import check_overlap as check_overlap
from qnnbroker.native.runnable import Runnable

MAX_PRIORITY: Final = 500
MAX_TENSOR_BYTES: Final = 0xFFFFFFFF

def checked_priority(priority: int) -> int: ...

@disjoint_base
class QnnGraph:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    context: QnnHandle
    info: GraphInfo
    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> tuple[TensorInfo, ...]: ...
    @property
    def outputs(self) -> tuple[TensorInfo, ...]: ...
    @property
    def priority(self) -> int: ...
    def set_priority(self, priority: int) -> None: ...
    def statistics(self) -> dict[str, int]: ...
    def bind(
        self,
        inputs: Iterable[tuple[Buffer, int, int]],
        outputs: Iterable[tuple[Buffer, int, int]],
        registrations: Sequence[QnnRegistration | None] | None = None,
    ) -> QnnRunnable: ...
    def __reduce__(self) -> Never: ...

@disjoint_base
class QnnRunnable(Runnable):
    graph: QnnGraph
    registrations: tuple[QnnRegistration | None, ...]
    def __new__(
        cls,
        graph: QnnGraph,
        inputs: Iterable[tuple[Buffer, int, int]],
        outputs: Iterable[tuple[Buffer, int, int]],
        registrations: Sequence[QnnRegistration | None] | None = None,
    ) -> Self: ...
    def execute(self) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def __reduce__(self) -> Never: ...
