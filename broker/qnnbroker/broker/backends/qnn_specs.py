# SPDX-License-Identifier: Apache-2.0
"""What the QNN binding says of a binary, its graphs and tensors, as specs of ours."""

from qnnbroker.native.qnn_info import BinaryInfo, GraphInfo, TensorInfo
from qnnbroker.protos.errors import Unsupported
from qnnbroker.protos.tensors import Quantization, TensorSpec

from .base import BinarySpec, GraphSpec

#: QNN data type number -> name of the stored elements (qnn types: class in the high byte,
#: width in the low one). Fixed-point types are the quantised ones.
DTYPES: dict[int, str] = {
    0x0008: "int8",
    0x0016: "int16",
    0x0032: "int32",
    0x0064: "int64",
    0x0108: "uint8",
    0x0116: "uint16",
    0x0132: "uint32",
    0x0164: "uint64",
    0x0216: "float16",
    0x0232: "float32",
    0x0264: "float64",
    0x0308: "int8",
    0x0316: "int16",
    0x0332: "int32",
    0x0408: "uint8",
    0x0416: "uint16",
    0x0432: "uint32",
    0x0508: "bool",
}


def dotted(version: tuple[int, ...]) -> str:
    """(2, 40, 0) -> "2.40.0"."""
    return ".".join(map(str, version))


def binary_spec(info: BinaryInfo) -> BinarySpec:
    """Our view of what a context binary says of itself.

    Raises:
        Unsupported: reason DTYPE.
    """
    shared = max((g.shared_weight_bytes for g in info.graphs), default=0)
    return BinarySpec(
        graphs=tuple(graph_spec(g) for g in info.graphs),
        build_id=info.build_id,
        backend_id=info.backend_id,
        dsp_arch=info.dsp_arch,
        soc_model=info.soc_model,
        weight_bytes=sum(g.weight_bytes for g in info.graphs) + shared,
        shared_weight_bytes=shared,
        blob_bytes=info.blob_bytes,
        core_api_version=info.core_api_version,
        backend_api_version=info.backend_api_version,
    )


def graph_spec(info: GraphInfo) -> GraphSpec:
    return GraphSpec(
        info.name,
        tuple(tensor_spec(t, info.name) for t in info.inputs),
        tuple(tensor_spec(t, info.name) for t in info.outputs),
    )


def tensor_spec(info: TensorInfo, graph: str) -> TensorSpec:
    if info.dtype not in DTYPES:
        raise Unsupported(
            f"tensor {info.name!r} of graph {graph!r} has the QNN data type {info.dtype:#06x}, "
            "which has no numpy dtype",
            reason="DTYPE",
        )
    quantization = None
    if (q := info.quantization) is not None:
        quantization = Quantization(q.scales, q.offsets, q.axis, q.encoding)
    spec = TensorSpec(info.name, DTYPES[info.dtype], info.shape, quantization)
    if spec.size_bytes != info.size_bytes:
        raise Unsupported(
            f"tensor {info.name!r} of graph {graph!r}: {spec.element}{list(spec.shape)} makes "
            f"{spec.size_bytes} bytes, the library says {info.size_bytes}",
            reason="DTYPE",
        )
    return spec
