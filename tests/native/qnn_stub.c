/* SPDX-License-Identifier: Apache-2.0
 * A library with QNN's two entry points and nothing behind them, for tests of what the loader
 * refuses. What it gets wrong is chosen by -D when it is compiled. */
#include <stdint.h>
#include <string.h>

#ifndef CODE
#define CODE 0
#endif
#ifndef COUNT
#define COUNT 1
#endif
#ifndef CORE_MAJOR
#define CORE_MAJOR 2
#endif
#ifndef CORE_MINOR
#define CORE_MINOR 30
#endif
#ifndef SYSTEM_MAJOR
#define SYSTEM_MAJOR 1
#endif
#ifndef EMPTY_SLOT
#define EMPTY_SLOT 75
#endif
#ifndef EMPTY_SYSTEM_SLOT
#define EMPTY_SYSTEM_SLOT 75
#endif

static uint64_t core[5 + 75], system_[4 + 75];
static void *core_list[2] = {NULL, core}, *system_list[1] = {system_};

static uint64_t refuse(void) { return 1100; }

static void put(void *base, unsigned offset, uint32_t value) {
    memcpy((char *)base + offset, &value, 4);
}

uint64_t QnnInterface_getProviders(void ***list, uint32_t *count) {
    put(core, 0, 6);
    core[1] = (uintptr_t) "STUB";
    put(core, 16, CORE_MAJOR);
    put(core, 20, CORE_MINOR);
    for (unsigned i = 0; i < 75; i++)
        core[5 + i] = i == EMPTY_SLOT ? 0 : (uintptr_t)refuse;
    *list = core_list; /* the first entry is empty, the second counts */
    *count = COUNT ? 2 : 0;
    return CODE;
}

uint64_t QnnSystemInterface_getProviders(void ***list, uint32_t *count) {
    put(system_, 16, SYSTEM_MAJOR);
    for (unsigned i = 0; i < 75; i++)
        system_[4 + i] = i == EMPTY_SYSTEM_SLOT ? 0 : (uintptr_t)refuse;
    *list = system_list;
    *count = 1;
    return 0;
}
