# SPDX-License-Identifier: Apache-2.0
"""What a context binary says about itself: its graphs, their tensors, and what they will cost."""

import math
from typing import NamedTuple

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, uint32_t, uint64_t

from qnnbroker.native.qnn_error cimport check
from qnnbroker.native.qnn_library cimport (
    QnnLibrary,
    qb_handle,
    qb_qnn,
    qb_qnn_parser_create,
    qb_qnn_parser_free,
    qb_qnn_parser_read,
)


cdef extern from "<string.h>" nogil:
    size_t strnlen(const char *text, size_t most)

cdef extern from "qb_tensor.h" nogil:
    uint32_t qb_u32(const void *base, size_t offset)
    ctypedef struct qb_binary_view:
        uint32_t version, backend_id
        const char *build_id
        const char *soc_name
        uint32_t core_api[3]
        uint32_t backend_api[3]
        uint32_t blob_version[3]
        uint64_t blob_bytes
        uint32_t graph_count
        const void *graphs
        uint32_t soc_model, dsp_arch
    ctypedef struct qb_graph_view:
        uint32_t version
        const char *name
        uint32_t input_count, output_count
        const void *inputs
        const void *outputs
        uint64_t spill_fill_bytes, vtcm_bytes, io_bytes, weight_bytes, shared_weight_bytes
    ctypedef struct qb_tensor_view:
        uint32_t version, id, type, dtype, rank
        const char *name
        const void *dims
        bint quantized
        uint32_t encoding, bits, pair_count
        int32_t axis
    bint qb_binary_read(const void *record, qb_binary_view *out)
    bint qb_graph_read(const void *array, uint32_t index, qb_graph_view *out)
    bint qb_tensor_read(const void *array, uint32_t index, qb_tensor_view *out)
    bint qb_tensor_pair(const qb_tensor_view *t, uint32_t index, float *scale, int32_t *offset)

#: More than these is nobody's model but a damaged file.
MAX_GRAPHS = 65536
MAX_TENSORS = 65536
MAX_RANK = 32
MAX_QUANT_PAIRS = 1 << 20
MAX_NAME_BYTES = 4096

#: Bits per element, by the low byte of a QNN data type (decimal digits read as hex).
_ELEMENT_BITS = {0x04: 4, 0x08: 8, 0x16: 16, 0x32: 32, 0x64: 64}


class QuantInfo(NamedTuple):
    """Quantisation of a tensor: real = (stored + offset) * scale, so ONNX's zero point is -offset.

    encoding 0: one scale and offset; 1: one pair per index of `axis`; 2 and 3: the same with a bit
    width. Other encodings have empty tuples.
    """

    encoding: int
    scales: tuple
    offsets: tuple
    axis: int | None
    bits: int | None = None


class TensorInfo(NamedTuple):
    """An input or output of a graph. `size_bytes` follows from shape and data type."""

    name: str
    tensor_id: int
    dtype: int  # QNN's number, e.g. 0x0232 for float32
    shape: tuple
    size_bytes: int
    tensor_type: int  # 0 input, 1 output
    quantization: QuantInfo | None


class GraphInfo(NamedTuple):
    """A graph. Byte counts are 0 where the binary does not state them."""

    name: str
    inputs: tuple
    outputs: tuple
    spill_fill_bytes: int
    vtcm_bytes: int
    io_bytes: int
    weight_bytes: int
    shared_weight_bytes: int


class BinaryInfo(NamedTuple):
    """A context binary. `soc_model` and `dsp_arch` are 0 where it does not state them."""

    backend_id: int
    build_id: str
    core_api_version: tuple
    backend_api_version: tuple
    blob_version: tuple
    soc_name: str
    soc_model: int
    dsp_arch: int
    blob_bytes: int
    graphs: tuple

    def graph(self, name):
        """The graph of that name.

        Raises:
            ValueError: there is none; says which there are.
        """
        for found in self.graphs:
            if found.name == name:
                return found
        raise ValueError(f"no graph {name!r} in the binary; there are {[g.name for g in self.graphs]}")


def element_bits(dtype):
    """Bits of one element of a QNN data type.

    Raises:
        ValueError: unknown width.
    """
    try:
        return _ELEMENT_BITS[dtype & 0xFF]
    except KeyError:
        raise ValueError(f"QNN data type {dtype:#06x} has an unknown width") from None


def parse_binary(QnnLibrary library not None, data):
    """Reads the description of a context binary.

    The library's parser is not robust: a damaged file can crash it. Check a hash first, and parse
    what nobody vouches for in a process of its own.

    Args:
        library: its system library parses.
        data: the whole binary, as a contiguous buffer; nothing of it is kept.

    Raises:
        QnnError: the library refuses it.
        ValueError: an absurd or unknown description.
    """
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return parse(library, view.buf, <uint64_t>view.len)
    finally:
        PyBuffer_Release(&view)


cdef object parse(QnnLibrary library, const void *data, uint64_t size):
    cdef const qb_qnn *q = library.qnn
    cdef qb_handle parser = 0
    cdef const void *record = NULL
    cdef uint64_t code
    if size == 0:
        raise ValueError("the context binary is empty")
    check(qb_qnn_parser_create(q, &parser), "systemContextCreate")
    try:
        with nogil:
            code = qb_qnn_parser_read(q, parser, data, size, &record)
        check(code, "systemContextGetBinaryInfo")
        if record is NULL:
            raise ValueError("the library found no description in the context binary")
        info = _binary(record)
    finally:
        qb_qnn_parser_free(q, parser)
    check_size(info, size)
    return info


cdef int check_size(object info, uint64_t size) except -1:
    """Refuses a binary of `size` bytes that by its own description has more content."""
    if info.blob_bytes > size:
        raise ValueError(
            f"the context binary states {info.blob_bytes} bytes of content but has {size}"
        )
    return 0


cdef str _text(const char *text):
    if text is NULL:
        return ""
    return text[: strnlen(text, MAX_NAME_BYTES)].decode("utf-8", "surrogateescape")


cdef int _bound(uint64_t count, uint64_t most, str what) except -1:
    if count > most:
        raise ValueError(f"the context binary states {count} {what}; at most {most} are believed")
    return 0


cdef object _binary(const void *record):
    cdef qb_binary_view b
    cdef uint32_t i
    if not qb_binary_read(record, &b):
        raise ValueError(f"version {b.version} of the binary's description is unknown")
    _bound(b.graph_count, MAX_GRAPHS, "graphs")
    return BinaryInfo(
        b.backend_id,
        _text(b.build_id),
        (b.core_api[0], b.core_api[1], b.core_api[2]),
        (b.backend_api[0], b.backend_api[1], b.backend_api[2]),
        (b.blob_version[0], b.blob_version[1], b.blob_version[2]),
        _text(b.soc_name),
        b.soc_model,
        b.dsp_arch,
        b.blob_bytes,
        tuple([_graph(b.graphs, i) for i in range(b.graph_count)]),
    )


cdef object _graph(const void *array, uint32_t index):
    cdef qb_graph_view g
    if not qb_graph_read(array, index, &g):
        raise ValueError(f"version {g.version} of graph {index}'s description is unknown")
    name = _text(g.name)
    return GraphInfo(
        name,
        _tensors(g.inputs, g.input_count, f"inputs of graph {name!r}"),
        _tensors(g.outputs, g.output_count, f"outputs of graph {name!r}"),
        g.spill_fill_bytes,
        g.vtcm_bytes,
        g.io_bytes,
        g.weight_bytes,
        g.shared_weight_bytes,
    )


cdef tuple _tensors(const void *array, uint32_t count, str what):
    cdef uint32_t i
    _bound(count, MAX_TENSORS, what)
    return tuple([_tensor(array, i) for i in range(count)])


cdef object _tensor(const void *array, uint32_t index):
    cdef qb_tensor_view t
    cdef uint32_t i
    if not qb_tensor_read(array, index, &t):
        raise ValueError(f"version {t.version} of tensor {index}'s description is unknown")
    name = _text(t.name)
    _bound(t.rank, MAX_RANK, f"dimensions of tensor {name!r}")
    if t.rank > 0 and t.dims is NULL:
        raise ValueError(f"tensor {name!r} has rank {t.rank} but no dimensions")
    shape = tuple([qb_u32(t.dims, 4 * i) for i in range(t.rank)])
    size_bytes = (math.prod(shape) * element_bits(t.dtype) + 7) // 8
    return TensorInfo(name, t.id, t.dtype, shape, size_bytes, t.type, _quantization(&t, name))


cdef object _quantization(const qb_tensor_view *t, str name):
    cdef uint32_t i
    cdef float scale
    cdef int32_t offset
    if not t.quantized:
        return None
    _bound(t.pair_count, MAX_QUANT_PAIRS, f"scales of tensor {name!r}")
    scales, offsets = [], []
    for i in range(t.pair_count):
        if not qb_tensor_pair(t, i, &scale, &offset):
            raise ValueError(f"tensor {name!r} is quantised but has no scales")
        scales.append(scale)
        offsets.append(offset)
    return QuantInfo(
        t.encoding,
        tuple(scales),
        tuple(offsets),
        t.axis if t.axis >= 0 else None,
        t.bits if t.encoding in (2, 3) else None,
    )
