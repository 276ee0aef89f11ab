/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "qb_code.h"

#include <link.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct unmapping {
    const char *prefix;
    uint64_t bytes;
} unmapping;

/* Relocations in read-only segments: such pages are not the file's. */
static bool is_relocated(const struct dl_phdr_info *object) {
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &object->dlpi_phdr[i];
        if (segment->p_type != PT_DYNAMIC)
            continue;
        const ElfW(Dyn) *entry = (const ElfW(Dyn) *)(object->dlpi_addr + segment->p_vaddr);
        for (; entry->d_tag != DT_NULL; entry++)
            if (entry->d_tag == DT_TEXTREL ||
                (entry->d_tag == DT_FLAGS && (entry->d_un.d_val & DF_TEXTREL)))
                return true;
    }
    return false;
}

/* Called with the loader's lock: nothing is unloaded meanwhile. */
static int unmap_object(struct dl_phdr_info *object, size_t size, void *context) {
    unmapping *u = context;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    (void)size;
    if (strncmp(object->dlpi_name, u->prefix, strlen(u->prefix)) || is_relocated(object))
        return 0;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &object->dlpi_phdr[i];
        /* What is written during relocation and protected then is part of a segment with PF_W. */
        if (segment->p_type != PT_LOAD || (segment->p_flags & PF_W))
            continue;
        uintptr_t start = object->dlpi_addr + segment->p_vaddr;
        uintptr_t end = (start + segment->p_filesz) & ~(page - 1);
        start = (start + page - 1) & ~(page - 1);
        if (end > start && !madvise((void *)start, end - start, MADV_DONTNEED))
            u->bytes += end - start;
    }
    return 0;
}

uint64_t qb_code_unmap(const char *prefix) {
    unmapping u = {prefix, 0};
    dl_iterate_phdr(unmap_object, &u);
    return u.bytes;
}
