/* The Chrome trace format: one JSON object, an event a line, times in microseconds.
 *
 *   process 1 "blocks": counters of the pool and of each layer, written when they change
 *   process 2 "steps": one slice per step, with compactions inside or beside it
 *   process 3 "requests": nested slices for each request: all of it, its wait, its prompt, its answer
 */
#define _POSIX_C_SOURCE 200809L
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/occupancy.h"
#include "tools/text.h"

enum { BLOCKS = 1, STEPS = 2, REQUESTS = 3 };
enum { HELD, FULL, RUNNING, WAITING, N_COUNTERS };

/* In microseconds, to the nanosecond. */
static double us(double seconds) { return round(seconds * 1e9) / 1e3; }

/* Writes an event as a line and frees it; NULL: out of memory. */
static void put(kvf__chrome *c, json_t *event) {
    fputs(c->n_events++ ? ",\n" : "\n", c->out.file);
    if (!event || json_dumpf(event, c->out.file, JSON_COMPACT | JSON_REAL_PRECISION(15)))
        c->failed |= !ferror(c->out.file); /* a write that fails is told at the end */
    json_decref(event);
}

/* What every event begins with. */
#define EVENT(ph, name, process, thread) "ph", ph, "name", name, "pid", process, "tid", thread
#define HEAD "{s:s, s:s, s:i, s:i"

static void name_thread(kvf__chrome *c, int process, int thread, const char *name) {
    put(c, json_pack(HEAD ", s:{s:s}}", EVENT("M", "thread_name", process, thread), "args", "name", name));
}

static void name_process(kvf__chrome *c, int process, const char *name) {
    put(c, json_pack(HEAD ", s:{s:s}}", EVENT("M", "process_name", process, 0), "args", "name", name));
    put(c, json_pack(HEAD ", s:{s:i}}", EVENT("M", "process_sort_index", process, 0), "args", "sort_index", process));
}

bool kvf__chrome_open(kvf__chrome *c, const char *path, const char *title, uint32_t n_layers) {
    *c = (kvf__chrome){.n_layers = n_layers};
    if (!path) return true;
    c->last = malloc((n_layers + N_COUNTERS) * sizeof *c->last);
    if (!c->last) return kvf__say("--trace: out of memory"), false;
    if (!kvf__out_open(&c->out, path)) return false;
    memset(c->last, 0xff, (n_layers + N_COUNTERS) * sizeof *c->last); /* the first of each is always written */
    c->is_open = true;
    json_t *producer = json_string(title);
    fputs("{\"displayTimeUnit\":\"ms\",\"otherData\":{\"producer\":", c->out.file);
    c->failed = !producer || (json_dumpf(producer, c->out.file, JSON_ENCODE_ANY) && !ferror(c->out.file));
    json_decref(producer);
    fputs("},\"traceEvents\":[", c->out.file);
    name_process(c, BLOCKS, "blocks");
    name_process(c, STEPS, "steps");
    name_process(c, REQUESTS, "requests");
    name_thread(c, STEPS, 1, "steps");
    name_thread(c, STEPS, 2, "compactions");
    return true;
}

static void counter(kvf__chrome *c, uint32_t slot, const char *name, double at_s, uint64_t value) {
    if (c->last[slot] == (uint32_t)value) return;
    c->last[slot] = (uint32_t)value;
    put(c, json_pack(HEAD ", s:f, s:{s:I}}", EVENT("C", name, BLOCKS, 0), "ts", us(at_s), "args", "blocks",
                     (json_int_t)value));
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
    const char *kind = s->n_prefill_tokens ? s->n_decode_tokens ? "prefill + decode" : "prefill" : "decode";
    put(c,
        json_pack(HEAD ", s:s, s:f, s:f, s:{s:I, s:I, s:I, s:I, s:I, s:I, s:I}}", EVENT("X", kind, STEPS, 1), "cat",
                  "step", "ts", us(s->begin_s), "dur", us(s->end_s - s->begin_s), "args", "step", (json_int_t)s->step,
                  "prefill_tokens", (json_int_t)s->n_prefill_tokens, "decode_tokens", (json_int_t)s->n_decode_tokens,
                  "running", (json_int_t)s->n_running, "waiting", (json_int_t)s->n_waiting, "preempted",
                  (json_int_t)s->n_preempted, "compactions", (json_int_t)s->n_compactions));
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
    put(c,
        json_pack(HEAD ", s:s, s:f, s:f, s:{s:I, s:I, s:I}}", EVENT("X", "compaction", STEPS, 2), "cat", "compaction",
                  "ts", us(b.begin_s), "dur", us(b.end_s - b.begin_s), "args", "layers", (json_int_t)b.n,
                  "slots_evicted", (json_int_t)b.n_slots, "blocks_given_up", (json_int_t)b.n_blocks));
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

static void put_end(kvf__chrome *c, const char *name, const char *id, double at_s) {
    put(c,
        json_pack(HEAD ", s:s, s:s, s:f}", EVENT("e", name, REQUESTS, 1), "cat", "request", "id", id, "ts", us(at_s)));
}

/* A part of a request. */
static void part(kvf__chrome *c, const kvf__occ_request *r, const char *id, const char *name, double begin_s,
                 double end_s) {
    if (isnan(begin_s) || isnan(end_s) || end_s < begin_s) return;
    put(c, json_pack(HEAD ", s:s, s:s, s:f, s:{s:I, s:I, s:I}}", EVENT("b", name, REQUESTS, 1), "cat", "request", "id",
                     id, "ts", us(begin_s), "args", "prompt_tokens", (json_int_t)r->n_prompt, "output_tokens",
                     (json_int_t)r->n_output, "preempted", (json_int_t)r->n_preempted));
    put_end(c, name, id, end_s);
}

void kvf__chrome_request(kvf__chrome *c, const kvf__occ_request *r) {
    if (!c->is_open) return;
    char name[40], id[32];
    id_of(r, id, sizeof id);
    snprintf(name, sizeof name, "request %s", id);
    put(c, json_pack(HEAD ", s:s, s:s, s:f, s:{s:s}}", EVENT("b", name, REQUESTS, 1), "cat", "request", "id", id, "ts",
                     us(r->arrival_s), "args", "end", r->end ? r->end : ""));
    part(c, r, id, "wait", r->arrival_s, r->start_s);
    part(c, r, id, "prompt", isnan(r->start_s) ? r->arrival_s : r->start_s, r->first_token_s);
    part(c, r, id, "answer", r->first_token_s, r->end_s);
    put_end(c, name, id, r->end_s);
}

bool kvf__chrome_close(kvf__chrome *c) {
    bool was_open = c->is_open;
    free(c->last);
    c->last = NULL;
    c->is_open = false;
    if (!was_open) return true;
    fputs("\n]}\n", c->out.file);
    if (c->failed) kvf__say("--trace: out of memory");
    return kvf__out_close(&c->out) && !c->failed;
}
