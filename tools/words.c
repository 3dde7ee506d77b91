/* The library's messages in the command's words: where the library names its own fields, they name options and fields of a
 * line. */
#define _POSIX_C_SOURCE 200809L
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "tools/cli.h"

/* Names that stand for nothing else, wherever they stand. */
static const char *const words[][2] = {
    {"kv_bytes", "--kv-memory"},
    {"host_bytes", "--host-memory"},
    {"max_context", "--context"},
    {"n_threads", "--threads"},
    {"max_running", "--max-running"},
    {"block_size", "--block-size"},
    {"heads_per_group", "--heads-per-group"},
    {"max_new", "--max-tokens"},
    {"n_samples", "beam_width"},
    {"more KV memory", "more --kv-memory"},
    {"create the engine with a probe", "give --probe FILE, which kvfold calibrate makes"},
    {"a smaller budget", "a smaller budget (--rho, --min-tokens, --budget-tokens)"}};

/* Ordinary words that are options where a text begins with them. */
static const char *const first_words[] = {"chunk", "policy", "preset"};

static bool in_name(char c) { return isalnum((unsigned char)c) || c == '_'; }

static void replace_words(const char *text, char out[KVF__WORDS_BYTES]) {
    size_t used = 0;
    for (const char *p = text; *p && used + 1 < KVF__WORDS_BYTES;) {
        const char *with = NULL;
        size_t length = 0;
        for (size_t i = 0; i < sizeof words / sizeof words[0] && !with && (p == text || !in_name(p[-1])); i++) {
            length = strlen(words[i][0]);
            if (!strncmp(p, words[i][0], length) && !in_name(p[length])) with = words[i][1];
        }
        int n = with ? snprintf(out + used, KVF__WORDS_BYTES - used, "%s", with) : 1;
        if (!with) out[used] = *p;
        used += (size_t)n;
        p += with ? length : 1;
    }
    out[used < KVF__WORDS_BYTES ? used : KVF__WORDS_BYTES - 1] = '\0';
}

void kvf__say_option(const char *text) {
    size_t length = strcspn(text, " :");
    for (size_t i = 0; i < sizeof first_words / sizeof first_words[0]; i++) {
        if (strlen(first_words[i]) != length || strncmp(text, first_words[i], length) != 0) continue;
        kvf__say("--%s", text);
        return;
    }
    uint32_t n = 0;
    const kvf_policy_option_info *list = kvf_policy_option_list(&n);
    for (uint32_t i = 0; i < n; i++) {
        if (strlen(list[i].name) != length || strncmp(text, list[i].name, length) != 0) continue;
        kvf__say("--%s%s", kvf__dashed(list[i].name).text, text + length);
        return;
    }
    char out[KVF__WORDS_BYTES];
    replace_words(text, out);
    kvf__say("%s", out);
}

/* A size as --kv-memory takes it, rounded up. */
static kvf__short size_option(uint64_t bytes) {
    kvf__short s;
    bool large = bytes >= (uint64_t)1 << 20;
    uint32_t shift = large ? 20 : 10;
    uint64_t n = (bytes >> shift) + ((bytes & (((uint64_t)1 << shift) - 1)) != 0);
    snprintf(s.text, sizeof s.text, "%llu%s", (unsigned long long)n, large ? "MiB" : "KiB");
    return s;
}

/* "n_prompt 900: needs 78 blocks, the pool has 50: give it at least 78, or REMEDY"; false for any other text. */
static bool pool_words(uint64_t block_bytes, const char *text, char out[KVF__WORDS_BYTES]) {
    unsigned long long n_prompt, need, there_are;
    int end = 0;
    if (sscanf(text, "n_prompt %llu: needs %llu %*[a-z ], the pool has %llu: give it at least %*u, or %n", &n_prompt,
               &need, &there_are, &end) != 3 ||
        !end || !block_bytes || need > UINT64_MAX / block_bytes)
        return false;
    const char *remedy = text + end;
    if (!strncmp(remedy, "lower", 5))
        remedy = "lower --max-tokens (in a line max_tokens) or the budget: --rho (rho), --min-tokens (min_tokens), "
                 "--budget-tokens (budget_tokens)";
    snprintf(
        out, KVF__WORDS_BYTES,
        "a prompt of %llu tokens needs %llu KV blocks, the KV memory has %llu: give at least --kv-memory %s, or %s",
        n_prompt, need, there_are, size_option(need * block_bytes).text, remedy);
    return true;
}

const char *kvf__request_words(kvf_engine *engine, const char *text, char out[KVF__WORDS_BYTES]) {
    kvf_engine_stats s = {.struct_size = sizeof s};
    uint64_t block_bytes = !engine || kvf_engine_get_stats(engine, &s) ? 0 : s.block_bytes;
    if (!pool_words(block_bytes, text, out)) replace_words(text, out);
    return out;
}
