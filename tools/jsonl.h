/* tools/jsonl.h: lines of a file or pipe in, lines of JSON out, and which ids were seen.
 *
 * Invariant: a reader never waits for input while the caller has other work (KVF__READ_LATER), so that the command can
 * stand at the end of a pipe whose writer waits for an answer.
 */
#ifndef KVF_TOOLS_JSONL_H
#define KVF_TOOLS_JSONL_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef struct kvf__reader {
    const char *name;
    int fd;
    bool end, own_fd;
    char *buffer; /* bytes [begin, used) are not yet given out; [begin, scanned) hold no line end */
    size_t begin, scanned, used, capacity;
    uint64_t n_lines; /* given out */
} kvf__reader;

typedef enum kvf__read { KVF__READ_LINE, KVF__READ_LATER, KVF__READ_END, KVF__READ_FAILED } kvf__read;

/* "-" is standard input. With twice a pipe is first copied to a temporary file. False after a message. */
bool kvf__reader_open(kvf__reader *reader, const char *path, bool twice);
void kvf__reader_close(kvf__reader *reader);
/* Back to the first line; the reader was opened for reading twice. */
bool kvf__reader_rewind(kvf__reader *reader);
/* The next line without its end, valid until the next call. wait: block until there is one; else LATER when none is
 * there yet. FAILED after a message. A signal that was caught ends a wait with LATER. */
kvf__read kvf__reader_next(kvf__reader *reader, bool wait, const char **line, size_t *n_bytes);
/* How many lines a regular file has, 0 for a pipe. */
uint64_t kvf__reader_count(const kvf__reader *reader);
/* Whether path is the very file that is being read. */
bool kvf__reader_is(const kvf__reader *reader, const char *path);

/* A file of lines, each flushed. The first failed write is reported and remembered; later ones do nothing. */
typedef struct kvf__sink {
    FILE *file; /* NULL: nothing is written */
    const char *name;
    bool failed;
    uint64_t n_lines;
} kvf__sink;

bool kvf__sink_open(kvf__sink *sink, const char *path); /* NULL: a sink that takes nothing; "-": standard output */
void kvf__sink_write(kvf__sink *sink, json_t *value);   /* takes value */
bool kvf__sink_close(kvf__sink *sink);                  /* false when anything could not be written */

/* The ids seen: an open hash set of places in one arena of texts: some 20 bytes a line and the id itself. */
typedef struct kvf__ids {
    size_t *slots; /* where the text begins in the arena, plus 1; 0: free */
    size_t n, n_slots;
    char *arena;
    size_t arena_used, arena_capacity;
} kvf__ids;

typedef enum kvf__ids_result { KVF__IDS_NEW, KVF__IDS_SEEN, KVF__IDS_NO_MEMORY } kvf__ids_result;
kvf__ids_result kvf__ids_add(kvf__ids *ids, const json_t *id);
void kvf__ids_free(kvf__ids *ids);

#endif
