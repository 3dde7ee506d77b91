/* A cached prompt in a file (docs/prompt-file.md). It is written under a temporary name and renamed; it is loaded only if its
 * checksum is right. */
#define _GNU_SOURCE
#define XXH_INLINE_ALL
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "engine/internal.h"

enum {
    VERSION = 1,
    IDENTITY_MAX = 64,
    FLAG_SUMS = 1,
    FLAG_DETERMINISTIC = 2,
    FLAG_FAST = 4,
    FLAG_SCORES = 8,
    FLAG_SQUARES = 16,
    FLAG_LOGPROBS = 32,
    FLAGS = 63
};
static const char magic[8] = "KVFPROMP";

/* Little endian, as the machines are that this builds for. */
typedef struct header {
    char magic[8];
    uint32_t version, header_bytes;
    uint32_t n_layers, n_kv_heads, n_q_heads, head_dim, dtype; /* kvf_dtype */
    uint32_t n_tokens, flags, identity_bytes, salt_bytes, reserved;
    unsigned char identity[IDENTITY_MAX], salt[KVF_PREFIX_SALT_MAX];
    uint64_t payload_bytes;
    uint64_t checksum[2]; /* XXH3, 128 bits, of the payload and then of the header with zeros here */
} header;
_Static_assert(sizeof(header) == 8 + 12 * 4 + 64 + 64 + 24, "the file's layout");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the file is written as memory lies");

static size_t row_bytes(const kvf_engine *e) { return (size_t)e->shape.head_dim * kvf_dtype_bytes(e->config.kv_dtype); }

/* Numbers of each (layer, KV head) beside K and V: the key norms, then the scores from the model. */
static int n_numbers(uint32_t flags) { return flags & FLAG_SCORES ? 2 : 1; }

/* The statistics that follow the rows, as KVF_SNAPSHOT_*. */
static uint32_t stats_of(uint32_t flags) {
    return (flags & FLAG_SUMS ? KVF_SNAPSHOT_SUMS : 0u) | (flags & FLAG_SQUARES ? KVF_SNAPSHOT_SQUARES : 0u) |
           (flags & FLAG_LOGPROBS ? KVF_SNAPSHOT_LOGPROBS : 0u);
}

static uint32_t flags_of(uint32_t stats) {
    return (stats & KVF_SNAPSHOT_SUMS ? FLAG_SUMS : 0u) | (stats & KVF_SNAPSHOT_SQUARES ? FLAG_SQUARES : 0u) |
           (stats & KVF_SNAPSHOT_LOGPROBS ? FLAG_LOGPROBS : 0u);
}

/* Tokens; for each (layer, KV head) K rows, V rows, key norms, scores; column sums for each (layer, query head); squares for each
 * (layer, KV head); log-probabilities. */
static uint64_t payload_bytes(const kvf_engine *e, uint32_t n_tokens, uint32_t flags) {
    const kvf_runner_shape *m = &e->shape;
    uint64_t head = 2 * row_bytes(e) + (uint64_t)n_numbers(flags) * sizeof(float);
    uint64_t token = sizeof(uint32_t) + (uint64_t)m->n_layers * m->n_kv_heads * head;
    for (uint32_t stat = KVF_SNAPSHOT_SUMS; stat <= KVF_SNAPSHOT_LOGPROBS; stat <<= 1)
        if (stats_of(flags) & stat) token += kvf__engine_statistic(e, stat).n_rows * sizeof(float);
    return token * n_tokens;
}

/* How the engine computes, as far as that shows in K and V. */
static uint32_t mode_of(const kvf_engine *e) {
    return (e->config.deterministic ? FLAG_DETERMINISTIC : 0u) | (e->config.fast_activations ? FLAG_FAST : 0u);
}

static header header_of(const kvf_engine *e, const kvf_prompt_file *f, uint32_t n_tokens, uint32_t flags) {
    header h = {.version = VERSION,
                .header_bytes = sizeof h,
                .n_layers = e->shape.n_layers,
                .n_kv_heads = e->shape.n_kv_heads,
                .n_q_heads = e->shape.n_q_heads,
                .head_dim = e->shape.head_dim,
                .dtype = (uint32_t)e->config.kv_dtype,
                .n_tokens = n_tokens,
                .flags = flags | mode_of(e),
                .identity_bytes = f->identity_bytes,
                .salt_bytes = f->salt_bytes,
                .payload_bytes = payload_bytes(e, n_tokens, flags)};
    memcpy(h.magic, magic, sizeof magic);
    if (f->identity_bytes) memcpy(h.identity, f->identity, f->identity_bytes);
    if (f->salt_bytes) memcpy(h.salt, f->salt, f->salt_bytes);
    return h;
}

static void finish_checksum(XXH3_state_t *x, header *h) {
    h->checksum[0] = h->checksum[1] = 0;
    (void)XXH3_128bits_update(x, h, sizeof *h);
    XXH128_hash_t sum = XXH3_128bits_digest(x);
    h->checksum[0] = sum.low64;
    h->checksum[1] = sum.high64;
}

static kvf_status check(const kvf_engine *e, const kvf_prompt_file *f, kvf_prompt_file *out, kvf_error *err) {
    if (!e) return kvf__fail(err, KVF_E_INVALID, "engine: is NULL");
    kvf_status st = kvf__config_read(out, sizeof *out, f, "kvf_prompt_file", err);
    if (st) return st;
    if (!e->config.prefix_cache)
        return kvf__fail(err, KVF_E_STATE,
                         "prompt file: the engine has no prefix cache; create it with prefix_cache 1");
    if (!out->path || !out->path[0]) return kvf__fail(err, KVF_E_INVALID, "prompt file: path is empty");
    if (out->identity_bytes > IDENTITY_MAX || (out->identity_bytes && !out->identity))
        return kvf__fail(err, KVF_E_INVALID, "identity of %u bytes: must have at most %d; give a hash of it",
                         out->identity_bytes, IDENTITY_MAX);
    if (out->salt_bytes > KVF_PREFIX_SALT_MAX || (out->salt_bytes && !out->salt))
        return kvf__fail(err, KVF_E_INVALID, "salt of %u bytes: must have at most %u; give a hash of it",
                         out->salt_bytes, KVF_PREFIX_SALT_MAX);
    return KVF_OK;
}

static kvf_prefix_key key_of(const kvf_prompt_file *f, const uint32_t *tokens, uint32_t n_tokens) {
    return (kvf_prefix_key){.struct_size = sizeof(kvf_prefix_key),
                            .tokens = tokens,
                            .n_tokens = n_tokens,
                            .salt = f->salt,
                            .salt_bytes = f->salt_bytes};
}

/* ---- Where a prompt's rows lie ---------------------------------------------------------------------------- */

/* A run of slots of one (layer, KV head) within one block. */
typedef struct run {
    void *rows[4]; /* K, V, key norms, scores; NULL: the pages have none */
    size_t row_bytes[4];
    uint64_t at; /* of the first slot in the metadata arrays */
    uint32_t n;
} run;

static run run_at(const kvf_engine *e, kvf_seq seq, uint32_t layer, uint32_t head, uint32_t begin, uint32_t end) {
    const kvf_pages *p = &e->pages;
    const uint32_t *blocks = NULL;
    uint32_t in_group = head % p->heads_per_group, bs = p->block_size, slot = begin % bs;
    kvf_status st = kvf_seq_table(e->manager, seq, layer, head / p->heads_per_group, NULL, NULL, &blocks);
    if (st) return (run){0};
    size_t block = blocks[begin / bs], at = kvf__meta_at(p, block, in_group, slot);
    return (run){{kvf__k_at(p, block, in_group, slot), kvf__v_at(p, block, in_group, slot), p->key_norm + at,
                  p->score ? p->score + at : NULL},
                 {row_bytes(e), row_bytes(e), sizeof *p->key_norm, sizeof *p->score},
                 at,
                 KVF__MIN(bs - slot, end - begin)};
}

/* ---- Saving ---------------------------------------------------------------------------------------------------- */

typedef struct writer {
    FILE *file;
    XXH3_state_t *hash;
    bool failed;
    const kvf_runner *runner;
    void *rows; /* rows of a block, read from where pages lie */
    kvf_error *err;
    kvf_status status; /* of the runner */
} writer;

static void put(writer *w, const void *data, size_t bytes) {
    if (fwrite(data, 1, bytes, w->file) != bytes) w->failed = true;
    (void)XXH3_128bits_update(w->hash, data, bytes);
}

static void put_from(writer *w, const void *from, size_t bytes) {
    if (!w->status) w->status = w->runner->read(w->runner->ctx, w->rows, from, bytes, w->err);
    if (!w->status) put(w, w->rows, bytes);
}

static void put_rows(kvf_engine *e, writer *w, kvf_seq seq, uint32_t n_tokens, uint32_t flags) {
    for (uint32_t layer = 0; layer < e->shape.n_layers; layer++)
        for (uint32_t head = 0; head < e->shape.n_kv_heads; head++)
            for (int what = 0; what < 2 + n_numbers(flags); what++)
                for (uint32_t t = 0; t < n_tokens;) {
                    run r = run_at(e, seq, layer, head, t, n_tokens);
                    put_from(w, r.rows[what], r.n * r.row_bytes[what]);
                    t += r.n;
                }
}

/* One row of a page of a snapshot, block_size floats. */
static float *page_row(const kvf_engine *e, uint32_t page, uint32_t row) {
    return e->buffer.snapshots + ((size_t)page * e->shape.n_layers * e->shape.n_q_heads + row) * e->config.block_size;
}

static void put_statistics(kvf_engine *e, writer *w, uint32_t n_tokens, uint32_t stats) {
    uint32_t bs = e->config.block_size;
    const uint32_t *ids = e->page_ids;
    for (uint32_t stat = KVF_SNAPSHOT_SUMS; stat <= KVF_SNAPSHOT_LOGPROBS; stat <<= 1) {
        if (!(stats & stat)) continue;
        for (uint32_t row = 0, n_rows = kvf__engine_statistic(e, stat).n_rows; row < n_rows; row++)
            for (uint32_t t = 0; t < n_tokens; t += bs)
                put_from(w, page_row(e, ids[t / bs], row), KVF__MIN(bs, n_tokens - t) * sizeof(float));
        ids += kvf__ceil_div(n_tokens, bs);
    }
}

static kvf_status io_failed(kvf_error *err, const char *path, const char *what) {
    return kvf__fail(err, KVF_E_IO, "%s: %s: %s", path, what, strerror(errno));
}

static kvf_status write_file(kvf_engine *e, const kvf_prompt_file *f, FILE *file, header *h, kvf_seq seq,
                             const uint32_t *tokens, kvf_error *err) {
    XXH3_state_t *hash = XXH3_createState();
    kvf_status st = KVF_OK;
    size_t bytes = e->config.block_size * KVF__MAX(row_bytes(e), sizeof(float));
    void *rows = kvf__alloc(&e->allocator, bytes);
    if (!hash || !rows) st = kvf__fail(err, KVF_E_NO_MEMORY, "%s: no memory for the checksum", f->path);
    if (!st) {
        writer w = {.file = file, .hash = hash, .runner = &e->runner, .rows = rows, .err = err};
        w.failed = fwrite(h, sizeof *h, 1, file) != 1;
        (void)XXH3_128bits_reset(hash);
        put(&w, tokens, h->n_tokens * sizeof *tokens);
        put_rows(e, &w, seq, h->n_tokens, h->flags);
        put_statistics(e, &w, h->n_tokens, stats_of(h->flags));
        finish_checksum(hash, h);
        if (w.status)
            st = w.status;
        else if (w.failed || fseek(file, 0, SEEK_SET) || fwrite(h, sizeof *h, 1, file) != 1 || fflush(file) ||
                 fsync(fileno(file)))
            st = io_failed(err, f->path, "writing failed");
    }
    if (fclose(file) && !st) st = io_failed(err, f->path, "writing failed");
    (void)XXH3_freeState(hash);
    kvf__free(&e->allocator, rows, bytes);
    return st;
}

/* A file that no other process or thread writes, also in a folder that machines share. path: room for its name. */
static FILE *create_part(const char *whole, char *path, size_t room) {
    int fd = -1;
    for (unsigned i = 0; i < 1000 && fd < 0 && (!i || errno == EEXIST); i++) {
        snprintf(path, room, "%s.%ld-%u.part", whole, (long)getpid(), i);
        fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    }
    FILE *file = fd < 0 ? NULL : fdopen(fd, "wb");
    if (fd >= 0 && !file) {
        (void)close(fd);
        (void)unlink(path);
    }
    return file;
}

/* To a file beside it, which takes its place when it is whole. */
static kvf_status replace_file(kvf_engine *e, const kvf_prompt_file *f, header *h, kvf_seq seq, const uint32_t *tokens,
                               kvf_error *err) {
    size_t room = strlen(f->path) + 48;
    char *path = kvf__alloc(&e->allocator, room);
    if (!path) return kvf__fail(err, KVF_E_NO_MEMORY, "%s: no memory for its name", f->path);
    FILE *file = create_part(f->path, path, room);
    kvf_status st = file ? write_file(e, f, file, h, seq, tokens, err) : io_failed(err, f->path, "cannot be created");
    if (!st && rename(path, f->path)) st = io_failed(err, f->path, "renaming failed");
    if (st && file) (void)unlink(path);
    kvf__free(&e->allocator, path, room);
    return st;
}

/* With its statistics where there is a snapshot, else the whole blocks. */
static kvf_status find_prompt(kvf_engine *e, const kvf_prefix_key *key, kvf_prefix_match *match, uint32_t *flags,
                              kvf_error *err) {
    kvf_prefix_options options;
    kvf_prefix_options_init(&options, sizeof options);
    options.host = e->copier != NULL;
    options.max_tokens = key->n_tokens;
    options.need_snapshot = 1;
    kvf_status st = kvf_prefix_lookup(e->manager, key, &options, match);
    if (!st && !match->n_tokens) {
        options.snapshot_stats = KVF_SNAPSHOT_LOGPROBS;
        st = kvf_prefix_lookup(e->manager, key, &options, match);
    }
    *flags = flags_of(match->snapshot_stats);
    if (!st && !match->n_tokens) {
        options.need_snapshot = 0;
        *flags = 0;
        st = kvf_prefix_lookup(e->manager, key, &options, match);
    }
    if (st) return kvf__fail(err, st, "prompt: %s", kvf_manager_error(e->manager)->text);
    if (!match->n_tokens)
        return kvf__fail(err, KVF_E_NOT_FOUND,
                         "prompt of %u tokens: no block of it is in the cache; generate from it first", key->n_tokens);
    return KVF_OK;
}

/* What lies on the host comes back first. */
static kvf_status attach(kvf_engine *e, kvf_seq seq, const kvf_prefix_key *key, const kvf_prefix_match *match,
                         kvf_error *err) {
    kvf_copy_list *copies = kvf__engine_spare_list(e, err);
    if (e->copier && !copies) return e->broken ? e->broken : KVF_E_CORRUPT;
    kvf_status st = kvf_prefix_attach(e->manager, seq, key, match, NULL, copies);
    if (st) return kvf__fail_as(err, st, kvf_manager_error(e->manager));
    return copies ? kvf__engine_copies(e, copies, err) : KVF_OK;
}

kvf_status kvf_engine_prompt_save(kvf_engine *e, const kvf_prompt_file *file, const uint32_t *tokens, uint32_t n_tokens,
                                  uint32_t *n_saved, kvf_error *err) {
    kvf_prompt_file f;
    kvf_status st = check(e, file, &f, err);
    if (st) return st;
    if (!tokens || !n_tokens) return kvf__fail(err, KVF_E_INVALID, "prompt: has no token; give at least one");
    kvf_prefix_key key = key_of(&f, tokens, n_tokens);
    kvf_prefix_match match = {.struct_size = sizeof match};
    uint32_t flags = 0, n = 0;
    if ((st = find_prompt(e, &key, &match, &flags, err))) return st;
    kvf_seq seq;
    if ((st = kvf_seq_create(e->manager, &seq)))
        return kvf__fail(err, st, "%s: %s", f.path, kvf_manager_error(e->manager)->text);
    if ((st = attach(e, seq, &key, &match, err)) ||
        (flags && (st = kvf_prefix_snapshot_get(e->manager, &match, e->page_ids, e->n_page_ids, &n)))) {
        kvf__fail(err, st, "%s: %s", f.path, kvf_manager_error(e->manager)->text);
    } else {
        header h = header_of(e, &f, match.n_tokens, flags | (e->pages.score ? FLAG_SCORES : 0u));
        st = replace_file(e, &f, &h, seq, tokens, err);
        if (!st && n_saved) *n_saved = match.n_tokens;
    }
    kvf_status freed = kvf_seq_free(e->manager, seq);
    return st ? st : freed;
}

/* ---- Loading ----------------------------------------------------------------------------------------------------- */

static kvf_status differs(kvf_error *err, const char *path, const char *what, uint32_t value, uint32_t ours) {
    return kvf__fail(err, KVF_E_FORMAT, "%s: %s %u: this engine has %u; the file is of another model or setting", path,
                     what, value, ours);
}

/* A whole file of this format, as it was written; what it is of is looked at after that. */
static kvf_status check_sound(const kvf_prompt_file *f, const header *h, uint64_t file_bytes, kvf_error *err) {
    if (memcmp(h->magic, magic, sizeof magic) != 0)
        return kvf__fail(err, KVF_E_FORMAT, "%s: is no prompt file: it does not begin with %.8s", f->path, magic);
    if (h->version != VERSION)
        return kvf__fail(err, KVF_E_UNSUPPORTED, "%s: version %u of the format: this program reads %d", f->path,
                         h->version, VERSION);
    uint64_t payload = file_bytes - sizeof *h;
    if (h->header_bytes != sizeof *h)
        return kvf__fail(err, KVF_E_FORMAT, "%s: is damaged: a header of %u bytes, where version %d has %zu", f->path,
                         h->header_bytes, VERSION, sizeof *h);
    if (h->payload_bytes != payload)
        return kvf__fail(err, KVF_E_FORMAT, "%s: is torn: %llu bytes follow its header, which says %llu", f->path,
                         (unsigned long long)payload, (unsigned long long)h->payload_bytes);
    XXH3_state_t *hash = XXH3_createState();
    if (!hash) return kvf__fail(err, KVF_E_NO_MEMORY, "%s: no memory for the checksum", f->path);
    header mine = *h;
    (void)XXH3_128bits_reset(hash);
    (void)XXH3_128bits_update(hash, h + 1, payload);
    finish_checksum(hash, &mine);
    (void)XXH3_freeState(hash);
    if (memcmp(mine.checksum, h->checksum, sizeof mine.checksum) == 0) return KVF_OK;
    return kvf__fail(err, KVF_E_FORMAT, "%s: is damaged: the checksum of its bytes is %016llx, its header says %016llx",
                     f->path, (unsigned long long)mine.checksum[0], (unsigned long long)h->checksum[0]);
}

static kvf_status check_fits(const kvf_engine *e, const kvf_prompt_file *f, const header *h, kvf_error *err) {
    const kvf_runner_shape *m = &e->shape;
    const struct {
        const char *what;
        uint32_t value, ours;
    } same[] = {{"n_layers", h->n_layers, m->n_layers},
                {"n_kv_heads", h->n_kv_heads, m->n_kv_heads},
                {"n_q_heads", h->n_q_heads, m->n_q_heads},
                {"head_dim", h->head_dim, m->head_dim},
                {"kv_dtype", h->dtype, (uint32_t)e->config.kv_dtype}};
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        if (same[i].value != same[i].ours) return differs(err, f->path, same[i].what, same[i].value, same[i].ours);
    if (h->identity_bytes != f->identity_bytes ||
        (f->identity_bytes && memcmp(h->identity, f->identity, f->identity_bytes) != 0))
        return kvf__fail(err, KVF_E_FORMAT, "%s: was made with another model", f->path);
    if (h->salt_bytes != f->salt_bytes || (f->salt_bytes && memcmp(h->salt, f->salt, f->salt_bytes) != 0))
        return kvf__fail(err, KVF_E_FORMAT, "%s: has another cache salt", f->path);
    if (!h->n_tokens || h->flags > FLAGS || h->payload_bytes != payload_bytes(e, h->n_tokens, h->flags))
        return kvf__fail(err, KVF_E_FORMAT, "%s: holds %llu bytes for %u tokens, where they need %llu", f->path,
                         (unsigned long long)h->payload_bytes, h->n_tokens,
                         (unsigned long long)payload_bytes(e, h->n_tokens, h->flags));
    if ((h->flags ^ mode_of(e)) & FLAG_FAST)
        return kvf__fail(err, KVF_E_FORMAT, "%s: was made %s fast_activations", f->path,
                         h->flags & FLAG_FAST ? "with" : "without");
    if (e->pages.score && !(h->flags & FLAG_SCORES))
        return kvf__fail(err, KVF_E_FORMAT,
                         "%s: was made without want_scores: it lacks the scores that this engine's pages have",
                         f->path);
    if (mode_of(e) & ~h->flags & FLAG_DETERMINISTIC)
        return kvf__fail(err, KVF_E_FORMAT,
                         "%s: was made without deterministic: this engine would not have the same bits", f->path);
    if (h->n_tokens >= e->config.max_context)
        return kvf__fail(err, KVF_E_NEVER_FITS, "%s: %u tokens: the context is %u tokens", f->path, h->n_tokens,
                         e->config.max_context);
    const uint32_t *tokens = (const uint32_t *)(const void *)(h + 1);
    for (uint32_t i = 0; i < h->n_tokens; i++)
        if (tokens[i] >= m->n_vocab)
            return kvf__fail(err, KVF_E_FORMAT, "%s: token %u at index %u: the vocabulary has %u", f->path, tokens[i],
                             i, m->n_vocab);
    return KVF_OK;
}

static kvf_status put_back(const kvf_engine *e, void *to, const void *from, size_t bytes, kvf_error *err) {
    return e->runner.write(e->runner.ctx, to, from, bytes, err);
}

/* A run's positions, and weight 1 and bias 0 as at birth. */
static kvf_status put_metadata(const kvf_engine *e, const run *r, uint32_t first, kvf_error *err) {
    const kvf_pages *p = &e->pages;
    enum { SLOTS = 256 }; /* of the largest block */
    uint32_t pos[SLOTS];
    float ones[SLOTS], zeros[SLOTS];
    for (uint32_t i = 0; i < r->n; i++) pos[i] = first + i, ones[i] = 1, zeros[i] = 0;
    kvf_status st = put_back(e, p->pos + r->at, pos, r->n * sizeof *pos, err);
    if (!st && p->weight) st = put_back(e, p->weight + r->at, ones, r->n * sizeof *ones, err);
    if (!st && p->bias) st = put_back(e, p->bias + r->at, zeros, r->n * sizeof *zeros, err);
    return st;
}

/* Scores that the pages do not keep are left out. */
static kvf_status get_rows(kvf_engine *e, kvf_seq seq, uint32_t n_tokens, uint32_t flags, const unsigned char **from,
                           kvf_error *err) {
    for (uint32_t layer = 0; layer < e->shape.n_layers; layer++)
        for (uint32_t head = 0; head < e->shape.n_kv_heads; head++)
            for (int what = 0; what < 2 + n_numbers(flags); what++)
                for (uint32_t t = 0; t < n_tokens;) {
                    run r = run_at(e, seq, layer, head, t, n_tokens);
                    size_t bytes = r.n * r.row_bytes[what];
                    kvf_status st = r.rows[what] ? put_back(e, r.rows[what], *from, bytes, err) : KVF_OK;
                    if (!st && what == 2) st = put_metadata(e, &r, t, err);
                    if (st) return st;
                    *from += bytes;
                    t += r.n;
                }
    return KVF_OK;
}

static kvf_status get_statistics(kvf_engine *e, uint32_t n_tokens, uint32_t stats, const unsigned char *from,
                                 kvf_error *err) {
    uint32_t bs = e->config.block_size;
    const uint32_t *ids = e->page_ids;
    for (uint32_t stat = KVF_SNAPSHOT_SUMS; stat <= KVF_SNAPSHOT_LOGPROBS; stat <<= 1) {
        if (!(stats & stat)) continue;
        for (uint32_t row = 0, n_rows = kvf__engine_statistic(e, stat).n_rows; row < n_rows; row++)
            for (uint32_t t = 0; t < n_tokens; t += bs) {
                size_t bytes = KVF__MIN(bs, n_tokens - t) * sizeof(float);
                kvf_status st = put_back(e, page_row(e, ids[t / bs], row), from, bytes, err);
                if (st) return st;
                from += bytes;
            }
        ids += kvf__ceil_div(n_tokens, bs);
    }
    return KVF_OK;
}

/* A sequence of these tokens for as long as it takes to write and store them. */
static kvf_status fill(kvf_engine *e, const kvf_prompt_file *f, const header *h, kvf_error *err) {
    const uint32_t *tokens = (const uint32_t *)(const void *)(h + 1);
    uint32_t stats = stats_of(h->flags);
    uint32_t n_pages = (uint32_t)__builtin_popcount(stats) * kvf__ceil_div(h->n_tokens, e->config.block_size);
    if (n_pages > e->n_snapshot_pages)
        return kvf__fail(
            err, KVF_E_NO_BLOCKS,
            "%s: the sums of its %u tokens need %llu bytes of snapshots, there are %llu: create the engine "
            "with more snapshot_bytes",
            f->path, h->n_tokens, (unsigned long long)n_pages * kvf__engine_snapshot_page_bytes(e),
            (unsigned long long)e->n_snapshot_pages * kvf__engine_snapshot_page_bytes(e));
    kvf_seq seq;
    kvf_status st = kvf_seq_create(e->manager, &seq);
    if (st) return kvf__fail(err, st, "%s: %s", f->path, kvf_manager_error(e->manager)->text);
    const kvf_append_item item = {seq, h->n_tokens};
    if ((st = kvf_append(e->manager, &item, 1, NULL))) {
        kvf__fail(err, st, "%s: %u tokens: %s", f->path, h->n_tokens, kvf_manager_error(e->manager)->text);
    } else {
        const unsigned char *from = (const unsigned char *)(tokens + h->n_tokens);
        st = get_rows(e, seq, h->n_tokens, h->flags, &from, err);
        kvf_prefix_key key = key_of(f, tokens, h->n_tokens);
        kvf_prefix_store_options options = {.struct_size = sizeof options, .flags = stats ? KVF_PREFIX_PARTIAL : 0};
        uint32_t n = 0;
        bool read = st == KVF_OK;
        if (read) st = kvf_prefix_store(e->manager, seq, &key, h->n_tokens, &options, NULL);
        if (!st && stats)
            st = kvf_prefix_snapshot_put(e->manager, seq, &key, h->n_tokens, KVF_SNAPSHOT_KEEP_LONG | stats,
                                         e->page_ids, e->n_page_ids, &n);
        if (st && read)
            kvf__fail(err, st, "%s: %s", f->path, kvf_manager_error(e->manager)->text);
        else if (n && (st = get_statistics(e, h->n_tokens, stats, from, err)) && kvf_prefix_clear(e->manager))
            st = KVF_E_CORRUPT; /* the cache names pages without contents */
    }
    kvf_status freed = kvf_seq_free(e->manager, seq);
    return st ? st : freed;
}

kvf_status kvf_engine_prompt_load(kvf_engine *e, const kvf_prompt_file *file, uint32_t *n_loaded, kvf_error *err) {
    kvf_prompt_file f;
    kvf_status st = check(e, file, &f, err);
    if (st) return st;
    int fd = open(f.path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* of a named pipe it would wait for a writer */
    if (fd < 0)
        return kvf__fail(err, errno == ENOENT ? KVF_E_NOT_FOUND : KVF_E_IO, "%s: cannot be opened: %s", f.path,
                         strerror(errno));
    struct stat info;
    void *map = MAP_FAILED;
    if (fstat(fd, &info) || !S_ISREG(info.st_mode))
        st = kvf__fail(err, KVF_E_IO, "%s: is no regular file", f.path);
    else if (info.st_size < (off_t)sizeof(header))
        st = kvf__fail(err, KVF_E_FORMAT, "%s: is no prompt file: it has %lld bytes, and a header alone %zu", f.path,
                       (long long)info.st_size, sizeof(header));
    else if ((map = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0)) == MAP_FAILED)
        st = io_failed(err, f.path, "cannot be mapped");
    (void)close(fd);
    if (st) return st;
    const header *h = map;
    if (!(st = check_sound(&f, h, (uint64_t)info.st_size, err)) && !(st = check_fits(e, &f, h, err)))
        st = fill(e, &f, h, err);
    if (!st && n_loaded) *n_loaded = h->n_tokens;
    (void)munmap(map, (size_t)info.st_size);
    return st;
}
