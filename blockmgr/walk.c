/* Reads a key block by block: the chained hash, and the comparison that a hit also requires. */
#include "blockmgr/cache.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

enum { BLOCK_MAX = 256, USUAL = 16 };

/* For functions that are compiled with the constant USUAL as the block size, so that copies and loops are unrolled. */
#define INLINE __attribute__((always_inline)) static inline

INLINE kvf__hash hash_bytes(const kvf__cache *c, const void *bytes, size_t n) {
    XXH128_hash_t h = XXH3_128bits_withSeed(bytes, n, c->seed);
    return c->zero_hash ? (kvf__hash){0, 0} : (kvf__hash){h.low64, h.high64};
}

static kvf_status check_key(const kvf_prefix_key *key, kvf_error *err) {
    if (!key->n_tokens || !key->tokens)
        return kvf__fail(err, KVF_E_INVALID, "key: %u tokens at %p: there must be one", key->n_tokens,
                         (const void *)key->tokens);
    if (key->salt_bytes > KVF_PREFIX_SALT_MAX)
        return kvf__fail(err, KVF_E_LIMIT, "key: a salt of %u bytes: must be at most %u; hash it first",
                         key->salt_bytes, KVF_PREFIX_SALT_MAX);
    if ((key->salt_bytes && !key->salt) || (key->n_extras && !key->extras))
        return kvf__fail(err, KVF_E_INVALID, "key: salt or extras: is NULL");
    for (uint32_t i = 0; i < key->n_extras; i++) {
        const kvf_prefix_extra *x = &key->extras[i];
        if (x->position >= key->n_tokens)
            return kvf__fail(err, KVF_E_INVALID, "key: extras[%u] at position %u: must be under n_tokens %u", i,
                             x->position, key->n_tokens);
        if (i && x->position < x[-1].position)
            return kvf__fail(err, KVF_E_INVALID, "key: extras[%u] at position %u follows one at %u: must ascend", i,
                             x->position, x[-1].position);
        if (x->reserved)
            return kvf__fail(err, KVF_E_INVALID, "key: extras[%u]: reserved %u: must be 0", i, x->reserved);
    }
    return KVF_OK;
}

kvf_status kvf__walk_begin(const kvf__cache *c, const kvf_prefix_key *key, kvf__walk *w, kvf_error *err) {
    kvf_status s = kvf__config_read(&w->key, sizeof w->key, key, "kvf_prefix_key", err);
    if (!s) s = check_key(&w->key, err);
    if (s) return s;
    w->node = KVF__NO_NODE;
    w->depth = w->n_hashed = w->extra = w->turn = 0;
    w->hashes[0] = w->hashes[1] = w->extras = (kvf__hash){0, 0};
    if (w->key.salt_bytes) w->hashes[0] = hash_bytes(c, w->key.salt, w->key.salt_bytes);
    return KVF_OK;
}

/* A digest of the extras from number i on whose position is under end; 0 if there are none. It calls the hash directly, so
 * that zero_hash does not affect it. */
static kvf__hash digest(const kvf_prefix_key *key, uint32_t i, uint32_t end) {
    kvf__hash d = {0, 0};
    for (; i < key->n_extras && key->extras[i].position < end; i++) {
        const kvf_prefix_extra *x = &key->extras[i];
        const uint64_t words[5] = {d.low, d.high, x->key[0], x->key[1], x->position};
        XXH128_hash_t h = XXH3_128bits(words, sizeof words);
        d = (kvf__hash){h.low64, h.high64};
    }
    return d;
}

INLINE kvf__hash hash_all(const kvf__cache *c, kvf__hash parent, kvf__hash extras, const uint32_t *tokens,
                          uint32_t n_tokens) {
    struct {
        kvf__hash parent, extras;
        uint32_t tokens[BLOCK_MAX];
    } all;
    all.parent = parent;
    all.extras = extras;
    memcpy(all.tokens, tokens, n_tokens * sizeof *tokens);
    return hash_bytes(c, &all, sizeof parent + sizeof extras + n_tokens * sizeof *tokens);
}

INLINE kvf__hash hash_block(const kvf__cache *c, kvf__hash parent, kvf__hash extras, const uint32_t *tokens,
                            uint32_t n_tokens) {
    if (n_tokens == USUAL) return hash_all(c, parent, extras, tokens, USUAL);
    return hash_all(c, parent, extras, tokens, n_tokens);
}

void kvf__walk_hash(const kvf__cache *c, kvf__walk *w, uint32_t n_tokens) {
    uint32_t begin = w->depth * c->block_size;
    w->extras = w->extra < w->key.n_extras ? digest(&w->key, w->extra, begin + n_tokens) : (kvf__hash){0, 0};
    w->hashes[w->turn ^ 1] = hash_block(c, w->hashes[w->turn], w->extras, w->key.tokens + begin, n_tokens);
    w->n_hashed = n_tokens;
}

kvf__hash kvf__node_hash(const kvf__cache *c, uint32_t node) {
    const kvf__node *n = &c->nodes[node];
    kvf__hash parent = {0, 0};
    if (n->parent != KVF__NO_NODE) {
        parent = c->nodes[n->parent].hash;
    } else if (n->salt_bytes) {
        parent = hash_bytes(c, c->salts + (size_t)node * KVF_PREFIX_SALT_MAX, n->salt_bytes);
    }
    return hash_block(c, parent, n->extras, kvf__node_tokens(c, node), n->n_tokens);
}

static bool same_hash(kvf__hash a, kvf__hash b) { return a.low == b.low && a.high == b.high; }

static bool same_salt(const kvf__cache *c, const kvf_prefix_key *key, uint32_t root) {
    return c->nodes[root].salt_bytes == key->salt_bytes &&
           (!key->salt_bytes || !memcmp(c->salts + (size_t)root * KVF_PREFIX_SALT_MAX, key->salt, key->salt_bytes));
}

/* For few tokens that are mostly equal this is cheaper than a call of memcmp. */
INLINE bool same_all(const uint32_t *a, const uint32_t *b, uint32_t n) {
    uint32_t differ = 0;
    for (uint32_t i = 0; i < n; i++) differ |= a[i] ^ b[i];
    return !differ;
}
INLINE bool same_tokens(const uint32_t *a, const uint32_t *b, uint32_t n) {
    return n == USUAL ? same_all(a, b, USUAL) : same_all(a, b, n);
}

uint32_t kvf__walk_find(const kvf__cache *c, const kvf__walk *w) {
    const uint32_t *tokens = w->key.tokens + (size_t)w->depth * c->block_size;
    kvf__hash hash = kvf__walk_hashed(w);
    uint32_t node = c->buckets[hash.low & c->bucket_mask];
    for (; node != KVF__NO_NODE; node = c->nodes[node].bucket_next) {
        const kvf__node *n = &c->nodes[node];
        if (same_hash(n->hash, hash) && n->parent == w->node && n->n_tokens == w->n_hashed &&
            same_hash(n->extras, w->extras) && same_tokens(kvf__node_tokens(c, node), tokens, n->n_tokens) &&
            (n->parent != KVF__NO_NODE || same_salt(c, &w->key, node)))
            return node;
    }
    return KVF__NO_NODE;
}

void kvf__walk_step(const kvf__cache *c, kvf__walk *w, uint32_t node) {
    w->node = node;
    w->turn ^= 1; /* the hash equals the node's; it is not loaded from there, so the next hash need not wait */
    w->depth++;
    while (w->extra < w->key.n_extras && w->key.extras[w->extra].position < w->depth * c->block_size) w->extra++;
}

/* The number of the first extra at or after a position. */
static uint32_t first_extra(const kvf_prefix_key *key, uint32_t position) {
    uint32_t low = 0, high = key->n_extras;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (key->extras[middle].position < position) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

bool kvf__walk_agrees(const kvf__cache *c, const kvf__walk *w, uint32_t node, uint32_t n_tokens) {
    const kvf__node *n = &c->nodes[node];
    uint32_t begin = n->depth * c->block_size;
    if (n_tokens > n->n_tokens || begin + n_tokens > w->key.n_tokens) return false;
    if (!same_tokens(kvf__node_tokens(c, node), w->key.tokens + begin, n_tokens)) return false;
    if (n->parent == KVF__NO_NODE && !same_salt(c, &w->key, node)) return false;
    kvf__hash extras = {0, 0};
    if (w->key.n_extras) extras = digest(&w->key, first_extra(&w->key, begin), begin + n->n_tokens);
    return same_hash(extras, n->extras);
}

bool kvf__walk_resume(const kvf__cache *c, kvf__walk *w, uint32_t node, uint32_t n_tokens) {
    while (node != KVF__NO_NODE && kvf__node_end(c, node) > n_tokens) node = c->nodes[node].parent;
    for (uint32_t at = node; at != KVF__NO_NODE; at = c->nodes[at].parent)
        if (!kvf__walk_agrees(c, w, at, c->nodes[at].n_tokens)) return false;
    if (node == KVF__NO_NODE) return true;
    w->node = node;
    w->hashes[w->turn] = c->nodes[node].hash;
    w->depth = c->nodes[node].depth + 1;
    w->extra = first_extra(&w->key, w->depth * c->block_size);
    return true;
}
