/* Cached prompts in files: what is loaded gives what was saved; foreign, torn and damaged files change nothing. */
#define _DEFAULT_SOURCE
#include "tests/engine_rig.h"

#include <stdlib.h>
#include <sys/stat.h>

static char path[256];

static void open_all(void) {
    open_model();
    gw_temp_path(path, sizeof path);
    unlink(path);
}

static void close_all(void) {
    unlink(path);
    close_model();
}

TestSuite(prompt_file, .init = open_all, .fini = close_all);

static kvf_engine_config caching(void) {
    kvf_engine_config c = config_of(600);
    c.chunk = 16;
    c.prefix_cache = 1;
    c.snapshot_bytes = 1 << 20;
    return c;
}

static kvf_prompt_file file_of(const char *identity) {
    return (kvf_prompt_file){.struct_size = sizeof(kvf_prompt_file),
                             .path = path,
                             .identity = identity,
                             .identity_bytes = (uint32_t)strlen(identity)};
}

static void answer_in(kvf_engine *e, struct answer *a, uint32_t n, const char *policy) {
    memset(a, 0, sizeof *a);
    submit(e, a, n, 1, 20, policy);
    run(e);
}

static uint64_t computed(kvf_engine *e) {
    kvf_engine_stats s = {.struct_size = sizeof s};
    cr_assert_eq(kvf_engine_get_stats(e, &s), KVF_OK);
    return s.n_prompt_tokens;
}

/* Runs a prompt and saves it; returns the tokens saved. */
static uint32_t save(kvf_engine *e, uint32_t n, const char *policy, struct answer *a) {
    uint32_t prompt[MAX_TOKENS], n_saved = 0;
    kvf_error err = {.text = ""};
    answer_in(e, a, n, policy);
    (void)request_of(prompt, n, 1, 1, NULL);
    kvf_prompt_file f = file_of("tiny");
    cr_assert_eq(kvf_engine_prompt_save(e, &f, prompt, n, &n_saved, &err), KVF_OK, "%s", err.text);
    cr_assert_eq(kvf_audit(e->manager, &err), KVF_OK, "%s", err.text);
    return n_saved;
}

Test(prompt_file, another_run_goes_on_from_it) {
    static const char *const policies[] = {"full",
                                           "h2o rho=0.3 min_tokens=16",
                                           "d2o rho=0.3 min_tokens=16 merge=mass",
                                           "fold rho=0.3 min_tokens=16 gate=0.2 head_budget=adaptive",
                                           "roco rho=0.3 min_tokens=16",
                                           "sirllm rho=0.3 min_tokens=16"};
    static const uint32_t lengths[] = {100, 96};
    for (int p = 0; p < 6; p++)
        for (int i = 0; i < 2; i++) {
            kvf_engine_config c = caching();
            c.heads_per_group = p == 3 ? 1 : 0; /* budgets of heads need groups of their own */
            struct answer first, second;
            kvf_error err = {.text = ""};
            uint32_t n_loaded = 0, n = lengths[i], expected = p ? n : n / BLOCK * BLOCK;
            kvf_engine *e = create(&c);
            cr_expect_eq(save(e, n, policies[p], &first), expected, "%s", policies[p]);
            kvf_engine_destroy(e);
            e = create(&c);
            kvf_prompt_file f = file_of("tiny");
            cr_assert_eq(kvf_engine_prompt_load(e, &f, &n_loaded, &err), KVF_OK, "%s", err.text);
            cr_assert_eq(kvf_audit(e->manager, &err), KVF_OK, "%s", err.text);
            cr_expect_eq(n_loaded, expected);
            answer_in(e, &second, n, policies[p]);
            cr_expect_eq(computed(e), KVF__MAX(n - expected, 1u), "%s: %llu computed", policies[p],
                         (unsigned long long)computed(e));
            expect_same(&first, &second, 0, policies[p]);
            kvf_engine_destroy(e);
        }
}

Test(prompt_file, blocks_of_another_size_read_it) {
    kvf_engine_config c = caching();
    struct answer first, second;
    kvf_error err = {.text = ""};
    kvf_engine *e = create(&c);
    cr_assert_eq(save(e, 96, "d2o rho=0.3 min_tokens=16", &first), 96u);
    kvf_engine_destroy(e);
    c.block_size = 16;
    e = create(&c);
    kvf_prompt_file f = file_of("tiny");
    cr_assert_eq(kvf_engine_prompt_load(e, &f, NULL, &err), KVF_OK, "%s", err.text);
    answer_in(e, &second, 96, "d2o rho=0.3 min_tokens=16");
    cr_expect_eq(computed(e), 1u);
    expect_same(&first, &second, 0, "block size 16");
    kvf_engine_destroy(e);
}

/* ---- What is refused ------------------------------------------------------------------------------------------ */

static void expect_refused(kvf_engine *e, const kvf_prompt_file *f, kvf_status status, const char *text) {
    kvf_error err = {.text = ""};
    kvf_engine_stats before = {.struct_size = sizeof before}, after = {.struct_size = sizeof after};
    cr_assert_eq(kvf_engine_get_stats(e, &before), KVF_OK);
    kvf_status st = kvf_engine_prompt_load(e, f, NULL, &err);
    cr_expect_eq(st, status, "%s: status %d: %s", text, (int)st, err.text);
    cr_expect(strstr(err.text, text), "%s: %s", text, err.text);
    cr_assert_eq(kvf_engine_get_stats(e, &after), KVF_OK);
    cr_expect_eq(before.occupancy.blocks.n_free, after.occupancy.blocks.n_free);
    cr_expect_eq(before.prefix.n_nodes, after.prefix.n_nodes);
}

static unsigned char *read_all(size_t *n) {
    FILE *f = fopen(path, "rb");
    struct stat info;
    cr_assert(f && !fstat(fileno(f), &info));
    *n = (size_t)info.st_size;
    unsigned char *bytes = malloc(*n);
    cr_assert_eq(fread(bytes, 1, *n, f), *n);
    fclose(f);
    return bytes;
}

static void write_all(const unsigned char *bytes, size_t n) {
    FILE *f = fopen(path, "wb");
    cr_assert(f);
    cr_assert_eq(fwrite(bytes, 1, n, f), n);
    fclose(f);
}

Test(prompt_file, any_damage_is_seen) {
    kvf_engine_config c = caching();
    struct answer a;
    kvf_engine *e = create(&c);
    (void)save(e, 40, "d2o rho=0.3 min_tokens=16", &a);
    kvf_engine_destroy(e);
    e = create(&c);
    kvf_prompt_file f = file_of("tiny");
    size_t n;
    unsigned char *bytes = read_all(&n);
    for (size_t cut = 0; cut < n; cut += cut < 256 ? 1 : 997) {
        write_all(bytes, cut);
        expect_refused(e, &f, KVF_E_FORMAT, cut < 208 ? "no prompt file" : "torn");
    }
    uint64_t rng = 3;
    for (int i = 0; i < 400; i++) {
        size_t at = i < 208 ? (size_t)i : gw_random(&rng) % n;
        kvf_error err = {.text = ""};
        bytes[at] ^= 0x10;
        write_all(bytes, n);
        kvf_status st = kvf_engine_prompt_load(e, &f, NULL, &err);
        cr_assert(st == KVF_E_FORMAT || st == KVF_E_UNSUPPORTED || st == KVF_E_NEVER_FITS, "byte %zu: %d", at, (int)st);
        bytes[at] ^= 0x10;
    }
    write_all(bytes, n);
    cr_expect_eq(kvf_engine_prompt_load(e, &f, NULL, NULL), KVF_OK);
    free(bytes);
    kvf_engine_destroy(e);
}

Test(prompt_file, refusals_name_the_file_and_the_remedy) {
    kvf_engine_config c = caching();
    struct answer a;
    kvf_error err = {.text = ""};
    uint32_t prompt[MAX_TOKENS];
    kvf_engine *e = create(&c);
    kvf_prompt_file f = file_of("tiny"), other = file_of("other");
    expect_refused(e, &f, KVF_E_NOT_FOUND, path);
    (void)request_of(prompt, 40, 1, 1, NULL);
    cr_expect_eq(kvf_engine_prompt_save(e, &f, prompt, 40, NULL, &err), KVF_E_NOT_FOUND);
    cr_expect(strstr(err.text, "no block of it is in the cache"), "%s", err.text);
    (void)save(e, 40, "full", &a);
    expect_refused(e, &other, KVF_E_FORMAT, "another model");
    f.salt = "x";
    f.salt_bytes = 1;
    expect_refused(e, &f, KVF_E_FORMAT, "another cache salt");
    f.salt_bytes = 1 << 20;
    expect_refused(e, &f, KVF_E_INVALID, "salt of 1048576 bytes");
    f = file_of("tiny");
    f.path = "";
    expect_refused(e, &f, KVF_E_INVALID, "path");
    f.path = "/";
    expect_refused(e, &f, KVF_E_IO, "no regular file");
    f = file_of("tiny");
    f.path = "/dev/full/x";
    cr_expect_eq(kvf_engine_prompt_save(e, &f, prompt, 40, NULL, &err), KVF_E_IO);
    cr_expect(strstr(err.text, "/dev/full/x"), "%s", err.text);
    kvf_engine_destroy(e);

    c.kv_dtype = KVF_F16;
    e = create(&c);
    f = file_of("tiny");
    expect_refused(e, &f, KVF_E_FORMAT, "kv_dtype 0");
    kvf_engine_destroy(e);
    c = caching();
    c.kv_bytes = (uint64_t)12 * BLOCK * 2 * 16 * 2 * 4;
    e = create(&c);
    expect_refused(e, &f, KVF_E_NO_BLOCKS, "40 tokens");
    kvf_engine_destroy(e);
    c = caching();
    c.prefix_cache = 0;
    e = create(&c);
    expect_refused(e, &f, KVF_E_STATE, "prefix_cache");
    kvf_engine_destroy(e);
}

/* The sums do not fit the engine's snapshots: nothing of the prompt is loaded. */
Test(prompt_file, sums_without_room_leave_the_cache_as_it_was) {
    kvf_engine_config c = caching();
    kvf_error err = {.text = ""};
    struct answer a;
    kvf_engine *e = create(&c);
    cr_assert_eq(save(e, 100, "h2o rho=0.3 min_tokens=16", &a), 100u);
    kvf_engine_destroy(e);
    c.snapshot_bytes = 1;
    e = create(&c);
    kvf_prompt_file f = file_of("tiny");
    cr_assert_eq(kvf_engine_prompt_load(e, &f, NULL, &err), KVF_E_NO_BLOCKS);
    cr_expect(strstr(err.text, "snapshot_bytes"), "%s", err.text);
    kvf_engine_stats s = {.struct_size = sizeof s};
    cr_assert_eq(kvf_engine_get_stats(e, &s), KVF_OK);
    cr_expect(s.prefix.n_nodes == 0 && s.prefix.stored == 0 && s.occupancy.blocks.n_held == 0, "%u nodes",
              s.prefix.n_nodes);
    kvf_engine_destroy(e);
}

/* K and V that would not have the same bits: an engine that promises these takes no others. */
Test(prompt_file, how_it_was_computed_counts) {
    for (int saved = 0; saved < 4; saved++)
        for (int loads = 0; loads < 4; loads++) {
            kvf_engine_config c = caching();
            kvf_error err = {.text = ""};
            struct answer a;
            c.deterministic = saved & 1;
            c.fast_activations = saved >> 1;
            kvf_engine *e = create(&c);
            cr_assert_eq(save(e, 40, "full", &a), 40u);
            kvf_engine_destroy(e);
            c.deterministic = loads & 1;
            c.fast_activations = loads >> 1;
            e = create(&c);
            kvf_prompt_file f = file_of("tiny");
            bool fits = saved >> 1 == loads >> 1 && (saved & 1) >= (loads & 1);
            cr_expect_eq(kvf_engine_prompt_load(e, &f, NULL, &err), fits ? KVF_OK : KVF_E_FORMAT, "%d, %d: %s", saved,
                         loads, err.text);
            kvf_engine_destroy(e);
        }
}

/* Scores from the model are in the file, by token; an engine whose pages have scores takes no file without. */
Test(prompt_file, scores_are_saved_and_loaded) {
    for (int saved = 0; saved < 2; saved++)
        for (int loads = 0; loads < 2; loads++) {
            kvf_probe *probe = random_probe(kvf_model_get_info(model)->n_embd);
            kvf_engine_config c = caching();
            kvf_error err = {.text = ""};
            struct answer a;
            uint32_t prompt[MAX_TOKENS], n = 96, n_right = 0;
            kvf_prompt_file f = file_of("tiny");
            c.probe = saved ? probe : NULL;
            kvf_engine *e = create(&c);
            answer_in(e, &a, n, "full");
            for (uint32_t i = 0; saved && i < e->pages.n_blocks * 2 * BLOCK; i++)
                e->pages.score[i] = (float)e->pages.pos[i] + 0.25f;
            (void)request_of(prompt, n, 1, 1, NULL);
            cr_assert_eq(kvf_engine_prompt_save(e, &f, prompt, n, NULL, &err), KVF_OK, "%s", err.text);
            kvf_engine_destroy(e);
            c.probe = loads ? probe : NULL;
            c.block_size = 16;
            c.heads_per_group = 1;
            e = create(&c);
            for (uint32_t i = 0; loads && i < e->pages.n_blocks * 16; i++) e->pages.score[i] = 0;
            if (loads && !saved) {
                expect_refused(e, &f, KVF_E_FORMAT, "without want_scores");
            } else {
                cr_expect_eq(kvf_engine_prompt_load(e, &f, NULL, &err), KVF_OK, "%s", err.text);
                for (uint32_t i = 0; loads && i < e->pages.n_blocks * 16; i++)
                    n_right += e->pages.score[i] > 0 && e->pages.score[i] == (float)e->pages.pos[i] + 0.25f;
                cr_expect_eq(n_right, loads ? n * e->shape.n_layers * e->shape.n_kv_heads : 0, "%u slots", n_right);
            }
            kvf_engine_destroy(e);
            kvf_probe_close(probe);
        }
}
