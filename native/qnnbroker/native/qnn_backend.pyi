# SPDX-License-Identifier: Apache-2.0
from typing import Self

from typing_extensions import disjoint_base

from qnnbroker.native.qnn_handle import QnnHandle
from qnnbroker.native.qnn_library import QnnLibrary

@disjoint_base
class QnnBackend(QnnHandle):
    library: QnnLibrary
    def __new__(cls, library: QnnLibrary, *, log_level: int = 2) -> Self: ...
    @property
    def build_id(self) -> str: ...

@disjoint_base
class QnnDevice(QnnHandle):
    backend: QnnBackend
    def __new__(cls, backend: QnnBackend) -> Self: ...
    @property
    def soc_model(self) -> int: ...
    @property
    def dsp_arch(self) -> int: ...
    @property
    def vtcm_mb(self) -> int: ...
    @property
    def core_count(self) -> int: ...
