/* A device's copies of a manager's two view buffers, kept by what each fill lists alone; whether they are the whole view then. */
#ifndef KVF_TEST_VIEW_MIRROR_H
#define KVF_TEST_VIEW_MIRROR_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kvfold/blockmgr.h"

typedef struct view_mirror {
    unsigned char *arrays[2][KVF_VIEW_ARRAYS];
    uint64_t n_ranges, n_entries; /* that were sent */
} view_mirror;

static inline size_t mirror_word(uint32_t array) {
    return array == KVF_VIEW_ROW_OFFSET ? sizeof(uint64_t) : sizeof(uint32_t);
}

static inline void mirror_open(view_mirror *d, const kvf_manager *m) {
    const kvf_manager_config *c = kvf_manager_get_config(m);
    size_t tables = (size_t)c->max_seqs * c->n_layers * (c->n_kv_heads / c->heads_per_group);
    for (int i = 0; i < 2; i++)
        for (uint32_t a = 0; a < KVF_VIEW_ARRAYS; a++) {
            size_t n = a <= KVF_VIEW_SCORE_ROWS ? kvf_view_row_entries(m)
                       : a <= KVF_VIEW_N_SLOTS  ? tables
                                                : c->max_seqs;
            d->arrays[i][a] = malloc(n * mirror_word(a));
            memset(d->arrays[i][a], 0xff, n * mirror_word(a));
        }
}

static inline void mirror_close(view_mirror *d) {
    for (int i = 0; i < 2; i++)
        for (uint32_t a = 0; a < KVF_VIEW_ARRAYS; a++) free(d->arrays[i][a]);
}

static inline const unsigned char *mirror_source(const kvf_view *v, uint32_t array) {
    const void *const arrays[] = {v->rows, v->score_rows, v->row_offset, v->n_slots, v->next_pos, v->seq_index};
    return arrays[array];
}

/* Sends what the last fill of a buffer lists. NULL, or what is wrong: a list that is out of order, or tells of what has not
 * changed; a copy that is not the view, or a view that is not what the tables are. */
static inline const char *mirror_send(view_mirror *d, const kvf_manager *m, uint32_t which, const kvf_seq *seqs,
                                      const kvf_view *v) {
    kvf_view_changes c = {.struct_size = sizeof c};
    uint64_t n_bytes = 0;
    if (kvf_view_read_changes(m, which, &c) || c.struct_size != sizeof c) return "kvf_view_read_changes";
    for (uint32_t i = 0; i < c.n_ranges; i++) {
        const kvf_view_range *r = &c.ranges[i];
        size_t word = mirror_word(r->array), n = r->n * word;
        unsigned char *to = d->arrays[which][r->array] + r->first * word;
        const unsigned char *from = mirror_source(v, r->array) + r->first * word;
        if (!r->n || (i && r->array < r[-1].array)) return "a range is empty, or out of order";
        if (!memcmp(to, from, word) || !memcmp(to + n - word, from + n - word, word))
            return "a range begins or ends with what was there";
        if (r->array > KVF_VIEW_SCORE_ROWS)
            for (size_t at = 0; at < n; at += word)
                if (!memcmp(to + at, from + at, word)) return "a range has what was there";
        memcpy(to, from, n);
        n_bytes += n;
        d->n_entries += r->n;
    }
    d->n_ranges += c.n_ranges;
    if (n_bytes != c.n_bytes) return "n_bytes is not what was sent";
    uint32_t n_tables = v->n_layers * v->n_groups;
    for (uint32_t a = KVF_VIEW_ROW_OFFSET; a < KVF_VIEW_ARRAYS; a++)
        if (memcmp(d->arrays[which][a], mirror_source(v, a),
                   (a <= KVF_VIEW_N_SLOTS ? v->n_seqs * n_tables : v->n_seqs) * mirror_word(a)))
            return "offsets, slots, positions or indices differ";
    for (uint32_t t = 0; t < v->n_seqs * n_tables; t++) {
        size_t at = v->row_offset[t] * sizeof(uint32_t), n;
        uint32_t n_slots, n_blocks, k = t % n_tables;
        const uint32_t *row;
        if (kvf_seq_table(m, seqs[t / n_tables], k / v->n_groups, k % v->n_groups, &n_slots, &n_blocks, &row))
            return "kvf_seq_table";
        if (v->n_slots[t] != n_slots || memcmp(v->rows + v->row_offset[t], row, n_blocks * sizeof *row))
            return "the view is not what the table is";
        n = n_blocks * sizeof *row;
        if (memcmp(d->arrays[which][KVF_VIEW_ROWS] + at, v->rows + v->row_offset[t], n)) return "a row differs";
        if (memcmp(d->arrays[which][KVF_VIEW_SCORE_ROWS] + at, v->score_rows + v->row_offset[t], n))
            return "a score row differs";
    }
    return NULL;
}

#endif
