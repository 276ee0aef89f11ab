# SPDX-License-Identifier: Apache-2.0
from typing import Final

NOT_SUPPORTED: Final = 1000
OUT_OF_MEMORY: Final = 1002
INVALID_ARGUMENT: Final = 1004
NOT_PERMITTED: Final = 1005
PLATFORM_NOT_SUPPORTED: Final = 1006
DSP_RESTARTED: Final = 1007
INCOMPATIBLE_LIBRARIES: Final = 1008
RESOURCE_UNAVAILABLE: Final = 1010
DSP_LOST: Final = 1011
GENERAL: Final = 1100
CONTEXT_INVALID_HANDLE: Final = 5002
BINARY_VERSION: Final = 5004
BINARY_CONFIGURATION: Final = 5008
BINARY_SUBOPTIMAL: Final = 5011
CONTEXT_ABORTED: Final = 5012
CONTEXT_TIMED_OUT: Final = 5013
GRAPH_INVALID_HANDLE: Final = 6001
GRAPH_ABORTED: Final = 6031
GRAPH_TIMED_OUT: Final = 6033
DEVICE_UNAVAILABLE: Final = 14002
BINARY_MALFORMED: Final = 30010

def name_of(code: int) -> str: ...

class QnnError(Exception):
    code: int
    operation: str
    message: str
    def __init__(self, code: int, operation: str, message: str = "") -> None: ...
    @property
    def name(self) -> str: ...
