/* SPDX-License-Identifier: Apache-2.0
 * Calls into a QNN library through its function table, by slot number. */
#include "qb_qnn.h"

#include <string.h>

#include "qb_log.h"
#include "qb_qnn_memory.h"
#include "qb_qnn_slots.h"
#include "qb_tensor.h"

/* Option numbers of the records below. */
enum {
    CONTEXT_OPTION_PRIORITY = 1,
    CONTEXT_OPTION_ENABLE_GRAPHS = 5,
    GRAPH_OPTION_PRIORITY = 3,
};

typedef qb_config config;

static void config_u32(config *c, uint32_t option, uint32_t value) {
    memset(c, 0, sizeof *c);
    memcpy(c->bytes, &option, 4);
    memcpy(c->bytes + 8, &value, 4);
}

static void config_ptr(config *c, uint32_t option, const void *value) {
    memset(c, 0, sizeof *c);
    memcpy(c->bytes, &option, 4);
    memcpy(c->bytes + 8, &value, 8);
}

#define CALL QB_CALL
#define CORE (qb_qnn_core_table(q))
#define SYSTEM (qb_qnn_system_table(q))

uint64_t qb_qnn_has_capability(const qb_qnn *q, uint32_t key) {
    CALL(CORE, QB_SLOT_HAS_CAPABILITY, (uint32_t), (key));
}

uint64_t qb_qnn_logger_create(const qb_qnn *q, uint32_t level, qb_handle *out) {
    CALL(CORE, QB_SLOT_LOG_CREATE,
         (void (*)(const char *, uint32_t, uint64_t, va_list), uint32_t, qb_handle *),
         (qb_log_callback, level, out));
}

uint64_t qb_qnn_logger_free(const qb_qnn *q, qb_handle logger) {
    if (!logger)
        return 0;
    CALL(CORE, QB_SLOT_LOG_FREE, (qb_handle), (logger));
}

uint64_t qb_qnn_backend_create(const qb_qnn *q, qb_handle logger, qb_handle *out) {
    CALL(CORE, QB_SLOT_BACKEND_CREATE, (qb_handle, const void *const *, qb_handle *),
         (logger, NULL, out));
}

uint64_t qb_qnn_backend_build_id(const qb_qnn *q, const char **out) {
    CALL(CORE, QB_SLOT_BACKEND_BUILD_ID, (const char **), (out));
}

uint64_t qb_qnn_backend_free(const qb_qnn *q, qb_handle backend) {
    if (!backend)
        return 0;
    CALL(CORE, QB_SLOT_BACKEND_FREE, (qb_handle), (backend));
}

static void read_platform(const void *info, qb_platform *out) {
    const uint8_t *device = qb_ptr(info, 16), *extension;
    if (qb_u32(info, 0) != 1)
        return;
    out->device_count = qb_u32(info, 8);
    if (out->device_count == 0 || !device || qb_u32(device, 0) != 1)
        return;
    out->core_count = qb_u32(device, 16);
    extension = qb_ptr(device, 32);
    if (!extension || qb_u32(extension, 0) != 0) /* 0: on the chip */
        return;
    out->vtcm_mb = qb_u64(extension, 8);
    out->soc_model = qb_u32(extension, 16);
    out->dsp_arch = qb_u32(extension, 24);
}

static uint64_t platform_get(const qb_qnn *q, qb_handle logger, const void **out) {
    CALL(CORE, QB_SLOT_PLATFORM_INFO, (qb_handle, const void **), (logger, out));
}

static uint64_t platform_free(const qb_qnn *q, qb_handle logger, const void *info) {
    CALL(CORE, QB_SLOT_FREE_PLATFORM_INFO, (qb_handle, const void *), (logger, info));
}

uint64_t qb_qnn_platform(const qb_qnn *q, qb_handle logger, qb_platform *out) {
    const void *info = NULL;
    memset(out, 0, sizeof *out);
    uint64_t code = platform_get(q, logger, &info);
    if (code || !info)
        return code;
    read_platform(info, out);
    return platform_free(q, logger, info);
}

uint64_t qb_qnn_device_create(const qb_qnn *q, qb_handle logger, qb_handle *out) {
    CALL(CORE, QB_SLOT_DEVICE_CREATE, (qb_handle, const void *const *, qb_handle *),
         (logger, NULL, out));
}

uint64_t qb_qnn_device_free(const qb_qnn *q, qb_handle device) {
    if (!device)
        return 0;
    CALL(CORE, QB_SLOT_DEVICE_FREE, (qb_handle), (device));
}

const void *const *qb_context_options_fill(qb_context_options *o, uint32_t priority,
                                           const char *const *enable_graphs) {
    int n = 0;
    memset(o->list, 0, sizeof o->list);
    if (priority != QB_QNN_NORMAL_PRIORITY) {
        config_u32(&o->configs[n], CONTEXT_OPTION_PRIORITY, priority);
        o->list[n] = &o->configs[n];
        n++;
    }
    if (enable_graphs) {
        config_ptr(&o->configs[n], CONTEXT_OPTION_ENABLE_GRAPHS, enable_graphs);
        o->list[n] = &o->configs[n];
        n++;
    }
    return n ? o->list : NULL;
}

uint64_t qb_qnn_context_create(const qb_qnn *q, qb_handle backend, qb_handle device,
                               const void *binary, uint64_t size, uint32_t priority,
                               const char *const *enable_graphs, qb_handle *out) {
    qb_context_options options;
    CALL(CORE, QB_SLOT_CONTEXT_FROM_BINARY,
         (qb_handle, qb_handle, const void *const *, const void *, uint64_t, qb_handle *, qb_handle),
         (backend, device, qb_context_options_fill(&options, priority, enable_graphs), binary, size,
          out, 0));
}

uint64_t qb_qnn_context_free(const qb_qnn *q, qb_handle context) {
    if (!context)
        return 0;
    CALL(CORE, QB_SLOT_CONTEXT_FREE, (qb_handle, qb_handle), (context, 0));
}

uint64_t qb_qnn_graph_retrieve(const qb_qnn *q, qb_handle context, const char *name,
                               qb_handle *out) {
    CALL(CORE, QB_SLOT_GRAPH_RETRIEVE, (qb_handle, const char *, qb_handle *), (context, name, out));
}

uint64_t qb_qnn_parser_create(const qb_qnn *q, qb_handle *out) {
    CALL(SYSTEM, QB_SYSTEM_SLOT_CREATE, (qb_handle *), (out));
}

uint64_t qb_qnn_parser_read(const qb_qnn *q, qb_handle parser, const void *binary, uint64_t size,
                            const void **out) {
    uint64_t unused; /* documented as a size, always written as 0 */
    CALL(SYSTEM, QB_SYSTEM_SLOT_BINARY_INFO,
         (qb_handle, void *, uint64_t, const void **, uint64_t *),
         (parser, (void *)(uintptr_t)binary, size, out, &unused));
}

uint64_t qb_qnn_parser_free(const qb_qnn *q, qb_handle parser) {
    if (!parser)
        return 0;
    CALL(SYSTEM, QB_SYSTEM_SLOT_FREE, (qb_handle), (parser));
}

static uint64_t graph_set_priority(qb_graph *self, uint32_t priority) {
    qb_qnn_graph *graph = (qb_qnn_graph *)self;
    const qb_qnn *q = graph->qnn;
    config option;
    const void *list[2] = {&option, NULL};
    config_u32(&option, GRAPH_OPTION_PRIORITY, priority);
    CALL(CORE, QB_SLOT_GRAPH_SET_CONFIG, (qb_handle, const void *const *), (graph->handle, list));
}

void qb_qnn_graph_init(qb_qnn_graph *graph, const qb_qnn *q, qb_handle handle, uint32_t priority) {
    memset(graph, 0, sizeof *graph);
    graph->qnn = q;
    graph->handle = handle;
    graph->base.priority = priority;
    if (qb_qnn_slot(CORE, QB_SLOT_GRAPH_SET_CONFIG))
        graph->base.set_priority = graph_set_priority;
}

static uint64_t execute(const qb_qnn *q, const qb_qnn_graph *graph, qb_qnn_runnable *r) {
    CALL(CORE, QB_SLOT_GRAPH_EXECUTE,
         (qb_handle, void *, uint32_t, void *, uint32_t, qb_handle, qb_handle),
         (graph->handle, r->inputs, r->input_count, r->outputs, r->output_count, 0, 0));
}

static atomic_uint_fast64_t executes[2]; /* not all tensors registered; all of them */

uint64_t qb_qnn_executes_raw(void) {
    return atomic_load_explicit(&executes[0], memory_order_relaxed);
}

uint64_t qb_qnn_executes_registered(void) {
    return atomic_load_explicit(&executes[1], memory_order_relaxed);
}

static uint64_t runnable_execute(qb_runnable *self) {
    qb_qnn_runnable *runnable = (qb_qnn_runnable *)self;
    const qb_qnn_graph *graph = (const qb_qnn_graph *)self->graph;
    atomic_fetch_add_explicit(&executes[runnable->registered], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&runnable->running, 1, memory_order_relaxed);
    uint64_t code = execute(graph->qnn, graph, runnable);
    atomic_fetch_sub_explicit(&runnable->running, 1, memory_order_release);
    return code;
}

void qb_qnn_runnable_init(qb_qnn_runnable *runnable, qb_qnn_graph *graph, void *inputs,
                          uint32_t input_count, void *outputs, uint32_t output_count) {
    memset(runnable, 0, sizeof *runnable);
    runnable->base.graph = &graph->base;
    runnable->base.execute = runnable_execute;
    runnable->inputs = inputs;
    runnable->input_count = input_count;
    runnable->outputs = outputs;
    runnable->output_count = output_count;
}

uint32_t qb_qnn_runnable_running(const qb_qnn_runnable *runnable) {
    return atomic_load_explicit(&((qb_qnn_runnable *)runnable)->running, memory_order_acquire);
}
