/* SPDX-License-Identifier: Apache-2.0
 * A client written from WIRE.md alone: no header, no library and no generated code of the project.
 *
 *   wire_client ATTACH_SOCKET
 *
 * Says "session TOKEN_HEX" and "buffer ID SIZE"; then obeys lines of its standard input:
 *   run BINDING COUNT IN OUT BYTES   COUNT runs; before each, BYTES at IN are filled, afterwards the
 *                                    same bytes must be at OUT; says "ran COUNT"
 *   submit BINDING COUNT             COUNT submissions at once, all taken: "done", and the statuses
 *   cancel BINDING                   a submission and a cancel of it: "done STATUS"
 *   late BINDING                     a submission that is late already: "done STATUS"
 *   flood BINDING DEADLINE FLAGS     submits and takes as fast as it can until the next line comes:
 *                                    "flooded COUNT STATUS"
 *   stop                             ends a flood, says nothing
 *   break                            a slot with an unknown flag: "thrown out", once it is */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define DIE(...) (fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), exit(1))

static int attach;
static volatile uint8_t *mine, *theirs;
static uint8_t *buffer;
static uint32_t sq_slots, cq_slots, max_in_flight;
static int doorbell, bell_fd;
static uint64_t next_ticket = 1;

/* ---- protobuf, as much as is needed ----------------------------------------------------------- */

static size_t put_varint(uint8_t *out, uint64_t value) {
    size_t n = 0;
    for (; value > 127; value >>= 7)
        out[n++] = (uint8_t)(value | 128);
    out[n++] = (uint8_t)value;
    return n;
}

static size_t put_number(uint8_t *out, unsigned field, uint64_t value) {
    size_t n = put_varint(out, field << 3);
    return n + put_varint(out + n, value);
}

static size_t put_text(uint8_t *out, unsigned field, const char *text) {
    size_t n = put_varint(out, field << 3 | 2);
    n += put_varint(out + n, strlen(text));
    memcpy(out + n, text, strlen(text));
    return n + strlen(text);
}

static uint64_t get_varint(const uint8_t **at, const uint8_t *end) {
    uint64_t value = 0;
    for (unsigned shift = 0; *at < end && shift < 64; shift += 7) {
        uint8_t byte = *(*at)++;
        value |= (uint64_t)(byte & 127) << shift;
        if (!(byte & 128))
            return value;
    }
    DIE("a varint that does not end");
}

/* The field of that number: a varint's value, or the length of bytes that `bytes` is set to. */
static uint64_t get_field(const uint8_t *at, const uint8_t *end, unsigned field,
                          const uint8_t **bytes) {
    uint64_t found = 0;
    while (at < end) {
        uint64_t key = get_varint(&at, end), value = get_varint(&at, end);
        const uint8_t *start = at;
        if ((key & 7) == 2) {
            if (value > (uint64_t)(end - at))
                DIE("a field that leaves its message");
            at += value;
        } else if (key & 7) {
            DIE("a field of an unexpected type");
        }
        if (key >> 3 == field) {
            found = value;
            if (bytes)
                *bytes = start;
        }
    }
    return found;
}

/* ---- frames ----------------------------------------------------------------------------------- */

static void put_u32(uint8_t *at, uint32_t v) {
    for (int i = 0; i < 4; i++)
        at[i] = (uint8_t)(v >> 8 * i);
}
static uint32_t get_u32(const uint8_t *at) {
    return at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24;
}

/* One request and its answer: the length of the body; `fds` come along. */
static size_t ask(unsigned kind, const uint8_t *body, size_t length, uint8_t *answer, int *fds,
                  int fd_count) {
    static uint32_t number;
    static uint8_t frame[65536];
    union {
        char bytes[CMSG_SPACE(16 * sizeof(int))];
        struct cmsghdr align;
    } control;
    memcpy(frame, "QNBK", 4);
    put_u32(frame + 4, kind);
    put_u32(frame + 8, ++number);
    put_u32(frame + 12, (uint32_t)length);
    memcpy(frame + 16, body, length);
    if (send(attach, frame, 16 + length, MSG_NOSIGNAL) != (ssize_t)(16 + length))
        DIE("send: %s", strerror(errno));
    struct iovec io = {frame, sizeof frame};
    struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = control.bytes,
                       .msg_controllen = sizeof control.bytes};
    ssize_t got = recvmsg(attach, &m, MSG_CMSG_CLOEXEC);
    if (got < 16 || m.msg_flags & (MSG_TRUNC | MSG_CTRUNC) || memcmp(frame, "QNBK", 4) ||
        get_u32(frame + 4) != (kind | 1u << 16) || get_u32(frame + 8) != number ||
        get_u32(frame + 12) != (uint32_t)got - 16)
        DIE("no answer to a request of kind %u: %zd bytes, %#x", kind, got, get_u32(frame + 4));
    int count = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
            count = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            if (count != fd_count)
                DIE("%d descriptors wanted, %d found", fd_count, count);
            memcpy(fds, CMSG_DATA(c), (size_t)count * sizeof(int));
        }
    if (count != fd_count)
        DIE("%d descriptors wanted, %d found", fd_count, count);
    memcpy(answer, frame + 16, (size_t)got - 16);
    return (size_t)got - 16;
}

static void *map_sealed(int fd, int protection, size_t *size) {
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || !(seals & F_SEAL_GROW) || fstat(fd, &st))
        DIE("memory that is not sealed");
    *size = (size_t)st.st_size;
    void *at = mmap(NULL, *size, protection, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED)
        DIE("mmap: %s", strerror(errno));
    close(fd);
    return at;
}

static void hello(void) {
    uint8_t body[256], answer[65536];
    const uint8_t *token, *limits = NULL;
    int fds[4];
    size_t n = 0, size[2];
    n += put_number(body + n, 1, 1); /* protocol_min */
    n += put_number(body + n, 2, 1); /* protocol_max */
    n += put_number(body + n, 3, 1); /* abi_version */
    n += put_number(body + n, 4, 1); /* capabilities: RING */
    n += put_text(body + n, 5, "wire client");
    size_t got = ask(1, body, n, answer, fds, 4);
    if (get_field(answer, answer + got, 2, NULL) != 1 ||
        !(get_field(answer, answer + got, 3, NULL) & 1))
        DIE("another layout, or no rings");
    uint64_t length = get_field(answer, answer + got, 5, &token);
    printf("session ");
    for (uint64_t i = 0; i < length; i++)
        printf("%02x", token[i]);
    printf("\n");
    length = get_field(answer, answer + got, 7, &limits);
    max_in_flight = (uint32_t)get_field(limits, limits + length, 5, NULL);
    mine = map_sealed(fds[0], PROT_READ | PROT_WRITE, &size[0]);
    theirs = map_sealed(fds[1], PROT_READ, &size[1]);
    doorbell = fds[2];
    bell_fd = fds[3];
    uint32_t *head = (uint32_t *)theirs;
    sq_slots = head[2];
    cq_slots = head[3];
    if (head[0] != 0x474e5251 || head[1] != 1 || !sq_slots || sq_slots & (sq_slots - 1) ||
        !cq_slots || cq_slots & (cq_slots - 1) || 256 + 32 * (uint64_t)sq_slots > size[0] ||
        256 + 64 * (uint64_t)cq_slots > size[1] || !max_in_flight || max_in_flight > cq_slots)
        DIE("not rings of this layout");
}

static void allocate(uint64_t wanted) {
    uint8_t body[16], answer[65536];
    int fd;
    size_t size, got = ask(2, body, put_number(body, 1, wanted), answer, &fd, 1);
    buffer = map_sealed(fd, PROT_READ | PROT_WRITE, &size);
    printf("buffer %llu %zu\n", (unsigned long long)get_field(answer, answer + got, 1, NULL), size);
}

/* ---- rings ------------------------------------------------------------------------------------ */

static uint32_t *word(volatile uint8_t *file, unsigned offset) {
    return (uint32_t *)(file + offset);
}
static uint32_t acquire(uint32_t *at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
static void release(uint32_t *at, uint32_t value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
static void fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

static void push(uint64_t binding, uint64_t ticket, uint64_t deadline, uint32_t flags) {
    uint32_t tail = *word(mine, 0);
    while (tail - acquire(word(theirs, 128)) >= sq_slots)
        continue; /* the broker takes them at once, whatever runs */
    uint64_t *slot = (uint64_t *)(mine + 256 + 32 * (tail & (sq_slots - 1)));
    slot[0] = binding;
    slot[1] = ticket;
    slot[2] = deadline;
    slot[3] = flags;
    release(word(mine, 0), tail + 1);
    fence();
    if (acquire(word(theirs, 192)) == 1) {
        uint64_t one = 1;
        if (write(doorbell, &one, 8) != 8 && errno != EAGAIN)
            DIE("doorbell: %s", strerror(errno));
    }
}

typedef struct completion {
    uint64_t ticket;
    uint32_t status;
    uint64_t queue_ns, execute_ns;
} completion;

/* Takes one if there is one. */
static int take(completion *out) {
    uint32_t head = *word(mine, 64), there = acquire(word(theirs, 64)) - head;
    if (there > cq_slots)
        DIE("completions that make no sense");
    if (!there)
        return 0;
    uint64_t *slot = (uint64_t *)(theirs + 256 + 64 * (head & (cq_slots - 1)));
    *out = (completion){slot[0], (uint32_t)slot[1], slot[2], slot[3]};
    release(word(mine, 64), head + 1);
    return 1;
}

/* Waits for the next one, asleep. */
static completion next(void) {
    completion c;
    while (!take(&c)) {
        char rung[64];
        release(word(mine, 128), 1);
        fence();
        int came = take(&c);
        if (!came && read(bell_fd, rung, sizeof rung) == 0)
            DIE("the broker hung up");
        release(word(mine, 128), 0);
        if (came)
            break;
    }
    return c;
}

/* ---- commands --------------------------------------------------------------------------------- */

static void run(uint64_t binding, uint64_t count, uint64_t in, uint64_t out, uint64_t bytes) {
    for (uint64_t n = 0; n < count; n++) {
        for (uint64_t i = 0; i < bytes; i++)
            buffer[in + i] = (uint8_t)(n * 31 + i * 7);
        memset(buffer + out, 0, bytes);
        push(binding, next_ticket, 0, 0);
        completion c = next();
        if (c.ticket != next_ticket++ || c.status)
            DIE("run %llu ended with %u", (unsigned long long)n, c.status);
        if (memcmp(buffer + in, buffer + out, bytes))
            DIE("run %llu: not what went in", (unsigned long long)n);
    }
    printf("ran %llu\n", (unsigned long long)count);
}

static void submit(uint64_t binding, uint64_t count) {
    uint64_t first = next_ticket, seen = 0;
    for (uint64_t n = 0; n < count; n++)
        push(binding, next_ticket++, 0, 0);
    printf("done");
    for (uint64_t n = 0; n < count; n++) {
        completion c = next();
        if (c.ticket < first || c.ticket - first >= count || seen >> (c.ticket - first) & 1)
            DIE("ticket %llu came twice, or is nobody's", (unsigned long long)c.ticket);
        seen |= 1ull << (c.ticket - first);
        printf(" %u", c.status);
    }
    printf("\n");
}

/* Has the next command come? The pipe of our commands, looked at without reading. */
static bool told(void) {
    struct pollfd commands = {.fd = 0, .events = POLLIN};
    return poll(&commands, 1, 0) > 0;
}

static void flood(uint64_t binding, uint64_t deadline, uint32_t flags) {
    uint64_t count = 0, flying = 0;
    bool over = false;
    completion c = {0, 0, 0, 0};
    for (uint64_t round = 1; !over || flying; round++) {
        over = over || (round % 1024 == 0 && told());
        for (int i = 0; i < 64 && flying < max_in_flight && !over; i++) {
            push(binding, next_ticket++, deadline, flags);
            if (flags) /* a cancel of nothing: no completion */
                count++;
            else
                flying++;
        }
        for (; take(&c); flying--)
            count++;
    }
    printf("flooded %llu %u\n", (unsigned long long)count, c.status);
}

int main(int argc, char **argv) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char line[256];
    if (argc != 2)
        DIE("see the head of the file");
    strncpy(address.sun_path, argv[1], sizeof address.sun_path - 1);
    attach = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (attach < 0 || connect(attach, (struct sockaddr *)&address, sizeof address))
        DIE("connect: %s", strerror(errno));
    struct ucred peer;
    socklen_t length = sizeof peer;
    if (getsockopt(attach, SOL_SOCKET, SO_PEERCRED, &peer, &length) ||
        (peer.uid && peer.uid != getuid()))
        DIE("the broker is somebody else's");
    setlinebuf(stdout);
    hello();
    allocate(65536);
    while (fgets(line, sizeof line, stdin)) {
        char *rest = line, *command = strsep(&rest, " \n");
        uint64_t n[5] = {0};
        for (int i = 0; i < 5 && rest; i++)
            n[i] = strtoull(rest, &rest, 10);
        if (!strcmp(command, "run")) {
            run(n[0], n[1], n[2], n[3], n[4]);
        } else if (!strcmp(command, "submit")) {
            submit(n[0], n[1]);
        } else if (!strcmp(command, "cancel")) {
            push(n[0], next_ticket, 0, 0);
            push(0, next_ticket++, 0, 1);
            printf("done %u\n", next().status);
        } else if (!strcmp(command, "late")) {
            push(n[0], next_ticket++, 1, 0);
            printf("done %u\n", next().status);
        } else if (!strcmp(command, "flood")) {
            flood(n[0], n[1], (uint32_t)n[2]);
        } else if (!strcmp(command, "break")) {
            uint8_t frame[65536];
            push(n[0], next_ticket++, 0, 0x80);
            if (recv(attach, frame, sizeof frame, 0) < 16 || get_u32(frame + 4) != 3u << 16)
                DIE("the broker did not say why");
            if (recv(attach, frame, sizeof frame, 0) > 0)
                DIE("the broker did not end the connection");
            printf("thrown out\n");
        } else if (strcmp(command, "stop")) { /* which only ends what came before it */
            DIE("what is %s?", command);
        }
    }
    return 0;
}
