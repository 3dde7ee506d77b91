/* Repetitions of prompts, for policies that score slots by them: a prompt is computed, then pieces of it once more behind it, each after
 * an instruction (the scheduler plans these as chunks, and takes each piece away); what its queries look at is added up in prompt_max,
 * from which the prompt's events take the scores. */
#include "engine/internal.h"

kvf_status kvf__engine_create_instruction(kvf_engine *e, kvf_error *err) {
    static const char text[] = KVF_REPEAT_INSTRUCTION;
    const kvf_engine_config *c = &e->config;
    if (c->instruction) {
        if (c->n_instruction > KVF_MAX_INSTRUCTION_TOKENS)
            return kvf__fail_field(err, KVF_E_INVALID, "n_instruction", c->n_instruction, 0, "must be at most %u",
                                   KVF_MAX_INSTRUCTION_TOKENS);
        memcpy(e->instruction, c->instruction, c->n_instruction * sizeof *e->instruction);
        e->n_instruction = c->n_instruction;
        return kvf__engine_check_ids(e, e->instruction, e->n_instruction, "instruction token id", err);
    }
    if (!e->tokenizer) return KVF_OK;
    size_t n = 0;
    kvf_status st =
        kvf_tokenizer_encode(e->tokenizer, text, strlen(text), 0, e->instruction, KVF_MAX_INSTRUCTION_TOKENS, &n, err);
    if (st && st != KVF_E_LIMIT) return st;
    e->n_instruction = (uint32_t)n;
    return st ? KVF_OK : kvf__engine_check_ids(e, e->instruction, e->n_instruction, "instruction token id", err);
}

kvf_status kvf__engine_check_repeats(const kvf_engine *e, const kvf_policy_options *o, kvf_error *err) {
    const char *name = e->runner.name ? e->runner.name : "?";
    bool computes = e->runner.device != NULL;
    if (!(kvf_policy_needs(o) & KVF_NEEDS_REPEAT)) return KVF_OK;
    if (!(e->runner.observes & KVF_NEEDS_REPEAT) || (computes && !e->buffer.prompt_max))
        return kvf__fail_value(err, KVF_E_UNSUPPORTED, "policy", o->ops->name,
                               "score repeat: runner %.64s does not repeat prompts", name);
    if (computes && o->score_norm == KVF_SCORE_NORM_OUTPUT && !e->runner.score)
        return kvf__fail_value(err, KVF_E_UNSUPPORTED, "policy", o->ops->name,
                               "score_norm output: runner %.64s has no function score; score_norm none needs none",
                               name);
    if (e->n_instruction > KVF_MAX_INSTRUCTION_TOKENS)
        return kvf__fail_value(
            err, KVF_E_UNSUPPORTED, "policy", o->ops->name,
            "score repeat: its instruction has %u tokens in this vocabulary, at most %u may be: give the "
            "engine an instruction",
            e->n_instruction, KVF_MAX_INSTRUCTION_TOKENS);
    return KVF_OK;
}

static void piece_tokens(const kvf_engine *e, const kvf_step_item *item, uint32_t *tokens) {
    const kvf__live *r = item->user;
    for (uint32_t t = 0; t < item->n_tokens; t++) {
        uint32_t at = item->piece_at + t;
        tokens[t] = at < e->n_instruction ? e->instruction[at] : r->tokens[item->piece_begin + at - e->n_instruction];
    }
}

kvf_status kvf__engine_lay_out_piece(kvf_engine *e, const kvf_step_item *item, uint32_t i, uint32_t *tokens,
                                     kvf_error *err) {
    kvf__live *r = item->user;
    uint32_t end = item->token_begin - item->piece_at;
    piece_tokens(e, item, tokens);
    e->max_begin[i] = kvf__live_segment_at(r, end - 1).begin;
    e->max_end[i] = end;
    kvf__prompt_needs needs = kvf__live_needs(r);
    if (!e->buffer.prompt_max || !(needs.needs & KVF_NEEDS_REPEAT)) return KVF_OK; /* whose policy it was has ended */
    e->max_by_residual[i] = needs.norm == KVF_SCORE_NORM_OUTPUT;
    e->added_max[i] = e->buffer.prompt_max + item->prefill_offset;
    if (!item->begins) return KVF_OK;
    return e->runner.clear(e->runner.ctx, e->added_max[i], e->shape.n_layers * e->shape.n_q_heads,
                           e->config.max_prefill_tokens, item->n_columns, err);
}

kvf_status kvf__engine_score(kvf_engine *e, const kvf_step *step, kvf_error *err) {
    kvf_status st = KVF_OK;
    for (uint32_t i = step->n_decode; i < step->n_items && !st; i++) {
        const kvf_step_item *item = &step->items[i];
        if (!item->prompt_ends || !e->buffer.prompt_max) continue;
        kvf__prompt_needs needs = kvf__live_needs(e->rows[i]);
        if (!(needs.needs & KVF_NEEDS_REPEAT) || needs.norm != KVF_SCORE_NORM_OUTPUT) continue;
        kvf__token_range range = kvf__live_segment_at(e->rows[i], item->token_begin);
        const kvf_repetition r = {.struct_size = sizeof r,
                                  .view = &e->view,
                                  .pages = &e->pages,
                                  .seq = i,
                                  .begin = range.begin,
                                  .end = range.end,
                                  .prompt_max = e->buffer.prompt_max + item->prefill_offset,
                                  .prompt_stride = e->config.max_prefill_tokens};
        st = e->runner.score(e->runner.ctx, &r, err);
    }
    return st;
}
