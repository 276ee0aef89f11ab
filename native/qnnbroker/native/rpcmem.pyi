# SPDX-License-Identifier: Apache-2.0
import os
from typing import Final, Self

from typing_extensions import disjoint_base

from qnnbroker.native.region import Region

DEFAULT_LIBRARY: Final = "libcdsprpc.so"
SYSTEM_HEAP: Final = 25
CACHED: Final = 1
OLD_MAX_BYTES: Final = 0x7FFFFFFF

@disjoint_base
class RpcMem:
    heap: int
    flags: int
    def __new__(
        cls, path: str | os.PathLike[str] = "libcdsprpc.so", *, heap: int = 25, flags: int = 1
    ) -> Self: ...
    @property
    def path(self) -> str: ...
    @property
    def has_alloc2(self) -> bool: ...
    def create(self, size_bytes: int) -> Region: ...
