/* SPDX-License-Identifier: Apache-2.0
 *
 * What the parts of the fake QNN library know of each other.
 *
 * One mutex, fake_lock, guards every object and the device; fake_changed is broadcast whenever
 * something that a thread may wait for has changed. Switches, record and log have small mutexes of
 * their own, which may be taken inside fake_lock and never the other way round.
 */
#ifndef QNN_FAKE_H
#define QNN_FAKE_H

#include "qnn_fake_abi.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAKE_EXPORT __attribute__((visibility("default")))
#define FAKE_PRINTF(text, first) __attribute__((format(printf, text, first)))

/* Result codes that the fake gives (numbers of the real library). */
enum {
    FAKE_OK = 0,
    FAKE_NOT_SUPPORTED = 1000,
    FAKE_NO_MEMORY = 1002,
    FAKE_INVALID_ARGUMENT = 1004,
    FAKE_NOT_PERMITTED = 1005,
    FAKE_RESTARTED = 1007,
    FAKE_LOST_FOR_GOOD = 1011,
    FAKE_GENERAL = 1100,
    FAKE_UNKNOWN_PROPERTY = 2000,
    FAKE_BACKEND_ARGUMENT = 4003,
    FAKE_BACKEND_HANDLE = 4011,
    FAKE_CONTEXT_ARGUMENT = 5000,
    FAKE_CONTEXT_HANDLE = 5002,
    FAKE_CONTEXT_CREATE = 5005,
    FAKE_CONTEXT_WRONG_CHIP = 5008,
    FAKE_CONTEXT_CONFIG = 5010,
    FAKE_GRAPH_ARGUMENT = 6000,
    FAKE_GRAPH_HANDLE = 6001,
    FAKE_GRAPH_NAME = 6003,
    FAKE_GRAPH_TENSOR = 6004,
    FAKE_GRAPH_NOT_FINALIZED = 6023,
    FAKE_GRAPH_FINALIZED = 6024,
    FAKE_GRAPH_CONTEXT_GONE = 6039,
    FAKE_MEMORY_ARGUMENT = 8000,
    FAKE_MEMORY_HANDLE = 8001,
    FAKE_MEMORY_MAPPING = 8003,
    FAKE_MEMORY_SHAPE = 8004,
    FAKE_MEMORY_TYPE = 8005,
    FAKE_ERROR_ARGUMENT = 10000,
    FAKE_ERROR_UNKNOWN = 10001,
    FAKE_LOG_ARGUMENT = 11003,
    FAKE_LOG_HANDLE = 11004,
    FAKE_PERF_ARGUMENT = 13001,
    FAKE_DEVICE_HANDLE = 14000,
    FAKE_DEVICE_CONFIG = 14001,
    FAKE_SYSTEM_HANDLE = 30000,
    FAKE_SYSTEM_ARGUMENT = 30001,
    FAKE_SYSTEM_BINARY = 30010,
};

/* ---- tables of handles: small numbers from 1, reused after free --------------------------- */

struct fake_table {
    void **slots;
    uint32_t size;
};

uint64_t fake_table_put(struct fake_table *table, void *object); /* 0: no memory */
void *fake_table_get(const struct fake_table *table, uint64_t handle);
void fake_table_drop(struct fake_table *table, uint64_t handle);

/* ---- switches and faults (qnn_fake_switches.c, qnn_fake_rules.c) --------------------------- */

struct fake_switches {
    uint32_t device_arch, soc, vtcm_mb, concurrency, info_version, null_slot;
    uint32_t core_api[3];
    bool file_mapped, hardware, mem_register, mem_ion, mem_custom, shared_weights_crash, noise, no_provider,
        record_off;
    uint64_t create_us, execute_us, memory_limit;
    char build[64];
    char record[256];
    char control[256];
};

/* What the rules ask of one call. */
struct fake_fault {
    uint64_t delay_us;
    uint64_t code; /* 0: go on */
    int crash;     /* 0 or a signal number */
    bool hang;
};

struct fake_rule {
    char call[48];    /* name of a call, or "*" */
    char subject[64]; /* graph name, or "" for any */
    uint64_t first, last;
    uint64_t seen;
    struct fake_fault fault;
    bool from_file;
};

struct fake_switches fake_switches_now(void);
bool fake_switches_bad(void); /* QNNBROKER_FAKE was not understood */
void fake_control_poll(void); /* re-reads the control file when it has changed */
uint64_t fake_hang_epoch(void);
struct fake_fault fake_faults_of(const char *call, const char *const *subjects, size_t count);

bool fake_rule_parse(const char *key, const char *value, struct fake_rule *rule);
bool fake_rule_add(const struct fake_rule *rule);
void fake_rules_drop(bool only_from_file);
struct fake_fault fake_rules_match(const char *call, const char *const *subjects, size_t count);

/* ---- one call: its record line, its faults (qnn_fake_call.c, qnn_fake_record.c) ------------- */

struct fake_call {
    const char *name;
    uint64_t started_us;
    size_t used;
    char arguments[640];
    char why[200];
};

void fake_begin(struct fake_call *call, const char *name);
void fake_note(struct fake_call *call, const char *format, ...) FAKE_PRINTF(2, 3);
void fake_note_text(struct fake_call *call, const char *key, const char *text);
void fake_why(struct fake_call *call, const char *format, ...) FAKE_PRINTF(2, 3);
uint64_t fake_end(struct fake_call *call, uint64_t code);
/* The faults of this call, applied at once; 0 means go on. */
uint64_t fake_check(struct fake_call *call);
/* Not to be called with fake_lock held. Gives up early, with 1007, when generation has passed. */
uint64_t fake_fault_apply(struct fake_call *call, const struct fake_fault *fault,
                          uint64_t generation);

/* Ends the process by a signal. */
void fake_crash(int number) __attribute__((noreturn));

void fake_record_line(const char *name, const char *arguments, uint64_t code);
void fake_record_error(const char *what, const char *format, ...) FAKE_PRINTF(2, 3);

void fake_log(uint32_t level, const char *format, ...) FAKE_PRINTF(2, 3);

uint64_t fake_now_us(void);
/* Sleeps without fake_lock held. False: the subsystem restarted meanwhile. */
bool fake_sleep_us(uint64_t us, uint64_t generation);

/* ---- the context binary (qnn_fake_text.c, qnn_fake_binary.c) -------------------------------- */

#define FAKE_MAX_RANK 8

struct fake_arena {
    struct fake_chunk *chunks;
};

void *fake_arena_get(struct fake_arena *arena, size_t bytes); /* zeroed; NULL: no memory */
char *fake_arena_text(struct fake_arena *arena, const char *text);
void fake_arena_free(struct fake_arena *arena);

struct fake_tensor {
    char *name;
    uint32_t id, dtype, rank;
    uint32_t *dims;
    uint64_t elements, bytes;
    uint32_t index; /* position in the caller's data array: inputs, then outputs */
    struct fake_quantization quantization;
};

enum fake_op_kind {
    FAKE_OP_NULL,
    FAKE_OP_COPY,
    FAKE_OP_ADD,
    FAKE_OP_MATMUL,
    FAKE_OP_SUM,
    FAKE_OP_SUM_BYTES,
    FAKE_OP_SLEEP,
    FAKE_OP_SPIN,
};

struct fake_op {
    enum fake_op_kind kind;
    const struct fake_tensor *a, *b, *out;
    uint64_t us;
};

struct fake_graph_spec {
    char *name;
    uint32_t input_count, output_count, op_count;
    struct fake_tensor *inputs, *outputs;
    struct fake_op *ops;
    uint64_t execute_us, weights, shared_weights, spill_fill, io_bytes;
    uint32_t vtcm;
};

struct fake_binary {
    struct fake_arena arena;
    char build[64];
    char class_name[32];
    uint32_t arch, soc, backend_id;
    uint32_t core_api[3], backend_api[3];
    uint64_t create_us, file_bytes;
    uint32_t graph_count;
    struct fake_graph_spec *graphs;
};

/* One line of a binary, cut at spaces. */
#define FAKE_MAX_WORDS 16
struct fake_line {
    uint32_t number;
    char *text;
    size_t room;
    char *words[FAKE_MAX_WORDS];
    uint32_t count;
};

/* 1: a line; 0: no more lines; -1: not a line of this format (too long, odd bytes, many words). */
int fake_line_next(struct fake_line *line, const char **at, const char *end);
bool fake_word_u64(const char *word, uint64_t most, uint64_t *out);
bool fake_word_u32(const char *word, uint32_t most, uint32_t *out);
bool fake_word_i32(const char *word, int32_t *out);
bool fake_word_float(const char *word, float *out);
bool fake_word_version(const char *word, uint32_t out[3]); /* "2.40.0" */
bool fake_word_name(const char *word, char *out, size_t room); /* undoes %41 */
bool fake_word_dims(const char *word, uint32_t *dims, uint32_t *rank);
bool fake_tensor_line(struct fake_arena *arena, const struct fake_line *line,
                      struct fake_tensor *tensor);
bool fake_op_line(const struct fake_line *line, const struct fake_graph_spec *graph,
                  struct fake_op *op);

/* 0, FAKE_SYSTEM_BINARY or FAKE_NO_MEMORY; why gets a sentence. Free with fake_binary_free. */
uint64_t fake_binary_parse(const void *data, uint64_t size, struct fake_binary **out, char *why,
                           size_t room);
void fake_binary_free(struct fake_binary *binary);

/* ---- numbers and ops (qnn_fake_numbers.c, qnn_fake_ops.c) ------------------------------------ */

uint32_t fake_dtype_from(const char *name); /* 0xFFFFFFFF: unknown */
uint64_t fake_dtype_bytes(uint32_t dtype, uint64_t elements); /* 0: unknown type */
bool fake_dtype_is_integer(uint32_t dtype); /* plain integers and bool; not quantised ones */
bool fake_dtype_is_quantized(uint32_t dtype);
void fake_load_integers(const struct fake_tensor *tensor, const void *data, int64_t *out);
void fake_store_integers(const struct fake_tensor *tensor, const int64_t *values, void *data);
void fake_load_reals(const struct fake_tensor *tensor, const void *data, double *out);
void fake_store_reals(const struct fake_tensor *tensor, const double *values, void *data);
/* data[tensor->index] is the memory of that tensor. 0, FAKE_NO_MEMORY or FAKE_RESTARTED. */
uint64_t fake_op_run(const struct fake_op *op, void *const *data, uint64_t generation);

/* ---- objects ------------------------------------------------------------------------------- */

struct fake_context;

struct fake_graph {
    struct fake_context *context;
    const struct fake_graph_spec *spec;
    uint64_t handle; /* 0 until it is retrieved */
    uint32_t priority;
    uint32_t on_device; /* executes that hold the device */
    bool enabled;
};

/* What a context reads for as long as it lives, and how it is given back; all 0: nothing. */
struct fake_mapped {
    const char *data;
    uint64_t size;
    int fd;
    fake_function release;
    void *param;
};

struct fake_context {
    struct fake_mapped mapped;
    uint64_t handle, backend, device;
    struct fake_binary *binary;
    struct fake_graph *graphs;
    void *weights;
    uint64_t weight_bytes;
    uint32_t calls; /* in progress: the context cannot go away */
    bool dying;     /* being freed */
    bool lost;      /* the subsystem restarted */
    bool poisoned;  /* a binary of another class was loaded beside it */
    bool prepare_only, deferred;
};

/* A backend or a device: what matters is that it lives and whether a restart voided it. */
struct fake_owner {
    uint64_t handle;
    bool lost;
};

struct fake_registration {
    uint64_t handle;
    struct fake_context *context;
    void *map;
    uint64_t map_bytes, offset, bytes;
    uint32_t dtype, rank, dims[FAKE_MAX_RANK];
    uint32_t users; /* executes that touch it now */
    int fd;
    bool lost;
};

extern pthread_mutex_t fake_lock;
extern pthread_cond_t fake_changed;
extern struct fake_table fake_backends, fake_devices, fake_contexts, fake_graphs,
    fake_registrations;
/* Counts subsystem restarts; under fake_lock. */
extern uint64_t fake_generation;

uint64_t fake_generation_now(void);
/* Voids all objects of contexts, backends and clients of power; told: a call reports it itself. */
void fake_restart(bool told);
void fake_fatal(void);   /* from now on 1011 */
bool fake_is_fatal(void);
bool fake_is_fatal_locked(void);
/* 1007 for the first call after a restart that came by itself, else the code given. Locked. */
uint64_t fake_lost_code(uint64_t code);

/* qnn_fake_schedule.c; with fake_lock held, which the first releases while it waits. */
bool fake_device_acquire(struct fake_graph *graph, uint64_t *order);
void fake_device_release(struct fake_graph *graph);

/* qnn_fake_context.c; with fake_lock held. Destroys what belongs to the owner, returns how many. */
uint32_t fake_contexts_destroy_of(uint64_t backend, uint64_t device);
void fake_context_void(struct fake_context *context);
/* qnn_fake_memory.c; with fake_lock held. */
uint32_t fake_registrations_drop(struct fake_context *context);
void fake_registration_void(struct fake_registration *registration);
void fake_power_void(void); /* qnn_fake_power.c; the same */
struct fake_registration *fake_registration_use(struct fake_context *context,
                                                const struct fake_tensor *tensor,
                                                uint64_t handle, char *why, size_t room);
void fake_registration_unuse(struct fake_registration *registration);

static inline uint64_t fake_handle(const void *handle) {
    return (uint64_t)(uintptr_t)handle;
}

static inline void *fake_to_handle(uint64_t number) {
    return (void *)(uintptr_t)number;
}

/* ---- the calls themselves; the tables are in qnn_fake_tables.c -------------------------------- */

uint64_t fake_property_has_capability(uint32_t key);
uint64_t fake_error_get_message(uint64_t code, const char **out);

uint64_t fake_backend_create(void *logger, const struct fake_config **config, void **out);
uint64_t fake_backend_set_config(void *backend, const struct fake_config **config);
uint64_t fake_backend_get_api_version(struct fake_api_version *out);
uint64_t fake_backend_get_build_id(const char **out);
uint64_t fake_backend_free(void *backend);

uint64_t fake_device_get_platform_info(void *logger, const struct fake_platform **out);
uint64_t fake_device_free_platform_info(void *logger, const struct fake_platform *info);
uint64_t fake_device_get_infrastructure(const struct fake_infrastructure **out);
uint64_t fake_device_create(void *logger, const struct fake_config **config, void **out);
uint64_t fake_device_get_info(void *device, const struct fake_platform **out);
uint64_t fake_device_free(void *device);

uint64_t fake_context_set_config(void *context, const struct fake_config **config);
uint64_t fake_context_get_binary_size(void *context, uint64_t *out);
uint64_t fake_context_create_from_binary(void *backend, void *device,
                                         const struct fake_config **config, const void *binary,
                                         uint64_t size, void **out, void *profile);
uint64_t fake_context_free(void *context, void *profile);
/* The call without its name; mapped: what the binary lies in as long as the context, or NULL. */
uint64_t fake_context_make(void *backend, void *device, const struct fake_config **config,
                           const void *binary, uint64_t size, void **out, void *profile,
                           const struct fake_mapped *mapped);
uint64_t fake_context_create_mapped(void *backend, void *device, const struct fake_config **config,
                                    const void *callback, const void *binary, uint64_t size,
                                    void **out, void *profile, void *signal);
void fake_mapped_release(struct fake_mapped *mapped);
bool fake_mapped_is_there(const struct fake_mapped *mapped);

uint64_t fake_graph_retrieve(void *context, const char *name, void **out);
uint64_t fake_graph_set_config(void *graph, const struct fake_config **config);
uint64_t fake_graph_finalize(void *graph, void *profile, void *signal);
uint64_t fake_graph_execute(void *graph, const struct fake_tensor_record *inputs,
                            uint32_t input_count, const struct fake_tensor_record *outputs,
                            uint32_t output_count, void *profile, void *signal);

uint64_t fake_log_create(fake_log_callback callback, uint32_t level, void **out);
uint64_t fake_log_set_level(void *logger, uint32_t level);
uint64_t fake_log_free(void *logger);

uint64_t fake_mem_register(void *context, const struct fake_memory_descriptor *descriptors,
                           uint32_t count, void **out);
uint64_t fake_mem_deregister(void *const *handles, uint32_t count);

uint64_t fake_system_context_create(void **out);
uint64_t fake_system_get_binary_info(void *handle, void *binary, uint64_t size, const void **out,
                                     uint64_t *out_size);
uint64_t fake_system_get_metadata(void *handle, const void *binary, uint64_t size,
                                  const void **out);
uint64_t fake_system_context_free(void *handle);
uint64_t fake_system_tensor_bytes(struct fake_tensor_record tensor, uint64_t *out);

#endif
