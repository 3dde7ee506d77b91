/* tools/jsonl.h: writes lines of JSON, and remembers which ids were seen. */
#ifndef KVF_TOOLS_JSONL_H
#define KVF_TOOLS_JSONL_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* When written lines are synced to disk (fdatasync), in case the machine fails. The end of the process, even kill -9,
 * loses nothing: a line belongs to the system once write() returns. */
typedef enum kvf__sync {
    KVF__SYNC_SECOND, /* at most once a second, and at the end */
    KVF__SYNC_LINE,   /* after each line */
    KVF__SYNC_NEVER
} kvf__sync;

/* A file of lines, each written by one write(). The first failed write is reported and remembered; later ones do
 * nothing. */
typedef struct kvf__sink {
    int fd;
    bool is_open; /* false: nothing is written */
    bool regular; /* a file, not a pipe or device */
    bool append;
    bool made; /* by kvf__sink_open: there was none of that name */
    bool failed, dirty;
    kvf__sync sync;
    double synced;
    const char *name;
    uint64_t n_lines;
} kvf__sink;

/* path NULL: a sink that discards everything; "-": standard output. The file's contents stay until kvf__sink_begin.
 * The file is locked. False after a message, also if another process is writing it. */
bool kvf__sink_open(kvf__sink *sink, const char *path, bool append, kvf__sync sync);
bool kvf__sink_begin(kvf__sink *sink);           /* empties the file, unless opened to append; false after a message */
void kvf__sink_cancel(kvf__sink *sink);          /* in place of begin: closes it, and removes what open made */
void kvf__sink_replace(kvf__sink *sink, int fd); /* goes on in the file that took the place of the one opened */
/* Whether fd is the regular file of that name; "-" is standard output. */
bool kvf__file_is(int fd, const char *path);
void kvf__sink_write(kvf__sink *sink, json_t *value); /* takes value */
void kvf__sink_tick(kvf__sink *sink);                 /* puts it on the disk when it is time */
bool kvf__sink_close(kvf__sink *sink);                /* false when anything could not be written */

/* The ids seen, each with a number: an open-addressing hash table of offsets into one arena; some 30 bytes a line and
 * the id itself. */
typedef struct kvf__ids {
    size_t *slots; /* where the text begins in the arena, plus 1; 0: free */
    size_t n, n_slots;
    char *arena;
    size_t arena_used, arena_capacity;
} kvf__ids;

typedef enum kvf__ids_result { KVF__IDS_NEW, KVF__IDS_SEEN, KVF__IDS_NO_MEMORY } kvf__ids_result;
kvf__ids_result kvf__ids_add(kvf__ids *ids, const json_t *id, uint64_t value); /* seen: the first value stays */
bool kvf__ids_get(const kvf__ids *ids, const json_t *id, uint64_t *value);
bool kvf__ids_has(const kvf__ids *ids, const json_t *id);
void kvf__ids_free(kvf__ids *ids);

#endif
