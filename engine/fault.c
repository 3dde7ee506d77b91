/* Failed steps, and results that are NaN or infinite.
 *
 * A step may fail at any point: after any layer, or between the events of a compaction. The content of the pages of its
 * requests is then unknown. So these requests give up their blocks and are recomputed, as after a preemption
 * (kvf_sched_undo); the results are those of a run without the failure. A request that is alone in a step that keeps failing
 * ends with the error. A device that fails ends all requests. */
#include <stdio.h>

#include "engine/internal.h"

enum { FAILURES_MAX = 3 }; /* of the steps a request is in, without a token in between */

/* ---- A step that failed ------------------------------------------------------------------------------------- */

/* Counts the failure for the requests that ran; if some of them are suspects already, only for these. */
static void count_failure(kvf_engine *e) {
    bool known = false;
    for (const kvf__live *r = e->first; r; r = r->next)
        known |= r->n_failures && !r->idle && kvf_sched_seq(e->sched, r->id);
    for (kvf__live *r = e->first; r; r = r->next)
        r->n_failures += !r->idle && kvf_sched_seq(e->sched, r->id) && (!known || r->n_failures);
}

/* The list is searched again after each end, since a callback may end others. */
static void end_failed(kvf_engine *e, const kvf_error *why) {
    for (kvf__live *r = e->first; r;) {
        if (!e->broken && r->n_failures < FAILURES_MAX) {
            r = r->next;
            continue;
        }
        kvf_error text = {.text = ""};
        if (e->broken)
            kvf__fail_as(&text, e->broken, why);
        else
            kvf__fail(&text, KVF_E_STATE, "its step failed %u times: %.400s", r->n_failures, why->text);
        kvf__live_finish(e, r, KVF_FINISH_ERROR, &text);
        r = e->first;
    }
}

void kvf__engine_take_back(kvf_engine *e, const kvf_error *why) {
    kvf_error unused = {.text = ""};
    kvf_status st = e->broken ? e->broken : kvf__engine_transfers_end(e, &unused);
    if (!st) {
        count_failure(e);
        for (kvf__live *r = e->first; r; r = r->next) r->lost = kvf_sched_seq(e->sched, r->id) != 0;
        st = kvf_sched_undo(e->sched);
        for (kvf__live *r = e->first; r; r = r->next)
            if (r->lost || r->seq) kvf__live_lost(e, r);
        e->stats.n_failed_steps++;
        kvf__log(&e->config.log, KVF_LOG_WARN, "a step failed and is taken back, what ran in it is computed again: %s",
                 why->text);
    }
    /* Those of a plan that nobody was given, to blocks that are free by now, and to the host. */
    if (!st) st = kvf__engine_copies(e, kvf_sched_copies(e->sched), &unused);
    (void)st; /* else the device has failed */
    e->in_step = 0;
    end_failed(e, e->broken ? &e->broken_text : why);
}

/* ---- NaN ---------------------------------------------------------------------------------------------------- */

static kvf_error not_finite(const kvf_engine *e, uint32_t layer) {
    kvf_error why = {.text = ""};
    uint32_t n_layers = e->shape.n_layers;
    char where[64];
    if (layer < n_layers)
        snprintf(where, sizeof where, "in layer %u (of 0 to %u)", layer, n_layers - 1);
    else
        snprintf(where, sizeof where, "in the head (the final norm or the output weights)");
    kvf__fail(
        &why, KVF_E_CORRUPT,
        "NaN or an infinite number %s: the model's weights there are damaged, or leave the range of floats; check "
        "the file",
        where);
    return why;
}

/* Ends them before anything of theirs is stored or used by a policy. If the prompt of held samples ends, the next sample takes over the
 * step's item, and ends too. */
void kvf__engine_end_not_finite(kvf_engine *e, const kvf_step *step) {
    for (uint32_t i = 0; i < step->n_items; i++) {
        if (e->not_finite[i] == KVF_FINITE || !e->rows[i]) continue;
        const kvf_step_item *item = &step->items[i];
        kvf_error why = not_finite(e, e->not_finite[i]);
        do {
            kvf__live_finish(e, item->user, KVF_FINISH_ERROR, &why);
        } while (kvf_sched_seq(e->sched, item->request));
    }
    for (uint32_t i = 0; i < step->n_items; i++) e->not_finite[i] = e->rows[i] ? KVF_FINITE : 0;
}
