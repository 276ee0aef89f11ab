/* SPDX-License-Identifier: Apache-2.0
 *
 * Questions with fixed answers: what the library can do, and what a code means.
 *
 * Unlike the real library's, the answers are true: a capability is "yes" when the call works.
 */
#include "qnn_fake.h"

#include <string.h>

/* Keys of one group: its base, its number of keys, and the numbers that work. */
static const struct {
    uint32_t base, count;
    /* One letter a key: s works, m with memory registration, f with file_mapped, - does not. */
    const char *works;
} groups[] = {
    {101, 8, "--------"},
    {201, 22, "-ss-ss-------------f--"},
    {301, 24, "-s---s----s-s-----------"},
    {401, 4, "----"},
    {501, 4, "-m--"},
    {1001, 2, "s-"},
    {1101, 5, "mmm--"},
    {1201, 3, "---"},
    {1301, 2, "ss"},
    {1401, 5, "-----"},
    {1501, 2, "ss"},
    {2001, 2, "--"},
};

uint64_t fake_property_has_capability(uint32_t key) {
    struct fake_call call;
    uint64_t code;

    fake_begin(&call, "propertyHasCapability");
    fake_note(&call, "key=%u", key);
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    code = FAKE_UNKNOWN_PROPERTY;
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++)
        if (key >= groups[i].base && key - groups[i].base < groups[i].count) {
            char answer = groups[i].works[key - groups[i].base];
            struct fake_switches switches = fake_switches_now();
            bool works = answer == 's' || (answer == 'm' && switches.mem_register) ||
                         (answer == 'f' && switches.file_mapped);

            code = works ? FAKE_OK : FAKE_NOT_SUPPORTED;
        }
    return fake_end(&call, code);
}

static const struct {
    uint32_t code;
    const char *text;
} messages[] = {
    {FAKE_OK, "no error"},
    {FAKE_NOT_SUPPORTED, "not supported by the fake"},
    {FAKE_NO_MEMORY, "out of memory"},
    {FAKE_INVALID_ARGUMENT, "invalid argument"},
    {FAKE_NOT_PERMITTED, "not permitted for this object"},
    {FAKE_RESTARTED, "the subsystem restarted; make everything anew"},
    {FAKE_LOST_FOR_GOOD, "the subsystem is lost to this process"},
    {FAKE_GENERAL, "general error"},
    {FAKE_UNKNOWN_PROPERTY, "unknown property key"},
    {FAKE_BACKEND_ARGUMENT, "backend: invalid argument"},
    {FAKE_BACKEND_HANDLE, "backend: invalid handle"},
    {FAKE_CONTEXT_ARGUMENT, "context: invalid argument"},
    {FAKE_CONTEXT_HANDLE, "context: invalid handle"},
    {FAKE_CONTEXT_CREATE, "context: cannot be created from the binary"},
    {FAKE_CONTEXT_WRONG_CHIP, "context: the binary is for another chip"},
    {FAKE_CONTEXT_CONFIG, "context: invalid config"},
    {FAKE_GRAPH_ARGUMENT, "graph: invalid argument"},
    {FAKE_GRAPH_HANDLE, "graph: invalid handle"},
    {FAKE_GRAPH_NAME, "graph: invalid name"},
    {FAKE_GRAPH_TENSOR, "graph: invalid tensor"},
    {FAKE_GRAPH_NOT_FINALIZED, "graph: not finalised"},
    {FAKE_GRAPH_FINALIZED, "graph: already finalised"},
    {FAKE_GRAPH_CONTEXT_GONE, "graph: its context is going away"},
    {FAKE_MEMORY_ARGUMENT, "memory: invalid argument"},
    {FAKE_MEMORY_HANDLE, "memory: invalid handle"},
    {FAKE_MEMORY_MAPPING, "memory: cannot be mapped"},
    {FAKE_MEMORY_SHAPE, "memory: invalid shape"},
    {FAKE_MEMORY_TYPE, "memory: unsupported type"},
    {FAKE_ERROR_ARGUMENT, "error: invalid argument"},
    {FAKE_ERROR_UNKNOWN, "error: unknown code"},
    {FAKE_LOG_ARGUMENT, "log: invalid argument"},
    {FAKE_LOG_HANDLE, "log: invalid handle"},
    {FAKE_DEVICE_HANDLE, "device: invalid handle"},
    {FAKE_DEVICE_CONFIG, "device: invalid config"},
};

uint64_t fake_error_get_message(uint64_t code, const char **out) {
    if (out == NULL)
        return FAKE_ERROR_ARGUMENT;
    for (size_t i = 0; i < sizeof messages / sizeof *messages; i++)
        if (messages[i].code == code) {
            *out = messages[i].text;
            return FAKE_OK;
        }
    *out = "unknown code";
    return FAKE_ERROR_UNKNOWN;
}
