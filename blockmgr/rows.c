/* The rows of the tables: one array, in which each table has a row of the length that it needs (manager.h). */
#include "blockmgr/manager.h"

enum { HEADER = 2, FIRST = 8, SLACK = 1 << 14 };

uint32_t kvf__row_room(const kvf_manager *m, uint32_t n) {
    return (KVF__MIN(n + n / 4 + 8, m->row_capacity) + 1) & ~1u;
}

/* Rows that are as long as kvf__row_fit leaves them, for n blocks in n_tables tables without a promise. */
static uint64_t room_for(uint64_t n, uint64_t n_tables) { return n + n / 4 + n_tables * 24; }

uint64_t kvf__rows_limit(uint64_t size, uint64_t room) { return KVF__MIN(size, room + room / 2 + SLACK); }

uint64_t kvf__rows_size(const kvf_manager *m, uint64_t n_promised) {
    uint64_t n_tables = (uint64_t)m->config.max_seqs * m->seq_tables;
    uint64_t room = room_for(m->config.n_table_blocks, n_tables) + n_promised, all = n_tables * (m->row_capacity + 8);
    return KVF__MIN(room + room / 2, all + all / 4) + kvf__row_room(m, m->row_capacity) + FIRST + SLACK;
}

uint64_t kvf__table_blocks(const kvf_manager *m) {
    uint64_t n = m->n_swapped_blocks;
    for (uint32_t l = 0; l < m->config.n_layers; l++) n += m->layer_blocks[l];
    return n;
}

uint64_t kvf__rows_room(const kvf_manager *m) {
    return room_for(kvf__table_blocks(m), (uint64_t)m->n_seqs * m->seq_tables);
}

kvf_status kvf__check_table_blocks(const kvf_manager *m, const char *call, uint64_t more) {
    uint64_t now = kvf__table_blocks(m), most = m->config.n_table_blocks;
    if (now + more <= most) return KVF_OK;
    return kvf__fail_field(m->error, KVF_E_LIMIT, "n_table_blocks", most, now + more,
                           "%s: the tables hold %llu blocks, and %llu more would be entered", call,
                           (unsigned long long)now, (unsigned long long)more);
}

void kvf__rows_carve(kvf__row_array *r, kvf__slab *slab, size_t n_tables, uint64_t size) {
    r->size = size;
    r->ids = kvf__slab_take(slab, size, sizeof *r->ids);
    r->pages = kvf__slab_take(slab, size, sizeof *r->pages);
    r->at = kvf__slab_take(slab, n_tables, sizeof *r->at);
    r->capacity = kvf__slab_take(slab, n_tables, sizeof *r->capacity);
}

void kvf__rows_init(kvf__row_array *r) {
    kvf__sparse(r->ids, r->size * sizeof *r->ids);
    kvf__sparse(r->pages, r->size * sizeof *r->pages);
    for (uint32_t i = 0; i < FIRST; i++) r->ids[i] = r->pages[i] = KVF_NO_BLOCK;
    r->end = r->high = FIRST;
    r->live = 0;
}

static bool is_live(const kvf__row_array *r, uint64_t header) {
    uint32_t t = r->ids[header];
    return t != KVF_NO_BLOCK && r->at[t] == header + HEADER;
}

/* Moves n entries of a score row; what they leave becomes KVF_NO_BLOCK. The places may overlap. */
static void move_pages(kvf__row_array *r, uint64_t to, uint64_t from, uint32_t n) {
    if (!n || to == from) return;
    memmove(r->pages + to, r->pages + from, n * sizeof *r->pages);
    uint64_t first = from < to ? from : KVF__MAX(from, to + n);
    uint64_t end = from < to ? KVF__MIN(from + n, to) : from + n;
    memset(r->pages + first, 0xff, (end - first) * sizeof *r->pages);
}

/* Moves all rows to the front, over those that no table has any more. */
static void slide(kvf_manager *m) {
    kvf__row_array *r = &m->rows;
    uint64_t to = FIRST, size;
    for (uint64_t from = FIRST; from < r->end; from += size) {
        uint32_t t = r->ids[from];
        size = (uint64_t)HEADER + r->ids[from + 1];
        if (!is_live(r, from)) continue;
        r->at[t] = to + HEADER;
        if (to != from) memmove(r->ids + to, r->ids + from, size * sizeof *r->ids);
        move_pages(r, to + HEADER, from + HEADER, m->n_pages[t] + (m->host_slots ? m->n_host_pages[t] : 0));
        to += size;
    }
    if (kvf__give_back(&m->config.allocator, r->pages + to, (r->high - to) * sizeof *r->pages)) {
        kvf__give_back(&m->config.allocator, r->ids + to, (r->high - to) * sizeof *r->ids);
        r->high = to;
    }
    r->end = to;
    for (int i = 0; i < 2 && !m->config.view_copies; i++) m->views[i].stamp.generation++; /* views of them are stale */
}

/* The capacity that a row of n entries gets, if its table has `held` blocks: what it has been promised fits too. */
static uint32_t room_of(const kvf_manager *m, uint32_t t, uint32_t n, uint32_t held) {
    uint32_t promised = KVF__MIN(held + m->promise[t], m->row_capacity);
    return KVF__MAX(kvf__row_room(m, n), (promised + 1) & ~1u);
}

void kvf__row_grow(kvf_manager *m, uint32_t t, uint32_t n) {
    kvf__row_array *r = &m->rows;
    uint32_t n_before = kvf__n_blocks(m, t), capacity = room_of(m, t, n, n_before);
    uint64_t taken = (uint64_t)HEADER + capacity;
    if (r->end + taken > kvf__rows_limit(r->size, r->live + taken)) slide(m);
    uint64_t at = r->end + HEADER;
    r->ids[r->end] = t;
    r->ids[r->end + 1] = capacity;
    r->end += taken;
    if (r->end > r->high) {
        memset(r->pages + r->high, 0xff, (r->end - r->high) * sizeof *r->pages); /* KVF_NO_BLOCK */
        r->high = r->end;
    }
    memcpy(r->ids + at, r->ids + r->at[t], n_before * sizeof *r->ids);
    memset(r->ids + at + n, 0xff, (capacity - n) * sizeof *r->ids); /* the caller writes those before */
    move_pages(r, at, r->at[t], m->n_pages[t]);
    kvf__row_drop(m, t);
    r->at[t] = at;
    r->capacity[t] = capacity;
    r->live += taken;
}

void kvf__row_fit(kvf_manager *m, uint32_t t, uint32_t n) {
    kvf__row_array *r = &m->rows;
    uint32_t room = room_of(m, t, n, n), before = r->capacity[t];
    if (!n && before) kvf__row_drop(m, t);
    if (!n || before < room + 10) return;
    uint32_t *rest = r->ids + r->at[t] + room;
    rest[0] = KVF_NO_BLOCK; /* a row of no table */
    rest[1] = before - room - HEADER;
    r->ids[r->at[t] - 1] = r->capacity[t] = room;
    r->live -= before - room;
}

void kvf__row_drop(kvf_manager *m, uint32_t t) {
    kvf__row_array *r = &m->rows;
    if (r->capacity[t]) r->live -= (uint64_t)HEADER + r->capacity[t];
    r->at[t] = r->capacity[t] = 0;
}

#define BROKEN(...) kvf__fail(err, KVF_E_CORRUPT, "rows: " __VA_ARGS__)

kvf_status kvf__rows_audit(const kvf_manager *m, kvf_error *err) {
    const kvf__row_array *r = &m->rows;
    uint64_t live = 0, n_live = 0, n_rows = 0, at = FIRST, size;
    for (; at < r->end; at += size) {
        size = (uint64_t)HEADER + r->ids[at + 1];
        if (!is_live(r, at)) continue;
        if (r->capacity[r->ids[at]] + (uint64_t)HEADER != size)
            return BROKEN("table %u: capacity %u, its row has %llu", r->ids[at], r->capacity[r->ids[at]],
                          (unsigned long long)(size - HEADER));
        live += size;
        n_live++;
    }
    for (uint32_t t = 0; t < m->config.max_seqs * m->seq_tables; t++) {
        if ((r->at[t] != 0) != (r->capacity[t] != 0)) return BROKEN("table %u: a place without a capacity", t);
        n_rows += r->at[t] != 0;
    }
    if (at != r->end || r->end > r->size || live != r->live || n_live != n_rows)
        return BROKEN("%llu entries of %llu, %llu in %llu rows; found %llu, %llu in %llu", (unsigned long long)r->end,
                      (unsigned long long)r->size, (unsigned long long)r->live, (unsigned long long)n_rows,
                      (unsigned long long)at, (unsigned long long)live, (unsigned long long)n_live);
    uint64_t n = kvf__table_blocks(m);
    if (n > m->config.n_table_blocks || r->live > kvf__rows_room(m) + m->config.n_blocks)
        return BROKEN("%llu blocks of %llu in tables, in rows of %llu entries", (unsigned long long)n,
                      (unsigned long long)m->config.n_table_blocks, (unsigned long long)r->live);
    return KVF_OK;
}
