# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import Final, Self

from typing_extensions import Buffer, disjoint_base

from qnnbroker.native.qnn_backend import QnnDevice
from qnnbroker.native.qnn_graph import QnnGraph
from qnnbroker.native.qnn_handle import QnnHandle
from qnnbroker.native.qnn_info import BinaryInfo

NORMAL_PRIORITY: Final = 100

@disjoint_base
class QnnContext(QnnHandle):
    keeps_binary: bool
    device: QnnDevice
    info: BinaryInfo
    priority: int
    def __new__(
        cls,
        device: QnnDevice,
        data: Buffer,
        *,
        priority: int = 100,
        enable_graphs: Sequence[str] | None = None,
        info: BinaryInfo | None = None,
        file_mapped: bool = False,
    ) -> Self: ...
    def graph(self, name: str) -> QnnGraph: ...
