/* SPDX-License-Identifier: Apache-2.0
 *
 * Graphs of a context: retrieving them, their priority, and executing them.
 */
#include "qnn_fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PRIORITY 500
#define NOTED_TENSORS 8

/* What one execute works on; the arrays are as long as the graph has tensors. */
struct execution {
    struct fake_call call;
    struct fake_graph *graph;
    uint64_t generation;
    uint32_t count;
    void **data;
    struct fake_registration **registrations;
    const struct fake_tensor **tensors;
};

/* With fake_lock held. */
static struct fake_graph *find_graph(struct fake_call *call, uint64_t handle, uint64_t *code) {
    struct fake_graph *graph = fake_table_get(&fake_graphs, handle);

    *code = FAKE_OK;
    if (fake_is_fatal_locked())
        *code = FAKE_LOST_FOR_GOOD;
    else if (graph == NULL || graph->context->dying)
        *code = FAKE_GRAPH_HANDLE;
    else if (graph->context->lost)
        *code = fake_lost_code(FAKE_GRAPH_HANDLE);
    if (*code == FAKE_RESTARTED)
        fake_why(call, "the subsystem restarted");
    else if (*code != FAKE_OK)
        fake_why(call, "graph handle %llu is not of a live context", (unsigned long long)handle);
    return *code == FAKE_OK ? graph : NULL;
}

static struct fake_graph *named(struct fake_context *context, const char *name) {
    for (uint32_t i = 0; name && i < context->binary->graph_count; i++)
        if (strcmp(context->graphs[i].spec->name, name) == 0)
            return &context->graphs[i];
    return NULL;
}

uint64_t fake_graph_retrieve(void *handle, const char *name, void **out) {
    struct fake_context *context;
    struct fake_graph *graph = NULL;
    struct fake_call call;
    uint64_t code;

    fake_begin(&call, "graphRetrieve");
    fake_note(&call, "context=%llu", (unsigned long long)fake_handle(handle));
    fake_note_text(&call, "name", name);
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    pthread_mutex_lock(&fake_lock);
    context = fake_table_get(&fake_contexts, fake_handle(handle));
    if (out == NULL)
        code = FAKE_GRAPH_ARGUMENT;
    else if (fake_is_fatal_locked())
        code = FAKE_LOST_FOR_GOOD;
    else if (context == NULL || context->dying)
        code = FAKE_CONTEXT_HANDLE;
    else if (context->lost)
        code = fake_lost_code(FAKE_CONTEXT_HANDLE);
    else if (context->deferred)
        code = FAKE_GRAPH_NOT_FINALIZED;
    else if ((graph = named(context, name)) == NULL)
        code = FAKE_GRAPH_NAME;
    else if (graph->handle == 0 &&
             (graph->handle = fake_table_put(&fake_graphs, graph)) == 0)
        code = FAKE_NO_MEMORY;
    if (code == FAKE_OK) {
        *out = fake_to_handle(graph->handle);
        fake_note(&call, "graph=%llu", (unsigned long long)graph->handle);
    }
    pthread_mutex_unlock(&fake_lock);
    return fake_end(&call, code);
}

/* Waits until the graph does not execute, as the real library does. With fake_lock held. */
static uint64_t set_priority(struct fake_call *call, uint64_t handle, uint32_t priority) {
    struct fake_graph *graph;
    uint64_t code;

    if (priority > MAX_PRIORITY)
        return FAKE_GRAPH_ARGUMENT;
    while ((graph = find_graph(call, handle, &code)) != NULL && graph->on_device)
        pthread_cond_wait(&fake_changed, &fake_lock);
    if (graph == NULL)
        return code;
    graph->priority = priority;
    pthread_cond_broadcast(&fake_changed);
    return FAKE_OK;
}

uint64_t fake_graph_set_config(void *handle, const struct fake_config **config) {
    struct fake_call call;
    uint64_t code;

    fake_begin(&call, "graphSetConfig");
    fake_note(&call, "graph=%llu", (unsigned long long)fake_handle(handle));
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    pthread_mutex_lock(&fake_lock);
    find_graph(&call, fake_handle(handle), &code);
    for (; config && *config && code == FAKE_OK; config++) {
        const struct fake_config *entry = *config;

        if (entry->option == 3) {
            fake_note(&call, "priority=%u", entry->as.number);
            code = set_priority(&call, fake_handle(handle), entry->as.number);
        } else {
            code = entry->option == 0 ? FAKE_GRAPH_FINALIZED : FAKE_NOT_SUPPORTED;
        }
    }
    pthread_mutex_unlock(&fake_lock);
    return fake_end(&call, code);
}

uint64_t fake_graph_finalize(void *graph, void *profile, void *signal) {
    struct fake_call call;

    fake_begin(&call, "graphFinalize");
    fake_note(&call, "graph=%llu", (unsigned long long)fake_handle(graph));
    return fake_end(&call, FAKE_NOT_SUPPORTED);
}

static const struct fake_tensor *with_id(const struct fake_tensor *tensors, uint32_t count,
                                         uint32_t id) {
    for (uint32_t i = 0; i < count; i++)
        if (tensors[i].id == id)
            return &tensors[i];
    return NULL;
}

static bool shape_is_right(const struct fake_tensor *tensor, const struct fake_tensor_body *body) {
    if (body->dtype && body->dtype != tensor->dtype)
        return false;
    if (body->rank && body->rank != tensor->rank)
        return false;
    return body->dims == NULL ||
           memcmp(body->dims, tensor->dims, tensor->rank * sizeof *tensor->dims) == 0;
}

/* One record of the caller to the memory of one tensor. */
static bool take_tensor(struct execution *e, const struct fake_tensor *tensor,
                        const struct fake_tensor_body *body, uint32_t nth) {
    uint32_t at = tensor->index;

    if (e->tensors[at]) {
        fake_why(&e->call, "tensor id %u comes twice", tensor->id);
        return false;
    }
    if (!shape_is_right(tensor, body)) {
        fake_why(&e->call, "tensor '%.60s' has another type or shape", tensor->name);
        return false;
    }
    if (body->memory_type == 1) {
        e->registrations[at] =
            fake_registration_use(e->graph->context, tensor, fake_handle(body->memory.handle),
                                  e->call.why, sizeof e->call.why);
        if (e->registrations[at] == NULL)
            return false;
        e->data[at] = (char *)e->registrations[at]->map + e->registrations[at]->offset;
    } else if (body->memory_type == 0) {
        if (body->memory.raw.data == NULL || body->memory.raw.size < tensor->bytes) {
            fake_why(&e->call, "tensor '%.60s' needs %llu bytes at an address, %u were given",
                     tensor->name, (unsigned long long)tensor->bytes, body->memory.raw.size);
            return false;
        }
        e->data[at] = body->memory.raw.data;
    } else {
        fake_why(&e->call, "tensor '%.60s' has memory type %u", tensor->name, body->memory_type);
        return false;
    }
    e->tensors[at] = tensor;
    if (nth < NOTED_TENSORS)
        fake_note(&e->call, "t%u=%s:%llx:%llu", tensor->id,
                  body->memory_type ? "handle" : "raw",
                  (unsigned long long)fake_handle(body->memory.handle),
                  (unsigned long long)tensor->bytes);
    return true;
}

static bool take_tensors(struct execution *e, const struct fake_tensor_record *records,
                         uint32_t count, const struct fake_tensor *tensors, uint32_t wanted) {
    if (count != wanted) {
        fake_why(&e->call, "%u tensors were given where the graph has %u", count, wanted);
        return false;
    }
    for (uint32_t i = 0; i < count; i++) {
        const struct fake_tensor *tensor = with_id(tensors, wanted, records[i].body.id);

        if (tensor == NULL || records[i].version < 1 || records[i].version > 2) {
            fake_why(&e->call, "tensor id %u of record version %u is not of this graph",
                     records[i].body.id, records[i].version);
            return false;
        }
        if (!take_tensor(e, tensor, &records[i].body, i))
            return false;
    }
    return true;
}

/* The real library gives wrong numbers and no error when an output lies over another tensor. */
static bool outputs_lie_apart(struct execution *e, uint32_t inputs) {
    for (uint32_t i = inputs; i < e->count; i++)
        for (uint32_t j = 0; j < e->count; j++) {
            const char *a = e->data[i], *b = e->data[j];

            if (i != j && a < b + e->tensors[j]->bytes && b < a + e->tensors[i]->bytes) {
                fake_why(&e->call, "output '%.60s' overlaps tensor '%.60s'", e->tensors[i]->name,
                         e->tensors[j]->name);
                return false;
            }
        }
    return true;
}

/* With fake_lock held, which it gives up while the graph computes. */
static uint64_t run(struct execution *e, const struct fake_fault *fault) {
    const struct fake_graph_spec *spec = e->graph->spec;
    uint64_t order = 0, code, queued_us = fake_now_us();

    if (!fake_device_acquire(e->graph, &order))
        return e->graph->context->lost ? fake_lost_code(FAKE_RESTARTED)
                                       : FAKE_GRAPH_CONTEXT_GONE;
    pthread_mutex_unlock(&fake_lock);
    fake_note(&e->call, "order=%llu queue_us=%llu", (unsigned long long)order,
              (unsigned long long)(fake_now_us() - queued_us));
    code = fake_fault_apply(&e->call, fault, e->generation);
    if (code == FAKE_OK && fake_is_fatal())
        code = FAKE_LOST_FOR_GOOD;
    if (code == FAKE_OK &&
        !fake_sleep_us(spec->execute_us + fake_switches_now().execute_us, e->generation))
        code = FAKE_RESTARTED;
    for (uint32_t i = 0; code == FAKE_OK && i < spec->op_count; i++)
        code = fake_op_run(&spec->ops[i], e->data, e->generation);
    pthread_mutex_lock(&fake_lock);
    fake_device_release(e->graph);
    if (e->graph->context->lost)
        code = fake_lost_code(FAKE_RESTARTED);
    return code;
}

/* With fake_lock held. */
static uint64_t check_and_run(struct execution *e, const struct fake_tensor_record *inputs,
                              uint32_t input_count, const struct fake_tensor_record *outputs,
                              uint32_t output_count, const struct fake_fault *fault) {
    const struct fake_graph_spec *spec = e->graph->spec;

    if (!take_tensors(e, inputs, input_count, spec->inputs, spec->input_count) ||
        !take_tensors(e, outputs, output_count, spec->outputs, spec->output_count) ||
        !outputs_lie_apart(e, spec->input_count))
        return FAKE_GRAPH_TENSOR;
    if (e->graph->context->prepare_only)
        return FAKE_GRAPH_ARGUMENT;
    if (!fake_mapped_is_there(&e->graph->context->mapped)) {
        fake_why(&e->call, "the binary is not where it was lent from");
        return FAKE_GENERAL;
    }
    if (!e->graph->enabled || e->graph->context->poisoned) {
        fake_why(&e->call, "the graph is not enabled, or another class of binary was loaded");
        return FAKE_GENERAL;
    }
    return run(e, fault);
}

/* With fake_lock held: the context can go after this. */
static void leave(struct execution *e) {
    struct fake_context *context = e->graph->context;

    for (uint32_t i = 0; i < e->count; i++)
        if (e->registrations[i])
            fake_registration_unuse(e->registrations[i]);
    context->calls--;
    if (context->lost && context->calls == 0)
        fake_context_void(context);
    pthread_cond_broadcast(&fake_changed);
}

static bool make_room(struct execution *e) {
    uint32_t count = e->graph->spec->input_count + e->graph->spec->output_count;

    e->data = calloc(count * 3ul, sizeof *e->data);
    if (e->data == NULL)
        return false;
    e->registrations = (struct fake_registration **)(e->data + count);
    e->tensors = (const struct fake_tensor **)(e->data + 2ul * count);
    e->count = count;
    return true;
}

uint64_t fake_graph_execute(void *handle, const struct fake_tensor_record *inputs,
                            uint32_t input_count, const struct fake_tensor_record *outputs,
                            uint32_t output_count, void *profile, void *signal) {
    struct execution e = {0};
    struct fake_fault fault;
    uint64_t code;

    fake_begin(&e.call, "graphExecute");
    fake_note(&e.call, "graph=%llu", (unsigned long long)fake_handle(handle));
    if (inputs == NULL || outputs == NULL || input_count == 0 || output_count == 0 || profile ||
        signal)
        return fake_end(&e.call, FAKE_GRAPH_ARGUMENT);
    pthread_mutex_lock(&fake_lock);
    e.graph = find_graph(&e.call, fake_handle(handle), &code);
    if (e.graph == NULL) {
        pthread_mutex_unlock(&fake_lock);
        return fake_end(&e.call, code);
    }
    e.graph->context->calls++;
    e.generation = fake_generation;
    fake_note_text(&e.call, "name", e.graph->spec->name);
    fake_note(&e.call, "priority=%u", e.graph->priority);
    fault = fake_faults_of(e.call.name, (const char *const *)&e.graph->spec->name, 1);
    if (make_room(&e))
        code = check_and_run(&e, inputs, input_count, outputs, output_count, &fault);
    else
        code = FAKE_NO_MEMORY;
    leave(&e);
    pthread_mutex_unlock(&fake_lock);
    free(e.data);
    return fake_end(&e.call, code);
}
