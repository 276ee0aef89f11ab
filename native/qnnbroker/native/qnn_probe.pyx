# SPDX-License-Identifier: Apache-2.0
"""What a QNN library can do, found by calling: each function gives the code of one harmless call.

NOT_SUPPORTED means no. Any other code means that the call is there, for instance one that refuses
the missing graph. Threads: any; the calls run without the GIL. All raise ValueError when closed.
"""

from libc.stdint cimport uint64_t

from qnnbroker.native.qnn_backend cimport QnnBackend, QnnDevice
from qnnbroker.native.qnn_graph cimport QnnGraph
from qnnbroker.native.qnn_library cimport qb_handle, qb_qnn

cdef extern from "qb_qnn_probe.h" nogil:
    uint64_t qb_qnn_probe_signal(const qb_qnn *q, qb_handle backend)
    uint64_t qb_qnn_probe_profile(const qb_qnn *q, qb_handle backend)
    uint64_t qb_qnn_probe_async(const qb_qnn *q, qb_handle graph)
    uint64_t qb_qnn_probe_callback(const qb_qnn *q, qb_handle backend, qb_handle device)


def probe_signal(QnnBackend backend not None):
    """signalCreate: whether executes can be aborted or timed out."""
    cdef uint64_t code
    backend.ensure_alive()
    with nogil:
        code = qb_qnn_probe_signal(backend.qnn, backend.handle)
    return code & 0xFFFF


def probe_profile(QnnBackend backend not None):
    """profileCreate: whether times inside the device can be had."""
    cdef uint64_t code
    backend.ensure_alive()
    with nogil:
        code = qb_qnn_probe_profile(backend.qnn, backend.handle)
    return code & 0xFFFF


def probe_async(QnnGraph graph not None):
    """graphExecuteAsync, without tensors: whether executes can be queued in the device."""
    cdef uint64_t code
    cdef const qb_qnn *qnn = graph.context.qnn
    cdef qb_handle handle = graph.native.handle
    graph.context.ensure_alive()
    with nogil:
        code = qb_qnn_probe_async(qnn, handle)
    return code & 0xFFFF


def probe_callback(QnnDevice device not None):
    """contextCreateFromBinaryWithCallback, without a binary: whether weights can stay in the file."""
    cdef uint64_t code
    cdef QnnBackend backend = device.backend
    device.ensure_alive()
    with nogil:
        code = qb_qnn_probe_callback(backend.qnn, backend.handle, device.handle)
    return code & 0xFFFF
