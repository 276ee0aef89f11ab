/* SPDX-License-Identifier: Apache-2.0
 * The one checked (offset, length) test. Whoever takes a span from a peer asks here and nowhere
 * else. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

/* True when [offset, offset + length) lies in [0, total). No sum is formed, so nothing can wrap.
 * An empty span is fine up to and including offset == total. */
static inline bool qb_span_ok(uint64_t total, uint64_t offset, uint64_t length) {
    return offset <= total && length <= total - offset;
}
