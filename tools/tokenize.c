/* kvfold tokenize: text to tokens and back. */
#define _POSIX_C_SOURCE 200809L
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

#include "tools/cli.h"

/* The bytes of n tokens as a new text; NULL when out of memory. */
static char *decode(const kvf_tokenizer *tokenizer, const uint32_t *ids, size_t n, int special, size_t *n_bytes) {
    *n_bytes = kvf_tokenizer_decode(tokenizer, ids, n, special, NULL, 0);
    char *text = malloc(*n_bytes + 1);
    if (text) (void)kvf_tokenizer_decode(tokenizer, ids, n, special, text, *n_bytes);
    return text;
}

/* The next id of a list: digits, with blanks, commas and brackets between. 1: one, 0: none is left, -1: no id. */
static int next_id(const char **text, uint64_t *id) {
    const char *p = *text + strspn(*text, " \t\r\n,[]");
    if (!*p) return 0;
    size_t n = strspn(p, "0123456789");
    *text = p;
    if (!n || n > 18 || (p[n] && !strchr(" \t\r\n,[]", p[n]))) return -1;
    *id = strtoull(p, NULL, 10);
    *text = p + n;
    return 1;
}

static uint32_t *read_ids(const char *text, uint32_t n_vocab, size_t *n) {
    uint32_t *ids = malloc((strlen(text) / 2 + 1) * sizeof *ids);
    uint64_t id = 0;
    int got = 0;
    *n = 0;
    while (ids && (got = next_id(&text, &id)) > 0 && id < n_vocab) ids[(*n)++] = (uint32_t)id;
    if (ids && !got) return ids;
    if (!ids)
        kvf__say("--decode: out of memory");
    else if (got < 0)
        kvf__say("--decode %s: must be whole numbers with commas or blanks between", kvf__shown(text).text);
    else
        kvf__say("--decode: id %llu: must be from 0 to %u, the vocabulary has %u tokens", (unsigned long long)id,
                 n_vocab - 1, n_vocab);
    free(ids);
    return NULL;
}

static int print_decoded(const kvf__cli *cli, const kvf_tokenizer *tokenizer) {
    size_t n, n_bytes;
    uint32_t *ids = read_ids(cli->decode, kvf_tokenizer_n_vocab(tokenizer), &n);
    if (!ids) return KVF__EXIT_USAGE;
    char *text = decode(tokenizer, ids, n, cli->special, &n_bytes);
    bool written = false;
    if (!text) {
        kvf__say("--decode: out of memory");
    } else if (cli->json) {
        written = kvf__json_print(json_pack("{s:o}", "text", kvf__json_text(text, n_bytes)));
    } else {
        fwrite(text, 1, n_bytes, stdout);
        putchar('\n');
        written = kvf__stdout_done();
    }
    free(text);
    free(ids);
    return written ? KVF__EXIT_OK : KVF__EXIT_OUTPUT;
}

/* A piece as people read it: quoted, with \n, \t and \xNN. */
static void print_piece(const char *piece, size_t n) {
    putchar('"');
    for (size_t i = 0; i < n;) {
        size_t length = kvf__utf8_length(piece + i, n - i, NULL);
        unsigned char byte = (unsigned char)piece[i];
        if (byte == '\n' || byte == '\t' || byte == '\r')
            printf("\\%c", byte == '\n' ? 'n' : byte == '\t' ? 't' : 'r');
        else if (byte == '"' || byte == '\\')
            printf("\\%c", byte);
        else if (!length || byte < 0x20 || byte == 0x7f)
            printf("\\x%02x", byte);
        else
            fwrite(piece + i, 1, length, stdout);
        i += length ? length : 1;
    }
    puts("\"");
}

static int print_tokens(const kvf__cli *cli, const kvf_tokenizer *tokenizer, const uint32_t *ids, size_t n) {
    if (cli->json) {
        json_t *list = json_array();
        for (size_t i = 0; i < n; i++) json_array_append_new(list, json_integer(ids[i]));
        json_t *o = json_pack("{s:o, s:I}", "token_ids", list, "n_tokens", (json_int_t)n);
        return kvf__json_print(o) ? KVF__EXIT_OK : KVF__EXIT_OUTPUT;
    }
    for (size_t i = 0; i < n; i++) {
        size_t n_bytes;
        char *piece = decode(tokenizer, &ids[i], 1, 1, &n_bytes);
        printf("%6u  ", ids[i]);
        print_piece(piece ? piece : "", piece ? n_bytes : 0);
        free(piece);
    }
    return kvf__stdout_done() ? KVF__EXIT_OK : KVF__EXIT_OUTPUT;
}

int kvf__tokenize_command(const void *options) {
    const kvf__cli *cli = options;
    if ((cli->n_words != 0) + (cli->file != NULL) + (cli->decode != NULL) != 1) {
        kvf__say("tokenize: give one of TEXT, --file FILE and --decode IDS");
        return KVF__EXIT_USAGE;
    }
    if (cli->plain && (cli->special || cli->decode)) {
        kvf__say(cli->special ? "--plain and --special: give one of them" : "--plain: is for text, not for --decode");
        return KVF__EXIT_USAGE;
    }
    size_t n_bytes = cli->n_words ? strlen(cli->words[0]) : 0, n = 0;
    char *from_file = NULL;
    if (cli->file && !(from_file = kvf__read_file(cli->file, "file", &n_bytes))) return KVF__EXIT_USAGE;
    kvf_model *model = kvf__setup_model(cli, true, NULL);
    int code = KVF__EXIT_USAGE;
    if (model && cli->decode) {
        code = print_decoded(cli, kvf_model_tokenizer(model));
    } else if (model) {
        kvf_error err = {.text = ""};
        const kvf_tokenizer *tokenizer = kvf_model_tokenizer(model);
        uint32_t flags = cli->plain ? 0 : KVF_ENCODE_SPECIAL;
        uint32_t *ids = kvf__encode(tokenizer, from_file ? from_file : cli->words[0], n_bytes, flags, &n, &err);
        if (ids)
            code = print_tokens(cli, tokenizer, ids, n);
        else
            kvf__say("tokenize: %s", err.text);
        free(ids);
    }
    kvf_model_close(model);
    free(from_file);
    return code;
}
