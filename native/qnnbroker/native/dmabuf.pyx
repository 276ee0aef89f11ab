# SPDX-License-Identifier: Apache-2.0
"""DMA buffers: telling them from memfds, and bracketing what the CPU does with them.

All calls release the GIL and may come from any thread.
"""

import os

from libc.stdint cimport uint32_t

cdef extern from "qb_dmabuf.h" nogil:
    const uint32_t QB_DMABUF_READ, QB_DMABUF_WRITE
    bint qb_dmabuf_is(int fd)
    int qb_dmabuf_begin(int fd, uint32_t access)
    int qb_dmabuf_end(int fd, uint32_t access)

READ, WRITE = QB_DMABUF_READ, QB_DMABUF_WRITE


def is_dma_buf(int fd):
    """True for a DMA buffer; a memfd needs no synchronisation."""
    return qb_dmabuf_is(fd)


def begin_access(int fd, uint32_t access):
    """Before the CPU reads (READ), writes (WRITE) or both: what the device wrote becomes visible.

    Raises:
        OSError: ENOTTY, not a DMA buffer; or what the kernel says.
    """
    cdef int error
    with nogil:
        error = qb_dmabuf_begin(fd, access)
    if error:
        raise OSError(error, f"begin of access to DMA buffer {fd}: {os.strerror(error)}")


def end_access(int fd, uint32_t access):
    """After it: what the CPU wrote becomes visible to the device. Raises as `begin_access`."""
    cdef int error
    with nogil:
        error = qb_dmabuf_end(fd, access)
    if error:
        raise OSError(error, f"end of access to DMA buffer {fd}: {os.strerror(error)}")
