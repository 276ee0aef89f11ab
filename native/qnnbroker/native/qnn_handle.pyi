# SPDX-License-Identifier: Apache-2.0
from types import TracebackType
from typing import Never, Self

from typing_extensions import disjoint_base

@disjoint_base
class QnnHandle:
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def __reduce__(self) -> Never: ...
