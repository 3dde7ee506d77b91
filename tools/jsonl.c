/* Writes JSON lines; remembers ids. */
#define _POSIX_C_SOURCE 200809L
#define XXH_INLINE_ALL
#include "tools/jsonl.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "tools/files.h"

/* ---- Sink -------------------------------------------------------------------------------------------- */

static void sink_fail(kvf__sink *s) {
    if (!s->failed)
        kvf__say("%s: %s (%llu lines were written); the run stops here", s->name, strerror(errno),
                 (unsigned long long)s->n_lines);
    s->failed = true;
}

bool kvf__file_is(int fd, const char *path) {
    struct stat a, b;
    int known = strcmp(path, "-") ? stat(path, &b) : fstat(STDOUT_FILENO, &b);
    return known == 0 && fstat(fd, &a) == 0 && S_ISREG(a.st_mode) && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

bool kvf__sink_open(kvf__sink *s, const char *path, bool append, kvf__sync sync) {
    *s = (kvf__sink){.name = path, .fd = STDOUT_FILENO, .append = append, .sync = sync, .synced = kvf__now()};
    if (!path) return true;
    bool standard = !strcmp(path, "-");
    if (standard) s->name = "standard output";
    if (!standard) s->fd = kvf__open_locked(path, append, &s->made);
    if (s->fd < 0) return false;
    struct stat status;
    s->is_open = true;
    s->regular = fstat(s->fd, &status) == 0 && S_ISREG(status.st_mode);
    return true;
}

bool kvf__sink_begin(kvf__sink *s) {
    if (!s->is_open || s->append || !s->regular || s->fd == STDOUT_FILENO || ftruncate(s->fd, 0) == 0) return true;
    kvf__say("%s: %s", kvf__shown(s->name).text, strerror(errno));
    return false;
}

void kvf__sink_replace(kvf__sink *s, int fd) {
    close(s->fd);
    s->fd = fd;
}

void kvf__sink_cancel(kvf__sink *s) {
    if (s->is_open && s->made)
        (void)unlink(s->name); /* while it is locked: a run that waits for it sees that it went */
    if (s->is_open && s->fd != STDOUT_FILENO) close(s->fd);
    s->is_open = false;
}

/* One write() in the usual case; the loop is for full disks, pipes and signals. */
static bool write_all(int fd, const char *bytes, size_t n) {
    while (n) {
        ssize_t got = write(fd, bytes, n);
        if (got < 0 && errno == EAGAIN) {
            struct pollfd poll_fd = {fd, POLLOUT, 0};
            (void)poll(&poll_fd, 1, -1);
        } else if (got < 0 && errno != EINTR) {
            return false;
        } else if (got > 0) {
            bytes += got;
            n -= (size_t)got;
        }
    }
    return true;
}

static void sync_now(kvf__sink *s) {
    if (s->is_open && s->dirty && s->regular && !s->failed && fdatasync(s->fd) != 0) sink_fail(s);
    s->dirty = false;
    s->synced = kvf__now();
}

void kvf__sink_write(kvf__sink *s, json_t *value) {
    if (s->is_open && !s->failed) {
        char *text = value ? json_dumps(value, JSON_COMPACT | JSON_REAL_PRECISION(10)) : NULL;
        size_t n = text ? strlen(text) : 0;
        errno = text ? 0 : ENOMEM;
        if (text) text[n] = '\n'; /* in the zero's place: the line goes out in one piece */
        if (!text || !write_all(s->fd, text, n + 1))
            sink_fail(s);
        else
            s->n_lines++, s->dirty = true;
        free(text);
        if (s->sync == KVF__SYNC_LINE) sync_now(s);
    }
    json_decref(value);
}

void kvf__sink_tick(kvf__sink *s) {
    if (s->dirty && s->sync == KVF__SYNC_SECOND && kvf__now() - s->synced >= 1) sync_now(s);
}

bool kvf__sink_close(kvf__sink *s) {
    if (s->sync != KVF__SYNC_NEVER) sync_now(s);
    errno = 0;
    if (s->is_open && s->fd != STDOUT_FILENO && close(s->fd) != 0) sink_fail(s);
    s->is_open = false;
    return !s->failed;
}

/* ---- Ids ----------------------------------------------------------------------------------------------- */

enum { ID_BYTES = 64 }; /* of the text kept of an id; a longer one is known by its hash, 128 bits */

static char *text_of(const json_t *id) {
    char *text = json_dumps(id, JSON_ENCODE_ANY | JSON_COMPACT); /* "7" and 7 differ by the quotes; no byte is zero */
    if (text && strlen(text) > ID_BYTES) {
        XXH128_hash_t hash = XXH3_128bits(text, strlen(text));
        snprintf(text, ID_BYTES, "#%016llx%016llx", (unsigned long long)hash.high64, (unsigned long long)hash.low64);
    }
    return text;
}

/* The slot of a text, or the free one where it would go. */
static size_t find_slot(const kvf__ids *ids, const char *text) {
    size_t mask = ids->n_slots - 1, i = (size_t)XXH3_64bits(text, strlen(text)) & mask;
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

kvf__ids_result kvf__ids_add(kvf__ids *ids, const json_t *id, uint64_t value) {
    char *text = text_of(id);
    size_t bytes = text ? strlen(text) + 1 : 0;
    kvf__ids_result result = KVF__IDS_NO_MEMORY;
    if (text && grow_ids(ids, bytes + sizeof value)) {
        size_t slot = find_slot(ids, text);
        result = ids->slots[slot] ? KVF__IDS_SEEN : KVF__IDS_NEW;
        if (result == KVF__IDS_NEW) {
            memcpy(ids->arena + ids->arena_used, text, bytes);
            memcpy(ids->arena + ids->arena_used + bytes, &value, sizeof value);
            ids->slots[slot] = ids->arena_used + 1;
            ids->arena_used += bytes + sizeof value;
            ids->n++;
        }
    }
    free(text);
    return result;
}

bool kvf__ids_get(const kvf__ids *ids, const json_t *id, uint64_t *value) {
    char *text = ids->n ? text_of(id) : NULL;
    size_t place = text ? ids->slots[find_slot(ids, text)] : 0;
    if (place) memcpy(value, ids->arena + place - 1 + strlen(text) + 1, sizeof *value);
    free(text);
    return place != 0;
}

bool kvf__ids_has(const kvf__ids *ids, const json_t *id) {
    uint64_t unused;
    return kvf__ids_get(ids, id, &unused);
}

void kvf__ids_free(kvf__ids *ids) {
    free(ids->slots);
    free(ids->arena);
    *ids = (kvf__ids){NULL, 0, 0, NULL, 0, 0};
}
