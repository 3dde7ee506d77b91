/* tests/scheduler_dump.h: the whole state of a scheduler and of its manager as text, so that two states can be compared.
 * Left out is what no request reads before it is set again: n_prefill and the look-up of one that does not run, and scratch. */
#ifndef KVF_TESTS_SCHEDULER_DUMP_H
#define KVF_TESTS_SCHEDULER_DUMP_H

#include <stdarg.h>

#include "scheduler_rig.h"

typedef struct rig_text {
    char text[1 << 16];
    size_t n;
} rig_text;

static inline __attribute__((format(printf, 2, 3))) void rig_say(rig_text *to, const char *format, ...) {
    va_list list;
    va_start(list, format);
    to->n += (size_t)vsnprintf(to->text + to->n, sizeof to->text - to->n, format, list);
    va_end(list);
    cr_assert(to->n < sizeof to->text);
}

static inline void rig_dump_request(rig *g, const kvf__req *r, rig_text *to) {
    const kvf_sched *s = g->sched;
    rig_say(to, "%llu: state %d bound %d reserved %d samples %d suspect %d parting %d arrival %llu rank %lld known %u ",
            (unsigned long long)r->name, (int)r->state, (int)r->bound, (int)r->reserved, (int)r->samples, r->suspect,
            r->parting, (unsigned long long)r->arrival, (long long)r->rank, r->n_known);
    rig_say(to, "computed %u new %u blocks %u extent %u held %u leader %u segment %u of %u", r->n_computed, r->max_new,
            r->n_blocks, r->extent_begin, r->n_held, r->leader, r->segment, r->n_segments);
    rig_say(to, " repetition %d of %u: %u", (int)r->repetition, r->n_repeated, r->n_piece);
    for (uint32_t h = r->held; h != KVF__SLOT_NONE; h = s->slots[h].next) rig_say(to, " holds %u", h);
    if (r->seq) rig_say(to, " seq %llu prefill %u", (unsigned long long)r->seq, r->n_prefill);
    int swapped = 0;
    if (r->seq) OK(kvf_seq_is_swapped(g->manager, r->seq, &swapped));
    for (uint32_t t = 0; r->seq && !swapped && t < s->n_tables; t++) {
        uint32_t n = 0, bs = s->block_size;
        const uint32_t *blocks = NULL;
        OK(kvf_seq_table(g->manager, r->seq, t / s->n_groups, t % s->n_groups, &n, NULL, &blocks));
        rig_say(to, " [%u", n);
        for (uint32_t i = 0; i < (n + bs - 1) / bs; i++) rig_say(to, " %u", blocks[i]);
        rig_say(to, "]");
    }
    rig_say(to, "\n");
}

static inline void rig_dump(rig *g, rig_text *to) {
    const kvf_sched *s = g->sched;
    to->n = 0;
    rig_say(to, "planned %d items %u reserved %u corrupt %d parting %u extents", s->planned, s->n_items, s->n_reserved,
            s->corrupt, s->n_parting);
    for (uint32_t i = 0; i < s->n_extents; i++) rig_say(to, " %u-%u", s->extents[i].begin, s->extents[i].end);
    for (int i = 0; i < KVF__N_REQ_STATES; i++) rig_say(to, " in %d: %u", i, s->n_in[i]);
    rig_say(to, "\nqueue");
    for (uint32_t i = s->queue.head; i != KVF__SLOT_NONE; i = s->slots[i].next) rig_say(to, " %u", i);
    rig_say(to, "\nrunning");
    for (uint32_t i = s->running.head; i != KVF__SLOT_NONE; i = s->slots[i].next) rig_say(to, " %u", i);
    kvf_occupancy o = {.struct_size = sizeof o};
    OK(kvf_occupancy_read(g->manager, &o, NULL, 0));
    rig_say(to, "\nblocks: %u free %u promised %u held, pages: %u free %u promised, %u sequences\n", o.blocks.n_free,
            o.blocks.n_promised, o.blocks.n_held, o.score_pages.n_free, o.score_pages.n_promised, o.n_seqs);
    for (uint32_t i = 0; i < s->n_slots_used; i++)
        if (s->slots[i].name) rig_dump_request(g, &s->slots[i], to);
}

#define RIG_EXPECT_SAME(before, after) \
    cr_assert(!strcmp((before).text, (after).text), "before:\n%s\nafter:\n%s", (before).text, (after).text)

#endif
