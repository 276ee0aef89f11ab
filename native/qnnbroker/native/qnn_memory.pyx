# SPDX-License-Identifier: Apache-2.0
"""QnnRegistration: a span of shared memory that one QNN context knows by a handle."""

import errno as _errno
import math
import os
import struct

from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport uint32_t, uint64_t

from qnnbroker.native.counters cimport QB_COUNT_REGISTRATION, qb_count
from qnnbroker.native.mapping cimport qb_span_ok
from qnnbroker.native.qnn_context cimport QnnContext
from qnnbroker.native.qnn_error cimport check
from qnnbroker.native.qnn_handle cimport QnnHandle
from qnnbroker.native.qnn_library cimport qb_handle

from qnnbroker.native.qnn_info import element_bits

#: An fd that holds one tensor from its start on.
ION = "ion"
#: A span of an fd that many tensors share.
CUSTOM = "custom"

cdef dict _KINDS = {ION: QB_MEMORY_ION, CUSTOM: QB_MEMORY_CUSTOM}


def executes():
    """(with every tensor in registered memory, others): executes of this process so far."""
    return qb_qnn_executes_registered(), qb_qnn_executes_raw()


cdef class QnnRegistration(QnnHandle):
    """Memory of one tensor, registered with a context.

    It is for tensors of exactly this data type and shape in graphs of that context. Runnables that
    use it are its children: it cannot be closed before them, nor the context before it. The library
    takes what it needs of `fd`, which the caller keeps.

    After a restart of the NPU `close` raises QnnError, with a code of an invalid handle; the
    registration counts as closed all the same, like the library's part of it.

    Threads: any. Fork: of no use in a child.

    Args:
        context: stays open as long as the registration.
        fd: of the shared memory, as the library must see it (rpcmem: the fd that rpcmem gave).
        total_bytes: size of the whole buffer behind `fd`.
        offset: where the tensor starts in it.
        dtype: QNN's number of the data type.
        shape: of the tensor; () is registered as one element.
        kind: CUSTOM, or ION, which wants `offset` 0.

    Raises:
        ValueError: the context is closed; a span that leaves the buffer, a size that overflows, a
            data type without a size, an unknown kind.
        OSError: EBADF, the fd is not open.
        QnnError: the library refuses; NOT_SUPPORTED where there is no memory registration.
    """

    def __cinit__(self, QnnContext context not None, int fd, total_bytes, offset, dtype, shape, *,
                  kind=CUSTOM):
        cdef qb_memory_spec spec
        cdef qb_handle memory = 0
        cdef uint64_t code
        cdef bytes dims
        context.ensure_alive()
        self.free_operation = "memDeRegister"
        self.qnn = context.qnn
        self.kind, self.dtype, self.offset = kind, dtype, offset
        self.shape = tuple(shape) or (1,)
        self.size_bytes = tensor_bytes(dtype, self.shape)
        if kind not in _KINDS:
            raise ValueError(f"a kind of memory {ION!r} or {CUSTOM!r} wanted, found {kind!r}")
        if not 0 <= total_bytes < 1 << 63 or not 0 <= offset < 1 << 63:
            raise ValueError(f"a buffer of {total_bytes} bytes, offset {offset}, makes no sense")
        if not qb_span_ok(total_bytes, offset, self.size_bytes):
            raise ValueError(
                f"{self.size_bytes} bytes from offset {offset} leave a buffer of {total_bytes}"
            )
        if kind == ION and offset != 0:
            raise ValueError(f"memory of kind {ION!r} starts at offset 0, found {offset}")
        try:
            os.fstat(fd)
        except OSError as error:
            raise OSError(_errno.EBADF, f"fd {fd} to register is not open") from error
        dims = struct.pack(f"={len(self.shape)}I", *self.shape)
        spec.kind = _KINDS[kind]
        spec.fd = fd
        spec.total_bytes, spec.offset = total_bytes, offset
        spec.dtype, spec.rank = dtype, len(self.shape)
        spec.dims = <const uint32_t *>PyBytes_AS_STRING(dims)
        context.busy += 1
        try:
            with nogil:
                code = qb_qnn_memory_register(self.qnn, context.handle, &spec, &memory)
            check(code, "memRegister")
        finally:
            context.end_call()
        self.adopt(memory, context)
        qb_count(QB_COUNT_REGISTRATION, 1)

    cdef uint64_t free_native(self, qb_handle handle) noexcept:
        cdef uint64_t code
        with nogil:
            code = qb_qnn_memory_deregister(self.qnn, handle)
        qb_count(QB_COUNT_REGISTRATION, -1)
        return code

    @property
    def context(self):
        """The QnnContext that knows it."""
        return self.parent


def tensor_bytes(dtype, shape):
    """Bytes of a tensor; sizes that no buffer can have are refused before they are multiplied out.

    Raises:
        ValueError: an unknown data type, a dimension below 1, or 4 GiB and more.
    """
    bits = element_bits(dtype)
    if any(not 1 <= d <= 0xFFFFFFFF for d in shape):
        raise ValueError(f"a shape without empty dimensions wanted, found {tuple(shape)}")
    size = (math.prod(shape) * bits + 7) // 8
    if size > 0xFFFFFFFF:
        raise ValueError(f"a tensor {tuple(shape)} of {size} bytes; QNN takes less than 4 GiB")
    return size
