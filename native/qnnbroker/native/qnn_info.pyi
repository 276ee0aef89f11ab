# SPDX-License-Identifier: Apache-2.0
from typing import Final, NamedTuple

from typing_extensions import Buffer

from qnnbroker.native.qnn_library import QnnLibrary

MAX_GRAPHS: Final = 65536
MAX_TENSORS: Final = 65536
MAX_RANK: Final = 32
MAX_QUANT_PAIRS: Final = 1048576
MAX_NAME_BYTES: Final = 4096

class QuantInfo(NamedTuple):
    encoding: int
    scales: tuple[float, ...]
    offsets: tuple[int, ...]
    axis: int | None
    bits: int | None = None

class TensorInfo(NamedTuple):
    name: str
    tensor_id: int
    dtype: int
    shape: tuple[int, ...]
    size_bytes: int
    tensor_type: int
    quantization: QuantInfo | None

class GraphInfo(NamedTuple):
    name: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    spill_fill_bytes: int
    vtcm_bytes: int
    io_bytes: int
    weight_bytes: int
    shared_weight_bytes: int

class BinaryInfo(NamedTuple):
    backend_id: int
    build_id: str
    core_api_version: tuple[int, int, int]
    backend_api_version: tuple[int, int, int]
    blob_version: tuple[int, int, int]
    soc_name: str
    soc_model: int
    dsp_arch: int
    blob_bytes: int
    graphs: tuple[GraphInfo, ...]
    def graph(self, name: str) -> GraphInfo: ...

def element_bits(dtype: int) -> int: ...
def parse_binary(library: QnnLibrary, data: Buffer) -> BinaryInfo: ...
