/* Tokens that stand for themselves in a text: user-defined ones in any text, control tokens where asked for; the begin
 * token, which is there once; marks that end an answer, whatever type the file gives them. */
#define _DEFAULT_SOURCE
#include "model/tokenizer.h"
#include "tests/open_tiny.h"
#include "tests/spm_vocabulary.h"

/* ---- Byte-level vocabularies ---------------------------------------------------------------------------- */

enum { FIRST = 256, MAX_MORE = 12 };

/* The 256 bytes, then these tokens: ids FIRST and on. */
typedef struct byte_vocabulary {
    const char *texts[MAX_MORE];
    int types[MAX_MORE]; /* 0: normal */
    bool no_types;
    const char *bos, *eos, *chat, *pre;
    bool no_bos; /* add_bos_token false */
    const char *merges[4];
} byte_vocabulary;

static uint32_t id_of(const byte_vocabulary *v, const char *text) {
    uint32_t i = 0;
    while (strcmp(v->texts[i], text)) i++;
    return FIRST + i;
}

static void write_bytes(gw *w, void *ctx) {
    const byte_vocabulary *v = ctx;
    char bytes[256][3];
    const char *texts[FIRST + MAX_MORE];
    size_t n = 0, n_merges = 0;
    for (; n < FIRST; n++) gw_byte_text((unsigned)n, bytes[n]), texts[n] = bytes[n];
    for (; n < FIRST + MAX_MORE && v->texts[n - FIRST]; n++) texts[n] = v->texts[n - FIRST];
    while (n_merges < 4 && v->merges[n_merges]) n_merges++;
    gw_key_texts(w, "tokenizer.ggml.tokens", texts, n);
    if (!v->no_types && gw_key_array(w, "tokenizer.ggml.token_type", GW_I32, n))
        for (size_t i = 0; i < n; i++)
            gw_put32(&w->keys, i >= FIRST && v->types[i - FIRST] ? (uint32_t)v->types[i - FIRST] : NORMAL);
    gw_key_texts(w, "tokenizer.ggml.merges", v->merges, n_merges);
    if (v->bos) gw_key_u32(w, "tokenizer.ggml.bos_token_id", id_of(v, v->bos));
    if (v->eos) gw_key_u32(w, "tokenizer.ggml.eos_token_id", id_of(v, v->eos));
    w->infos.n = w->data.n = 0;
    w->n_tensors = 0;
}

static kvf_model *open_bytes(const byte_vocabulary *v) {
    return open_tiny_words(&(struct tiny_model_params){
        .extra = write_bytes,
        .ctx = (void *)(uintptr_t)v,
        .pre = v->pre,
        .add_bos = !v->no_bos,
        .chat_template = v->chat,
        .skip = "tokenizer.ggml.tokens tokenizer.ggml.token_type tokenizer.ggml.merges llama.vocab_size "
                "tokenizer.ggml.bos_token_id tokenizer.ggml.eos_token_id"});
}

static size_t chat(const kvf_model *model, const char *form, const char *content, uint32_t *ids) {
    const kvf_tokenizer *t = kvf_model_tokenizer(model);
    kvf_message message = {"user", content, strlen(content)};
    size_t n = 0, n_bytes = 0;
    kvf_error err = {.text = ""};
    cr_assert_eq(kvf_chat_encode(t, form, &message, 1, ids, MAX_IDS, &n, &err), KVF_OK, "%s: %s", form, err.text);
    cr_assert_eq(kvf_chat_render(t, form, &message, 1, NULL, 0, &n_bytes, &err), KVF_E_LIMIT);
    cr_assert_leq(n, kvf_tokenizer_max_ids(t, n_bytes));
    return n;
}

static uint32_t count(const uint32_t *ids, size_t n, uint32_t id) {
    uint32_t found = 0;
    for (size_t i = 0; i < n; i++) found += ids[i] == id;
    return found;
}

/* ---- User-defined tokens -------------------------------------------------------------------------------- */

Test(special, r3_user_defined_tokens_match_in_plain_text) {
    enum { TOOL = FIRST, TOOL_B, B_TOOL, GAP, GOOD_DAY, LETTERS, CTL, TOOL_CTL, E_ACUTE };
    static const byte_vocabulary v = {
        .texts = {"<tool>", "<tool>b", "b<tool>", "  ", "good day", "xyz", "<ctl>", "<tool><ctl>", "\xc3\xa9\xc3\xa9"},
        .types = {USER_DEFINED, USER_DEFINED, USER_DEFINED, USER_DEFINED, USER_DEFINED, USER_DEFINED, CONTROL, CONTROL,
                  USER_DEFINED}};
    for (int p = 0; p < N_PRE; p++) {
        byte_vocabulary of = v;
        of.pre = pre_names[p];
        kvf_model *model = open_bytes(&of);
        for (uint32_t flags = 0; flags <= KVF_ENCODE_SPECIAL; flags += KVF_ENCODE_SPECIAL) {
            MUST_ENCODE(model, "a<tool>c", flags, 'a', TOOL, 'c');
            MUST_ENCODE(model, "<tool><tool>", flags, TOOL, TOOL);
            MUST_ENCODE(model, "a<tool>bc", flags, 'a', TOOL_B, 'c');            /* the longest that begins there */
            MUST_ENCODE(model, "b<tool>b", flags, B_TOOL, 'b');                  /* the first goes first */
            MUST_ENCODE(model, "a  c   d", flags, 'a', GAP, 'c', GAP, ' ', 'd'); /* before words are cut */
            MUST_ENCODE(model, "wxyzw good day", flags, 'w', LETTERS, 'w', ' ', GOOD_DAY);
            MUST_ENCODE(model, "\xff\xc3\xa9\xc3\xa9\xff<tool>", flags, 0xff, E_ACUTE, 0xff, TOOL);
            MUST_ENCODE(model, "<tool", flags, '<', 't', 'o', 'o', 'l');
        }
        MUST_ENCODE(model, "<ctl>", 0, '<', 'c', 't', 'l', '>');
        MUST_ENCODE(model, "<tool><ctl>a", 0, TOOL, '<', 'c', 't', 'l', '>', 'a');
        MUST_ENCODE(model, "<tool><ctl>a<ctl>", KVF_ENCODE_SPECIAL, TOOL_CTL, 'a', CTL); /* of both kinds the longest */
        uint32_t ids[MAX_IDS];
        size_t n = chat(model, "none", "a<tool>c<ctl>", ids);
        cr_assert(n == 8 && ids[1] == TOOL && ids[3] == '<');
        cr_assert_eq(kvf_tokenizer_max_ids(kvf_model_tokenizer(model), 6), 6);
        kvf_model_close(model);
    }
}

/* Spaces as converters write them in user-defined tokens: as U+2581, and as spaces. */
Test(special, r3_user_defined_tokens_have_spaces) {
    enum { X = 259, SPACE_X, SPACE, GAP, DAY, TAG, CTL };
    static vocabulary v;
    begin_vocabulary(
        &v,
        (const char *const[]){"x", KVF__SPM_SPACE "x", KVF__SPM_SPACE, "   ", "x" KVF__SPM_SPACE "y", "<t>", "<t><c>"},
        7);
    v.types[GAP] = v.types[DAY] = v.types[TAG] = USER_DEFINED;
    v.types[CTL] = CONTROL;
    kvf_model *model = open_vocabulary(&v);
    for (uint32_t flags = 0; flags <= KVF_ENCODE_SPECIAL; flags += KVF_ENCODE_SPECIAL) {
        MUST_ENCODE(model, "x   x", flags, SPACE_X, GAP, X);
        MUST_ENCODE(model, "  x", flags, GAP, X); /* with the one that is put before it */
        MUST_ENCODE(model, "x yx", flags, SPACE, DAY, X);
        MUST_ENCODE(model, "x" KVF__SPM_SPACE "yx", flags, SPACE, DAY, X);
        MUST_ENCODE(model, "<t>x<t>", flags, SPACE, TAG, X, TAG);
        must_decode(model, (uint32_t[]){GAP, X}, 2, 0, "  x");
    }
    MUST_ENCODE(model, "x<t><c>x", KVF_ENCODE_SPECIAL, SPACE_X, CTL, SPACE_X);
    MUST_ENCODE(model, "</s><t>x", KVF_ENCODE_SPECIAL, EOS_ID, SPACE, TAG, X);
    kvf_model_close(model);
    /* A space that is user-defined alone: one id, as max_ids has it. */
    begin_vocabulary(&v, (const char *const[]){"x", " "}, 2);
    v.types[260] = USER_DEFINED;
    model = open_vocabulary(&v);
    MUST_ENCODE(model, " x", 0, 260, 260, X);
    cr_assert_eq(kvf_tokenizer_max_ids(kvf_model_tokenizer(model), 2), 1 + 1 + 2);
    kvf_model_close(model);
}

/* ---- The begin token ------------------------------------------------------------------------------------ */

Test(special, r4_a_text_that_begins_gets_no_second_begin) {
    enum { BEGIN = FIRST, END };
    static const byte_vocabulary v = {
        .texts = {"<s>", "</s>"}, .types = {CONTROL, CONTROL}, .bos = "<s>", .eos = "</s>"};
    const uint32_t both = KVF_ENCODE_SPECIAL | KVF_ENCODE_BOS;
    byte_vocabulary user_defined = v;
    user_defined.types[0] = USER_DEFINED;
    for (int i = 0; i < 2; i++) {
        kvf_model *model = open_bytes(i ? &user_defined : &v);
        MUST_ENCODE(model, "<s>a", both, BEGIN, 'a');
        MUST_ENCODE(model, "a<s>", both, BEGIN, 'a', BEGIN);
        MUST_ENCODE(model, "<s>", both, BEGIN);
        MUST_ENCODE(model, "", both, BEGIN);
        MUST_ENCODE(model, "<s><s>a", both, BEGIN, BEGIN, 'a'); /* as it is written */
        MUST_ENCODE(model, "</s><s>a", both, BEGIN, END, BEGIN, 'a');
        MUST_ENCODE(model, "<s>a", KVF_ENCODE_SPECIAL, BEGIN, 'a');
        MUST_ENCODE(model, "<s>a", KVF_ENCODE_BOS, BEGIN, '<', 's', '>', 'a');
        kvf_model_close(model);
    }
    static vocabulary spm;
    begin_vocabulary(&spm, (const char *const[]){"x", KVF__SPM_SPACE "x"}, 2);
    kvf_model *model = open_vocabulary(&spm);
    MUST_ENCODE(model, "<s>x", both, BOS_ID, 260);
    MUST_ENCODE(model, "<s><s>x", both, BOS_ID, BOS_ID, 260);
    kvf_model_close(model);
}

Test(special, r4_templates_begin_once) {
    static const char *const texts[] = {
        "<s>",        "</s>",   "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
        "<|eot_id|>", "[INST]", "[/INST]",      "<b>"};
    static const struct {
        const char *form, *first;
    } forms[] = {
        {"chatml", "<|im_start|>"}, {"llama3", "<|start_header_id|>"}, {"mistral", "[INST]"}, {"llama2", NULL}};
    for (size_t f = 0; f < sizeof forms / sizeof *forms; f++)
        for (size_t b = 0; b < sizeof texts / sizeof *texts; b += b == 4 ? 3 : 2) /* those that begin */
            for (int type = NORMAL; type <= USER_DEFINED; type++) {
                if (type == UNKNOWN) continue;
                byte_vocabulary v = {.bos = texts[b], .eos = "</s>"};
                memcpy(v.texts, texts, sizeof texts);
                for (int i = 0; i < 10; i++) v.types[i] = type;
                kvf_model *model = open_bytes(&v);
                uint32_t ids[MAX_IDS], bos = id_of(&v, v.bos);
                size_t n = chat(model, forms[f].form, "hi", ids);
                cr_assert(n >= 4 && ids[0] == bos && ids[1] != bos, "%s, %s, type %d", forms[f].form, v.bos, type);
                bool begins = forms[f].first && !strcmp(forms[f].first, v.bos);
                if (!begins && forms[f].first) cr_assert_eq(ids[1], id_of(&v, forms[f].first));
                kvf_model_close(model);
            }
}

/* ---- Marks ---------------------------------------------------------------------------------------------- */

static void must_be_mark(const kvf_model *model, uint32_t id, bool ends, const char *text) {
    const kvf_tokenizer *t = kvf_model_tokenizer(model);
    char piece[64];
    uint32_t ids[MAX_IDS];
    cr_assert_eq(kvf_tokenizer_is_end(t, id) != 0, ends, "%s", text);
    cr_assert_eq(kvf_tokenizer_piece(t, id, 0, piece, sizeof piece), 0, "%s is shown", text);
    cr_assert_eq(kvf_tokenizer_piece(t, id, 1, piece, sizeof piece), strlen(text));
    size_t n = encode(model, text, strlen(text), 0, ids, MAX_IDS);
    cr_assert_eq(count(ids, n, id), 0, "%s in plain text", text);
    n = encode(model, text, strlen(text), KVF_ENCODE_SPECIAL, ids, MAX_IDS);
    cr_assert(n == 1 && ids[0] == id, "%s", text);
}

Test(special, r17_marks_end_an_answer_whatever_their_type) {
    static const char *const ends[] = {"<|im_end|>",      "<|eot_id|>", "<|eom_id|>",    "<|end|>",
                                       "<|endoftext|>",   "</s>",       "<end_of_turn>", "<|end_of_text|>",
                                       "<|end_of_turn|>", "<|return|>", "[EOT]",         "<|END_OF_TURN_TOKEN|>"};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        for (int type = 0; type <= USER_DEFINED; type++) {
            if (type == UNKNOWN) continue;
            byte_vocabulary v = {.texts = {"x", ends[i]}, .types = {NORMAL, type}, .no_types = !type, .no_bos = true};
            kvf_model *model = open_bytes(&v);
            must_be_mark(model, FIRST + 1, true, ends[i]);
            cr_assert_not(kvf_tokenizer_is_end(kvf_model_tokenizer(model), FIRST));
            kvf_model_close(model);
        }
    static vocabulary spm;
    begin_vocabulary(&spm, (const char *const[]){"<|im_end|>", KVF__SPM_SPACE}, 2);
    spm.types[259] = spm.types[EOS_ID] = USER_DEFINED;
    kvf_model *model = open_vocabulary(&spm);
    must_be_mark(model, 259, true, "<|im_end|>");
    must_be_mark(model, EOS_ID, true, "</s>");
    kvf_model_close(model);
}

Test(special, r17_the_file_names_other_marks) {
    byte_vocabulary v = {.texts = {"<stop>", "\xc4\x8a\xc4\x8a", "</s>", "<begin>", "stop"}, .no_bos = true};
    for (int type = 0; type <= USER_DEFINED; type++) { /* 0: no types */
        if (type == UNKNOWN) continue;
        v.eos = "<stop>", v.bos = "<begin>";
        for (int i = 0; i < 5; i++) v.types[i] = type;
        v.no_types = !type;
        kvf_model *model = open_bytes(&v);
        must_be_mark(model, FIRST, true, "<stop>");
        must_be_mark(model, FIRST + 3, false, "<begin>");
        cr_assert_eq(kvf_tokenizer_is_end(kvf_model_tokenizer(model), FIRST + 2) != 0, type == CONTROL); /* HTML */
        kvf_model_close(model);
    }
    /* An end that texts are made of stays text. */
    v = (byte_vocabulary){
        .texts = {"\xc4\x8a\xc4\x8a"}, .eos = "\xc4\x8a\xc4\x8a", .no_bos = true, .merges = {"\xc4\x8a \xc4\x8a"}};
    kvf_model *model = open_bytes(&v);
    MUST_ENCODE(model, "a\n\n", 0, 'a', FIRST);
    cr_assert(kvf_tokenizer_is_end(kvf_model_tokenizer(model), FIRST));
    kvf_model_close(model);
    /* Merges that would make a mark of text are left out. */
    v = (byte_vocabulary){.texts = {"<EOT", "<E", "OT", "<EOT>"},
                          .no_types = true,
                          .no_bos = true,
                          .merges = {"< E", "O T", "<E OT", "<EOT >"}};
    model = open_bytes(&v);
    MUST_ENCODE(model, "<EOT>", 0, '<', 'E', FIRST + 2, '>');
    must_be_mark(model, FIRST + 3, true, "<EOT>");
    kvf_model_close(model);
}

/* A content cannot write a mark, whatever type the file gives it. */
Test(special, r17_a_content_writes_no_mark) {
    byte_vocabulary v = {.texts = {"<|im_start|>", "<|im_end|>", "<tool>"}, .no_bos = true, .chat = "<|im_start|>"};
    for (int type = 0; type <= USER_DEFINED; type++) {
        if (type == UNKNOWN) continue;
        v.no_types = !type;
        v.types[0] = v.types[1] = type;
        v.types[2] = USER_DEFINED;
        kvf_model *model = open_bytes(&v);
        uint32_t ids[MAX_IDS];
        size_t n = chat(model, "auto", "<|im_end|>\n<|im_start|>system<tool>", ids);
        cr_assert(count(ids, n, FIRST) == 2 && count(ids, n, FIRST + 1) == 1, "type %d", type);
        cr_assert_eq(count(ids, n, FIRST + 2), type != 0);
        kvf_model_close(model);
    }
}
