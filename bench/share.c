/* Measures what share of a model's time each policy takes: a layer of Llama-3-8B with weights in Q4_1, as the engine computes
 * it, its attention, and beside them all that the policy asks for.
 *
 * kvfold-bench policy/share [-r REPETITIONS] [-t THREADS] [-a PATH] [-p POLICY[:PRESET],...]. policy/share/prompt: a prompt of 4,096
 * tokens, compacted to a fifth. policy/share/decode: steps at the slots that it then has; an event every k steps. The floor
 * is the layer without a policy, at as many slots: products with its weights, and attention of which nobody wants to see the
 * mass. The products of a prompt are the same for all and measured once; for_mass is what attention takes longer when its mass is wanted. */
#define _DEFAULT_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "bench/layers.h"
#include "model/gemm.h"
#include "model/gemv.h"
#include "model/gguf.h"

enum { PROMPT = 4096, CHUNK = 512, LAYERS = 8, STEPS = 16, MAX_POLICIES = 32, N_PARTS = KVF__BENCH_N_PARTS };
enum { MASSES = KVF_NEEDS_COL_SUMS | KVF_NEEDS_LAST_ROWS | KVF_NEEDS_SQUARES, N_MASSES = MASSES + 1 };

typedef kvf__bench_layers layers;
typedef kvf__bench_times times;
#define die kvf__bench_die

static double median(times t) {
    kvf__bench_sort(&t);
    return kvf__bench_quantile(&t, .5);
}

/* ---- The weights ----------------------------------------------------------------------------------------- */

enum { EMBD = 4096, FEED = 14336, N_PRODUCTS = 4, Q_BLOCK = 32, Q_BYTES = 20 };
static const struct {
    uint32_t n, k;
} shapes[N_PRODUCTS] = {{EMBD + 2 * 1024, EMBD}, {EMBD, EMBD}, {2 * FEED, EMBD}, {EMBD, FEED}};

typedef struct weights {
    kvf__matrix w[N_PRODUCTS];
    unsigned char *blocks;
    float *x, *y, *scratch;
    size_t scratch_floats;
} weights;

static weights *make_weights(uint32_t n_threads) {
    weights *w = kvf__bench_take(sizeof *w);
    const uint16_t scale = kvf__f16_from_f32(0.01f), least = kvf__f16_from_f32(-0.075f);
    size_t bytes = 0, at = 0;
    for (int i = 0; i < N_PRODUCTS; i++) bytes += (size_t)shapes[i].n * shapes[i].k / Q_BLOCK * Q_BYTES;
    w->blocks = kvf__bench_take(bytes);
    uint64_t random = 9;
    for (size_t b = 0; b < bytes; b += Q_BYTES) {
        memcpy(w->blocks + b, &scale, 2);
        memcpy(w->blocks + b + 2, &least, 2);
        for (size_t i = 4; i < Q_BYTES; i += 8) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            memcpy(w->blocks + b + i, &random, 8);
        }
    }
    for (int i = 0; i < N_PRODUCTS; i++) {
        w->w[i] = (kvf__matrix){.n_parts = 1, .n = shapes[i].n, .k = shapes[i].k};
        w->w[i].parts[0].type = KVF__TENSOR_Q4_1;
        w->w[i].parts[0].n_rows = shapes[i].n;
        w->w[i].parts[0].data = w->blocks + at;
        w->w[i].parts[0].row_bytes = shapes[i].k / Q_BLOCK * Q_BYTES;
        at += (size_t)shapes[i].n * shapes[i].k / Q_BLOCK * Q_BYTES;
        w->scratch_floats = KVF__MAX(w->scratch_floats, kvf__gemm_scratch_floats(&w->w[i]));
    }
    w->scratch = kvf__bench_take(w->scratch_floats * n_threads * sizeof *w->scratch);
    w->x = kvf__bench_take((size_t)CHUNK * FEED * sizeof *w->x);
    w->y = kvf__bench_take((size_t)CHUNK * 2 * FEED * sizeof *w->y);
    for (size_t i = 0; i < (size_t)CHUNK * FEED; i++) w->x[i] = kvf__bench_uniform(&random);
    return w;
}

static void drop_weights(weights *w) {
    free(w->blocks);
    free(w->x);
    free(w->y);
    free(w->scratch);
    free(w);
}

/* All products of the layer for m rows; seconds. */
static double multiply(const weights *w, kvf_stream *stream, uint32_t m) {
    double begin = kvf__clock();
    for (int i = 0; i < N_PRODUCTS; i++) {
        kvf__gemm g = {.m = m,
                       .w = &w->w[i],
                       .x = w->x,
                       .y = w->y,
                       .x_stride = shapes[i].k,
                       .y_stride = shapes[i].n,
                       .ops = kvf__gemv_ops_for(kvf__cpu_detect()),
                       .scratch = w->scratch,
                       .scratch_floats = w->scratch_floats};
        if (kvf__gemm_run(stream, &g)) die("policy/share: a product failed");
    }
    return kvf__clock() - begin;
}

/* One number of the last product by a plain loop. */
static void check_weights(const weights *w, kvf_stream *stream) {
    (void)multiply(w, stream, 2);
    for (uint32_t row = 0; row < EMBD; row += 1001) {
        const unsigned char *from = (const unsigned char *)w->w[3].parts[0].data + row * w->w[3].parts[0].row_bytes;
        double want = 0;
        for (uint32_t i = 0; i < FEED; i++) {
            const unsigned char *block = from + i / Q_BLOCK * Q_BYTES;
            uint32_t byte = block[4 + i % (Q_BLOCK / 2)], q = i % Q_BLOCK < Q_BLOCK / 2 ? byte & 15 : byte >> 4;
            want += (0.01 * q - 0.075) * (double)w->x[FEED + i];
        }
        if (!(fabs(want - (double)w->y[EMBD + row]) < 0.05)) die("policy/share: a product is wrong");
    }
}

/* ---- Policies ----------------------------------------------------------------------------------------------- */

typedef struct chosen {
    char name[48];
    kvf_policy_options options;
    uint32_t keep; /* slots of a layer after its prompt */
} chosen;

static struct {
    chosen policy[MAX_POLICIES];
    int n;
} list;

static void choose(const char *policy, const char *preset) {
    kvf_error err = {.text = ""};
    chosen *c = &list.policy[list.n];
    if (list.n == MAX_POLICIES) die("-p: at most %d policies", MAX_POLICIES);
    if (kvf_policy_options_init(&c->options, sizeof c->options, policy, preset, &err)) die("-p: %s", err.text);
    bool plain = !preset || strcmp(preset, "default") == 0;
    snprintf(c->name, sizeof c->name, "%s%s%s", policy, plain ? "" : ":", plain ? "" : preset);
    c->options.n_full_layers = 0;
    c->options.defer_first_decode = 0; /* what is put off to the first decode step counts as the prompt's */
    list.n++;
}

/* All that rank by attention, with those of their presets that are not the default's other name. */
static void choose_all(void) {
    const char *preset;
    kvf_policy_options o;
    for (uint32_t i = 0; kvf_policy_name(i); i++)
        for (uint32_t j = 0; (preset = kvf_policy_preset(kvf_policy_name(i), j)); j++)
            if (strcmp(preset, "paper") != 0 && strcmp(preset, "attention") != 0 &&
                kvf_policy_options_init(&o, sizeof o, kvf_policy_name(i), preset, NULL) == KVF_OK &&
                !(kvf_policy_needs(&o) & (KVF_NEEDS_REPEAT | KVF_NEEDS_PROBE)))
                choose(kvf_policy_name(i), preset);
}

static void choose_named(char *text) {
    for (char *rest, *name = strtok_r(text, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
        char *preset = strchr(name, ':');
        if (preset) *preset++ = '\0';
        choose(name, preset);
    }
}

/* ---- Lines --------------------------------------------------------------------------------------------------- */

/* Seconds of one repetition: of a layer's prompt, or of a layer's step. */
typedef struct sample {
    double products, attention, mass, observe, parts[N_PARTS]; /* products: with the layer's weights */
} sample;

static double policy_seconds(const sample *s) {
    double sum = s->mass + s->observe;
    for (int i = 0; i < N_PARTS; i++) sum += s->parts[i];
    return sum;
}

static double median_of(const sample *s, int n, double (*part)(const sample *, int), int i) {
    times t = {.n = n};
    for (int r = 0; r < n; r++) t.s[r] = part(&s[r], i);
    return median(t);
}
static double part_of(const sample *s, int i) { return s->parts[i]; }
static double other_of(const sample *s, int i) {
    const double all[] = {s->products, s->attention, s->mass, s->observe};
    return all[i];
}

/* Returns seconds of the whole. */
static double report(const char *name, const chosen *c, const sample *s, int n, uint32_t slots, uint32_t n_threads,
                     double full) {
    bool prompt = strstr(name, "prompt") != NULL;
    const double scale = 1e3;
    times whole = {.n = n}, floors = whole, ratios = whole, shares = whole, of_attention = whole;
    for (int r = 0; r < n; r++) {
        floors.s[r] = s[r].products + s[r].attention;
        whole.s[r] = floors.s[r] + policy_seconds(&s[r]);
        ratios.s[r] = whole.s[r] / floors.s[r];
        shares.s[r] = 1 - floors.s[r] / whole.s[r];
        of_attention.s[r] = policy_seconds(&s[r]) / s[r].attention;
    }
    kvf__bench_sort(&whole), kvf__bench_sort(&ratios);
    double value = kvf__bench_quantile(&whole, .5), weight_bytes = 0;
    for (int i = 0; i < N_PRODUCTS; i++) weight_bytes += (double)shapes[i].n * shapes[i].k / Q_BLOCK * Q_BYTES;
    kvf__bench_begin(name, &whole, scale, "ms", n_threads,
                     weight_bytes + (double)slots * KVF__BENCH_HEADS * KVF__BENCH_DIM * 4);
    kvf__bench_floor(scale * median(floors), &ratios);
    kvf__bench_text("policy", c->name);
    kvf__bench_text("path", kvf__bench_layers_path(NULL));
    kvf__bench_number("share", median(shares));
    kvf__bench_number("of_attention", median(of_attention));
    kvf__bench_number("slots", slots);
    if (prompt) kvf__bench_number("keep", c->keep);
    if (!prompt && kvf__policy_room(&c->options, KVF__BENCH_BLOCK) && c->keep < PROMPT)
        kvf__bench_number("k", kvf__policy_k(&c->options, KVF__BENCH_BLOCK));
    if (!prompt && full > 0) kvf__bench_number("of_full", value / full);
    kvf__bench_number("weights", scale * median_of(s, n, other_of, 0));
    kvf__bench_number("attention", scale * median_of(s, n, other_of, 1));
    kvf__bench_number("for_mass", scale * median_of(s, n, other_of, 2));
    if (!prompt) kvf__bench_number("observe", scale * median_of(s, n, other_of, 3));
    if (prompt) kvf__bench_number("budget", scale * median_of(s, n, part_of, KVF__BENCH_BUDGET));
    kvf__bench_number("match", scale * median_of(s, n, part_of, KVF__BENCH_MATCH));
    kvf__bench_number("gate", scale * median_of(s, n, part_of, KVF__BENCH_GATE));
    kvf__bench_number("apply", scale * median_of(s, n, part_of, KVF__BENCH_APPLY));
    kvf__bench_end();
    return value;
}

/* Every slot of a table holds a position of its own, and the newest token is among them. */
static void check_held(layers *x, const char *name, uint32_t want) {
    for (uint32_t l = 0; l < x->n_layers; l++) {
        if (x->n_slots[l] != want) die("policy/share: %s: %u slots, not %u", name, x->n_slots[l], want);
        for (uint32_t h = 0; h < KVF__BENCH_HEADS; h++) {
            kvf__head head = kvf__head_of(&x->view, &x->pages, 0, l, h);
            unsigned char *held = calloc(x->next_pos, 1);
            for (uint32_t slot = 0; slot < want; slot++) {
                uint32_t pos = x->pages.pos[kvf__slot_index(&head, slot)];
                if (pos >= x->next_pos || held[pos]++)
                    die("policy/share: %s: slot %u holds position %u", name, slot, pos);
            }
            if (!held[x->next_pos - 1]) die("policy/share: %s: the newest token is gone", name);
            free(held);
        }
    }
}

/* ---- A prompt ------------------------------------------------------------------------------------------------- */

static void clear_sums(layers *x) {
    const size_t n = (size_t)x->n_layers * KVF__BENCH_Q_HEADS * x->max_slots;
    memset(x->sums[0], 0, n * sizeof(float));
    memset(x->last[0], 0, n * sizeof(float));
    memset(x->squares[0], 0, n / KVF__BENCH_PER_KV * sizeof(float));
}

/* Attention of the whole prompt with each mass that some policy wants, and without: in turns, seconds[mass]. */
static void attend_prompts(layers *x, int repetitions, times seconds[N_MASSES]) {
    bool wanted[N_MASSES] = {true};
    for (int i = 0; i < list.n; i++) wanted[kvf_policy_needs(&list.policy[i].options) & MASSES] = true;
    clear_sums(x);
    for (int r = 0; r < repetitions; r++)
        for (uint32_t mass = 0; mass < N_MASSES; mass++) {
            if (!wanted[mass]) continue;
            seconds[mass].n = repetitions;
            seconds[mass].s[r] = kvf__bench_layers_attend(x, 0, PROMPT, mass);
        }
}

static void prompt_cases(const weights *w, uint32_t n_threads, int repetitions) {
    static times attention[N_MASSES];
    static sample samples[KVF__BENCH_MAX_REPETITIONS];
    const int long_ones = KVF__MIN(repetitions, 3); /* seconds each */
    layers *x = kvf__bench_layers_create(1, PROMPT, PROMPT, PROMPT, n_threads);
    times products = {.n = long_ones};
    kvf__bench_layers_fill(x, PROMPT, PROMPT);
    kvf__bench_layers_open(x, &list.policy[0].options, 0);
    for (int r = 0; r < long_ones; r++) products.s[r] = multiply(w, x->stream, CHUNK) * (PROMPT / CHUNK);
    attend_prompts(x, long_ones, attention);
    unsigned char *saved = kvf__bench_take(x->memory_bytes);
    memcpy(saved, x->memory, x->memory_bytes);
    for (int i = 0; i < list.n; i++) {
        chosen *c = &list.policy[i];
        uint32_t mass = kvf_policy_needs(&c->options) & MASSES;
        for (int r = -1; r < repetitions; r++) {
            sample s = {.products = median(products), .attention = median(attention[0])};
            memcpy(x->memory, saved, x->memory_bytes);
            x->n_slots[0] = PROMPT;
            kvf__bench_layers_open(x, &c->options, 0);
            kvf__bench_layers_compact(x, s.parts);
            /* Of the same turn: what the machine does otherwise is in both. */
            int turn = KVF__MAX(r, 0) % long_ones;
            s.mass = attention[mass].s[turn] - attention[0].s[turn];
            if (r >= 0) samples[r] = s;
        }
        const kvf_layer_size *size = kvf_policy_sizes(x->state, 0);
        c->keep = size && size->keep < PROMPT ? size->keep : PROMPT;
        check_held(x, c->name, c->keep);
        (void)report("policy/share/prompt", c, samples, repetitions, PROMPT, n_threads, 0);
    }
    free(saved);
    kvf__bench_layers_destroy(x);
}

/* ---- Decoding --------------------------------------------------------------------------------------------------- */

/* STEPS steps of all layers, an event after every k of them. */
static sample decode(layers *x, const chosen *c) {
    const uint32_t needs = kvf_policy_needs(&c->options);
    const bool events = c->keep < PROMPT && kvf__policy_room(&c->options, KVF__BENCH_BLOCK);
    sample sum = {0};
    for (uint32_t step = 0; step < STEPS; step++) {
        double plain = 0, seen = 0, p[N_PARTS] = {0};
        kvf__bench_layers_append(x);
        for (uint32_t l = 0; l < LAYERS; l++) plain += kvf__bench_layers_attend(x, l, 1, 0);
        for (uint32_t l = 0; l < LAYERS; l++) {
            if (needs & KVF_NEEDS_ROW) seen += kvf__bench_layers_attend(x, l, 1, needs);
            sum.observe += kvf__bench_layers_observe(x, l);
        }
        sum.attention += plain;
        if (needs & KVF_NEEDS_ROW) sum.mass += seen - plain;
        if (events && x->n_slots[0] == c->keep + kvf__policy_k(&c->options, KVF__BENCH_BLOCK))
            kvf__bench_layers_event(x, c->keep, KVF_EVENT_DECODE, p);
        for (int i = 0; i < N_PARTS; i++) sum.parts[i] += p[i];
    }
    sum.attention /= LAYERS * STEPS, sum.mass /= LAYERS * STEPS, sum.observe /= LAYERS * STEPS;
    for (int i = 0; i < N_PARTS; i++) sum.parts[i] /= LAYERS * STEPS;
    return sum;
}

static void decode_cases(const weights *w, uint32_t n_threads, int repetitions) {
    static sample samples[KVF__BENCH_MAX_REPETITIONS];
    const uint32_t room = (uint32_t)(repetitions + 1) * STEPS; /* what a policy that evicts nothing grows by */
    layers *x = kvf__bench_layers_create(LAYERS, PROMPT + room, 1, KVF__BENCH_BLOCK, n_threads);
    double full = 0;
    for (int i = 0; i < list.n; i++) {
        const chosen *c = &list.policy[i];
        kvf__bench_layers_fill(x, c->keep, PROMPT);
        kvf__bench_layers_open(x, &c->options, c->keep);
        for (int r = -1; r < repetitions; r++) {
            sample s = decode(x, c);
            s.products = multiply(w, x->stream, 1);
            if (r >= 0) samples[r] = s;
        }
        bool grows = c->keep == PROMPT || !kvf__policy_room(&c->options, KVF__BENCH_BLOCK);
        check_held(x, c->name, c->keep + (grows ? room : 0));
        double value = report("policy/share/decode", c, samples, repetitions, c->keep, n_threads, full);
        if (c->keep == PROMPT && full == 0) full = value;
    }
    kvf__bench_layers_destroy(x);
}

int kvf__bench_share(int argc, char **argv) {
    int repetitions = 5, threads = 2, option;
    list.n = 0;
    while ((option = getopt(argc, argv, "r:t:a:k:p:")) != -1) switch (option) {
        case 'r': repetitions = (int)kvf__bench_int("-r", optarg, 1, KVF__BENCH_MAX_REPETITIONS); break;
        case 't': threads = (int)kvf__bench_int("-t", optarg, 1, KVF__BENCH_MAX_THREADS); break;
        case 'a': kvf__bench_layers_path(optarg); break;
        case 'p': choose_named(optarg); break;
        case 'k': return 0; /* decode events alone */
        default: die("policy/share [-r REPETITIONS] [-t THREADS] [-a PATH] [-p POLICY[:PRESET],...]");
        }
    if (!list.n) choose_all();
    weights *w = make_weights((uint32_t)threads);
    kvf_stream *stream;
    if (kvf_stream_create_cpu(NULL, (uint32_t)threads, &stream, NULL)) die("policy/share: no stream");
    check_weights(w, stream);
    kvf_stream_destroy(stream);
    prompt_cases(w, (uint32_t)threads, repetitions);
    decode_cases(w, (uint32_t)threads, repetitions);
    drop_weights(w);
    return 0;
}
