/* Lines to a person: what was created, and that a pool is too small. */
#define _DEFAULT_SOURCE
#include "tests/engine_rig.h"

TestSuite(engine_log, .init = open_model, .fini = close_model);

struct lines {
    uint32_t n[KVF_LOG_WARN + 1];
    char last[512];
};

static void count_line(void *ctx, kvf_log_level level, const char *line) {
    struct lines *l = ctx;
    l->n[level]++;
    snprintf(l->last, sizeof l->last, "%s", line);
}

Test(engine_log, a_pool_that_is_too_small_is_told_to_the_log) {
    struct lines lines = {{0}, ""};
    struct answer a[4];
    kvf_engine_config c = config_of(60);
    c.log = (kvf_log){count_line, &lines};
    memset(a, 0, sizeof a);
    kvf_engine *e = create(&c);
    cr_expect(lines.n[KVF_LOG_INFO] == 1 && lines.n[KVF_LOG_WARN] == 0);
    cr_expect(strstr(lines.last, "60 blocks of 8 tokens"), "%s", lines.last);
    for (uint32_t i = 0; i < 4; i++) submit(e, &a[i], 30 + i, i, 100, "full");
    run(e);
    kvf_engine_stats s = {.struct_size = sizeof s};
    cr_assert_eq(kvf_engine_get_stats(e, &s), KVF_OK);
    kvf_engine_destroy(e);
    uint32_t told = 0;
    for (uint64_t n = 1; n <= s.n_preempted; n *= 2) told++;
    cr_expect(told > 0 && lines.n[KVF_LOG_WARN] == told, "%u lines of %llu preemptions", lines.n[KVF_LOG_WARN],
              (unsigned long long)s.n_preempted);
    cr_expect(strstr(lines.last, "60 blocks") && strstr(lines.last, "raise the KV memory"), "%s", lines.last);
}
