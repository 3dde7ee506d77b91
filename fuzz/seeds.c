/* Writes the first inputs of the target gguf into a folder: tiny models without the data of their tensors, which would be
 * most of their bytes and of which only the norms are read. Usage: kvfold-fuzz-seeds FOLDER */
#define _GNU_SOURCE
#include "fuzz/fuzz.h"

static int write_seed(const char *folder, const char *name, const struct tiny_model_params *params) {
    gw w = {0};
    size_t n;
    char path[4096];
    kvf_test_tiny_model(&w, params);
    size_t n_zeros = w.data.n;
    w.data.n = 0;
    unsigned char *bytes = gw_bytes(&w, &n), *seed = malloc(n + 1);
    FUZZ_MUST(seed && n_zeros / 4096 < 255, "a tiny model");
    seed[0] = (unsigned char)(n_zeros / 4096 + 1);
    memcpy(seed + 1, bytes, n);
    FUZZ_MUST(w.n_tensors == 0 || seed[0] > 1, "data");
    for (int whole = 0; whole < 2; whole++) { /* a seed that does not open teaches little */
        kvf_model *model = fuzz_open(bytes, n, (size_t)seed[0] * 4096, whole ? 0 : 1);
        FUZZ_MUST(model || (whole && !w.n_tensors), name);
        kvf_model_close(model);
    }
    int rc =
        snprintf(path, sizeof path, "%s/%s", folder, name) < (int)sizeof path ? gw_write_bytes(path, seed, n + 1) : -1;
    if (rc) perror(path);
    free(bytes);
    free(seed);
    gw_free(&w);
    return rc;
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        struct tiny_model_params params;
    } seeds[] = {
        {"llama_f32", {.n_layers = 1}},
        {"mistral_q8_0", {.arch = "mistral", .weight_type = GW_Q8_0, .n_layers = 1, .sliding_window = 64}},
        {"qwen2_q4_0", {.arch = "qwen2", .weight_type = GW_Q4_0, .n_layers = 1, .separate_output = 1}},
        {"llama_q4_k",
         {.weight_type = GW_Q4_K, .wide_type_p1 = GW_Q6_K + 1, .n_layers = 1, .head_dim = 64, .n_ff = 256}},
        {"rope", {.n_layers = 1, .rope_scaling = "llama3", .rope_factor = 8, .rope_original = 64}},
        {"spm", {.extra = fuzz_spm_keys, .skip = FUZZ_SPM_SKIP}},
    };
    if (argc != 2) {
        fprintf(stderr, "usage: kvfold-fuzz-seeds FOLDER\n");
        return 2;
    }
    for (size_t i = 0; i < sizeof seeds / sizeof *seeds; i++)
        if (write_seed(argv[1], seeds[i].name, &seeds[i].params)) return 1;
    return 0;
}
