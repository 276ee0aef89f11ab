/* SPDX-License-Identifier: Apache-2.0
 *
 * The parser of fake context binaries (the format is in docs/fake-backend.md).
 *
 * It refuses what it does not know; whatever the bytes are, it answers with a code and a sentence.
 */
#include "qnn_fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAGIC "qnnbroker-fake"
#define MAX_GRAPHS 1024
#define MAX_TENSORS 1024 /* of one graph, inputs and outputs each */
#define MAX_ALL_TENSORS 16384
#define MAX_OPS 256
#define MAX_MEMORY (1ull << 36)
#define MAX_US 3600000000u

struct parser {
    struct fake_binary *binary;
    struct fake_line line;
    struct fake_graph_spec *graph; /* the open one */
    uint32_t graph_room, input_room, output_room, op_room;
    uint32_t tensor_total, next_id;
    uint32_t seen_top, seen_graph; /* one bit a key: none may come twice */
    uint64_t declared_size;
    bool ended;
};

/* Room for one more entry; the old entries move, so nothing may point at them yet. */
static bool room_for(struct fake_arena *arena, void *entries, uint32_t count, uint32_t *room,
                     size_t entry) {
    void **array = entries;
    void *bigger;

    if (count < *room)
        return true;
    bigger = fake_arena_get(arena, entry * (*room ? *room * 2 : 4));
    if (bigger == NULL)
        return false;
    if (count)
        memcpy(bigger, *array, entry * count);
    *array = bigger;
    *room = *room ? *room * 2 : 4;
    return true;
}

static bool id_taken(const struct fake_graph_spec *graph, uint32_t id,
                     const struct fake_tensor *except) {
    for (uint32_t i = 0; i < graph->input_count + graph->output_count; i++) {
        const struct fake_tensor *tensor =
            i < graph->input_count ? &graph->inputs[i] : &graph->outputs[i - graph->input_count];

        if (tensor != except && tensor->id == id)
            return true;
    }
    return false;
}

/* Gives every tensor its place and an id that is unique in the graph. */
static const char *close_graph(struct parser *p) {
    struct fake_graph_spec *graph = p->graph;

    if (graph == NULL)
        return NULL;
    if (graph->input_count == 0 || graph->output_count == 0)
        return "a graph needs an input and an output";
    for (uint32_t i = 0; i < graph->input_count + graph->output_count; i++) {
        struct fake_tensor *tensor =
            i < graph->input_count ? &graph->inputs[i] : &graph->outputs[i - graph->input_count];

        tensor->index = i;
        if (tensor->id && id_taken(graph, tensor->id, tensor))
            return "two tensors have one id";
        while (tensor->id == 0) {
            uint32_t id = p->next_id++;

            if (!id_taken(graph, id, NULL))
                tensor->id = id;
        }
        graph->io_bytes += (tensor->bytes + 4095) & ~4095ull;
    }
    p->graph = NULL;
    return NULL;
}

static const char *open_graph(struct parser *p) {
    struct fake_binary *binary = p->binary;
    const char *wrong = close_graph(p);
    char name[256];

    if (wrong)
        return wrong;
    if (p->line.count != 2 || !fake_word_name(p->line.words[1], name, sizeof name))
        return "graph wants one name";
    if (binary->graph_count == MAX_GRAPHS)
        return "too many graphs";
    for (uint32_t i = 0; i < binary->graph_count; i++)
        if (strcmp(binary->graphs[i].name, name) == 0)
            return "two graphs have one name";
    if (!room_for(&binary->arena, &binary->graphs, binary->graph_count, &p->graph_room,
                  sizeof *binary->graphs))
        return "no memory";
    p->graph = &binary->graphs[binary->graph_count];
    memset(p->graph, 0, sizeof *p->graph);
    p->graph->vtcm = 4u << 20;
    p->graph->name = fake_arena_text(&binary->arena, name);
    if (p->graph->name == NULL)
        return "no memory";
    binary->graph_count++;
    p->input_room = p->output_room = p->op_room = p->seen_graph = 0;
    return NULL;
}

static const char *add_tensor(struct parser *p, bool output) {
    struct fake_graph_spec *graph = p->graph;
    struct fake_arena *arena = &p->binary->arena;
    uint32_t *count = output ? &graph->output_count : &graph->input_count;
    struct fake_tensor **list = output ? &graph->outputs : &graph->inputs;
    struct fake_tensor *tensor;

    if (graph->op_count)
        return "tensors come before ops";
    if (*count == MAX_TENSORS || p->tensor_total == MAX_ALL_TENSORS)
        return "too many tensors";
    if (!room_for(arena, list, *count, output ? &p->output_room : &p->input_room, sizeof *tensor))
        return "no memory";
    tensor = &(*list)[*count];
    memset(tensor, 0, sizeof *tensor);
    if (!fake_tensor_line(arena, &p->line, tensor))
        return "not a tensor";
    for (uint32_t i = 0; i < *count; i++)
        if (strcmp((*list)[i].name, tensor->name) == 0)
            return "two tensors have one name";
    (*count)++;
    p->tensor_total++;
    return NULL;
}

static const char *add_op(struct parser *p) {
    struct fake_graph_spec *graph = p->graph;

    if (graph->input_count == 0 || graph->output_count == 0)
        return "a graph needs an input and an output";
    if (graph->op_count == MAX_OPS)
        return "too many ops";
    if (!room_for(&p->binary->arena, &graph->ops, graph->op_count, &p->op_room,
                  sizeof *graph->ops))
        return "no memory";
    memset(&graph->ops[graph->op_count], 0, sizeof *graph->ops);
    if (!fake_op_line(&p->line, graph, &graph->ops[graph->op_count]))
        return "not an op that these tensors allow";
    graph->op_count++;
    return NULL;
}

struct key {
    const char *name;
    void *field;
    uint64_t most;
    uint32_t bytes; /* of the field: 4 or 8 for a number, 12 for a version, else room for a word */
};

static const char *set_key(struct parser *p, const struct key *keys, uint32_t count,
                           uint32_t *seen) {
    for (uint32_t i = 0; i < count; i++) {
        uint64_t number;

        if (strcmp(p->line.words[0], keys[i].name) != 0)
            continue;
        if (*seen & (1u << i))
            return "a key came twice";
        *seen |= 1u << i;
        if (p->line.count != 2)
            return "a key wants one value";
        if (keys[i].bytes == 12)
            return fake_word_version(p->line.words[1], keys[i].field) ? NULL : "not a version";
        if (keys[i].most == 0) {
            if (strlen(p->line.words[1]) >= keys[i].bytes)
                return "the value is too long";
            strcpy(keys[i].field, p->line.words[1]);
            return NULL;
        }
        if (!fake_word_u64(p->line.words[1], keys[i].most, &number))
            return "not a number, or too large";
        if (keys[i].bytes == 4)
            *(uint32_t *)keys[i].field = (uint32_t)number;
        else
            *(uint64_t *)keys[i].field = number;
        return NULL;
    }
    return "an unknown key";
}

static const char *one_line(struct parser *p) {
    struct fake_binary *binary = p->binary;
    const char *word = p->line.words[0];

    if (strcmp(word, "graph") == 0)
        return open_graph(p);
    if (strcmp(word, "end") == 0) {
        p->ended = true;
        if (p->line.count != 1)
            return "end stands alone";
        return binary->graph_count ? close_graph(p) : "no graph";
    }
    if (p->graph == NULL) {
        const struct key keys[] = {
            {"size", &p->declared_size, UINT64_MAX, 8},
            {"build", binary->build, 0, sizeof binary->build},
            {"class", binary->class_name, 0, sizeof binary->class_name},
            {"arch", &binary->arch, 999, 4},
            {"soc", &binary->soc, 99999, 4},
            {"create_us", &binary->create_us, MAX_US, 8},
            {"backend_id", &binary->backend_id, UINT32_MAX, 4},
            {"core_api", binary->core_api, 0, sizeof binary->core_api},
            {"backend_api", binary->backend_api, 0, sizeof binary->backend_api},
        };

        return set_key(p, keys, sizeof keys / sizeof *keys, &p->seen_top);
    }
    if (strcmp(word, "input") == 0 || strcmp(word, "output") == 0)
        return add_tensor(p, *word == 'o');
    if (strcmp(word, "op") == 0)
        return add_op(p);
    {
        const struct key keys[] = {
            {"execute_us", &p->graph->execute_us, MAX_US, 8},
            {"weights", &p->graph->weights, MAX_MEMORY, 8},
            {"shared_weights", &p->graph->shared_weights, MAX_MEMORY, 8},
            {"spill_fill", &p->graph->spill_fill, MAX_MEMORY, 8},
            {"vtcm", &p->graph->vtcm, 1u << 30, 4},
        };

        return set_key(p, keys, sizeof keys / sizeof *keys, &p->seen_graph);
    }
}

static const char *parse(struct parser *p, const char *at, const char *end) {
    uint64_t size = (uint64_t)(end - at);
    uint32_t version;
    bool magic = size > strlen(MAGIC) && memcmp(at, MAGIC, strlen(MAGIC)) == 0;
    int more = magic ? fake_line_next(&p->line, &at, end) : 0;

    if (more != 1 || p->line.count != 2 || strcmp(p->line.words[0], MAGIC) != 0 ||
        !fake_word_u32(p->line.words[1], UINT32_MAX, &version))
        return "not a fake context binary";
    if (version != 1)
        return "a version of the format that this library does not know";
    while (!p->ended && (more = fake_line_next(&p->line, &at, end)) == 1) {
        const char *wrong = one_line(p);

        if (wrong)
            return wrong;
    }
    if (more < 0)
        return "a line that is too long or not plain text";
    if (!p->ended)
        return "the end is missing";
    for (; at < end; at++)
        if (*at != '\n' && *at != ' ')
            return "something comes after the end";
    if (p->declared_size && p->declared_size != size)
        return "the file has another size than it declares";
    return NULL;
}

uint64_t fake_binary_parse(const void *data, uint64_t size, struct fake_binary **out, char *why,
                           size_t room) {
    struct parser p = {.next_id = 1};
    const char *wrong = "no memory";

    p.binary = calloc(1, sizeof *p.binary);
    if (p.binary) {
        struct fake_switches switches = fake_switches_now();

        snprintf(p.binary->build, sizeof p.binary->build, "%s", switches.build);
        memcpy(p.binary->core_api, switches.core_api, sizeof switches.core_api);
        memcpy(p.binary->backend_api, (const uint32_t[3]){5, 51, 0}, sizeof p.binary->backend_api);
        p.binary->backend_id = FAKE_BACKEND_ID;
        p.binary->file_bytes = size;
        wrong = parse(&p, data, (const char *)data + size);
    }
    free(p.line.text);
    if (wrong == NULL) {
        *out = p.binary;
        return FAKE_OK;
    }
    snprintf(why, room, "line %u: %s", p.line.number, wrong);
    fake_binary_free(p.binary);
    return strcmp(wrong, "no memory") == 0 ? FAKE_NO_MEMORY : FAKE_SYSTEM_BINARY;
}

void fake_binary_free(struct fake_binary *binary) {
    if (binary)
        fake_arena_free(&binary->arena);
    free(binary);
}
