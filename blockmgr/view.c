/* The view of a batch in all layers, in one of two buffers. With view_copies each buffer has rows of its own and lists what a
 * fill has changed in them. */
#include "blockmgr/manager.h"

/* ---- The slab ------------------------------------------------------------------------------------------ */

static void carve_copy(kvf__row_copy *c, kvf__slab *slab, size_t n_tables) {
    c->known = kvf__slab_take(slab, n_tables, sizeof *c->known);
    c->filled = kvf__slab_take(slab, n_tables, sizeof *c->filled);
}

void kvf__views_carve(kvf_manager *m, kvf__slab *slab, size_t n_tables) {
    size_t n_seqs = m->config.max_seqs;
    for (int i = 0; i < 2; i++) {
        kvf__view_buffer *v = &m->views[i];
        v->row_offset = kvf__slab_take(slab, n_tables, sizeof *v->row_offset);
        v->n_slots = kvf__slab_take(slab, n_tables, sizeof *v->n_slots);
        v->next_pos = kvf__slab_take(slab, n_seqs, sizeof *v->next_pos);
        v->seq_index = kvf__slab_take(slab, n_seqs, sizeof *v->seq_index);
        if (!m->config.view_copies) continue;
        kvf__rows_carve(&v->rows, slab, n_tables, m->view_rows_size);
        carve_copy(&v->blocks, slab, n_tables);
        carve_copy(&v->pages, slab, n_tables);
        /* At most, for each table: a row, a score row, its offset, n_slots; for each sequence: next_pos, seq_index. */
        v->ranges = kvf__slab_take(slab, 4 * n_tables + 2 * n_seqs, sizeof *v->ranges);
    }
}

/* No table has a row any more. */
static void clear_rows(const kvf_manager *m, kvf__view_buffer *v) {
    size_t n_tables = (size_t)m->n_seqs_max * m->seq_tables; /* others never had one */
    uint32_t *const arrays[] = {v->rows.capacity, v->blocks.known, v->blocks.filled, v->pages.known, v->pages.filled};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) memset(arrays[i], 0, n_tables * sizeof *arrays[i]);
    memset(v->rows.at, 0, n_tables * sizeof *v->rows.at);
    v->rows.end = 0;
}

static void init_buffer(const kvf_manager *m, kvf__view_buffer *v) {
    size_t n_seqs = m->config.max_seqs, n_tables = n_seqs * m->seq_tables;
    clear_rows(m, v);
    v->rows.high = 0;
    memset(v->row_offset, 0xff, n_tables * sizeof *v->row_offset);
    memset(v->n_slots, 0xff, n_tables * sizeof *v->n_slots);
    memset(v->next_pos, 0xff, n_seqs * sizeof *v->next_pos);
    memset(v->seq_index, 0xff, n_seqs * sizeof *v->seq_index);
    v->n_ranges = 0;
    v->n_bytes = 0;
    v->stamp.generation++; /* views of it are stale: the ids are gone */
}

void kvf__views_init(kvf_manager *m) {
    for (int i = 0; i < 2; i++) {
        kvf__sparse(m->views[i].rows.ids, m->views[i].rows.size * sizeof(uint32_t));
        kvf__sparse(m->views[i].rows.pages, m->views[i].rows.size * sizeof(uint32_t));
        init_buffer(m, &m->views[i]);
    }
}

void kvf__views_cut(kvf_manager *m, uint32_t t, uint32_t n_blocks, uint32_t n_pages) {
    for (int i = 0; i < 2; i++) {
        kvf__view_buffer *v = &m->views[i];
        v->blocks.known[t] = KVF__MIN(v->blocks.known[t], n_blocks);
        v->pages.known[t] = KVF__MIN(v->pages.known[t], n_pages);
    }
}

/* ---- Fill ------------------------------------------------------------------------------------------------ */

/* Adds changed entries to the list; entries next to the last range are merged into it. */
static void note(kvf__view_buffer *v, kvf_view_array array, uint64_t first, uint32_t n) {
    kvf_view_range *last = v->n_ranges ? &v->ranges[v->n_ranges - 1] : NULL;
    v->n_bytes += (uint64_t)n * (array == KVF_VIEW_ROW_OFFSET ? sizeof(uint64_t) : sizeof(uint32_t));
    if (last && last->array == (uint32_t)array && last->first + last->n == first && last->n <= UINT32_MAX - n) {
        last->n += n;
    } else {
        v->ranges[v->n_ranges++] = (kvf_view_range){first, n, (uint32_t)array};
    }
}

static uint32_t index_at(const kvf_seq *seqs, uint32_t i) { return kvf__seq_index(seqs[i]); }

/* Gives a table's row n entries at the end. It will be compared, over its whole capacity, with what lies there. */
static void place_row(const kvf_manager *m, kvf__view_buffer *v, uint32_t t, uint32_t n) {
    kvf__row_array *r = &v->rows;
    r->at[t] = r->end;
    r->capacity[t] = kvf__row_room(m, n);
    r->end += r->capacity[t];
    v->blocks.known[t] = v->pages.known[t] = 0;
    v->blocks.filled[t] = v->pages.filled[t] = r->capacity[t];
    if (r->end <= v->rows.high) return;
    memset(r->ids + v->rows.high, 0xff, (r->end - v->rows.high) * sizeof *r->ids); /* as a device's copy begins */
    memset(r->pages + v->rows.high, 0xff, (r->end - v->rows.high) * sizeof *r->pages);
    v->rows.high = r->end;
}

/* Gives the batch's rows the room that they need. */
static void place_rows(const kvf_manager *m, kvf__view_buffer *v, const kvf_seq *seqs, uint32_t n_seqs) {
    uint64_t more = 0;
    for (uint32_t i = 0; i < n_seqs; i++)
        for (uint32_t k = 0, t = index_at(seqs, i) * m->seq_tables; k < m->seq_tables; k++, t++)
            if (kvf__n_blocks(m, t) > v->rows.capacity[t]) more += kvf__row_room(m, kvf__n_blocks(m, t));
    if (!more) return;
    if (v->rows.end + more > kvf__rows_limit(v->rows.size, kvf__rows_room(m))) clear_rows(m, v);
    for (uint32_t i = 0; i < n_seqs; i++)
        for (uint32_t k = 0, t = index_at(seqs, i) * m->seq_tables; k < m->seq_tables; k++, t++)
            if (kvf__n_blocks(m, t) > v->rows.capacity[t]) place_row(m, v, t, kvf__n_blocks(m, t));
}

/* Copies a table's row of n entries, with KVF_NO_BLOCK after them, and lists one range from the first changed entry to the
 * last one. */
static void copy_row(kvf__view_buffer *v, kvf_view_array array, uint32_t *copies, kvf__row_copy *c, const uint32_t *row,
                     uint32_t t, uint32_t n) {
    uint64_t at = v->rows.at[t];
    uint32_t *copy = copies + at, first = c->known[t], end = KVF__MAX(n, c->filled[t]);
    c->known[t] = c->filled[t] = n;
    while (end > n && first < end && copy[end - 1] == KVF_NO_BLOCK) end--;
    while (end <= n && first < end && copy[end - 1] == row[end - 1]) end--;
    while (first < KVF__MIN(n, end) && copy[first] == row[first]) first++;
    while (first >= n && first < end && copy[first] == KVF_NO_BLOCK) first++;
    if (first == end) return;
    uint32_t n_ids = KVF__MIN(n, end) - KVF__MIN(n, first);
    memcpy(copy + first, row + first, n_ids * sizeof *row);
    memset(copy + first + n_ids, 0xff, (end - first - n_ids) * sizeof *row); /* KVF_NO_BLOCK */
    note(v, array, at + first, end - first);
}

static void copy_word(kvf__view_buffer *v, kvf_view_array array, uint32_t *words, uint32_t at, uint32_t word) {
    if (words[at] == word) return;
    words[at] = word;
    note(v, array, at, 1);
}

/* Fills array by array, so that adjacent changes become one range. */
static void fill_copies(kvf_manager *m, kvf__view_buffer *v, const kvf_seq *seqs, uint32_t n_seqs) {
    uint32_t n = m->seq_tables;
    v->n_ranges = 0;
    v->n_bytes = 0;
    place_rows(m, v, seqs, n_seqs);
    for (uint32_t i = 0; i < n_seqs; i++)
        for (uint32_t k = 0, t = index_at(seqs, i) * n; k < n; k++, t++)
            copy_row(v, KVF_VIEW_ROWS, v->rows.ids, &v->blocks, kvf__row(m, t), t, kvf__n_blocks(m, t));
    for (uint32_t i = 0; i < n_seqs; i++)
        for (uint32_t k = 0, t = index_at(seqs, i) * n; k < n; k++, t++)
            copy_row(v, KVF_VIEW_SCORE_ROWS, v->rows.pages, &v->pages, kvf__score_row(m, t), t, m->n_pages[t]);
    for (uint32_t i = 0; i < n_seqs; i++)
        for (uint32_t k = 0, t = index_at(seqs, i) * n; k < n; k++, t++) {
            if (v->row_offset[i * n + k] == v->rows.at[t]) continue;
            v->row_offset[i * n + k] = v->rows.at[t];
            note(v, KVF_VIEW_ROW_OFFSET, i * n + k, 1);
        }
    for (uint32_t i = 0; i < n_seqs; i++)
        for (uint32_t k = 0, t = index_at(seqs, i) * n; k < n; k++, t++)
            copy_word(v, KVF_VIEW_N_SLOTS, v->n_slots, i * n + k, m->n_slots[t]);
    for (uint32_t i = 0; i < n_seqs; i++)
        copy_word(v, KVF_VIEW_NEXT_POS, v->next_pos, i, m->seqs[index_at(seqs, i)].next_pos);
    for (uint32_t i = 0; i < n_seqs; i++) copy_word(v, KVF_VIEW_SEQ_INDEX, v->seq_index, i, index_at(seqs, i));
}

static void fill(const kvf_manager *m, const kvf__view_buffer *v, const kvf_seq *seqs, uint32_t n_seqs) {
    for (uint32_t i = 0; i < n_seqs; i++) {
        uint32_t index = index_at(seqs, i), n = m->seq_tables, first = index * n;
        v->seq_index[i] = index;
        v->next_pos[i] = m->seqs[index].next_pos;
        memcpy(v->row_offset + (size_t)i * n, m->rows.at + first, n * sizeof *v->row_offset);
        memcpy(v->n_slots + (size_t)i * n, m->n_slots + first, n * sizeof *v->n_slots);
    }
}

/* All checks, before the buffer changes. */
static kvf_status check(const kvf_manager *m, uint32_t which, const kvf_seq *seqs, uint32_t n_seqs,
                        const kvf_view *out) {
    if (which > 1) return kvf__fail(m->error, KVF_E_INVALID, "which %u: must be 0 or 1", which);
    if (!kvf__output_is_valid(out))
        return kvf__fail(m->error, KVF_E_INVALID, "out: must be given, its struct_size set to sizeof(kvf_view)");
    if (n_seqs && !seqs) return kvf__fail(m->error, KVF_E_INVALID, "seqs: is NULL");
    if (n_seqs > m->config.max_seqs)
        return kvf__fail(m->error, KVF_E_LIMIT, "n_seqs %u: must be at most max_seqs %u", n_seqs, m->config.max_seqs);
    uint32_t index = 0;
    for (uint32_t i = 0; i < n_seqs; i++) {
        kvf_status s = kvf__seq_find(m, seqs[i], &index);
        if (s) return s;
        if (m->seqs[index].swapped) return kvf__fail_swapped(m, "view");
    }
    return KVF_OK;
}

kvf_status kvf_view_fill(kvf_manager *manager, uint32_t which, const kvf_seq *seqs, uint32_t n_seqs, kvf_view *out) {
    if (!manager) return KVF_E_INVALID;
    kvf_status s = check(manager, which, seqs, n_seqs, out);
    if (s) return s;
    bool copies = manager->config.view_copies != 0;
    kvf__view_buffer *v = &manager->views[which];
    if (copies) {
        fill_copies(manager, v, seqs, n_seqs);
    } else {
        fill(manager, v, seqs, n_seqs);
    }
    const kvf_view view = {.struct_size = sizeof view,
                           .n_seqs = n_seqs,
                           .n_layers = manager->config.n_layers,
                           .n_groups = manager->n_groups,
                           .heads_per_group = manager->config.heads_per_group,
                           .block_size = manager->config.block_size,
                           .rows = copies ? v->rows.ids : manager->rows.ids,
                           .score_rows = copies ? v->rows.pages : manager->rows.pages,
                           .row_offset = v->row_offset,
                           .n_slots = v->n_slots,
                           .next_pos = v->next_pos,
                           .seq_index = v->seq_index,
                           .stamp = &v->stamp,
                           .generation = v->stamp.generation + 1};
    v->stamp = (struct kvf_view_stamp){view.generation, manager->config.n_blocks, view};
    kvf__output(out, &view, sizeof view);
    return KVF_OK;
}

uint64_t kvf_view_row_entries(const kvf_manager *manager) { return manager ? manager->view_rows_size : 0; }

/* ---- What has changed -------------------------------------------------------------------------------------- */

static kvf_status check_copies(const kvf_manager *m, uint32_t which) {
    if (!m) return KVF_E_INVALID;
    if (which > 1) return kvf__fail(m->error, KVF_E_INVALID, "which %u: must be 0 or 1", which);
    if (m->config.view_copies) return KVF_OK;
    return kvf__fail(m->error, KVF_E_UNSUPPORTED, "view_copies 0: this manager's views have no rows of their own");
}

kvf_status kvf_view_read_changes(const kvf_manager *manager, uint32_t which, kvf_view_changes *out) {
    kvf_status s = check_copies(manager, which);
    if (s) return s;
    if (!kvf__output_is_valid(out))
        return kvf__fail(manager->error, KVF_E_INVALID,
                         "out: must be given, its struct_size set to sizeof(kvf_view_changes)");
    const kvf__view_buffer *v = &manager->views[which];
    kvf__output(out, &(kvf_view_changes){0, v->ranges, v->n_ranges, v->n_bytes}, sizeof *out);
    return KVF_OK;
}

kvf_status kvf_view_forget(kvf_manager *manager, uint32_t which) {
    kvf_status s = check_copies(manager, which);
    if (!s) init_buffer(manager, &manager->views[which]);
    return s;
}

/* ---- Audit --------------------------------------------------------------------------------------------------- */

static kvf_status check_copy(const kvf__row_copy *c, const uint32_t *copy, uint32_t capacity, const uint32_t *row,
                             const char *what, uint32_t t, uint32_t n, kvf_error *err) {
    if (c->known[t] > n || c->known[t] > c->filled[t] || c->filled[t] > capacity)
        return kvf__fail(err, KVF_E_CORRUPT, "view: %s %u: known %u of %u, filled %u", what, t, c->known[t], n,
                         c->filled[t]);
    for (uint32_t i = 0; i < capacity; i++)
        if ((i < c->known[t] && copy[i] != row[i]) || (i >= c->filled[t] && copy[i] != KVF_NO_BLOCK))
            return kvf__fail(err, KVF_E_CORRUPT, "view: %s %u: entry %u is %u, known are %u", what, t, i, copy[i],
                             c->known[t]);
    return KVF_OK;
}

kvf_status kvf__views_audit(const kvf_manager *m, kvf_error *err) {
    kvf_status s = KVF_OK;
    for (int i = 0; i < 2; i++)
        for (uint32_t t = 0; !s && t < m->config.max_seqs * m->seq_tables; t++) {
            const kvf__view_buffer *v = &m->views[i];
            uint64_t at = v->rows.at[t], end = at + v->rows.capacity[t];
            if (end > v->rows.end || v->rows.end > v->rows.high || v->rows.high > v->rows.size)
                return kvf__fail(err, KVF_E_CORRUPT, "view: row %u: ends at %llu of %llu", t, (unsigned long long)end,
                                 (unsigned long long)v->rows.end);
            s = check_copy(&v->blocks, v->rows.ids + at, v->rows.capacity[t], kvf__row(m, t), "row", t,
                           kvf__n_blocks(m, t), err);
            if (!s)
                s = check_copy(&v->pages, v->rows.pages + at, v->rows.capacity[t], kvf__score_row(m, t), "score row", t,
                               m->n_pages[t], err);
        }
    return s;
}
