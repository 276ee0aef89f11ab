# SPDX-License-Identifier: Apache-2.0
from typing import Final, Self

from typing_extensions import disjoint_base

from qnnbroker.native.qnn_library import QnnLibrary

MAX_RPC_POLLING_US: Final = 9999

@disjoint_base
class QnnPower:
    def __new__(cls, library: QnnLibrary, *, device: int = 0, core: int = 0) -> Self: ...
    def vote(
        self,
        *,
        dcvs: bool,
        saver: bool,
        sleep_latency_us: int,
        corner: int,
        rpc_latency_us: int = 0,
        rpc_polling_us: int = 0,
    ) -> None: ...
    def close(self) -> None: ...
