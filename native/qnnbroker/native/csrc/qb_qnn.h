/* SPDX-License-Identifier: Apache-2.0
 * The QNN functions that the binding uses: loading the two libraries, finding their function tables,
 * and one plain C function per call. What a graph and a runnable are for the executor is here too.
 *
 * Threads: everything but qb_qnn_open may be called from any thread, without the GIL, and may block
 * for seconds. Fork: never call any of it in a child that was forked after a context was made. */
#pragma once
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "qb_runnable.h"

/* A QNN handle: a pointer or a small number, the library's own business. 0: none. */
typedef uint64_t qb_handle;

/* The code for "this library cannot do that"; also what a call through an empty slot gives. */
#define QB_QNN_NOT_SUPPORTED 1000u
#define QB_QNN_NORMAL_PRIORITY 100u
#define QB_QNN_MAX_PRIORITY 500u

/* Two libraries that are loaded. Never freed: QNN libraries cannot be unloaded. */
typedef struct qb_qnn {
    struct qb_qnn *next;
    char *directory;     /* as realpath gives it */
    const void *core;    /* interface records, owned by the libraries */
    const void *system;
    const char *provider_name;
    uint32_t backend_id;
    uint32_t core_api[3], backend_api[3], system_api[3];
} qb_qnn;

/* Loads libQnnHtp.so and libQnnSystem.so of `directory` (a real path), or gives what an earlier call
 * loaded from there. NULL: `why` has a sentence.
 *
 * While the libraries initialise, the working directory is one that nobody can put a file into and
 * fd 1 is fd 2, both for the whole process; so call this with the GIL held and before starting
 * threads that use either. */
QB_EXPORT const qb_qnn *qb_qnn_open(const char *directory, char *why, size_t why_bytes);

QB_EXPORT uint64_t qb_qnn_has_capability(const qb_qnn *q, uint32_t key);

/* Each of these returns a QNN code and writes its output only when that is 0. Frees accept 0. */
QB_EXPORT uint64_t qb_qnn_logger_create(const qb_qnn *q, uint32_t level, qb_handle *out);
QB_EXPORT uint64_t qb_qnn_logger_free(const qb_qnn *q, qb_handle logger);
QB_EXPORT uint64_t qb_qnn_backend_create(const qb_qnn *q, qb_handle logger, qb_handle *out);
QB_EXPORT uint64_t qb_qnn_backend_build_id(const qb_qnn *q, const char **out);
QB_EXPORT uint64_t qb_qnn_backend_free(const qb_qnn *q, qb_handle backend);

typedef struct qb_platform {
    uint32_t device_count, core_count, soc_model, dsp_arch;
    uint64_t vtcm_mb;
} qb_platform; /* of the first device; all 0 where the library does not say */

QB_EXPORT uint64_t qb_qnn_platform(const qb_qnn *q, qb_handle logger, qb_platform *out);
QB_EXPORT uint64_t qb_qnn_device_create(const qb_qnn *q, qb_handle logger, qb_handle *out);
QB_EXPORT uint64_t qb_qnn_device_free(const qb_qnn *q, qb_handle device);

/* One option: a number and a union at 8. Unions have grown between SDKs and a library that reads a
 * wider one must not read our stack, hence the room. */
typedef struct qb_config {
    _Alignas(8) uint8_t bytes[128];
} qb_config;

/* The options that a context is created with; they have to live as long as the call. */
typedef struct qb_context_options {
    qb_config configs[2];
    const void *list[3];
} qb_context_options;

const void *const *qb_context_options_fill(qb_context_options *options, uint32_t priority,
                                           const char *const *enable_graphs);

/* `enable_graphs` is NULL, or an array of names that a NULL ends. */
QB_EXPORT uint64_t qb_qnn_context_create(const qb_qnn *q, qb_handle backend, qb_handle device,
                                         const void *binary, uint64_t size, uint32_t priority,
                                         const char *const *enable_graphs, qb_handle *out);
QB_EXPORT uint64_t qb_qnn_context_free(const qb_qnn *q, qb_handle context);
QB_EXPORT uint64_t qb_qnn_graph_retrieve(const qb_qnn *q, qb_handle context, const char *name,
                                         qb_handle *out);

/* The system library's parser. The records that `out` points to live as long as `parser`. */
QB_EXPORT uint64_t qb_qnn_parser_create(const qb_qnn *q, qb_handle *out);
QB_EXPORT uint64_t qb_qnn_parser_read(const qb_qnn *q, qb_handle parser, const void *binary,
                                      uint64_t size, const void **out);
QB_EXPORT uint64_t qb_qnn_parser_free(const qb_qnn *q, qb_handle parser);

/* A graph of a context. `base` comes first: the executor knows only that. */
typedef struct qb_qnn_graph {
    qb_graph base;
    const qb_qnn *qnn;
    qb_handle handle;
} qb_qnn_graph;

QB_EXPORT void qb_qnn_graph_init(qb_qnn_graph *graph, const qb_qnn *q, qb_handle handle,
                                 uint32_t priority);

/* A graph with the tensor arrays of one binding, 144 bytes a tensor. */
typedef struct qb_qnn_runnable {
    qb_runnable base;
    void *inputs, *outputs;
    uint32_t input_count, output_count;
    bool registered;     /* every tensor is registered memory */
    atomic_uint running; /* executes under way */
} qb_qnn_runnable;

QB_EXPORT void qb_qnn_runnable_init(qb_qnn_runnable *runnable, qb_qnn_graph *graph, void *inputs,
                                    uint32_t input_count, void *outputs, uint32_t output_count);
QB_EXPORT uint32_t qb_qnn_runnable_running(const qb_qnn_runnable *runnable);
