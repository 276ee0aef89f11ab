/* SPDX-License-Identifier: Apache-2.0
 *
 * The system library's half: what a context binary contains, as the tree of records that callers walk.
 *
 * One tree for each system handle; the next binary on the same handle overwrites it in place.
 */
#include "qnn_fake.h"

#include <stdlib.h>
#include <string.h>

#define HANDLE_MASK 0x5a17c0de00000000ull /* handles look like nothing in particular */
#define WRAPPER_BYTES 144
#define GRAPH_STRIDE 88
#define BLOB_BYTES 112
#define FILE_OVERHEAD 4096 /* file size less context blob size, in every real sample */

struct system_context {
    uint64_t info[WRAPPER_BYTES / 8]; /* the address that callers see, the same at every parse */
    struct fake_arena arena;
    struct fake_binary *binary;
};

static pthread_mutex_t system_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct fake_table system_contexts;

/* Where the fields of a BinaryInfo body are, by version; 0: not in that version. */
static const struct {
    uint8_t blob_version, blob_size, graph_count, graphs, metadata_size, metadata, soc;
} places[3] = {
    {60, 88, 112, 120, 0, 0, 0},
    {60, 88, 112, 120, 0, 0, 0},
    {48, 64, 88, 96, 112, 120, 128},
};

static void put32(void *record, uint32_t offset, uint32_t value) {
    memcpy((char *)record + offset, &value, sizeof value);
}

static void put64(void *record, uint32_t offset, uint64_t value) {
    memcpy((char *)record + offset, &value, sizeof value);
}

static void put_pointer(void *record, uint32_t offset, const void *value) {
    memcpy((char *)record + offset, &value, sizeof value);
}

static struct fake_tensor_record *tensor_records(struct fake_arena *arena,
                                                 const struct fake_tensor *tensors, uint32_t count,
                                                 uint32_t type) {
    struct fake_tensor_record *records = fake_arena_get(arena, count * sizeof *records);

    for (uint32_t i = 0; records && i < count; i++) {
        records[i].version = 1;
        records[i].body = (struct fake_tensor_body){
            .id = tensors[i].id,
            .name = tensors[i].name,
            .type = type,
            .dtype = tensors[i].dtype,
            .quantization = tensors[i].quantization,
            .rank = tensors[i].rank,
            .dims = tensors[i].dims,
        };
    }
    return records;
}

/* The blob of the HTP backend, two records in one. */
static void *graph_blob(struct fake_arena *arena, const struct fake_graph_spec *spec) {
    char *blob = fake_arena_get(arena, BLOB_BYTES);

    if (blob == NULL)
        return NULL;
    put32(blob, 0, 1);
    put64(blob, 8, spec->spill_fill);
    put32(blob, 16, spec->vtcm);
    put32(blob, 40, 2);
    put64(blob, 72, spec->io_bytes);
    put64(blob, 88, spec->weights);
    put64(blob, 104, spec->shared_weights);
    return blob;
}

static bool graph_info(struct fake_arena *arena, const struct fake_graph_spec *spec, char *record,
                       uint32_t version) {
    void *inputs = tensor_records(arena, spec->inputs, spec->input_count, 0);
    void *outputs = tensor_records(arena, spec->outputs, spec->output_count, 1);
    void *blob = graph_blob(arena, spec);
    char *body = record + 8;

    if (!inputs || !outputs || !blob)
        return false;
    put32(record, 0, version);
    put_pointer(body, 0, spec->name);
    put32(body, 8, spec->input_count);
    put_pointer(body, 16, inputs);
    put32(body, 24, spec->output_count);
    put_pointer(body, 32, outputs);
    if (version == 3) {
        put32(body, 56, BLOB_BYTES);
        put_pointer(body, 64, blob);
    }
    return true;
}

static bool fill(struct system_context *context) {
    const struct fake_binary *binary = context->binary;
    struct fake_switches switches = fake_switches_now();
    uint32_t version = switches.info_version, metadata[2] = {1, binary->arch};
    char *body = (char *)context->info + 8;
    char *graphs = fake_arena_get(&context->arena, (size_t)binary->graph_count * GRAPH_STRIDE);
    uint32_t *copy = fake_arena_get(&context->arena, sizeof metadata);

    if (graphs == NULL || copy == NULL)
        return false;
    for (uint32_t i = 0; i < binary->graph_count; i++)
        if (!graph_info(&context->arena, &binary->graphs[i], graphs + (size_t)i * GRAPH_STRIDE,
                        version))
            return false;
    memset(context->info, 0, sizeof context->info);
    put32(context->info, 0, version);
    put32(body, 0, binary->backend_id);
    put_pointer(body, 8, binary->build);
    for (uint32_t i = 0; i < 3; i++) {
        put32(body, 16 + 4 * i, binary->core_api[i]);
        put32(body, 28 + 4 * i, binary->backend_api[i]);
    }
    put_pointer(body, 40, "");
    put32(body, places[version - 1].blob_version, 4);
    put32(body, places[version - 1].blob_version + 8u, 6);
    put64(body, places[version - 1].blob_size,
          binary->file_bytes > FILE_OVERHEAD ? binary->file_bytes - FILE_OVERHEAD : 0);
    put32(body, places[version - 1].graph_count, binary->graph_count);
    put_pointer(body, places[version - 1].graphs, graphs);
    if (version == 3) {
        memcpy(copy, metadata, sizeof metadata);
        put32(body, places[2].metadata_size, sizeof metadata);
        put_pointer(body, places[2].metadata, copy);
        put32(body, places[2].soc, binary->soc);
    }
    return true;
}

static void empty(struct system_context *context) {
    fake_arena_free(&context->arena);
    fake_binary_free(context->binary);
    context->binary = NULL;
}

static struct system_context *find(const void *handle) {
    return fake_table_get(&system_contexts, fake_handle(handle) ^ HANDLE_MASK);
}

uint64_t fake_system_context_create(void **out) {
    struct system_context *context;
    struct fake_call call;
    uint64_t code, number;

    fake_begin(&call, "systemContextCreate");
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    context = out ? calloc(1, sizeof *context) : NULL;
    if (context == NULL)
        return fake_end(&call, out ? FAKE_NO_MEMORY : FAKE_SYSTEM_ARGUMENT);
    pthread_mutex_lock(&system_mutex);
    number = fake_table_put(&system_contexts, context);
    pthread_mutex_unlock(&system_mutex);
    *out = fake_to_handle(number ^ HANDLE_MASK);
    fake_note(&call, "system=%llu", (unsigned long long)number);
    return fake_end(&call, FAKE_OK);
}

static uint64_t read_binary(const char *name, const void *handle, const void *data, uint64_t size,
                            const void **out) {
    struct system_context *context;
    struct fake_binary *binary;
    struct fake_call call;
    uint64_t code;

    fake_begin(&call, name);
    fake_note(&call, "system=%llu size=%llu",
              (unsigned long long)(fake_handle(handle) ^ HANDLE_MASK), (unsigned long long)size);
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    pthread_mutex_lock(&system_mutex);
    context = find(handle);
    if (context == NULL)
        code = FAKE_SYSTEM_HANDLE;
    else if (data == NULL || size == 0 || out == NULL)
        code = FAKE_SYSTEM_ARGUMENT;
    else
        code = fake_binary_parse(data, size, &binary, call.why, sizeof call.why);
    if (code == FAKE_OK) {
        empty(context);
        context->binary = binary;
        if (fill(context))
            *out = context->info;
        else
            code = FAKE_NO_MEMORY;
    }
    pthread_mutex_unlock(&system_mutex);
    return fake_end(&call, code);
}

uint64_t fake_system_get_binary_info(void *handle, void *binary, uint64_t size, const void **out,
                                     uint64_t *out_size) {
    if (out_size)
        *out_size = 0; /* the real one does not tell it either */
    return read_binary("systemContextGetBinaryInfo", handle, binary, size, out);
}

uint64_t fake_system_get_metadata(void *handle, const void *binary, uint64_t size,
                                  const void **out) {
    return read_binary("systemContextGetMetaData", handle, binary, size, out);
}

uint64_t fake_system_context_free(void *handle) {
    struct system_context *context;
    struct fake_call call;
    uint64_t code;

    fake_begin(&call, "systemContextFree");
    fake_note(&call, "system=%llu", (unsigned long long)(fake_handle(handle) ^ HANDLE_MASK));
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    pthread_mutex_lock(&system_mutex);
    context = find(handle);
    fake_table_drop(&system_contexts, fake_handle(handle) ^ HANDLE_MASK);
    if (context)
        empty(context);
    pthread_mutex_unlock(&system_mutex);
    free(context);
    return fake_end(&call, context ? FAKE_OK : FAKE_SYSTEM_HANDLE);
}

uint64_t fake_system_tensor_bytes(struct fake_tensor_record tensor, uint64_t *out) {
    uint64_t elements = 1;

    if (out == NULL || tensor.body.dims == NULL || tensor.body.rank > 32)
        return FAKE_SYSTEM_ARGUMENT;
    for (uint32_t i = 0; i < tensor.body.rank; i++)
        elements *= tensor.body.dims[i];
    *out = fake_dtype_bytes(tensor.body.dtype, elements);
    return *out ? FAKE_OK : FAKE_SYSTEM_ARGUMENT;
}
