/* Repetitions: behind a prompt or segment, pieces of it are computed once more, for policies that score slots by them. */
#include "scheduler/sched.h"

typedef struct range {
    uint32_t begin, end;
} range;

/* Tokens of the prompt or segment that is prefilled. */
static range prefilled(const kvf__req *r) {
    const kvf_sched_segment *segment = r->segment < r->n_segments ? &r->segments[r->segment] : NULL;
    return (range){segment && segment->end == r->n_prefill ? segment->begin : 0, r->n_prefill};
}

static uint32_t room_behind(const kvf_sched *s, uint32_t end) {
    uint64_t used = (uint64_t)end + s->config.n_instruction;
    return used < s->config.max_context ? (uint32_t)(s->config.max_context - used) : 0;
}

uint32_t kvf__repeat_piece(const kvf_sched *s, uint32_t piece, uint32_t n_tokens, uint32_t end) {
    return KVF__MIN(KVF__MIN(piece, n_tokens), room_behind(s, end));
}

/* Pieces shrink near the context's end, but not below what tells the model anything. */
kvf_status kvf__repeat_check(kvf_sched *s, const kvf__req *r, uint32_t n_tokens, uint32_t end) {
    uint32_t least = KVF__MIN(n_tokens, KVF_MIN_PIECE_TOKENS), room = room_behind(s, end);
    if (room >= least) return KVF_OK;
    return kvf__fail_field(
        &s->error, KVF_E_NEVER_FITS, "n_prompt", end, 0,
        "policy %s repeats the prompt behind it, where an instruction of %u tokens leaves %u of the "
        "context's %u positions, and a piece has at least %u: shorten the prompt, or raise max_context",
        r->options.ops->name, s->config.n_instruction, room, s->config.max_context, least);
}

bool kvf__repeat_owed(const kvf_sched *s, const kvf__req *r) {
    return r->repetition != KVF__REPEATED && kvf__sched_needs(s, r).piece;
}

bool kvf__repeat_due(const kvf_sched *s, const kvf__req *r) {
    (void)s;
    return r->repetition == KVF__REPEATING;
}

/* The piece that is next, or runs. */
static range piece_of(const kvf_sched *s, const kvf__req *r) {
    range all = prefilled(r);
    uint32_t piece = kvf__sched_needs(s, r).piece; /* 0: the sample that needed it has ended. It goes on */
    uint32_t n = kvf__repeat_piece(s, piece ? piece : UINT32_MAX, all.end - all.begin, all.end);
    return (range){r->n_repeated, KVF__MIN(r->n_repeated + n, all.end)};
}

static uint32_t piece_tokens(const kvf_sched *s, range piece) {
    return s->config.n_instruction + piece.end - piece.begin;
}

/* On the grid of chunks, as prompts. */
uint32_t kvf__repeat_chunk(const kvf_sched *s, const kvf__req *r) {
    uint32_t chunk = s->config.chunk, at = r->n_prefill + r->n_piece;
    return KVF__MIN(piece_tokens(s, piece_of(s, r)) - r->n_piece, chunk - at % chunk);
}

void kvf__repeat_mark_item(const kvf_sched *s, const kvf__req *r, kvf_step_item *item) {
    range piece = piece_of(s, r);
    item->token_begin = r->n_prefill + r->n_piece;
    item->piece_begin = piece.begin;
    item->piece_end = piece.end;
    item->piece_at = r->n_piece;
    item->begins = r->n_piece == 0 && piece.begin == prefilled(r).begin;
}

void kvf__repeat_begin(kvf__req *r) {
    r->repetition = KVF__REPEATING;
    r->n_repeated = prefilled(r).begin;
    r->n_piece = 0;
    r->n_computed = r->n_prefill - 1;
}

/* A complete piece leaves nothing behind; the last one takes the slot of the prompt's last token with it. */
bool kvf__repeat_done(kvf_sched *s, kvf__req *r, uint32_t n_tokens) {
    range piece = piece_of(s, r);
    r->n_piece += n_tokens;
    if (r->n_piece < piece_tokens(s, piece)) return true;
    bool last = piece.end == r->n_prefill;
    kvf_status status = kvf_seq_rollback(s->config.manager, r->seq, r->n_piece + last);
    r->n_repeated = piece.end;
    r->n_piece = 0;
    if (last) r->repetition = KVF__REPEATED;
    return status == KVF_OK; /* else the caller began a compaction, or freed it */
}

void kvf__repeat_forget(kvf__req *r) {
    r->repetition = KVF__UNREPEATED;
    r->n_repeated = r->n_piece = 0;
}
