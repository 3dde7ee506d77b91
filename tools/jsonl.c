/* Lines in, JSON lines out. */
#define _POSIX_C_SOURCE 200809L
#include "tools/jsonl.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/text.h"

enum { READ_BYTES = 65536 };

/* ---- Reader ------------------------------------------------------------------------------------------ */

static bool is_regular(int fd) {
    struct stat s;
    return fstat(fd, &s) == 0 && S_ISREG(s.st_mode);
}

/* Copies a pipe to a file without a name, which then takes its place. */
static bool spool(kvf__reader *r) {
    FILE *copy = tmpfile();
    char part[READ_BYTES];
    ssize_t n = copy ? 1 : -1;
    while (n > 0) {
        n = read(r->fd, part, sizeof part);
        if (n > 0 && fwrite(part, 1, (size_t)n, copy) != (size_t)n) n = -1;
    }
    int fd = n == 0 && fflush(copy) == 0 ? dup(fileno(copy)) : -1;
    if (fd < 0) kvf__say("%s: could not be kept for the second run: %s; give a file", r->name, strerror(errno));
    if (copy) fclose(copy);
    if (fd < 0 || lseek(fd, 0, SEEK_SET) < 0) return false;
    if (r->own_fd) close(r->fd);
    r->fd = fd;
    r->own_fd = true;
    return true;
}

bool kvf__reader_open(kvf__reader *r, const char *path, bool twice) {
    *r = (kvf__reader){.name = path, .fd = STDIN_FILENO};
    struct stat s;
    if (!strcmp(path, "-")) {
        r->name = "standard input";
    } else {
        r->fd = open(path, O_RDONLY | O_CLOEXEC);
        r->own_fd = r->fd >= 0;
        if (r->fd >= 0 && fstat(r->fd, &s) == 0 && S_ISDIR(s.st_mode)) {
            close(r->fd);
            r->fd = -1;
            errno = EISDIR;
        }
        if (r->fd < 0) {
            kvf__say("--input %s: %s", kvf__shown(path).text, strerror(errno));
            return false;
        }
    }
    if (!twice || is_regular(r->fd) || spool(r)) return true;
    kvf__reader_close(r);
    return false;
}

void kvf__reader_close(kvf__reader *r) {
    if (r->own_fd) close(r->fd);
    free(r->buffer);
    *r = (kvf__reader){.fd = -1};
}

bool kvf__reader_rewind(kvf__reader *r) {
    if (lseek(r->fd, 0, SEEK_SET) < 0) {
        kvf__say("%s: could not be read again: %s", r->name, strerror(errno));
        return false;
    }
    r->begin = r->scanned = r->used = 0;
    r->n_lines = 0;
    r->end = false;
    return true;
}

static bool make_room(kvf__reader *r) {
    if (r->begin) {
        memmove(r->buffer, r->buffer + r->begin, r->used - r->begin);
        r->used -= r->begin;
        r->scanned -= r->begin;
        r->begin = 0;
    }
    if (r->capacity - r->used >= READ_BYTES) return true;
    char *larger = realloc(r->buffer, r->capacity * 2 + 2 * READ_BYTES);
    if (!larger) {
        kvf__say("%s line %llu: out of memory after %zu bytes", r->name, (unsigned long long)r->n_lines + 1, r->used);
        return false;
    }
    r->buffer = larger;
    r->capacity = r->capacity * 2 + 2 * READ_BYTES;
    return true;
}

/* Reads once. */
static kvf__read fill(kvf__reader *r, bool wait) {
    struct pollfd poll_fd = {r->fd, POLLIN, 0};
    if (!wait && poll(&poll_fd, 1, 0) == 0) return KVF__READ_LATER;
    if (!make_room(r)) return KVF__READ_FAILED;
    ssize_t n = read(r->fd, r->buffer + r->used, r->capacity - r->used);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) return KVF__READ_LATER;
    if (n < 0) {
        kvf__say("%s: read failed after line %llu: %s", r->name, (unsigned long long)r->n_lines, strerror(errno));
        return KVF__READ_FAILED;
    }
    r->used += (size_t)n;
    r->end = n == 0;
    return KVF__READ_LINE;
}

kvf__read kvf__reader_next(kvf__reader *r, bool wait, const char **line, size_t *n_bytes) {
    for (;;) {
        char *from = r->buffer + r->scanned;
        char *at = r->used > r->scanned ? memchr(from, '\n', r->used - r->scanned) : NULL;
        if (at || (r->end && r->used > r->begin)) {
            char *stop = at ? at : r->buffer + r->used;
            *line = r->buffer + r->begin;
            *n_bytes = (size_t)(stop - *line);
            r->begin = r->scanned = (size_t)(stop - r->buffer) + (at != NULL);
            r->n_lines++;
            return KVF__READ_LINE;
        }
        if (r->end) return KVF__READ_END;
        r->scanned = r->used;
        kvf__read got = fill(r, wait);
        if (got != KVF__READ_LINE) return got;
    }
}

uint64_t kvf__reader_count(const kvf__reader *r) {
    if (!is_regular(r->fd)) return 0;
    char part[READ_BYTES];
    uint64_t n = 0;
    off_t offset = 0;
    char last = '\n';
    for (ssize_t got; (got = pread(r->fd, part, sizeof part, offset)) > 0; offset += got) {
        for (const char *p = part; (p = memchr(p, '\n', (size_t)(part + got - p))); p++) n++;
        last = part[got - 1];
    }
    return n + (last != '\n');
}

bool kvf__reader_is(const kvf__reader *r, const char *path) {
    struct stat a, b;
    return strcmp(path, "-") && fstat(r->fd, &a) == 0 && S_ISREG(a.st_mode) && stat(path, &b) == 0 &&
           a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/* ---- Sink -------------------------------------------------------------------------------------------- */

static void sink_fail(kvf__sink *s) {
    if (!s->failed)
        kvf__say("%s: %s (%llu lines were written); the run stops here", s->name, strerror(errno),
                 (unsigned long long)s->n_lines);
    s->failed = true;
}

bool kvf__sink_open(kvf__sink *s, const char *path) {
    *s = (kvf__sink){.name = path};
    if (!path) return true;
    bool standard = !strcmp(path, "-");
    s->file = standard ? stdout : fopen(path, "w");
    if (standard) s->name = "standard output";
    if (s->file) return true;
    kvf__say("%s: could not be opened for writing: %s", kvf__shown(path).text, strerror(errno));
    return false;
}

void kvf__sink_write(kvf__sink *s, json_t *value) {
    if (s->file && !s->failed) {
        char *text = value ? json_dumps(value, JSON_COMPACT | JSON_REAL_PRECISION(10)) : NULL;
        errno = text ? 0 : ENOMEM;
        if (!text || fputs(text, s->file) < 0 || fputc('\n', s->file) < 0 || fflush(s->file) != 0)
            sink_fail(s);
        else
            s->n_lines++;
        free(text);
    }
    json_decref(value);
}

bool kvf__sink_close(kvf__sink *s) {
    errno = 0;
    if (s->file && (s->file == stdout ? fflush(stdout) : fclose(s->file)) != 0) sink_fail(s);
    s->file = NULL;
    return !s->failed;
}

/* ---- Ids ----------------------------------------------------------------------------------------------- */

static uint64_t hash_text(const char *p) {
    uint64_t h = 0xcbf29ce484222325u;
    while (*p) h = (h ^ (unsigned char)*p++) * 0x100000001b3u;
    return h ^ (h >> 29);
}

/* The slot of a text, or the free one where it would go. */
static size_t find_slot(const kvf__ids *ids, const char *text) {
    size_t mask = ids->n_slots - 1, i = (size_t)hash_text(text) & mask;
    while (ids->slots[i] && strcmp(ids->arena + ids->slots[i] - 1, text) != 0) i = (i + 1) & mask;
    return i;
}

static bool grow_ids(kvf__ids *ids, size_t bytes) {
    if (ids->arena_capacity - ids->arena_used < bytes) {
        size_t capacity = ids->arena_capacity + ids->arena_capacity / 2 + bytes + 4096;
        char *arena = realloc(ids->arena, capacity);
        if (!arena) return false;
        ids->arena = arena;
        ids->arena_capacity = capacity;
    }
    if (ids->n < ids->n_slots / 4 * 3) return true;
    kvf__ids larger = *ids;
    larger.n_slots = ids->n_slots ? ids->n_slots * 2 : 256;
    larger.slots = calloc(larger.n_slots, sizeof *larger.slots);
    if (!larger.slots) return false;
    for (size_t i = 0; i < ids->n_slots; i++)
        if (ids->slots[i]) larger.slots[find_slot(&larger, ids->arena + ids->slots[i] - 1)] = ids->slots[i];
    free(ids->slots);
    *ids = larger;
    return true;
}

kvf__ids_result kvf__ids_add(kvf__ids *ids, const json_t *id) {
    char *text = json_dumps(id, JSON_ENCODE_ANY | JSON_COMPACT); /* "7" and 7 differ by the quotes; no byte is zero */
    size_t bytes = text ? strlen(text) + 1 : 0;
    kvf__ids_result result = KVF__IDS_NO_MEMORY;
    if (text && grow_ids(ids, bytes)) {
        size_t slot = find_slot(ids, text);
        result = ids->slots[slot] ? KVF__IDS_SEEN : KVF__IDS_NEW;
        if (result == KVF__IDS_NEW) {
            memcpy(ids->arena + ids->arena_used, text, bytes);
            ids->slots[slot] = ids->arena_used + 1;
            ids->arena_used += bytes;
            ids->n++;
        }
    }
    free(text);
    return result;
}

void kvf__ids_free(kvf__ids *ids) {
    free(ids->slots);
    free(ids->arena);
    *ids = (kvf__ids){NULL, 0, 0, NULL, 0, 0};
}
