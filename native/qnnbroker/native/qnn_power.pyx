# SPDX-License-Identifier: Apache-2.0
"""QnnPower: votes for the clocks of an NPU."""

from libc.stdint cimport uint32_t, uint64_t

from qnnbroker.native.qnn_error cimport check
from qnnbroker.native.qnn_library cimport QnnLibrary, qb_qnn

cdef extern from "qb_qnn_power.h" nogil:
    ctypedef struct qb_power_vote:
        bint dcvs
        uint32_t power_mode, sleep_latency_us, corner, rpc_latency_us, rpc_polling_us
    uint64_t qb_qnn_power_open(const qb_qnn *q, uint32_t device, uint32_t core, uint32_t *id)
    uint64_t qb_qnn_power_vote(const qb_qnn *q, uint32_t id, const qb_power_vote *vote)
    uint64_t qb_qnn_power_close(const qb_qnn *q, uint32_t id)

#: The longest polling time that is documented, microseconds; it is the whole process'.
MAX_RPC_POLLING_US = 9999

cdef uint32_t _PERFORMANCE = 0x10
cdef uint32_t _SAVER = 4


cdef class QnnPower:
    """One client of the performance infrastructure; its last vote holds until `close`.

    Threads: one call at a time; each may block for milliseconds, without the GIL. Fork: of no use
    in a child.

    Args:
        library: of a backend that was created.
        device, core: numbers of the NPU and its core.

    Raises:
        QnnError: NOT_SUPPORTED, there is no such infrastructure; or what the library says.
    """

    cdef QnnLibrary library
    cdef uint32_t id
    cdef bint open

    def __cinit__(self, QnnLibrary library not None, *, uint32_t device=0, uint32_t core=0):
        cdef uint64_t code
        self.library = library
        with nogil:
            code = qb_qnn_power_open(library.qnn, device, core, &self.id)
        check(code, "createPowerConfigId")
        self.open = True

    def vote(self, *, bint dcvs, bint saver, uint32_t sleep_latency_us, uint32_t corner,
             uint32_t rpc_latency_us=0, uint32_t rpc_polling_us=0):
        """Replaces this client's vote.

        Args:
            dcvs: clocks may follow the load.
            saver: they prefer to save power; otherwise to perform.
            sleep_latency_us: how long the NPU may take to wake.
            corner: voltage corner, QNN's number, of bus and core.
            rpc_latency_us: how long a call to the DSP may sleep; 0 votes for nothing.
            rpc_polling_us: how long it polls before, up to MAX_RPC_POLLING_US; 0 likewise.

        Raises:
            ValueError: closed, or polling for too long.
            QnnError: the library refuses.
        """
        cdef qb_power_vote vote
        cdef uint64_t code
        if not self.open:
            raise ValueError("QnnPower is closed")
        if rpc_polling_us > MAX_RPC_POLLING_US:
            raise ValueError(f"rpc_polling_us of at most {MAX_RPC_POLLING_US} wanted")
        vote.dcvs, vote.power_mode = dcvs, _SAVER if saver else _PERFORMANCE
        vote.sleep_latency_us, vote.corner = sleep_latency_us, corner
        vote.rpc_latency_us, vote.rpc_polling_us = rpc_latency_us, rpc_polling_us
        with nogil:
            code = qb_qnn_power_vote(self.library.qnn, self.id, &vote)
        check(code, "setPowerConfig")

    def close(self):
        """Takes the vote back. Idempotent.

        Raises:
            QnnError: the library refused; it counts as closed all the same.
        """
        cdef uint64_t code
        if self.open:
            self.open = False
            with nogil:
                code = qb_qnn_power_close(self.library.qnn, self.id)
            check(code, "destroyPowerConfigId")
