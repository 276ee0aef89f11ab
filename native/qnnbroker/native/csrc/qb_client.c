/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "qb_client_impl.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "qb_counters.h"
#include "qb_doorbell.h"

static bool is_power_of_two(uint32_t n) { return n && !(n & (n - 1)) && n <= QB_RING_MAX_SLOTS; }

qb_client *qb_client_new(void *client_file, uint64_t client_bytes, const void *broker_file,
                         uint64_t broker_bytes, int doorbell, int bell, uint32_t limit,
                         uint64_t spin_ns, uint64_t spin_limit_ns) {
    const qb_broker_file *theirs = broker_file;
    uint32_t sq_slots, cq_slots;
    pthread_condattr_t monotonic;
    qb_client *c;
    errno = EPROTO;
    if (broker_bytes < QB_RING_HEADER_BYTES || client_bytes < QB_RING_HEADER_BYTES ||
        qb_load_relaxed(&theirs->magic) != QB_RING_MAGIC ||
        qb_load_relaxed(&theirs->abi) != QB_RING_ABI)
        return NULL;
    sq_slots = qb_load_relaxed(&theirs->sq_slots);
    cq_slots = qb_load_relaxed(&theirs->cq_slots);
    if (!is_power_of_two(sq_slots) || !is_power_of_two(cq_slots) || !limit || limit > sq_slots ||
        limit > cq_slots || qb_client_file_bytes(sq_slots) > client_bytes ||
        qb_broker_file_bytes(cq_slots) > broker_bytes)
        return NULL;
    errno = ENOMEM;
    c = calloc(1, sizeof *c);
    if (!c || !(c->tickets = calloc(limit, sizeof *c->tickets)) ||
        (c->wake = qb_doorbell_new()) < 0) {
        if (c)
            free(c->tickets);
        free(c);
        return NULL;
    }
    pthread_mutex_init(&c->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&c->progress, &monotonic);
    pthread_condattr_destroy(&monotonic);
    c->mine = client_file;
    c->theirs = theirs;
    c->sq_mask = sq_slots - 1;
    c->cq_mask = cq_slots - 1;
    c->doorbell = doorbell;
    c->bell = bell;
    c->limit = limit;
    c->spin_ns = spin_ns;
    c->spin_limit_ns = spin_limit_ns;
    for (uint32_t i = 0; i < limit; i++)
        c->tickets[i].next_free = i + 1; /* `limit` ends the list */
    qb_count(QB_COUNT_RING, 1);
    return c;
}

void qb_client_free(qb_client *c) {
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->progress);
    close(c->wake);
    free(c->tickets);
    free(c);
    qb_count(QB_COUNT_RING, -1);
}

qb_ticket *qb_client_find(qb_client *c, uint64_t number) {
    uint32_t place = number & 0xffff;
    qb_ticket *t = place < c->limit ? &c->tickets[place] : NULL;
    return t && t->state != QB_TICKET_FREE && t->number == number ? t : NULL;
}

void qb_client_give_back(qb_client *c, qb_ticket *t) {
    t->state = QB_TICKET_FREE;
    t->watched = false;
    t->next_free = c->free_ticket;
    c->free_ticket = (uint32_t)(t - c->tickets);
    c->in_flight--;
    if (c->room_waiters) {
        pthread_cond_broadcast(&c->progress);
        if (c->reader_wants_room) /* it sleeps on the bell, which need not ring for this */
            qb_doorbell_ring(c->wake);
    }
}

/* Writes a submission; the lock is held. Whether the broker must be rung; -1: not with `spare` slots
 * left over. */
static int push(qb_client *c, const qb_sq_slot *slot, uint32_t spare) {
    if (c->sq_tail - qb_load_acquire(&c->theirs->sq_head) + spare > c->sq_mask)
        return -1;
    c->mine->slots[c->sq_tail & c->sq_mask] = *slot;
    qb_store_release(&c->mine->sq_tail, ++c->sq_tail);
    qb_full_fence();
    return qb_load_relaxed(&c->theirs->sleeping) != 0;
}

/* Takes what has completed; the lock is held. How many. */
uint32_t qb_client_take(qb_client *c) {
    uint32_t n = qb_load_acquire(&c->theirs->cq_tail) - c->cq_head;
    if (!n)
        return 0;
    if (n > c->cq_mask + 1) {
        c->lost = true;
        return 0;
    }
    for (uint32_t i = 0; i < n; i++) {
        qb_cq_slot slot;
        qb_copy_words(&slot, &c->theirs->slots[c->cq_head & c->cq_mask], sizeof slot);
        c->cq_head++;
        qb_ticket *t = qb_client_find(c, slot.ticket);
        if (!t || t->state == QB_TICKET_DONE)
            continue; /* not ours: a broker that invents completions harms nobody but itself */
        if (slot.status == 0) {
            uint64_t *median_ns = t->median_ns;
            if (!*median_ns)
                *median_ns = slot.execute_ns + 1;
            else if (slot.execute_ns > *median_ns)
                *median_ns += *median_ns / 8 + 1;
            else if (slot.execute_ns < *median_ns)
                *median_ns -= *median_ns / 8;
            c->wait_ns[median_ns - c->median_ns] = slot.queue_ns + slot.execute_ns;
        }
        if (t->state == QB_TICKET_ABANDONED) {
            qb_client_give_back(c, t);
            continue;
        }
        t->completion = slot;
        t->state = QB_TICKET_DONE;
        if (t->watched)
            c->watched_done++;
    }
    qb_store_release(&c->mine->cq_head, c->cq_head);
    return n;
}

int qb_client_submit(qb_client *c, uint64_t binding, uint64_t deadline_ns, bool watched,
                     uint64_t *ticket) {
    int ring = -1;
    pthread_mutex_lock(&c->lock);
    if (c->free_ticket >= c->limit)
        qb_client_take(c); /* abandoned ones may be over */
    if (c->free_ticket < c->limit && !c->lost) {
        qb_ticket *t = &c->tickets[c->free_ticket];
        uint64_t number = ++c->sequence << 16 | c->free_ticket;
        uint64_t *median_ns = &c->median_ns[(uint32_t)binding % QB_CLIENT_MEDIANS];
        qb_sq_slot slot = {.binding = binding, .ticket = number, .deadline_ns = deadline_ns};
        qb_store_relaxed(&c->mine->core, qb_client_core(c, median_ns));
        ring = push(c, &slot, 0);
        if (ring >= 0) {
            c->free_ticket = t->next_free;
            c->in_flight++;
            *t = (qb_ticket){.number = number,
                             .state = QB_TICKET_PENDING,
                             .watched = watched,
                             .median_ns = median_ns};
            *ticket = number;
        } else {
            c->lost = true; /* cancels leave room for every ticket: the broker's index is nonsense */
        }
    }
    bool lost = c->lost;
    pthread_mutex_unlock(&c->lock);
    if (ring > 0)
        qb_doorbell_ring(c->doorbell);
    if (ring < 0)
        return lost ? QB_CLIENT_LOST : QB_CLIENT_WOULD_BLOCK;
    return 0;
}

int qb_client_cancel(qb_client *c, uint64_t ticket) {
    int ring = 0, result = QB_CLIENT_UNKNOWN;
    pthread_mutex_lock(&c->lock);
    qb_ticket *t = qb_client_find(c, ticket);
    if (t && (t->state == QB_TICKET_PENDING || t->state == QB_TICKET_ABANDONED)) {
        /* Once is enough, and never the last slots: those are for the tickets that are free. */
        qb_sq_slot slot = {.ticket = ticket, .flags = QB_SUBMIT_CANCEL};
        ring = t->cancelling ? 0 : push(c, &slot, c->limit);
        result = ring < 0 ? QB_CLIENT_WOULD_BLOCK : 0;
        t->cancelling = !result;
    }
    pthread_mutex_unlock(&c->lock);
    if (ring > 0)
        qb_doorbell_ring(c->doorbell);
    return result;
}

void qb_client_abandon(qb_client *c, uint64_t ticket) {
    pthread_mutex_lock(&c->lock);
    qb_ticket *t = qb_client_find(c, ticket);
    if (t && t->state == QB_TICKET_DONE) {
        if (t->watched)
            c->watched_done--;
        qb_client_give_back(c, t);
    } else if (t) {
        t->state = QB_TICKET_ABANDONED;
    }
    pthread_mutex_unlock(&c->lock);
}

int qb_client_take_watched(qb_client *c, qb_cq_slot *out, uint32_t n) {
    uint32_t count = 0;
    pthread_mutex_lock(&c->lock);
    if (!c->reading && qb_bell_wait(c->bell, -1, 0) == QB_BELL_CLOSED)
        c->lost = true;
    c->armed = true;
    qb_client_say_sleeps(c);
    qb_full_fence();
    if (qb_client_take(c))
        pthread_cond_broadcast(&c->progress);
    for (uint32_t i = 0; i < c->limit && c->watched_done && count < n; i++) {
        qb_ticket *t = &c->tickets[i];
        if (t->state != QB_TICKET_DONE || !t->watched)
            continue;
        out[count++] = t->completion;
        c->watched_done--;
        qb_client_give_back(c, t);
    }
    int result = !count && c->lost ? QB_CLIENT_LOST : (int)count;
    pthread_mutex_unlock(&c->lock);
    return result;
}

void qb_client_unwatch(qb_client *c) {
    pthread_mutex_lock(&c->lock);
    c->armed = false;
    qb_client_say_sleeps(c);
    pthread_mutex_unlock(&c->lock);
}

void qb_client_close(qb_client *c) {
    pthread_mutex_lock(&c->lock);
    c->closed = true;
    pthread_cond_broadcast(&c->progress);
    pthread_mutex_unlock(&c->lock);
    qb_doorbell_ring(c->wake); /* for whoever sleeps on the bell */
    qb_nap_end(&c->theirs->cq_tail);
}

uint32_t qb_client_in_flight(qb_client *c) {
    pthread_mutex_lock(&c->lock);
    uint32_t n = c->in_flight;
    pthread_mutex_unlock(&c->lock);
    return n;
}

bool qb_client_lost(qb_client *c) {
    pthread_mutex_lock(&c->lock);
    bool lost = c->lost;
    pthread_mutex_unlock(&c->lock);
    return lost;
}
