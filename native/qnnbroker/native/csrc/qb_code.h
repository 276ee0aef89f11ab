/* SPDX-License-Identifier: Apache-2.0
 * The code and constants of loaded libraries in this process's memory. */
#pragma once
#include <stdint.h>

#define QB_EXPORT __attribute__((visibility("default")))

/* Unmaps the pages of all read-only segments of the loaded libraries whose path begins with `prefix`:
 * the next use of a page maps it again, from the page cache or the file. How many bytes of segments.
 * Any thread, also beside threads that run this code. */
QB_EXPORT uint64_t qb_code_unmap(const char *prefix);
