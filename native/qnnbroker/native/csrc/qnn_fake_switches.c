/* SPDX-License-Identifier: Apache-2.0
 *
 * The switches of the fake: from QNNBROKER_FAKE at load, from qnn_fake_control(), and from a file.
 *
 * A text of switches is items of the form key=value, or one word, parted by commas or newlines. A
 * text with a fault in it changes nothing. What the control file says replaces what it said before;
 * the environment and qnn_fake_control() lay down what the file starts from.
 */
#include "qnn_fake.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_TEXT 65536
#define MAX_NEW_RULES 64

static pthread_mutex_t switch_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct fake_switches base, current;
static bool environment_bad;
static uint64_t hang_epoch;
static struct stat last_seen;
static bool file_again; /* base has changed: what the file says has to be laid over it again */

struct changes {
    struct fake_switches switches;
    struct fake_rule rules[MAX_NEW_RULES];
    size_t rule_count;
    bool drop_rules, restart, unhang;
};

static bool on_off(const char *value, bool *out) {
    *out = strcmp(value, "on") == 0;
    return *out || strcmp(value, "off") == 0;
}

static bool text_value(const char *value, char *out, size_t room) {
    if (strlen(value) >= room)
        return false;
    strcpy(out, value);
    return true;
}

static bool set(struct fake_switches *s, const char *key, const char *value) {
    static const struct {
        const char *key;
        size_t offset;
        uint32_t most;
    } numbers[] = {
        {"device_arch", offsetof(struct fake_switches, device_arch), 999},
        {"soc", offsetof(struct fake_switches, soc), 99999},
        {"vtcm_mb", offsetof(struct fake_switches, vtcm_mb), 1024},
        {"concurrency", offsetof(struct fake_switches, concurrency), 1024},
        {"info_version", offsetof(struct fake_switches, info_version), 3},
        {"null_slot", offsetof(struct fake_switches, null_slot), FAKE_CORE_SLOTS - 1},
    };
    static const struct {
        const char *key;
        size_t offset;
    } flags[] = {
        {"file_mapped", offsetof(struct fake_switches, file_mapped)},
        {"hardware", offsetof(struct fake_switches, hardware)},
        {"mem_register", offsetof(struct fake_switches, mem_register)},
        {"mem_ion", offsetof(struct fake_switches, mem_ion)},
        {"mem_custom", offsetof(struct fake_switches, mem_custom)},
        {"noise", offsetof(struct fake_switches, noise)},
        {"no_provider", offsetof(struct fake_switches, no_provider)},
        {"shared_weights_crash", offsetof(struct fake_switches, shared_weights_crash)},
    };

    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (strcmp(key, numbers[i].key) == 0) {
            uint32_t *field = (uint32_t *)((char *)s + numbers[i].offset);

            return fake_word_u32(value, numbers[i].most, field) &&
                   (*field > 0 || field == &s->null_slot);
        }
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        if (strcmp(key, flags[i].key) == 0)
            return on_off(value, (bool *)((char *)s + flags[i].offset));
    if (strcmp(key, "create_us") == 0)
        return fake_word_u64(value, 3600000000u, &s->create_us);
    if (strcmp(key, "execute_us") == 0)
        return fake_word_u64(value, 3600000000u, &s->execute_us);
    if (strcmp(key, "memory_limit") == 0)
        return fake_word_u64(value, UINT64_MAX / 2, &s->memory_limit);
    if (strcmp(key, "build") == 0)
        return text_value(value, s->build, sizeof s->build);
    if (strcmp(key, "control") == 0)
        return text_value(value, s->control, sizeof s->control);
    if (strcmp(key, "core_api") == 0)
        return fake_word_version(value, s->core_api);
    if (strcmp(key, "record") != 0)
        return false;
    s->record_off = strcmp(value, "off") == 0;
    return text_value(s->record_off ? "" : value, s->record, sizeof s->record);
}

static bool item(struct changes *changes, char *text) {
    char *value = strchr(text, '=');
    struct fake_rule *rule = &changes->rules[changes->rule_count];

    if (value == NULL) {
        if (strcmp(text, "restart") == 0)
            changes->restart = true;
        else if (strcmp(text, "unhang") == 0)
            changes->unhang = true;
        else if (strcmp(text, "clear") == 0)
            changes->drop_rules = true;
        else
            return false;
        return true;
    }
    *value++ = 0;
    if (set(&changes->switches, text, value))
        return true;
    if (changes->rule_count == MAX_NEW_RULES || !fake_rule_parse(text, value, rule))
        return false;
    changes->rule_count++;
    return true;
}

/* Returns NULL, or the item that is wrong (inside text, which is cut up). */
static const char *parse(struct changes *changes, char *text) {
    char *rest = NULL;

    for (char *word = strtok_r(text, ",\n", &rest); word; word = strtok_r(NULL, ",\n", &rest)) {
        char *tail;

        word += strspn(word, " \t\r");
        for (tail = word + strlen(word); tail > word && strchr(" \t\r", tail[-1]); tail--)
            tail[-1] = 0;
        if (*word && *word != '#' && !item(changes, word))
            return word;
    }
    return NULL;
}

/* With the mutex held; what has to be done without it is left in changes. False: too many rules. */
static bool commit(struct changes *changes, bool from_file) {
    bool all = true;

    current = changes->switches;
    if (!from_file)
        base = changes->switches;
    if (changes->drop_rules)
        fake_rules_drop(false);
    for (size_t i = 0; i < changes->rule_count; i++) {
        changes->rules[i].from_file = from_file;
        all = all && fake_rule_add(&changes->rules[i]);
    }
    hang_epoch += changes->unhang;
    return all;
}

static void act(const struct changes *changes) {
    if (changes->restart)
        fake_restart(false);
    pthread_mutex_lock(&fake_lock);
    pthread_cond_broadcast(&fake_changed);
    pthread_mutex_unlock(&fake_lock);
}

/* Changes the switches of the library that is loaded; a text that is not understood does nothing. */
FAKE_EXPORT uint64_t qnn_fake_control(const char *text) {
    struct changes *changes = calloc(1, sizeof *changes);
    char *copy = text ? strdup(text) : NULL;
    uint64_t code = FAKE_INVALID_ARGUMENT;

    if (changes && copy) {
        pthread_mutex_lock(&switch_mutex);
        changes->switches = base;
        if (parse(changes, copy) == NULL) {
            code = commit(changes, false) ? FAKE_OK : FAKE_NO_MEMORY;
            file_again = true;
        }
        pthread_mutex_unlock(&switch_mutex);
        if (code == FAKE_OK)
            act(changes);
    }
    free(copy);
    free(changes);
    return code;
}

static bool same_file(const struct stat *a, const struct stat *b) {
    return a->st_ino == b->st_ino && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static char *read_whole(int fd) {
    char *text = malloc(MAX_TEXT);
    size_t used = 0;
    ssize_t got = 0;

    while (text && used < MAX_TEXT - 1 && (got = read(fd, text + used, MAX_TEXT - 1 - used)) > 0)
        used += (size_t)got;
    if (text)
        text[used] = 0;
    return text;
}

/* With the mutex held. */
static struct changes *reread(const char **bad, char **text) {
    struct stat now;
    int fd;
    struct changes *changes = NULL;
    bool seen_before;

    if (stat(current.control, &now) != 0)
        return NULL;
    seen_before = same_file(&now, &last_seen);
    if (seen_before && !file_again)
        return NULL;
    fd = open(current.control, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    if (fstat(fd, &last_seen) == 0 && (*text = read_whole(fd)) != NULL &&
        (changes = calloc(1, sizeof *changes)) != NULL) {
        changes->switches = base;
        *bad = parse(changes, *text);
        if (seen_before)
            changes->restart = changes->unhang = false; /* those happen once */
        if (*bad == NULL) {
            fake_rules_drop(true);
            if (!commit(changes, true))
                *bad = "too many rules";
        }
        file_again = false;
    }
    close(fd);
    return changes;
}

void fake_control_poll(void) {
    struct changes *changes = NULL;
    const char *bad = NULL;
    char *text = NULL;

    pthread_mutex_lock(&switch_mutex);
    if (current.control[0])
        changes = reread(&bad, &text);
    pthread_mutex_unlock(&switch_mutex);
    if (bad)
        fake_record_error("control_file_refused", "item=%.100s", bad);
    else if (changes)
        act(changes);
    free(text);
    free(changes);
}

__attribute__((constructor)) static void load(void) {
    const char *given = getenv("QNNBROKER_FAKE");
    struct changes *changes = calloc(1, sizeof *changes);
    char *copy = strdup(given ? given : "");
    const char *bad = NULL;

    base = (struct fake_switches){
        .device_arch = 68,
        .soc = 30,
        .vtcm_mb = 4,
        .concurrency = 1,
        .info_version = 3,
        .null_slot = FAKE_NONE,
        .mem_ion = true,
        .mem_custom = true,
        .core_api = {2, 40, 0},
        .build = "v2.51.0.260929181845",
    };
    current = base;
    if (changes && copy) {
        changes->switches = base;
        bad = parse(changes, copy);
        if (bad == NULL && !commit(changes, false))
            bad = "too many rules";
    }
    environment_bad = changes == NULL || copy == NULL || bad != NULL;
    if (bad)
        fprintf(stderr, "fake QNN: QNNBROKER_FAKE is not understood at '%s'\n", bad);
    if (current.noise)
        printf(" # fake QNN: loaded\n");
    free(copy);
    free(changes);
}

bool fake_switches_bad(void) {
    return environment_bad;
}

struct fake_switches fake_switches_now(void) {
    struct fake_switches copy;

    pthread_mutex_lock(&switch_mutex);
    copy = current;
    pthread_mutex_unlock(&switch_mutex);
    return copy;
}

uint64_t fake_hang_epoch(void) {
    uint64_t epoch;

    pthread_mutex_lock(&switch_mutex);
    epoch = hang_epoch;
    pthread_mutex_unlock(&switch_mutex);
    return epoch;
}

struct fake_fault fake_faults_of(const char *call, const char *const *subjects, size_t count) {
    struct fake_fault fault;

    pthread_mutex_lock(&switch_mutex);
    fault = fake_rules_match(call, subjects, count);
    pthread_mutex_unlock(&switch_mutex);
    return fault;
}
