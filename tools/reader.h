/* tools/reader.h: lines of a file or pipe, plain or compressed (gzip, zstd).
 *
 * Invariants
 *   - A reader never waits for input while the caller has other work (KVF__READ_LATER), so that the command can stand at
 *     the end of a pipe whose writer waits for an answer.
 *   - Compressed input is recognised by its bytes, never by its name. If it is cut off or corrupt, the whole lines before
 *     that place are returned first, then KVF__READ_FAILED.
 *   - Memory is bounded by max_line, however long a line is.
 */
#ifndef KVF_TOOLS_READER_H
#define KVF_TOOLS_READER_H

#include <stdint.h>

#include "tools/unpack.h"

typedef struct kvf__reader {
    const char *name;
    int fd;
    bool end, own_fd;
    char *buffer; /* bytes [begin, used) are not yet given out; [begin, scanned) hold no line end */
    size_t begin, scanned, used, capacity;
    uint64_t n_lines, n_bytes; /* given out: lines, and bytes with the line ends */
    bool line_ended;           /* the last line given out had its line end */
    kvf__pack pack;            /* UNSURE until the first bytes were seen */
    kvf__unpack *unpack;
    unsigned char *raw; /* packed bytes [raw_begin, raw_used) */
    size_t raw_begin, raw_used;
    bool raw_end, full; /* full: the last step filled all the room it had */
    const char *broken; /* what is wrong with the packed bytes */
    size_t max_line;    /* set after opening: a longer line is LONG; 0: any length */
    bool skipping;      /* the rest of a LONG line is still to come */
} kvf__reader;

typedef enum kvf__read { KVF__READ_LINE, KVF__READ_LATER, KVF__READ_END, KVF__READ_FAILED, KVF__READ_LONG } kvf__read;

/* "-" is standard input. With twice a pipe is first copied to a temporary file. False after a message. */
bool kvf__reader_open(kvf__reader *reader, const char *path, bool twice);
void kvf__reader_close(kvf__reader *reader);
/* Back to the first line, if the reader was opened for reading twice or its input is seekable. */
bool kvf__reader_can_rewind(const kvf__reader *reader);
bool kvf__reader_rewind(kvf__reader *reader);
/* The next line without its end, valid until the next call. wait: block until there is one; else LATER when none is
 * there yet. FAILED after a message. A signal that was caught ends a wait with LATER. LONG: the first max_line bytes of a
 * line that has more; the next call skips the rest without keeping it. */
kvf__read kvf__reader_next(kvf__reader *reader, bool wait, const char **line, size_t *n_bytes);
/* Skips byte order marks at the beginning of a line: concatenated files have them in the middle. */
void kvf__line_skip_mark(const char **line, size_t *n_bytes);
/* How many lines a regular file has, 0 for a pipe and for packed input. */
uint64_t kvf__reader_count(const kvf__reader *reader);

#endif
