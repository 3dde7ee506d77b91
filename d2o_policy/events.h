/* d2o_policy/events.h: struct kvf_events, for events.c and its tests. */
#ifndef KVF_D2O_POLICY_EVENTS_H
#define KVF_D2O_POLICY_EVENTS_H

#include "d2o_policy/pages.h"
#include "kvfold/events.h"

/* What of a sequence's state a moment may change before it is certain to go on. */
typedef struct kvf__before {
    bool budgeted, sized, deferred, changed, has_density;
    uint32_t n_prompt, budget, lo;
    kvf_policy_counts counts;
} kvf__before;

struct kvf_events {
    kvf_events_config config;
    kvf_allocator allocator;
    size_t bytes;
    uint32_t n_layers, n_groups, n_tables, heads_per_group;
    kvf_plan *plan;
    void *workspace;
    size_t workspace_bytes;
    double *values;                   /* [n_layers][n_q_heads_total]: the metric */
    kvf_event *events, *batch_events; /* [max_rows * n_tables], as are the next five */
    kvf_compact_item *items;
    uint32_t *item_of_event, *batch_items, *group_keep; /* group_keep: sizes of items whose head groups differ */
    uint32_t *keep, *table_slots;                       /* [n_tables] */
    kvf__before *before;                                /* [max_rows] */
    uint8_t *dropped;                                   /* [max_rows] */
    /* The call at hand. */
    const kvf_moment_rows *rows;
    kvf_error *err;
    uint32_t n_events;
};

#endif
