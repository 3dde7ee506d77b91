/* The baselines against loops in double precision written from their papers: which positions each head keeps, at the prompt's
 * end and over 50 decode steps, and what values cam leaves. */
#include "baselines_rig.h"

static void try_policy(const char *policy, void (*change)(kvf_policy_options *o)) {
    static const uint32_t gs[] = {1, 3, 4}, ks[] = {1, 3, 8}, budgets[] = {40, 48, 90, 100};
    static world w;
    for (uint64_t seed = 1; seed <= 12; seed++) {
        open_world(&w, policy, gs[seed % 3], seed, seed % 2 ? 1 : 2);
        if (change) change(&w.o);
        live(&w, budgets[seed % 4], ks[seed / 3 % 3]);
        close_world(&w);
    }
}

static void small_window(kvf_policy_options *o) { o->window = o->score_window = 16; }
static void cam_h2o(kvf_policy_options *o) { OK(kvf_policy_options_init(o, sizeof *o, "cam", "h2o", err)); }
static void cam_few(kvf_policy_options *o) { o->cam_tokens = 3; }

Test(policy_baselines, roco_keeps_what_the_paper_says) { try_policy("roco", NULL); }
Test(policy_baselines, snapkv_keeps_what_the_paper_says) {
    try_policy("snapkv", NULL);
    try_policy("snapkv", small_window);
}
Test(policy_baselines, pyramidkv_keeps_what_the_paper_says) { try_policy("pyramidkv", small_window); }
Test(policy_baselines, sirllm_keeps_what_the_paper_says) { try_policy("sirllm", NULL); }
Test(policy_baselines, cam_keeps_and_spreads_what_the_paper_says) {
    try_policy("cam", NULL);
    try_policy("cam", cam_few);
    try_policy("cam", cam_h2o);
}
