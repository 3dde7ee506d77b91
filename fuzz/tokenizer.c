/* Text to ids and back, and dialogues, with byte-level BPE vocabularies of every pre-tokenizer and a SentencePiece one. The
 * first byte of an input chooses the vocabulary and the flags; the rest is text. */
#define _GNU_SOURCE
#include "fuzz/fuzz.h"

enum { N_BPE = 5, N_MODELS = N_BPE + 1, N_FLAGS = 4 };

static kvf_model *models[N_MODELS];

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    static const char *const pre_names[N_BPE] = {"smollm", "gpt-2", "default", "llama-bpe", "qwen2"};
    (void)argc, (void)argv;
    for (int i = 0; i < N_BPE; i++) models[i] = fuzz_open_tiny(&(struct tiny_model_params){.pre = pre_names[i]});
    models[N_BPE] = fuzz_open_tiny(&(struct tiny_model_params){.extra = fuzz_spm_keys, .skip = FUZZ_SPM_SKIP});
    return 0;
}

/* How many ids there are does not depend on the room, and bytes that BPE encodes come back. */
static void encode(const kvf_tokenizer *t, const char *text, size_t n, uint32_t flags, bool bpe) {
    size_t n_ids = 0, n_less = 0, most = kvf_tokenizer_max_ids(t, n);
    uint32_t *ids = malloc(most * sizeof *ids + 1), *less = malloc(most * sizeof *less + 1);
    FUZZ_MUST(ids && less, "memory");
    FUZZ_MUST(kvf_tokenizer_encode(t, text, n, flags, ids, most, &n_ids, NULL) == KVF_OK && n_ids <= most, "encode");
    FUZZ_MUST(n_ids >= kvf_tokenizer_min_ids(t, text, n), "fewer ids than there can be");
    for (size_t i = 0; i < n_ids; i++) FUZZ_MUST(ids[i] < kvf_tokenizer_n_vocab(t), "an id");
    if (n_ids) {
        FUZZ_MUST(kvf_tokenizer_encode(t, text, n, flags, less, n_ids - 1, &n_less, NULL) == KVF_E_LIMIT, "no room");
        FUZZ_MUST(n_less == n_ids, "as many ids as with room");
    }
    size_t n_back = kvf_tokenizer_decode(t, ids, n_ids, 1, NULL, 0);
    char *back = malloc(n_back + 1);
    FUZZ_MUST(back && kvf_tokenizer_decode(t, ids, n_ids, 1, back, n_back) == n_back, "decode");
    if (bpe && !(flags & KVF_ENCODE_BOS)) FUZZ_MUST(n_back == n && !memcmp(back, text, n), "the same text");
    free(back);
    free(less);
    free(ids);
}

static void decode_any(const kvf_tokenizer *t, const char *bytes, size_t n) {
    uint32_t ids[64];
    char buffer[32];
    size_t n_ids = n / 2 < 64 ? n / 2 : 64;
    for (size_t i = 0; i < n_ids; i++)
        ids[i] = (uint32_t)(unsigned char)bytes[2 * i] << 8 | (unsigned char)bytes[2 * i + 1];
    (void)kvf_tokenizer_decode(t, ids, n_ids, (int)(n & 1), buffer, sizeof buffer);
}

/* A content writes no control token, whatever it says. */
static void dialogue(const kvf_tokenizer *t, const char *text, size_t n) {
    static const char *const names[] = {"auto", "chatml", "llama2", "llama3", "mistral", "none"};
    static const char *const controls[] = {"<|im_start|>", "<|im_end|>", "<s>", "</s>"};
    for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
        size_t n_bytes = 0, n_ids[2] = {0, 0}, n_found[2][4] = {{0}};
        kvf_status rendered, st = KVF_OK;
        kvf_message messages[3] = {{"system", "Be brief.", 9}, {"user", text, n}, {"user", "a", 1}};
        rendered = kvf_chat_render(t, names[k], messages, 2, NULL, 0, &n_bytes, NULL);
        if (rendered != KVF_E_LIMIT) continue;
        size_t most = kvf_tokenizer_max_ids(t, n_bytes) + 64; /* the plain dialogue may be the longer one */
        uint32_t *ids = malloc(most * sizeof *ids);
        FUZZ_MUST(ids, "memory");
        for (int plain = 0; plain < 2; plain++) {
            if (plain) messages[1] = messages[2];
            st = kvf_chat_encode(t, names[k], messages, 2, ids, plain ? most : most - 64, &n_ids[plain], NULL);
            FUZZ_MUST(st == KVF_OK, names[k]);
            for (size_t i = 0; i < n_ids[plain]; i++)
                for (size_t c = 0; c < 4; c++) n_found[plain][c] += ids[i] == kvf_tokenizer_find(t, controls[c]);
        }
        FUZZ_MUST(!memcmp(n_found[0], n_found[1], sizeof n_found[0]), "control tokens of the template alone");
        free(ids);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!size) return 0;
    uint32_t which = data[0] % N_MODELS, flags = data[0] / N_MODELS % N_FLAGS;
    const kvf_tokenizer *t = kvf_model_tokenizer(models[which]);
    const char *text = (const char *)data + 1;
    encode(t, text, size - 1, flags, which < N_BPE);
    decode_any(t, text, size - 1);
    dialogue(t, text, size - 1);
    return 0;
}
