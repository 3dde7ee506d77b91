/* GGUF files, opened as a whole and for the tokenizer alone; a file that opens must then tokenize. The first byte of an
 * input says how many times 4 KiB of zeros follow the rest, so that small inputs can have tensors with data. */
#define _GNU_SOURCE
#include "fuzz/fuzz.h"

static void use(const kvf_model *model) {
    static const char text[] = "Hello <|im_end|> w\xc3\xb6rld\n 12 \xff</s>";
    const kvf_tokenizer *tokenizer = kvf_model_tokenizer(model);
    const kvf_model_info *info = kvf_model_get_info(model);
    uint32_t n_vocab = kvf_tokenizer_n_vocab(tokenizer);
    size_t n_ids = 0, most = kvf_tokenizer_max_ids(tokenizer, sizeof text - 1);
    FUZZ_MUST(most <= 8 * sizeof text, "ids of a short text");
    uint32_t *ids = malloc(most * sizeof *ids + 1);
    FUZZ_MUST(ids, "memory");
    char buffer[64];
    FUZZ_MUST(info->n_vocab == n_vocab, "vocabulary");
    for (uint32_t flags = 0; flags < 4; flags++) {
        kvf_status st = kvf_tokenizer_encode(tokenizer, text, sizeof text - 1, flags, ids, most, &n_ids, NULL);
        FUZZ_MUST(st == KVF_OK && n_ids <= most, "encode");
        for (size_t i = 0; i < n_ids; i++) FUZZ_MUST(ids[i] < n_vocab, "an id");
        (void)kvf_tokenizer_decode(tokenizer, ids, n_ids, (int)(flags & 1), buffer, sizeof buffer);
    }
    free(ids);
    for (uint32_t id = 0; id < n_vocab && id < 4096; id++)
        (void)kvf_tokenizer_piece(tokenizer, id, 1, buffer, sizeof buffer);
    kvf_message message = {"user", text, sizeof text - 1};
    char rendered[512];
    (void)!kvf_chat_render(tokenizer, NULL, &message, 1, rendered, sizeof rendered, &n_ids, NULL);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!size) return 0;
    size_t n_zeros = (size_t)data[0] * 4096;
    for (int tokenizer_only = 0; tokenizer_only < 2; tokenizer_only++) {
        kvf_model *model = fuzz_open(data + 1, size - 1, n_zeros, tokenizer_only);
        if (model) use(model);
        kvf_model_close(model);
    }
    return 0;
}
