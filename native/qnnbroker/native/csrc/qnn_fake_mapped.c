/* SPDX-License-Identifier: Apache-2.0
 *
 * Contexts that read their binary through the caller's callbacks, for as long as they live.
 *
 * Off by default, like in the emulation (1000); file_mapped=on makes it work as on a device that
 * reads weights from the file's pages. The fake asks for the whole binary in one span.
 */
#include "qnn_fake.h"

struct request {
    uint64_t offset, size;
    bool needs_mapping;
};

struct loan {
    int32_t fd;
    void *data;
};

struct response {
    struct loan memory;
    uint64_t data_offset, aligned_size;
};

struct returned {
    struct loan memory;
    uint64_t size;
};

struct callback {
    uint32_t type, unused, version;
    uint64_t (*provide)(struct request, struct response *, void *);
    uint64_t (*release)(struct returned, void *);
    void *param;
};

_Static_assert(sizeof(struct callback) == 40, "callback");

void fake_mapped_release(struct fake_mapped *mapped) {
    uint64_t (*release)(struct returned, void *) =
        (uint64_t(*)(struct returned, void *))mapped->release;

    if (mapped->data)
        release((struct returned){{mapped->fd, (void *)(uintptr_t)mapped->data}, mapped->size},
                mapped->param);
    mapped->data = NULL;
}

bool fake_mapped_is_there(const struct fake_mapped *mapped) {
    /* Every page is touched, as a device would: one that is gone is a SIGBUS, and one that is
     * another file's is seen at least at the start. */
    unsigned sum = 0;

    for (uint64_t at = 0; at < mapped->size; at += 4096)
        sum += (unsigned char)mapped->data[at];
    return !mapped->data || (mapped->data[0] == 'q' && sum);
}

uint64_t fake_context_create_mapped(void *backend, void *device, const struct fake_config **config,
                                    const void *record, const void *binary, uint64_t size,
                                    void **out, void *profile, void *signal) {
    const struct callback *callback = record;
    struct response lent = {{-1, NULL}, 0, 0};
    struct fake_mapped mapped;
    struct fake_call call;
    uint64_t code;

    fake_begin(&call, "contextCreateFromBinaryWithCallback");
    fake_note(&call, "size=%llu", (unsigned long long)size);
    if (!fake_switches_now().file_mapped)
        return fake_end(&call, FAKE_NOT_SUPPORTED);
    if (!callback || callback->version != 1 || !callback->provide || !callback->release || signal)
        return fake_end(&call, FAKE_CONTEXT_ARGUMENT);
    code = callback->provide((struct request){0, size, true}, &lent, callback->param);
    fake_note(&call, "fd=%d aligned=%llu", lent.memory.fd, (unsigned long long)lent.aligned_size);
    if (code != FAKE_OK || lent.memory.data == NULL || lent.data_offset != 0 ||
        lent.aligned_size < size || lent.aligned_size % 4096)
        return fake_end(&call, code ? code : FAKE_CONTEXT_CREATE);
    mapped = (struct fake_mapped){lent.memory.data, size, lent.memory.fd,
                                  (fake_function)callback->release, callback->param};
    code = fake_context_make(backend, device, config, mapped.data, size, out, profile, &mapped);
    return fake_end(&call, code); /* after a failure nothing is given back, as in the real one */
}
