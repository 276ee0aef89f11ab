/* SPDX-License-Identifier: Apache-2.0
 *
 * Who has the device: strict priority among the waiting executes, first come first served inside a
 * priority, as many at a time as the switch `concurrency` says (1, like the real thing).
 */
#include "qnn_fake.h"

struct waiter {
    struct waiter *next; /* in the order of arrival */
    const struct fake_graph *graph;
};

static struct waiter *first;
static uint32_t running;
static uint64_t orders;

static void append(struct waiter *waiter) {
    struct waiter **at = &first;

    while (*at)
        at = &(*at)->next;
    *at = waiter;
}

static void take_out(const struct waiter *waiter) {
    struct waiter **at = &first;

    while (*at != waiter)
        at = &(*at)->next;
    *at = waiter->next;
}

/* Priorities are read now, not on arrival: one that changes counts for those who wait, too. */
static const struct waiter *best(void) {
    const struct waiter *found = first;

    for (const struct waiter *waiter = first; waiter; waiter = waiter->next)
        if (waiter->graph->priority > found->graph->priority)
            found = waiter;
    return found;
}

/* How many executes wait for the device: lets a test know that they have come that far. */
FAKE_EXPORT uint64_t qnn_fake_waiting(void) {
    uint64_t count = 0;

    pthread_mutex_lock(&fake_lock);
    for (const struct waiter *waiter = first; waiter; waiter = waiter->next)
        count++;
    pthread_mutex_unlock(&fake_lock);
    return count;
}

bool fake_device_acquire(struct fake_graph *graph, uint64_t *order) {
    struct waiter me = {.graph = graph};
    const struct fake_context *context = graph->context;

    append(&me);
    while (!context->dying && !context->lost &&
           !(running < fake_switches_now().concurrency && best() == &me))
        pthread_cond_wait(&fake_changed, &fake_lock);
    take_out(&me);
    pthread_cond_broadcast(&fake_changed); /* the next one may be the best now */
    if (context->dying || context->lost)
        return false;
    running++;
    graph->on_device++;
    *order = ++orders;
    return true;
}

void fake_device_release(struct fake_graph *graph) {
    running--;
    graph->on_device--;
    pthread_cond_broadcast(&fake_changed);
}
