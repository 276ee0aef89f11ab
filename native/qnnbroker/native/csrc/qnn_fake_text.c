/* SPDX-License-Identifier: Apache-2.0
 *
 * Lines, words and numbers of the text format, and the memory that a parsed binary lives in.
 */
#define _GNU_SOURCE /* strtof_l */
#include "qnn_fake.h"

#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_LINE 65536

struct fake_chunk {
    struct fake_chunk *next;
    uint64_t align;
    char bytes[];
};

void *fake_arena_get(struct fake_arena *arena, size_t bytes) {
    struct fake_chunk *chunk;

    if (bytes > SIZE_MAX / 2)
        return NULL;
    chunk = calloc(1, sizeof *chunk + bytes);
    if (chunk == NULL)
        return NULL;
    chunk->next = arena->chunks;
    arena->chunks = chunk;
    return chunk->bytes;
}

char *fake_arena_text(struct fake_arena *arena, const char *text) {
    char *copy = fake_arena_get(arena, strlen(text) + 1);

    return copy ? strcpy(copy, text) : NULL;
}

void fake_arena_free(struct fake_arena *arena) {
    struct fake_chunk *next;

    for (struct fake_chunk *chunk = arena->chunks; chunk; chunk = next) {
        next = chunk->next;
        free(chunk);
    }
    arena->chunks = NULL;
}

static bool grow(struct fake_line *line, size_t bytes) {
    char *text;

    if (line->room >= bytes)
        return true;
    text = realloc(line->text, bytes);
    if (text == NULL)
        return false;
    line->text = text;
    line->room = bytes;
    return true;
}

static int cut(struct fake_line *line) {
    char *rest = NULL;

    line->count = 0;
    for (char *word = strtok_r(line->text, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        if (line->count == FAKE_MAX_WORDS)
            return -1;
        line->words[line->count++] = word;
    }
    return 1;
}

/* Blank lines and lines that begin with # do not count as lines. */
int fake_line_next(struct fake_line *line, const char **at, const char *end) {
    while (*at < end) {
        const char *start = *at;
        const char *newline = memchr(start, '\n', (size_t)(end - start));
        size_t length = (size_t)((newline ? newline : end) - start);

        *at = newline ? newline + 1 : end;
        line->number++;
        if (length == 0 || start[0] == '#')
            continue;
        if (length >= MAX_LINE || !grow(line, length + 1))
            return -1;
        for (size_t i = 0; i < length; i++)
            if (start[i] < ' ' || start[i] > '~')
                return -1;
        memcpy(line->text, start, length);
        line->text[length] = 0;
        if (cut(line) < 0)
            return -1;
        if (line->count > 0)
            return 1;
    }
    return 0;
}

bool fake_word_u64(const char *word, uint64_t most, uint64_t *out) {
    uint64_t value = 0;

    if (*word == 0)
        return false;
    for (; *word; word++) {
        uint64_t digit = (uint64_t)(*word - '0');

        if (*word < '0' || *word > '9' || value > (UINT64_MAX - digit) / 10)
            return false;
        value = value * 10 + digit;
    }
    *out = value;
    return value <= most;
}

bool fake_word_u32(const char *word, uint32_t most, uint32_t *out) {
    uint64_t value;

    if (!fake_word_u64(word, most, &value))
        return false;
    *out = (uint32_t)value;
    return true;
}

bool fake_word_i32(const char *word, int32_t *out) {
    bool negative = *word == '-';
    uint64_t value;

    if (!fake_word_u64(word + negative, negative ? 2147483648u : 2147483647u, &value))
        return false;
    *out = (int32_t)(negative ? -(int64_t)value : (int64_t)value);
    return true;
}

/* Never with the locale of the process, which may want a comma. */
bool fake_word_float(const char *word, float *out) {
    locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    char *tail = NULL;

    if (*word == 0 || strspn(word, "0123456789+-.eE") != strlen(word) || plain == (locale_t)0) {
        if (plain != (locale_t)0)
            freelocale(plain);
        return false;
    }
    *out = strtof_l(word, &tail, plain);
    freelocale(plain);
    return *tail == 0 && isfinite(*out);
}

bool fake_word_version(const char *word, uint32_t out[3]) {
    char tail;

    return strspn(word, "0123456789.") == strlen(word) &&
           sscanf(word, "%9u.%9u.%9u%c", &out[0], &out[1], &out[2], &tail) == 3;
}

static int hex_digit(char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

bool fake_word_name(const char *word, char *out, size_t room) {
    size_t used = 0;

    for (; *word; word++) {
        char c = *word;

        if (c == '%') {
            int high = hex_digit(word[1]);
            int low = high < 0 ? -1 : hex_digit(word[2]);

            if (low < 0 || high + low == 0)
                return false;
            c = (char)(high * 16 + low);
            word += 2;
        }
        if (used + 1 >= room)
            return false;
        out[used++] = c;
    }
    out[used] = 0;
    return used > 0;
}

/* "1x3x224x224", or "-" for rank 0 */
bool fake_word_dims(const char *word, uint32_t *dims, uint32_t *rank) {
    char number[16];

    *rank = 0;
    if (strcmp(word, "-") == 0)
        return true;
    for (;; word++) {
        size_t digits = strspn(word, "0123456789");

        if (digits == 0 || digits >= sizeof number || *rank == FAKE_MAX_RANK)
            return false;
        memcpy(number, word, digits);
        number[digits] = 0;
        if (!fake_word_u32(number, INT32_MAX, &dims[*rank]) || dims[*rank] == 0)
            return false;
        (*rank)++;
        word += digits;
        if (*word == 0)
            return true;
        if (*word != 'x')
            return false;
    }
}
