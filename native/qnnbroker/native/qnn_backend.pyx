# SPDX-License-Identifier: Apache-2.0
"""QnnBackend and QnnDevice: a library initialised, and the NPU behind it."""

from libc.stdint cimport uint64_t

from qnnbroker.native.counters cimport QB_COUNT_BACKEND, QB_COUNT_DEVICE, qb_count
from qnnbroker.native.qnn_error cimport check
from qnnbroker.native.qnn_handle cimport QnnHandle
from qnnbroker.native.qnn_library cimport (
    QnnLibrary,
    qb_handle,
    qb_platform,
    qb_qnn_backend_build_id,
    qb_qnn_backend_create,
    qb_qnn_backend_free,
    qb_qnn_device_create,
    qb_qnn_device_free,
    qb_qnn_logger_create,
    qb_qnn_logger_free,
    qb_qnn_platform,
)

from qnnbroker.native.qnn_error import NOT_SUPPORTED

cdef uint64_t _NOT_SUPPORTED = NOT_SUPPORTED


cdef class QnnBackend(QnnHandle):
    """A QNN library with its state: the logger and the backend handle.

    The logger comes first and goes last, because without one the library prints errors on stdout.
    What it logs comes out of `qnn_library.drain_log`.

    Threads: any. Fork: never fork once a context was made, the child would hang in QNN.

    Args:
        library: the library.
        log_level: what to log: 1 errors, 2 warnings, 3 information, 4 verbose, 5 debug.

    Raises:
        ValueError: an unknown log level.
        QnnError: the library cannot start.
    """

    def __cinit__(self, QnnLibrary library not None, *, int log_level=2):
        cdef qb_handle backend = 0
        cdef uint64_t code
        if not 1 <= log_level <= 5:
            raise ValueError(f"log_level must be from 1 to 5, not {log_level}")
        self.free_operation = "backendFree"
        self.library = library
        self.qnn = library.qnn
        code = qb_qnn_logger_create(self.qnn, <unsigned int>log_level, &self.logger)
        if code != _NOT_SUPPORTED:  # a library without a log has nothing to keep off stdout
            check(code, "logCreate")
        with nogil:
            code = qb_qnn_backend_create(self.qnn, self.logger, &backend)
        check(code, "backendCreate")
        self.adopt(backend, None)
        qb_count(QB_COUNT_BACKEND, 1)

    def __dealloc__(self):
        # Only when backendCreate failed: otherwise the logger went with the backend.
        if self.logger != 0 and self.handle == 0:
            qb_qnn_logger_free(self.qnn, self.logger)

    cdef uint64_t free_native(self, qb_handle handle) noexcept:
        cdef qb_handle logger = self.logger
        cdef uint64_t code
        self.logger = 0
        with nogil:
            code = qb_qnn_backend_free(self.qnn, handle)
            qb_qnn_logger_free(self.qnn, logger)
        qb_count(QB_COUNT_BACKEND, -1)
        return code

    @property
    def build_id(self):
        """The library's build, e.g. "v2.51.0.260929181845"; "" when it does not say.

        Raises:
            ValueError: closed.
        """
        cdef const char *text = NULL
        self.ensure_alive()
        if qb_qnn_backend_build_id(self.qnn, &text) != 0 or text is NULL:
            return ""
        return text.decode("utf-8", "replace")


cdef class QnnDevice(QnnHandle):
    """The NPU behind a backend.

    Threads and fork as QnnBackend.

    Args:
        backend: stays open as long as the device.

    Raises:
        ValueError: the backend is closed.
        QnnError: no device, or it cannot be opened.
    """

    def __cinit__(self, QnnBackend backend not None):
        cdef qb_handle device = 0
        cdef uint64_t code
        backend.ensure_alive()
        self.free_operation = "deviceFree"
        self.backend = backend
        self.qnn = backend.qnn
        backend.busy += 1
        try:
            with nogil:
                # Only for information: a library that does not know its platform may still run.
                qb_qnn_platform(self.qnn, backend.logger, &self.platform)
                code = qb_qnn_device_create(self.qnn, backend.logger, &device)
            check(code, "deviceCreate")
        finally:
            backend.end_call()
        self.adopt(device, backend)
        qb_count(QB_COUNT_DEVICE, 1)

    cdef uint64_t free_native(self, qb_handle handle) noexcept:
        cdef uint64_t code
        with nogil:
            code = qb_qnn_device_free(self.qnn, handle)
        qb_count(QB_COUNT_DEVICE, -1)
        return code

    @property
    def soc_model(self):
        """QNN's number of the chip; 0 when the library does not say."""
        return self.platform.soc_model

    @property
    def dsp_arch(self):
        """Hexagon architecture, e.g. 73; 0 when the library does not say."""
        return self.platform.dsp_arch

    @property
    def vtcm_mb(self):
        """Tightly coupled memory of the NPU in MB; 0 when the library does not say."""
        return self.platform.vtcm_mb

    @property
    def core_count(self):
        """Number of NPU cores; 0 when the library does not say."""
        return self.platform.core_count
