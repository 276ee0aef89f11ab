/* SPDX-License-Identifier: Apache-2.0
 * DMA buffers: memory that the CPU caches and the device does not see through. CPU access stands
 * between a begin and an end, which write back and drop cached lines as needed. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

#define QB_EXPORT __attribute__((visibility("default")))

#define QB_DMABUF_READ 1u
#define QB_DMABUF_WRITE 2u

QB_EXPORT bool qb_dmabuf_is(int fd);
/* 0 or an errno. `access` is READ, WRITE or both. */
QB_EXPORT int qb_dmabuf_begin(int fd, uint32_t access);
QB_EXPORT int qb_dmabuf_end(int fd, uint32_t access);
