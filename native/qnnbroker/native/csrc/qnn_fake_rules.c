/* SPDX-License-Identifier: Apache-2.0
 *
 * Fault rules: which call of which name fails, hangs, crashes or comes late.
 *
 * A rule counts the calls that it could apply to from the moment it was set, so "the next one" is 1.
 * The callers in qnn_fake_switches.c hold the switch mutex around all functions but the parser.
 */
#include "qnn_fake.h"

#include <signal.h>
#include <string.h>

#define MAX_RULES 64

static struct fake_rule rules[MAX_RULES];
static size_t rule_count;

/* "3", "3+", "3-5" or "*" */
static bool parse_when(const char *text, struct fake_rule *rule) {
    char first[24];
    size_t digits = strspn(text, "0123456789");

    if (strcmp(text, "*") == 0) {
        rule->first = 1;
        rule->last = UINT64_MAX;
        return true;
    }
    if (digits == 0 || digits >= sizeof first)
        return false;
    memcpy(first, text, digits);
    first[digits] = 0;
    if (!fake_word_u64(first, 1000000000, &rule->first) || rule->first == 0)
        return false;
    rule->last = rule->first;
    if (text[digits] == 0)
        return true;
    if (strcmp(text + digits, "+") == 0) {
        rule->last = UINT64_MAX;
        return true;
    }
    return text[digits] == '-' && fake_word_u64(text + digits + 1, 1000000000, &rule->last) &&
           rule->last >= rule->first;
}

static bool parse_effect(const char *key, const char *extra, struct fake_fault *fault) {
    if (strcmp(key, "fail") == 0)
        return extra && fake_word_u64(extra, UINT32_MAX, &fault->code) && fault->code > 0;
    if (strcmp(key, "delay") == 0)
        return extra && fake_word_u64(extra, 3600000000u, &fault->delay_us);
    if (strcmp(key, "hang") == 0) {
        fault->hang = true;
        return extra == NULL;
    }
    if (strcmp(key, "crash") != 0)
        return false;
    if (extra == NULL || strcmp(extra, "segv") == 0)
        fault->crash = SIGSEGV;
    else if (strcmp(extra, "abort") == 0)
        fault->crash = SIGABRT;
    else if (strcmp(extra, "kill") == 0)
        fault->crash = SIGKILL;
    return fault->crash != 0;
}

/* CALL[@GRAPH]:WHEN[:EXTRA] */
bool fake_rule_parse(const char *key, const char *value, struct fake_rule *rule) {
    char text[256];
    char *when, *extra, *subject;

    memset(rule, 0, sizeof *rule);
    if (strlen(value) >= sizeof text)
        return false;
    strcpy(text, value);
    when = strchr(text, ':');
    if (when == NULL)
        return false;
    *when++ = 0;
    extra = strchr(when, ':');
    if (extra)
        *extra++ = 0;
    subject = strchr(text, '@');
    if (subject)
        *subject++ = 0;
    if (text[0] == 0 || strlen(text) >= sizeof rule->call)
        return false;
    strcpy(rule->call, text);
    if (subject && !fake_word_name(subject, rule->subject, sizeof rule->subject))
        return false;
    return parse_when(when, rule) && parse_effect(key, extra, &rule->fault);
}

bool fake_rule_add(const struct fake_rule *rule) {
    if (rule_count == MAX_RULES)
        return false;
    rules[rule_count++] = *rule;
    return true;
}

void fake_rules_drop(bool only_from_file) {
    size_t kept = 0;

    for (size_t i = 0; i < rule_count; i++)
        if (only_from_file && !rules[i].from_file)
            rules[kept++] = rules[i];
    rule_count = kept;
}

static bool applies(const struct fake_rule *rule, const char *call, const char *const *subjects,
                    size_t count) {
    if (strcmp(rule->call, "*") != 0 && strcmp(rule->call, call) != 0)
        return false;
    if (rule->subject[0] == 0)
        return true;
    for (size_t i = 0; i < count; i++)
        if (strcmp(subjects[i], rule->subject) == 0)
            return true;
    return false;
}

struct fake_fault fake_rules_match(const char *call, const char *const *subjects, size_t count) {
    struct fake_fault fault = {0};

    for (size_t i = 0; i < rule_count; i++) {
        struct fake_rule *rule = &rules[i];

        if (!applies(rule, call, subjects, count))
            continue;
        rule->seen++;
        if (rule->seen < rule->first || rule->seen > rule->last)
            continue;
        fault.delay_us += rule->fault.delay_us;
        fault.hang |= rule->fault.hang;
        if (fault.code == 0)
            fault.code = rule->fault.code;
        if (fault.crash == 0)
            fault.crash = rule->fault.crash;
    }
    return fault;
}
