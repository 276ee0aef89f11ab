/* SPDX-License-Identifier: Apache-2.0
 *
 * The records that cross the QNN C API, as far as the fake library reads or writes them.
 *
 * Written from a table of offsets; LP64, little endian. Every size that a caller relies on is
 * asserted below. Records with a version field hold it at offset 0 and their body at offset 8.
 */
#ifndef QNN_FAKE_ABI_H
#define QNN_FAKE_ABI_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#define FAKE_CORE_SLOTS 75
#define FAKE_SYSTEM_SLOTS 16
#define FAKE_NONE 0x7FFFFFFFu

typedef void (*fake_function)(void);

#define FAKE_BACKEND_ID 6

struct fake_version {
    uint32_t major, minor, patch;
};

struct fake_api_version {
    struct fake_version core, backend;
};

struct fake_core_interface {
    uint32_t backend_id;
    const char *provider;
    struct fake_api_version api;
    fake_function slots[FAKE_CORE_SLOTS + 1]; /* one more, always NULL */
};

struct fake_system_interface {
    uint32_t backend_id;
    const char *provider;
    struct fake_version api;
    fake_function slots[FAKE_SYSTEM_SLOTS + 1];
};

struct fake_scale_offset {
    float scale;
    int32_t offset;
};

struct fake_quantization {
    uint32_t definition; /* 1 defined, FAKE_NONE not quantised */
    uint32_t encoding;   /* 0 tensor, 1 axis, 2 bit-width tensor, 3 bit-width axis */
    union {
        struct fake_scale_offset tensor;
        struct {
            int32_t axis;
            uint32_t count;
            const struct fake_scale_offset *pairs;
        } axis;
        struct {
            uint32_t bits;
            float scale;
            int32_t offset;
        } width_tensor;
        struct {
            uint32_t bits;
            int32_t axis;
            uint32_t count;
            const float *scales;
            const int32_t *offsets;
        } width_axis;
        uint64_t room[4];
    } as;
};

struct fake_tensor_body {
    uint32_t id;
    const char *name;
    uint32_t type; /* 0 the application writes it, 1 it reads it */
    uint32_t format;
    uint32_t dtype;
    struct fake_quantization quantization;
    uint32_t rank;
    const uint32_t *dims;
    uint32_t memory_type; /* 0 raw, 1 memory handle */
    union {
        struct {
            void *data;
            uint32_t size;
        } raw;
        void *handle;
    } memory;
    const uint8_t *dynamic_dims; /* from here on only in version 2 */
    uint32_t sparse_layout, sparse_elements, sparse_dims;
    uint8_t is_produced;
};

struct fake_tensor_record {
    uint32_t version;
    struct fake_tensor_body body;
};

/* One entry of a config list (a list is an array of pointers that NULL ends). */
struct fake_config {
    uint32_t option;
    union {
        const void *pointer;
        uint32_t number;
        uint64_t wide;
    } as;
};

/* Context custom config: option 0, union 8. Device custom config: option 0, union 8, arch 12. */
struct fake_custom_config {
    uint32_t option;
    uint32_t unused;
    uint32_t first, second;
};

struct fake_memory_descriptor {
    uint32_t rank;
    const uint32_t *dims;
    const char *config;
    uint32_t dtype;
    uint32_t memory_type; /* 1 ION, 2 custom */
    union {
        int32_t fd;
        const struct fake_htp_descriptor *custom;
        uint64_t room[2];
    } as;
};

struct fake_htp_descriptor {
    uint32_t type; /* 1 shared buffer */
    uint64_t total_bytes;
    int32_t fd;
    uint64_t offset;
};

struct fake_htp_device {
    uint32_t device_type;
    uint64_t vtcm_mb;
    uint32_t soc_model;
    uint8_t signed_pd, dlbc;
    uint32_t arch;
};

struct fake_core_record {
    uint32_t version, unused, id, type;
    const void *extension;
};

struct fake_device_record {
    uint32_t version, unused, id, type, core_count;
    const struct fake_core_record *cores;
    const struct fake_htp_device *extension;
};

struct fake_platform {
    uint32_t version, unused, device_count;
    const struct fake_device_record *devices;
};

struct fake_infrastructure {
    uint32_t type; /* 0 performance */
    fake_function create_power_config, destroy_power_config, set_power_config, set_memory_config;
};

typedef void (*fake_log_callback)(const char *format, uint32_t level, uint64_t time, va_list);

_Static_assert(sizeof(struct fake_api_version) == 24, "version pair");
_Static_assert(offsetof(struct fake_core_interface, slots) == 40, "core interface");
_Static_assert(offsetof(struct fake_system_interface, slots) == 32, "system interface");
_Static_assert(sizeof(struct fake_quantization) == 40, "quantisation block");
_Static_assert(offsetof(struct fake_tensor_body, rank) == 72, "tensor rank");
_Static_assert(offsetof(struct fake_tensor_body, memory) == 96, "tensor memory");
_Static_assert(offsetof(struct fake_tensor_body, is_produced) == 132, "tensor version 2");
_Static_assert(sizeof(struct fake_tensor_record) == 144, "tensor record");
_Static_assert(sizeof(struct fake_config) == 16, "config entry");
_Static_assert(sizeof(struct fake_memory_descriptor) == 48, "memory descriptor");
_Static_assert(offsetof(struct fake_memory_descriptor, as) == 32, "memory descriptor union");
_Static_assert(sizeof(struct fake_htp_descriptor) == 32, "shared buffer descriptor");
_Static_assert(sizeof(struct fake_htp_device) == 32, "device extension");
_Static_assert(sizeof(struct fake_core_record) == 24, "core record");
_Static_assert(sizeof(struct fake_device_record) == 40, "device record");
_Static_assert(sizeof(struct fake_platform) == 24, "platform info");
_Static_assert(sizeof(struct fake_infrastructure) == 40, "infrastructure");

#endif
