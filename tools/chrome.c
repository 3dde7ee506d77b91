/* The Chrome trace format: one JSON object, an event a line, times in microseconds.
 *
 *   process 1 "blocks": counters of the pool and of each layer, written when they change
 *   process 2 "steps": one slice per step, with compactions inside or beside it
 *   process 3 "requests": nested slices for each request: all of it, its wait, its prompt, its answer
 */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/occupancy.h"
#include "tools/text.h"

enum { BLOCKS = 1, STEPS = 2, REQUESTS = 3 };
enum { HELD, FULL, RUNNING, WAITING, N_COUNTERS };

static double us(double seconds) { return seconds * 1e6; }

/* Begins an event's line. */
static FILE *event(kvf__chrome *c) {
    fputs(c->n_events++ ? ",\n" : "\n", c->out.file);
    return c->out.file;
}

static void name_process(kvf__chrome *c, int process, const char *name) {
    fprintf(event(c), "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"tid\":0,\"args\":{\"name\":\"%s\"}}",
            process, name);
    fprintf(event(c),
            "{\"ph\":\"M\",\"name\":\"process_sort_index\",\"pid\":%d,\"tid\":0,\"args\":{\"sort_index\":%d}}", process,
            process);
}

bool kvf__chrome_open(kvf__chrome *c, const char *path, const char *title, uint32_t n_layers) {
    *c = (kvf__chrome){.n_layers = n_layers};
    if (!path) return true;
    c->last = malloc((n_layers + N_COUNTERS) * sizeof *c->last);
    if (!c->last) return kvf__say("--trace: out of memory"), false;
    if (!kvf__out_open(&c->out, path)) return false;
    memset(c->last, 0xff, (n_layers + N_COUNTERS) * sizeof *c->last); /* the first of each is always written */
    c->is_open = true;
    fprintf(c->out.file, "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"producer\":\"%s\"},\"traceEvents\":[", title);
    name_process(c, BLOCKS, "blocks");
    name_process(c, STEPS, "steps");
    name_process(c, REQUESTS, "requests");
    fprintf(event(c), "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":1,\"args\":{\"name\":\"steps\"}}",
            STEPS);
    fprintf(event(c),
            "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":2,\"args\":{\"name\":\"compactions\"}}", STEPS);
    return true;
}

static void counter(kvf__chrome *c, uint32_t slot, const char *name, double at_s, uint64_t value) {
    if (c->last[slot] == (uint32_t)value) return;
    c->last[slot] = (uint32_t)value;
    fprintf(event(c), "{\"ph\":\"C\",\"name\":\"%s\",\"pid\":%d,\"tid\":0,\"ts\":%.3f,\"args\":{\"blocks\":%llu}}",
            name, BLOCKS, us(at_s), (unsigned long long)value);
}

static void counters(kvf__chrome *c, const kvf__occ *o, const kvf__occ_step *s, bool after) {
    double at_s = after ? s->end_s : s->begin_s;
    counter(c, HELD, "held", at_s, after ? s->held_after : s->held);
    for (uint32_t l = 0; l < c->n_layers; l++) {
        char name[32];
        snprintf(name, sizeof name, "layer %02u", l);
        counter(c, N_COUNTERS + l, name, at_s, after ? o->profile_layers[l].held : o->peak[l]);
    }
}

void kvf__chrome_step(kvf__chrome *c, const kvf__occ *o, const kvf__occ_step *s) {
    if (!c->is_open) return;
    counters(c, o, s, false);
    fprintf(event(c),
            "{\"ph\":\"X\",\"name\":\"%s\",\"cat\":\"step\",\"pid\":%d,\"tid\":1,\"ts\":%.3f,\"dur\":%.3f,\"args\":{"
            "\"step\":%llu,\"prefill_tokens\":%u,\"decode_tokens\":%u,\"running\":%u,\"waiting\":%u,\"preempted\":%u,"
            "\"compactions\":%u}}",
            s->n_prefill_tokens ? s->n_decode_tokens ? "prefill + decode" : "prefill" : "decode", STEPS, us(s->begin_s),
            us(s->end_s - s->begin_s), (unsigned long long)s->step, s->n_prefill_tokens, s->n_decode_tokens,
            s->n_running, s->n_waiting, s->n_preempted, s->n_compactions);
    counter(c, FULL, "full cache", s->begin_s, s->full);
    counter(c, RUNNING, "requests running", s->begin_s, s->n_running);
    counter(c, WAITING, "requests waiting", s->begin_s, s->n_waiting);
    counters(c, o, s, true);
}

void kvf__chrome_flush(kvf__chrome *c) {
    const kvf__chrome_batch b = c->batch;
    c->batch.n = 0;
    if (b.n) c->batches_s += b.end_s - b.begin_s;
    if (!c->is_open || !b.n) return;
    fprintf(event(c),
            "{\"ph\":\"X\",\"name\":\"compaction\",\"cat\":\"compaction\",\"pid\":%d,\"tid\":2,\"ts\":%.3f,"
            "\"dur\":%.3f,\"args\":{\"layers\":%llu,\"slots_evicted\":%llu,\"blocks_given_up\":%llu}}",
            STEPS, us(b.begin_s), us(b.end_s - b.begin_s), (unsigned long long)b.n, (unsigned long long)b.n_slots,
            (unsigned long long)b.n_blocks);
}

void kvf__chrome_compaction(kvf__chrome *c, double begin_s, double end_s, const kvf_profile_event *e) {
    kvf__chrome_batch *b = &c->batch;
    if (b->n && (b->begin_s < begin_s || b->end_s < end_s)) kvf__chrome_flush(c);
    if (!b->n) *b = (kvf__chrome_batch){.begin_s = begin_s, .end_s = end_s};
    b->n++;
    b->n_slots += e->slots_before - e->slots_after;
    b->n_blocks += e->n_blocks;
}

/* "7", and "7.1" of its second answer: async events nest by their id. */
static void id_of(const kvf__occ_request *r, char *text, size_t capacity) {
    snprintf(text, capacity, r->answer ? "%llu.%u" : "%llu", (unsigned long long)r->id, r->answer);
}

/* A part of a request. */
static void part(kvf__chrome *c, const kvf__occ_request *r, const char *id, const char *name, double begin_s,
                 double end_s) {
    if (isnan(begin_s) || isnan(end_s) || end_s < begin_s) return;
    fprintf(
        event(c),
        "{\"ph\":\"b\",\"cat\":\"request\",\"name\":\"%s\",\"id\":\"%s\",\"pid\":%d,\"tid\":1,\"ts\":%.3f,\"args\":{"
        "\"prompt_tokens\":%u,\"output_tokens\":%u,\"preempted\":%u}}",
        name, id, REQUESTS, us(begin_s), r->n_prompt, r->n_output, r->n_preempted);
    fprintf(event(c),
            "{\"ph\":\"e\",\"cat\":\"request\",\"name\":\"%s\",\"id\":\"%s\",\"pid\":%d,\"tid\":1,\"ts\":%.3f}", name,
            id, REQUESTS, us(end_s));
}

void kvf__chrome_request(kvf__chrome *c, const kvf__occ_request *r) {
    if (!c->is_open) return;
    char name[40], id[32];
    id_of(r, id, sizeof id);
    snprintf(name, sizeof name, "request %s", id);
    fprintf(
        event(c),
        "{\"ph\":\"b\",\"cat\":\"request\",\"name\":\"%s\",\"id\":\"%s\",\"pid\":%d,\"tid\":1,\"ts\":%.3f,\"args\":{"
        "\"end\":\"%s\"}}",
        name, id, REQUESTS, us(r->arrival_s), r->end ? r->end : "");
    part(c, r, id, "wait", r->arrival_s, r->start_s);
    part(c, r, id, "prompt", isnan(r->start_s) ? r->arrival_s : r->start_s, r->first_token_s);
    part(c, r, id, "answer", r->first_token_s, r->end_s);
    fprintf(event(c),
            "{\"ph\":\"e\",\"cat\":\"request\",\"name\":\"%s\",\"id\":\"%s\",\"pid\":%d,\"tid\":1,\"ts\":%.3f}", name,
            id, REQUESTS, us(r->end_s));
}

bool kvf__chrome_close(kvf__chrome *c) {
    bool was_open = c->is_open;
    free(c->last);
    c->last = NULL;
    c->is_open = false;
    if (!was_open) return true;
    fputs("\n]}\n", c->out.file);
    return kvf__out_close(&c->out);
}
