/* tests/tiny_models.h: the tiny models that tests/data/tiny_logits.json has the logits of. A change here, or in what
 * gguf_writer.h writes, needs new ones: python3 scripts/tiny_reference.py --make tests/data/tiny_logits.json */
#ifndef KVF_TESTS_TINY_MODELS_H
#define KVF_TESTS_TINY_MODELS_H

#include "tests/open_tiny.h"

enum { TINY_TOKENS = 24 };

/* Every weight type; and two in one file, as "Q4_K_M" files have them. Rows of the types with 256 elements a block are
 * longer. */
#define TINY_KIND(arch_, type_, seed_)                                                \
    {                                                                                 \
        arch_ "_" #type_, { .arch = arch_, .weight_type = GW_##type_, .seed = seed_ } \
    }
#define TINY_K_KIND(arch_, name_, type_, wide_, seed_)                                                    \
    {                                                                                                     \
        arch_ "_" name_, {                                                                                \
            .arch = arch_, .weight_type = type_, .wide_type_p1 = wide_ + 1, .seed = seed_, .n_layers = 1, \
            .n_q_heads = 4, .head_dim = 64, .n_ff = 256, .separate_output = wide_ != type_                \
        }                                                                                                 \
    }
#define TINY_KINDS(arch, seed)                                                                                        \
    TINY_KIND(arch, F32, seed), TINY_KIND(arch, F16, seed + 1), TINY_KIND(arch, BF16, seed + 2),                      \
        TINY_KIND(arch, Q8_0, seed + 3), TINY_KIND(arch, Q4_0, seed + 4), TINY_KIND(arch, Q4_1, seed + 5),            \
        TINY_KIND(arch, Q5_0, seed + 6), TINY_KIND(arch, Q5_1, seed + 7),                                             \
        TINY_K_KIND(arch, "Q4_K", GW_Q4_K, GW_Q4_K, seed + 8), TINY_K_KIND(arch, "Q5_K", GW_Q5_K, GW_Q5_K, seed + 9), \
        TINY_K_KIND(arch, "Q6_K", GW_Q6_K, GW_Q6_K, seed + 10),                                                       \
        TINY_K_KIND(arch, "Q4_K_M", GW_Q4_K, GW_Q6_K, seed + 11)

static const struct tiny_case {
    const char *name;
    struct tiny_model_params params;
} tiny_cases[] = {
    {"f32", {.weight_type = GW_F32, .seed = 1, .skip = "tokenizer.chat_template"}},
    {"f16", {.weight_type = GW_F16, .seed = 2, .n_q_heads = 6, .n_kv_heads = 2, .head_dim = 16, .n_ff = 80}},
    {"q8_0", {.weight_type = GW_Q8_0, .seed = 3, .separate_output = 1}},
    {"q4_0", {.weight_type = GW_Q4_0, .seed = 4, .embd_type_p1 = GW_Q8_0 + 1, .rope_base = 500000}},
    {"q4_1", {.weight_type = GW_Q4_1, .seed = 5, .n_layers = 3, .n_q_heads = 8, .n_kv_heads = 1, .head_dim = 8}},
    {"rope_freqs", {.weight_type = GW_F32, .seed = 6, .rope_freqs = 1, .separate_output = 1, .n_kv_heads = 4}},
    TINY_KINDS("llama", 100),
    TINY_KINDS("mistral", 200),
    TINY_KINDS("qwen2", 300),
    {"qwen2_separate", {.arch = "qwen2", .weight_type = GW_F16, .seed = 7, .separate_output = 1, .n_kv_heads = 1}},
    {"qwen2_rope_freqs", {.arch = "qwen2", .weight_type = GW_F32, .seed = 8, .rope_freqs = 1}},
    {"own_head_dim", {.arch = "mistral", .weight_type = GW_Q8_0, .seed = 9, .n_embd = 96, .head_dim = 32}},
    {"rope_linear", {.weight_type = GW_F32, .seed = 10, .rope_scaling = "linear", .rope_factor = 4}},
    {"rope_scale_linear", {.weight_type = GW_F32, .seed = 11, .rope_linear = 8, .rope_freqs = 1}},
    {"rope_llama3",
     {.weight_type = GW_F32, .seed = 12, .rope_scaling = "llama3", .rope_factor = 8, .rope_original = 64}},
    {"sliding_window", {.arch = "mistral", .weight_type = GW_F32, .seed = 13, .sliding_window = TINY_TOKENS}},
};

enum { TINY_CASES = sizeof tiny_cases / sizeof *tiny_cases };

/* The prompt of every case. */
static inline uint32_t tiny_token(uint32_t i) { return (i * 37 + 11) % TINY_N_VOCAB; }
static inline void tiny_tokens(uint32_t *ids, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) ids[i] = tiny_token(i);
}

#endif
