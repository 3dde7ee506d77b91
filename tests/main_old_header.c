/* main_old_header.c: a program compiled against shorter structs (old_header.h), linked with today's library. The bytes
 * beside each struct stay as they are, and the calls do what they did. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/old_header.h"

enum { GUARD = 0xa5, GUARD_BYTES = 4096, LAYERS = 3, BS = 16, TOKENS = 40 };
static int n_wrong;

#define MUST(what, ...)                                                               \
    do {                                                                              \
        if (!(__VA_ARGS__)) n_wrong++, printf("%s: wrong: %s\n", what, #__VA_ARGS__); \
    } while (0)

/* A variable x of a type, n of them, with guard bytes behind. */
#define GUARDED(type, x, n)               \
    struct {                              \
        type of[n];                       \
        unsigned char guard[GUARD_BYTES]; \
    } x;                                  \
    memset(&x, GUARD, sizeof x)
#define SIZED(x) (memset(&(x).of, 0, sizeof(x).of), (x).of[0].struct_size = sizeof(x).of[0])
#define GUARD_HOLDS(what, x) guard_holds(what, (x).guard)

static void guard_holds(const char *what, const unsigned char *guard) {
    size_t n = 0;
    for (size_t i = 0; i < GUARD_BYTES; i++) n += guard[i] != GUARD;
    if (n) n_wrong++, printf("%s: %zu bytes beside the struct were written\n", what, n);
}

static kvf_manager *make_manager(void) {
    GUARDED(kvf_manager_config, c, 1);
    GUARDED(kvf_profile_config, p, 1);
    kvf_manager *m = NULL;
    kvf_manager_config_init(c.of, sizeof *c.of);
    kvf_profile_config_init(p.of, sizeof *p.of);
    GUARD_HOLDS("r8 kvf_manager_config_init", c);
    GUARD_HOLDS("r8 kvf_profile_config_init", p);
    MUST("r8 defaults", c.of->struct_size == sizeof *c.of && c.of->block_size == BS && p.of->n_events == 4096);
    c.of->n_layers = LAYERS, c.of->n_kv_heads = 2, c.of->n_blocks = 64, c.of->prefix_cache = 1, c.of->profile = p.of;
    MUST("r8 kvf_manager_create", kvf_manager_create(c.of, &m, NULL) == 0);
    GUARD_HOLDS("r8 kvf_manager_create", c);
    return m;
}

static void try_tables(kvf_manager *m, kvf_seq seq) {
    GUARDED(kvf_view, v, 1);
    SIZED(v);
    MUST("r8 kvf_view_fill", kvf_view_fill(m, 0, &seq, 1, v.of) == 0);
    GUARD_HOLDS("r8 kvf_view_fill", v);
    MUST("r8 view", v.of->struct_size == sizeof *v.of && v.of->n_layers == LAYERS && v.of->n_slots[2] == TOKENS);
    GUARDED(kvf_occupancy, o, 1);
    GUARDED(kvf_layer_occupancy, l, LAYERS);
    SIZED(o);
    MUST("r8 kvf_occupancy_read", kvf_occupancy_read(m, o.of, l.of, sizeof *l.of) == 0);
    GUARD_HOLDS("r8 kvf_occupancy_read", o);
    GUARD_HOLDS("r8 kvf_occupancy_read, layers", l);
    MUST("r8 occupancy", o.of->blocks.n_held == 9 && o.of->slots_used == LAYERS * TOKENS);
    for (int i = 0; i < LAYERS; i++) MUST("r8 layers", l.of[i].n_blocks == 3 && l.of[i].slots_used == TOKENS);
    memset(&l, GUARD, sizeof l);
    MUST("r8 kvf_seq_occupancy", kvf_seq_occupancy(m, seq, l.of, sizeof *l.of) == 0 && l.of[2].n_blocks == 3);
    GUARD_HOLDS("r8 kvf_seq_occupancy", l);
    GUARDED(kvf_profile, p, 1);
    GUARDED(kvf_profile_layer, pl, LAYERS);
    SIZED(p);
    MUST("r8 kvf_profile_read", kvf_profile_read(m, p.of, pl.of, sizeof *pl.of, LAYERS) == 0 && p.of->held == 9);
    GUARD_HOLDS("r8 kvf_profile_read", p);
    GUARD_HOLDS("r8 kvf_profile_read, layers", pl);
    for (int i = 0; i < LAYERS; i++) MUST("r8 profile layers", pl.of[i].entries == 3 && pl.of[i].held == 3);
}

static void try_prefix(kvf_manager *m, kvf_seq seq) {
    uint32_t tokens[TOKENS], n = 0;
    for (uint32_t i = 0; i < TOKENS; i++) tokens[i] = 7 * i;
    const kvf_prefix_key key = {.struct_size = sizeof key, .tokens = tokens, .n_tokens = TOKENS};
    MUST("r8 kvf_prefix_store", kvf_prefix_store(m, seq, &key, TOKENS, NULL, &n) == 0);
    GUARDED(kvf_prefix_match, f, 1);
    SIZED(f);
    MUST("r8 kvf_prefix_lookup", kvf_prefix_lookup(m, &key, NULL, f.of) == 0 && f.of->n_tokens == 2 * BS);
    GUARD_HOLDS("r8 kvf_prefix_lookup", f);
    GUARDED(kvf_prefix_stats, s, 1);
    SIZED(s);
    MUST("r8 kvf_prefix_stats_read", kvf_prefix_stats_read(m, s.of) == 0);
    GUARD_HOLDS("r8 kvf_prefix_stats_read", s);
    GUARDED(kvf_prefix_options, o, 1);
    kvf_prefix_options_init(o.of, sizeof *o.of);
    GUARD_HOLDS("r8 kvf_prefix_options_init", o);
    o.of->max_tokens = BS;
    MUST("r8 shorter options", kvf_prefix_lookup(m, &key, o.of, f.of) == 0 && f.of->n_tokens == BS);
    GUARD_HOLDS("r8 kvf_prefix_lookup, options", f);
    f.of->struct_size = 0;
    MUST("r8 struct_size 0", kvf_prefix_lookup(m, &key, NULL, f.of) != 0);
}

static void try_options(void) {
    GUARDED(kvf_policy_options, o, 1);
    MUST("r8 kvf_policy_options_init", kvf_policy_options_init(o.of, sizeof *o.of, "h2o", NULL, NULL) == 0);
    GUARD_HOLDS("r8 kvf_policy_options_init", o);
    MUST("r8 options", o.of->struct_size == sizeof *o.of && kvf_policy_options_check(o.of, LAYERS, BS, NULL) == 0);
    MUST("r8 options", kvf_policy_evicts(o.of) == 1 && kvf_policy_needs(o.of) != 0);
    MUST("r8 an option that the struct has no place for", kvf_policy_option_set(o.of, "rho", "0.5", NULL) != 0);
    GUARD_HOLDS("r8 kvf_policy_option_set", o);
}

/* Inputs that end early are read no farther: in the heap, where a sanitizer sees it. */
static void try_batch(kvf_manager *m, kvf_seq seq) {
    GUARDED(kvf_policy_options, o, 1);
    kvf_policy_state_config c = {sizeof c, LAYERS, 2, 2, 0, 0, 8, BS, 256, 8192};
    kvf_policy_state *state = NULL;
    double values[LAYERS * 2];
    whole_view *whole = calloc(1, sizeof *whole);
    kvf_view *view = calloc(1, sizeof *view);
    kvf_policy_batch *b = calloc(1, sizeof *b);
    MUST("r8 kvf_policy_options_init", kvf_policy_options_init(o.of, sizeof *o.of, "h2o", NULL, NULL) == 0);
    MUST("r8 kvf_policy_state_create", kvf_policy_state_create(&c, &state, NULL) == 0);
    MUST("r8 kvf_policy_open", kvf_policy_open(state, 0, o.of, NULL) == 0);
    whole->old.struct_size = sizeof *whole, view->struct_size = sizeof *view, b->struct_size = sizeof *b;
    MUST("r8 kvf_view_fill", kvf_view_fill(m, 0, &seq, 1, &whole->old) == 0 && kvf_view_fill(m, 0, &seq, 1, view) == 0);
    b->view = whole;
    MUST("r8 a shorter batch", kvf_policy_metric(state, NULL, b, 0, TOKENS, values, NULL) == 0);
    b->view = view;
    MUST("r8 a view without positions", kvf_policy_metric(state, NULL, b, 0, TOKENS, values, NULL) != 0);
    kvf_policy_state_destroy(state);
    free(whole), free(view), free(b);
}

/* The items of a step are as far apart as the library says, not as the program's struct is long. */
static void try_scheduler(void) {
    GUARDED(kvf_policy_options, o, 1);
    GUARDED(kvf_sched_config, c, 1);
    kvf_manager *m = make_manager();
    const kvf_policy_state_config pc = {sizeof pc, LAYERS, 2, 2, 0, 0, 8, BS, 256, 8192};
    kvf_policy_state *state = NULL;
    kvf_sched *s = NULL;
    uint64_t names[2] = {0};
    if (!m) return;
    MUST("r8 kvf_policy_options_init", kvf_policy_options_init(o.of, sizeof *o.of, "full", NULL, NULL) == 0);
    MUST("r8 kvf_policy_state_create", kvf_policy_state_create(&pc, &state, NULL) == 0);
    kvf_sched_config_init(c.of, sizeof *c.of);
    GUARD_HOLDS("r8 kvf_sched_config_init", c);
    c.of->manager = m, c.of->policies = state, c.of->max_running = 2;
    MUST("r8 kvf_sched_create", kvf_sched_create(c.of, &s, NULL) == 0);
    for (uint32_t i = 0; s && i < 2; i++) {
        kvf_sched_request *r = calloc(1, sizeof *r); /* in the heap: read no farther */
        *r = (kvf_sched_request){sizeof *r, TOKENS + i, 4, o.of};
        MUST("r8 kvf_sched_submit", kvf_sched_submit(s, r, &names[i]) == 0);
        free(r);
    }
    GUARDED(kvf_step, step, 1);
    SIZED(step);
    if (s) {
        MUST("r8 kvf_sched_plan",
             kvf_sched_plan(s, 0, step.of) == 0 && step.of->n_items == 2 && step.of->n_decode == 0);
        GUARD_HOLDS("r8 kvf_sched_plan", step);
    }
    for (uint32_t i = 0; s && i < step.of->n_items; i++) {
        const kvf_step_item *item = KVF_AT(kvf_step_item, step.of->items, i, step.of->item_bytes);
        MUST("r8 items", item->request == names[i] && item->n_tokens == TOKENS + i && item->prompt_ends);
    }
    MUST("r8 kvf_sched_done", kvf_sched_done(s) == 0 && kvf_sched_prompt_done(s, names[1]) == 0);
    kvf_sched_destroy(s);
    kvf_policy_state_destroy(state);
    kvf_manager_destroy(m);
}

int main(void) {
    kvf_manager *m = make_manager();
    kvf_seq seq = 0;
    if (!m) return 1;
    MUST("r8 kvf_seq_create", kvf_seq_create(m, &seq) == 0);
    MUST("r8 kvf_append", kvf_append(m, &(kvf_append_item){seq, TOKENS}, 1, NULL) == 0);
    try_tables(m, seq);
    try_prefix(m, seq);
    try_options();
    try_batch(m, seq);
    try_scheduler();
    kvf_manager_destroy(m);
    unsigned major = 0, minor = 0, patch = 0;
    MUST("version", sscanf(kvf_version(), "%u.%u.%u", &major, &minor, &patch) == 3 &&
                        kvf_version_number() == major * 10000 + minor * 100 + patch);
    printf("%d wrong\n", n_wrong);
    return n_wrong != 0;
}
