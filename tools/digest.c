/* XXH3 of bytes and of models; digests of files are cached in the user's cache folder. */
#define _GNU_SOURCE
#include "tools/digest.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "tools/files.h"
#include "tools/progress.h"
#include "tools/text.h"

enum { CHUNK = 1 << 20 };

uint64_t kvf__digest(const void *bytes, size_t n) { return XXH3_64bits(bytes, n); }

void kvf__digest_text(uint64_t digest, char text[KVF__DIGEST_BYTES]) {
    snprintf(text, KVF__DIGEST_BYTES, "%016" PRIx64, digest);
}

bool kvf__digest_read(const char *text, uint64_t *digest) {
    if (!text || strlen(text) != KVF__DIGEST_BYTES - 1 || strspn(text, "0123456789abcdef") != KVF__DIGEST_BYTES - 1)
        return false;
    *digest = strtoull(text, NULL, 16);
    return true;
}

/* ---- The cache ------------------------------------------------------------------------------------------------ */

/* The first half of a cache file's line, which differs after any change of the file. Programs can set mtime, but not
 * the time of the last change of data or names (ctime). */
static void stamp_of(const struct stat *s, char *text, size_t capacity) {
    snprintf(text, capacity, "kvfold-digest 1 %llu %lld.%09ld %lld.%09ld ", (unsigned long long)s->st_size,
             (long long)s->st_mtim.tv_sec, s->st_mtim.tv_nsec, (long long)s->st_ctim.tv_sec, s->st_ctim.tv_nsec);
}

static bool cache_name(const struct stat *s, char path[KVF__PATH_BYTES]) {
    char name[80];
    snprintf(name, sizeof name, "digests/%llx-%llx", (unsigned long long)s->st_dev, (unsigned long long)s->st_ino);
    return kvf__cache_path(name, path);
}

static bool cache_get(const struct stat *s, uint64_t *digest) {
    char path[KVF__PATH_BYTES], stamp[160], line[200] = "";
    FILE *f = cache_name(s, path) ? fopen(path, "re") : NULL;
    if (!f) return false;
    bool read = fgets(line, sizeof line, f) != NULL;
    fclose(f);
    stamp_of(s, stamp, sizeof stamp);
    size_t n = strlen(stamp);
    if (!read || strncmp(line, stamp, n) != 0) return false;
    line[strcspn(line, "\n")] = '\0';
    return kvf__digest_read(line + n, digest);
}

/* Two changes within one tick of the file system's clock have one time, so what has changed just now is not kept. */
static bool is_settled(const struct stat *s) {
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now)) return false;
    double age = (double)(now.tv_sec - s->st_ctim.tv_sec) + 1e-9 * (double)(now.tv_nsec - s->st_ctim.tv_nsec);
    return age > (s->st_ctim.tv_nsec ? 0.1 : 2);
}

/* A cache that cannot be written is none. */
static void cache_put(const struct stat *s, uint64_t digest) {
    char path[KVF__PATH_BYTES], part[KVF__PATH_BYTES + 32], line[200], text[KVF__DIGEST_BYTES];
    if (!is_settled(s) || !cache_name(s, path)) return;
    kvf__cache_folder(path);
    stamp_of(s, line, sizeof line);
    kvf__digest_text(digest, text);
    size_t n = strlen(line);
    snprintf(line + n, sizeof line - n, "%s\n", text);
    snprintf(part, sizeof part, "%s.%ld.part", path, (long)getpid());
    int fd = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0) return;
    n = strlen(line);
    bool whole = write(fd, line, n) == (ssize_t)n;
    if (close(fd) != 0 || !whole || rename(part, path) != 0) (void)unlink(part);
}

/* ---- Files ------------------------------------------------------------------------------------------------------ */

typedef struct hashing { /* a model's parts, one after another */
    bool quiet;
    uint64_t n_bytes, n_done; /* of all parts; hashed or known */
    double started;
    kvf__progress progress;
} hashing;

static void show(hashing *h, const char *path) {
    if (h->quiet || kvf__now() - h->started < 1 || !kvf__progress_due(&h->progress)) return;
    char text[160];
    snprintf(text, sizeof text, "reading %.50s for its digest: %.0f%%", kvf__shown(path).text,
             h->n_bytes ? 100 * (double)h->n_done / (double)h->n_bytes : 0);
    kvf__progress_text(&h->progress, text);
}

static bool hash_fd(hashing *h, const char *path, int fd, uint64_t *digest) {
    char *chunk = malloc(CHUNK);
    XXH3_state_t *state = XXH3_createState();
    bool ok = chunk && state && XXH3_64bits_reset(state) == XXH_OK;
    ssize_t n = 0;
    while (ok && ((n = read(fd, chunk, CHUNK)) > 0 || (n < 0 && errno == EINTR))) {
        if (n < 0) continue;
        ok = XXH3_64bits_update(state, chunk, (size_t)n) == XXH_OK;
        h->n_done += (uint64_t)n;
        show(h, path);
    }
    if (ok && n == 0) *digest = XXH3_64bits_digest(state);
    if (!chunk || !state) errno = ENOMEM;
    (void)XXH3_freeState(state);
    free(chunk);
    return ok && n == 0;
}

static bool hash_file(hashing *h, const char *path, uint64_t *digest) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat before, after;
    bool ok = fd >= 0 && fstat(fd, &before) == 0;
    if (ok && cache_get(&before, digest)) {
        h->n_done += (uint64_t)before.st_size;
    } else if (ok && (ok = hash_fd(h, path, fd, digest)) && fstat(fd, &after) == 0) {
        char a[160], b[160];
        stamp_of(&before, a, sizeof a);
        stamp_of(&after, b, sizeof b);
        if (!strcmp(a, b)) cache_put(&after, *digest);
    }
    if (!ok) kvf__say("%s: %s", kvf__shown(path).text, strerror(errno));
    if (fd >= 0) close(fd);
    return ok;
}

bool kvf__digest_model(const char *path, bool quiet, uint64_t *digest, uint64_t *n_bytes) {
    hashing h = {.quiet = quiet, .started = kvf__now(), .progress = kvf__progress_begin(!quiet, "digest", 0)};
    char part[KVF__PATH_BYTES];
    struct stat s;
    uint32_t n_parts = 0;
    for (uint32_t i = 0; kvf__model_part(path, i, part); i++)
        if (stat(part, &s) == 0) h.n_bytes += (uint64_t)s.st_size, n_parts++;
    XXH3_state_t *state = XXH3_createState();
    bool ok = state && XXH3_64bits_reset(state) == XXH_OK;
    if (!ok) kvf__say("%s: out of memory", kvf__shown(path).text);
    for (uint32_t i = 0; ok && kvf__model_part(path, i, part); i++) {
        if (i && stat(part, &s) != 0 && errno == ENOENT) continue; /* a name that only looks like a part's */
        ok = hash_file(&h, part, digest) && XXH3_64bits_update(state, digest, sizeof *digest) == XXH_OK;
    }
    if (ok && n_parts > 1) *digest = XXH3_64bits_digest(state);
    if (n_bytes) *n_bytes = h.n_bytes;
    (void)XXH3_freeState(state);
    kvf__progress_clear();
    return ok;
}
