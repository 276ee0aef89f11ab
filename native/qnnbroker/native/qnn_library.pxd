# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int32_t, uint32_t, uint64_t

from qnnbroker.native.runnable cimport qb_graph, qb_runnable

cdef extern from "qb_log.h" nogil:
    const size_t QB_LOG_LINE_BYTES
    int qb_log_take(uint32_t *level, char *text)
    uint64_t qb_log_dropped()
    int qb_log_fd()

cdef extern from "qb_qnn.h" nogil:
    ctypedef uint64_t qb_handle
    const uint32_t QB_QNN_NORMAL_PRIORITY
    const uint32_t QB_QNN_MAX_PRIORITY
    ctypedef struct qb_qnn:
        char *directory
        const char *provider_name
        uint32_t backend_id
        uint32_t core_api[3]
        uint32_t backend_api[3]
        uint32_t system_api[3]
    ctypedef struct qb_platform:
        uint32_t device_count, core_count, soc_model, dsp_arch
        uint64_t vtcm_mb
    ctypedef struct qb_qnn_graph:
        qb_graph base
        qb_handle handle
    ctypedef struct qb_qnn_runnable:
        qb_runnable base
        bint registered

    const qb_qnn *qb_qnn_open(const char *directory, char *why, size_t why_bytes)
    uint64_t qb_qnn_has_capability(const qb_qnn *q, uint32_t key)
    uint64_t qb_qnn_logger_create(const qb_qnn *q, uint32_t level, qb_handle *out)
    uint64_t qb_qnn_logger_free(const qb_qnn *q, qb_handle logger)
    uint64_t qb_qnn_backend_create(const qb_qnn *q, qb_handle logger, qb_handle *out)
    uint64_t qb_qnn_backend_build_id(const qb_qnn *q, const char **out)
    uint64_t qb_qnn_backend_free(const qb_qnn *q, qb_handle backend)
    uint64_t qb_qnn_platform(const qb_qnn *q, qb_handle logger, qb_platform *out)
    uint64_t qb_qnn_device_create(const qb_qnn *q, qb_handle logger, qb_handle *out)
    uint64_t qb_qnn_device_free(const qb_qnn *q, qb_handle device)
    uint64_t qb_qnn_context_create(const qb_qnn *q, qb_handle backend, qb_handle device,
                                   const void *binary, uint64_t size, uint32_t priority,
                                   const char *const *enable_graphs, qb_handle *out)
    uint64_t qb_qnn_context_free(const qb_qnn *q, qb_handle context)
    uint64_t qb_qnn_graph_retrieve(const qb_qnn *q, qb_handle context, const char *name,
                                   qb_handle *out)
    uint64_t qb_qnn_parser_create(const qb_qnn *q, qb_handle *out)
    uint64_t qb_qnn_parser_read(const qb_qnn *q, qb_handle parser, const void *binary,
                                uint64_t size, const void **out)
    uint64_t qb_qnn_parser_free(const qb_qnn *q, qb_handle parser)
    void qb_qnn_graph_init(qb_qnn_graph *graph, const qb_qnn *q, qb_handle handle,
                           uint32_t priority)
    void qb_qnn_runnable_init(qb_qnn_runnable *runnable, qb_qnn_graph *graph, void *inputs,
                              uint32_t input_count, void *outputs, uint32_t output_count)
    uint32_t qb_qnn_runnable_running(const qb_qnn_runnable *runnable)

cdef class QnnLibrary:
    cdef const qb_qnn *qnn  # never freed, hence never dangling
    cdef object __weakref__
