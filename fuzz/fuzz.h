/* fuzz/fuzz.h: shared by the targets: FUZZ_MUST, a file made of bytes, tiny models.
 *
 * Before any #include a target defines _GNU_SOURCE, for memfd_create.
 */
#ifndef KVF_FUZZ_FUZZ_H
#define KVF_FUZZ_FUZZ_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kvfold/model.h"
#include "tests/gguf_writer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);

/* A crash, which the fuzzer reports with the input. */
#define FUZZ_MUST(condition, what)                                                    \
    do {                                                                              \
        if (!(condition)) {                                                           \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, what, #condition); \
            abort();                                                                  \
        }                                                                             \
    } while (0)

/* Opens bytes, followed by n_zeros of them, as a model file. NULL when that was refused, with a text. */
static inline kvf_model *fuzz_open(const void *data, size_t n, size_t n_zeros, int tokenizer_only) {
    char path[64];
    kvf_error err = {.text = ""};
    kvf_model *model = NULL;
    int fd = memfd_create("kvfold-fuzz", MFD_CLOEXEC);
    FUZZ_MUST(fd >= 0 && write(fd, data, n) == (ssize_t)n && ftruncate(fd, (off_t)(n + n_zeros)) == 0, "memory file");
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    kvf_model_config config = {.struct_size = sizeof config, .tokenizer_only = tokenizer_only};
    kvf_status st = kvf_model_open(path, &config, &model, &err);
    close(fd);
    FUZZ_MUST((st == KVF_OK) == (model != NULL), kvf_status_name(st));
    FUZZ_MUST(!st || err.text[0], kvf_status_name(st));
    return model;
}

static inline kvf_model *fuzz_open_tiny(const struct tiny_model_params *params) {
    gw w = {0};
    size_t n;
    kvf_test_tiny_model(&w, params);
    unsigned char *bytes = gw_bytes(&w, &n);
    kvf_model *model = fuzz_open(bytes, n, 0, 1);
    FUZZ_MUST(model, "the tiny model");
    free(bytes);
    gw_free(&w);
    return model;
}

/* ---- A SentencePiece vocabulary, without tensors ------------------------------------------------------------ */

#define FUZZ_SPM_SKIP                                                                          \
    "tokenizer.ggml.model tokenizer.ggml.pre tokenizer.ggml.tokens tokenizer.ggml.token_type " \
    "tokenizer.ggml.merges tokenizer.ggml.bos_token_id tokenizer.ggml.eos_token_id "           \
    "tokenizer.ggml.add_bos_token llama.vocab_size tokenizer.chat_template"

static inline void fuzz_spm_keys(gw *w, void *ctx) {
    static const char *const words[] = {"\xe2\x96\x81",
                                        "\xe2\x96\x81\xe2\x96\x81",
                                        "t",
                                        "h",
                                        "e",
                                        "a",
                                        "he",
                                        "the",
                                        "\xe2\x96\x81the",
                                        "\342\226\201a",
                                        "\xc3\xa9",
                                        "aa",
                                        "[INST]",
                                        "[/INST]",
                                        "<tool>",
                                        "  ",
                                        "\xe2\x96\x81t<"};
    enum { N_WORDS = sizeof words / sizeof *words, N = 259 + N_WORDS, USER_DEFINED = N - 3 };
    char store[259][8];
    const char *texts[N];
    (void)ctx;
    for (unsigned i = 0; i < N; i++) {
        texts[i] = i < 259 ? store[i] : words[i - 259];
        if (i < 3) strcpy(store[i], i == 0 ? "<unk>" : i == 1 ? "<s>" : "</s>");
        if (i >= 3 && i < 259) snprintf(store[i], sizeof store[i], "<0x%02X>", (i - 3) & 255);
    }
    gw_key_text(w, "tokenizer.ggml.model", "llama");
    gw_key_texts(w, "tokenizer.ggml.tokens", texts, N);
    gw_key_array(w, "tokenizer.ggml.scores", GW_FLOAT, N);
    for (int i = 0; i < N; i++) gw_put(&w->keys, &(float){i < 259 ? 0 : 258.0f - (float)i}, sizeof(float));
    gw_key_array(w, "tokenizer.ggml.token_type", GW_I32, N);
    for (uint32_t i = 0; i < N; i++)
        gw_put32(&w->keys, i == 0 ? 2 : i < 3 ? 3 : i < 259 ? 6 : i < USER_DEFINED ? 1 : 4);
    gw_key_u32(w, "tokenizer.ggml.unknown_token_id", 0);
    gw_key_u32(w, "tokenizer.ggml.bos_token_id", 1);
    gw_key_u32(w, "tokenizer.ggml.eos_token_id", 2);
    gw_key_text(w, "tokenizer.chat_template", "{{ bos_token + '[INST] ' + content + ' [/INST]' + eos_token }}");
    w->infos.n = w->data.n = 0; /* without tensors there is no embedding whose rows would have to agree */
    w->n_tensors = 0;
}

#endif
