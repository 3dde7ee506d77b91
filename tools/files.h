/* tools/files.h: which files a command reads and writes, compared in one place; opening one to write it.
 *
 * Invariants
 *   - Nothing is opened for writing before kvf__files_check() has found that no output is an input or another output, by
 *     whatever name (link, hard link, ./, another mount): files are compared by device and inode.
 *   - A regular file that is being written is locked (flock) by the process that writes it.
 */
#ifndef KVF_TOOLS_FILES_H
#define KVF_TOOLS_FILES_H

#include "tools/cli.h"

typedef struct kvf__file_use kvf__file_use;

typedef struct kvf__files { /* zero: none */
    kvf__file_use *list;
    uint32_t n, capacity;
    bool failed; /* out of memory: the check says so */
} kvf__files;

/* Names are copied; NULL is none; "-" is standard input, or output. what: "the trace". option: "--report". */
void kvf__files_read(kvf__files *files, const char *path, const char *what);
void kvf__files_write(kvf__files *files, const char *option, const char *path);
/* The file that the options name, or the default one, with all its parts. */
void kvf__files_read_model(kvf__files *files, const kvf__cli *cli);
bool kvf__files_check(const kvf__files *files); /* false after a message */
/* What a file is that may be written later, "the model"; NULL: none of these. */
const char *kvf__files_find(const kvf__files *files, const char *path);
void kvf__files_free(kvf__files *files);

/* Opens a file for writing without truncating it. A regular file is locked: another process is refused until this one
 * closes it or ends. made: the file was created. Returns -1 after a message. */
int kvf__open_locked(const char *path, bool append, bool *made);

/* The path of part i of a model; part 0 is the file itself: FILE-00001-of-00003.gguf has two more. False: there are
 * no more. */
bool kvf__model_part(const char *path, uint32_t i, char part[KVF__PATH_BYTES]);

#endif
