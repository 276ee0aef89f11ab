/* SPDX-License-Identifier: Apache-2.0
 * Calls that only find out whether the library can do something: what they make is freed at once,
 * and where a thing is needed that nobody has, they pass none. QB_QNN_NOT_SUPPORTED is a "no"; any
 * other code means that the call is there.
 *
 * Threads: any, without the GIL. */
#pragma once
#include "qb_qnn.h"

QB_EXPORT uint64_t qb_qnn_probe_signal(const qb_qnn *q, qb_handle backend);
QB_EXPORT uint64_t qb_qnn_probe_profile(const qb_qnn *q, qb_handle backend);
QB_EXPORT uint64_t qb_qnn_probe_async(const qb_qnn *q, qb_handle graph);
QB_EXPORT uint64_t qb_qnn_probe_callback(const qb_qnn *q, qb_handle backend, qb_handle device);
