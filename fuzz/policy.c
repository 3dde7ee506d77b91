/* Policy options: set from text, read back, checked, projected, and opened for a sequence. An input is a header of numbers
 * (struct head) and lines NAME=VALUE. */
#define _GNU_SOURCE
#include "kvfold/policy.h"
#include "fuzz/fuzz.h"

enum { TEXT_BYTES = 1024 };

/* Packed by hand: read_head. */
typedef struct head {
    uint32_t preset, n_layers, n_groups, block_size, n_prompt, max_new;
} head;
enum { HEAD_BYTES = 12 };

static const char *const presets[] = {"paper", "serving", "authors"}; /* of d2o; then every policy's default */
enum { N_PRESETS = sizeof presets / sizeof *presets };

static uint32_t n_policies(void) {
    uint32_t n = 0;
    while (kvf_policy_name(n)) n++;
    return n;
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    return 0;
}

/* A byte of each exponent: lengths from a few tokens to 2^32 - 1. */
static uint32_t wide(const uint8_t *p) { return (uint32_t)((p[0] | (uint32_t)p[1] << 8) * 65537u) >> p[2] % 32; }

static head read_head(const uint8_t *p) {
    return (head){.preset = p[0] % (N_PRESETS + n_policies()),
                  .n_layers = 1u + p[1] % 128u,
                  .n_groups = 1u + p[2] % 16u,
                  .block_size = 8u << p[3] % 6u,
                  .n_prompt = wide(p + 4),
                  .max_new = wide(p + 7)};
}

/* What is set reads back as itself; what is refused changes nothing. */
static void set(kvf_policy_options *o, const char *name, const char *value) {
    kvf_error err = {.text = ""};
    kvf_policy_options before = *o;
    char text[TEXT_BYTES], again[TEXT_BYTES];
    kvf_status st = kvf_policy_option_set(o, name, value, &err);
    if (st) {
        FUZZ_MUST(err.text[0], kvf_status_name(st));
        FUZZ_MUST(!memcmp(o, &before, sizeof before), "all or nothing");
        return;
    }
    FUZZ_MUST(kvf_policy_option_get(o, name, text, sizeof text) == KVF_OK, name);
    FUZZ_MUST(kvf_policy_option_set(o, name, text, &err) == KVF_OK, err.text);
    FUZZ_MUST(kvf_policy_option_get(o, name, again, sizeof again) == KVF_OK && !strcmp(text, again), "the same value");
}

/* The budget changes, before and after the prompt: what is previewed comes, what is refused changes nothing. */
static void change(kvf_policy_state *state, const head *h) {
    kvf_error err = {.text = ""};
    kvf_layer_size *sizes = calloc(h->n_layers, sizeof *sizes);
    double *variance = calloc((size_t)h->n_layers * h->n_groups, sizeof *variance);
    FUZZ_MUST(sizes && variance, "memory");
    for (uint32_t i = 0; i < 4; i++) {
        const kvf_policy_options *now = kvf_policy_get_options(state, 0);
        double rho = (h->max_new + 37 * i) % 103 / 100.0, before = now->rho;
        uint32_t tokens = i & 1 ? h->max_new / (i + 1) : 0;
        int sized = 0;
        kvf_status previewed = kvf_policy_preview_budget(state, 0, rho, tokens, sizes, &sized, &err);
        kvf_status st = kvf_policy_set_budget(state, 0, rho, tokens, &err);
        FUZZ_MUST(st == previewed && (st == KVF_OK || err.text[0]), kvf_status_name(st));
        FUZZ_MUST(now->rho == (st ? before : rho), "all or nothing");
        const kvf_layer_size *now_sizes = kvf_policy_sizes(state, 0);
        if (!st) FUZZ_MUST(!sized == !now_sizes, "sizes");
        if (!st && sized) FUZZ_MUST(!memcmp(sizes, now_sizes, h->n_layers * sizeof *sizes), "the sizes previewed");
        if (i != 1) continue;
        st = kvf_policy_budget(state, 0, variance, h->n_prompt, &err);
        FUZZ_MUST(st == KVF_OK || err.text[0], kvf_status_name(st));
    }
    free(variance);
    free(sizes);
}

static void open_sequence(const kvf_policy_options *o, const head *h) {
    kvf_policy_state *state = NULL;
    kvf_error err = {.text = ""};
    kvf_policy_state_config config = {.struct_size = sizeof config,
                                      .n_layers = h->n_layers,
                                      .n_kv_heads = h->n_groups,
                                      .n_q_heads = h->n_groups,
                                      .head_dim = 16,
                                      .block_size = h->block_size,
                                      .max_seqs = 1,
                                      .max_slots = 4 * h->block_size};
    kvf_status st = kvf_policy_state_create(&config, &state, &err);
    FUZZ_MUST(st == KVF_OK, err.text);
    st = kvf_policy_open(state, 0, o, &err);
    FUZZ_MUST(st == KVF_OK || err.text[0], kvf_status_name(st));
    if (st == KVF_OK) change(state, h);
    kvf_policy_state_destroy(state);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < HEAD_BYTES) return 0;
    head h = read_head(data);
    kvf_error err = {.text = ""};
    kvf_policy_options o;
    memset(&o, 0, sizeof o);
    const char *preset = h.preset < N_PRESETS ? presets[h.preset] : NULL;
    const char *policy = preset ? "d2o" : kvf_policy_name(h.preset - N_PRESETS);
    FUZZ_MUST(kvf_policy_options_init(&o, sizeof o, policy, preset, &err) == KVF_OK, err.text);
    char *text = malloc(size - HEAD_BYTES + 1);
    FUZZ_MUST(text, "memory");
    memcpy(text, data + HEAD_BYTES, size - HEAD_BYTES);
    text[size - HEAD_BYTES] = '\0';
    for (char *line = text, *next; line; line = next) {
        next = strchr(line, '\n');
        if (next) *next++ = '\0';
        char *value = strchr(line, '=');
        if (!value) continue;
        *value++ = '\0';
        set(&o, line, value);
    }
    free(text);
    kvf_status st = kvf_policy_options_check(&o, h.n_layers, h.block_size, &err);
    FUZZ_MUST(st == KVF_OK || err.text[0], kvf_status_name(st));
    if (st) return 0;
    st = kvf_policy_options_resolve(&o, h.n_layers, 64ull * h.n_groups, &err);
    FUZZ_MUST(st == KVF_OK || err.text[0], kvf_status_name(st));
    if (st) return 0;
    kvf_policy_need need;
    err.text[0] = '\0';
    st = kvf_policy_project(&o, h.n_layers, h.n_groups, h.block_size, h.n_prompt, h.max_new, &need, &err);
    FUZZ_MUST(st == KVF_OK || err.text[0], kvf_status_name(st));
    open_sequence(&o, &h);
    return 0;
}
