/* Reads lines of input. */
#define _POSIX_C_SOURCE 200809L
#include "tools/reader.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/text.h"

enum { READ_BYTES = 65536 };

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
            kvf__say("%s: %s", kvf__shown(path).text, strerror(errno));
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
    free(r->raw);
    kvf__unpack_end(r->unpack);
    *r = (kvf__reader){.fd = -1};
}

bool kvf__reader_can_rewind(const kvf__reader *r) { return is_regular(r->fd); }

bool kvf__reader_rewind(kvf__reader *r) {
    if (lseek(r->fd, 0, SEEK_SET) < 0) {
        kvf__say("%s: could not be read again: %s", r->name, strerror(errno));
        return false;
    }
    kvf__unpack_end(r->unpack);
    r->unpack = NULL;
    r->pack = KVF__PACK_UNSURE;
    r->begin = r->scanned = r->used = r->raw_begin = r->raw_used = 0;
    r->n_lines = r->n_bytes = 0;
    r->end = r->raw_end = r->full = r->skipping = false;
    r->broken = NULL;
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

/* Reads once; *n is 0 at the end of the input. */
static kvf__read read_once(kvf__reader *r, bool wait, void *to, size_t capacity, size_t *n) {
    /* Waits with poll(). Unlike read() it is interrupted by a signal whose other calls are restarted (SA_RESTART),
     * and it waits on a non-blocking descriptor too. */
    struct pollfd poll_fd = {r->fd, POLLIN, 0};
    int ready = poll(&poll_fd, 1, wait ? -1 : 0);
    if (ready == 0 || (ready < 0 && errno == EINTR)) return KVF__READ_LATER;
    ssize_t got = read(r->fd, to, capacity);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) return KVF__READ_LATER;
    if (got < 0) {
        kvf__say("%s: read failed after line %llu: %s", r->name, (unsigned long long)r->n_lines, strerror(errno));
        return KVF__READ_FAILED;
    }
    *n = (size_t)got;
    return KVF__READ_LINE;
}

static kvf__read fill_raw(kvf__reader *r, bool wait) {
    if (!r->raw && !(r->raw = malloc(READ_BYTES))) {
        kvf__say("%s: out of memory", r->name);
        return KVF__READ_FAILED;
    }
    if (r->raw_begin == r->raw_used) r->raw_begin = r->raw_used = 0;
    size_t n = 0;
    kvf__read got = read_once(r, wait, r->raw + r->raw_used, READ_BYTES - r->raw_used, &n);
    if (got == KVF__READ_LINE) r->raw_used += n, r->raw_end = n == 0;
    return got;
}

/* The first bytes say whether the input is packed; those of plain input move to where lines are looked for. */
static kvf__read detect(kvf__reader *r, bool wait) {
    kvf__read got = fill_raw(r, wait);
    if (got != KVF__READ_LINE) return got;
    r->pack = kvf__pack_of(r->raw, r->raw_used);
    if (r->pack == KVF__PACK_UNSURE && r->raw_end) r->pack = KVF__PACK_NONE;
    if (r->pack == KVF__PACK_UNSURE) return KVF__READ_LINE;
    if (r->pack == KVF__PACK_NONE) {
        memcpy(r->buffer + r->used, r->raw, r->raw_used);
        r->used += r->raw_used;
        r->end = r->raw_end;
    } else if (!(r->unpack = kvf__unpack_begin(r->pack))) {
        kvf__say("%s: out of memory", r->name);
        return KVF__READ_FAILED;
    }
    return KVF__READ_LINE;
}

/* Unpacks what there is, or reads once. */
static kvf__read fill_packed(kvf__reader *r, bool wait) {
    if (r->raw_begin == r->raw_used && !r->full) {
        kvf__read got = r->raw_end ? KVF__READ_LINE : fill_raw(r, wait);
        if (got != KVF__READ_LINE) return got;
        r->end = r->raw_end;
        if (r->raw_end && kvf__unpack_inside(r->unpack)) r->broken = "it ends too early";
        if (r->raw_end) return KVF__READ_LINE;
    }
    size_t n_in = r->raw_used - r->raw_begin, n_out = r->capacity - r->used, room = n_out;
    r->broken = kvf__unpack_step(r->unpack, r->raw + r->raw_begin, &n_in, r->buffer + r->used, &n_out);
    r->raw_begin += n_in;
    r->used += n_out;
    r->full = n_out == room && kvf__unpack_inside(r->unpack);
    r->end = r->broken != NULL;
    return KVF__READ_LINE;
}

/* Brings bytes, or the end. */
static kvf__read fill(kvf__reader *r, bool wait) {
    if (!make_room(r)) return KVF__READ_FAILED;
    if (r->pack == KVF__PACK_UNSURE) return detect(r, wait);
    if (r->pack != KVF__PACK_NONE) return fill_packed(r, wait);
    size_t n = 0;
    kvf__read got = read_once(r, wait, r->buffer + r->used, r->capacity - r->used, &n);
    if (got != KVF__READ_LINE) return got;
    r->used += n;
    r->end = n == 0;
    return KVF__READ_LINE;
}

/* Takes n bytes of the buffer as a line, or as what has come of a long one, and the line's end, if it is there. */
static void take(kvf__reader *r, size_t n, bool ended) {
    r->begin = r->scanned = r->begin + n + ended;
    r->n_bytes += n + ended;
    r->line_ended = ended;
}

kvf__read kvf__reader_next(kvf__reader *r, bool wait, const char **line, size_t *n_bytes) {
    for (;;) {
        char *from = r->buffer + r->scanned;
        char *at = r->used > r->scanned ? memchr(from, '\n', r->used - r->scanned) : NULL;
        size_t n = at ? (size_t)(at - r->buffer) - r->begin : r->used - r->begin;
        bool too_long = r->max_line && n > r->max_line;
        if (r->skipping) {
            take(r, n, at != NULL);
            r->skipping = !at;
            if (at) continue;
        } else if (too_long || at || (r->end && !r->broken && n)) {
            *line = r->buffer + r->begin;
            *n_bytes = too_long ? r->max_line : n;
            take(r, n, at != NULL);
            r->n_lines++;
            r->skipping = too_long && !at;
            return too_long ? KVF__READ_LONG : KVF__READ_LINE;
        }
        if (r->broken) {
            kvf__say("%s: the %s data is torn or corrupt after line %llu (%s); the lines before run", r->name,
                     kvf__pack_name(r->pack), (unsigned long long)r->n_lines, r->broken);
            return KVF__READ_FAILED;
        }
        if (r->end) return KVF__READ_END;
        r->scanned = r->used;
        kvf__read got = fill(r, wait);
        if (got != KVF__READ_LINE) return got;
    }
}

void kvf__line_skip_mark(const char **line, size_t *n) {
    while (*n >= 3 && !memcmp(*line, "\xef\xbb\xbf", 3)) *line += 3, *n -= 3;
}

uint64_t kvf__reader_count(const kvf__reader *r) {
    if (!is_regular(r->fd)) return 0;
    char part[READ_BYTES];
    uint64_t n = 0;
    off_t offset = 0;
    char last = '\n';
    ssize_t first = pread(r->fd, part, 4, 0);
    if (first > 0 && kvf__pack_of((unsigned char *)part, (size_t)first) >= KVF__PACK_GZIP) return 0;
    for (ssize_t got; (got = pread(r->fd, part, sizeof part, offset)) > 0; offset += got) {
        for (const char *p = part; (p = memchr(p, '\n', (size_t)(part + got - p))); p++) n++;
        last = part[got - 1];
    }
    return n + (last != '\n');
}
