# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterable, Sequence
from typing import Final, Self

from typing_extensions import disjoint_base

from qnnbroker.native.qnn_context import QnnContext
from qnnbroker.native.qnn_handle import QnnHandle

ION: Final = "ion"
CUSTOM: Final = "custom"

def executes() -> tuple[int, int]: ...
def tensor_bytes(dtype: int, shape: Sequence[int]) -> int: ...

@disjoint_base
class QnnRegistration(QnnHandle):
    kind: str
    dtype: int
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    def __new__(
        cls,
        context: QnnContext,
        fd: int,
        total_bytes: int,
        offset: int,
        dtype: int,
        shape: Iterable[int],
        *,
        kind: str = "custom",
    ) -> Self: ...
    @property
    def context(self) -> QnnContext: ...
