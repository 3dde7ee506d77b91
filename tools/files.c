/* The files of a command: compared by device and inode, locked while they are written. */
#define _GNU_SOURCE
#include "tools/files.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

struct kvf__file_use {
    char *path;
    char option[32]; /* of an output; "": an input */
    char what[40];   /* of an input */
};

static void add(kvf__files *f, const char *path, const char *option, const char *what) {
    if (!path || f->failed) return;
    if (f->n == f->capacity) {
        uint32_t capacity = f->capacity * 2 + 16;
        kvf__file_use *larger = realloc(f->list, capacity * sizeof *larger);
        if (!larger) {
            f->failed = true;
            return;
        }
        f->list = larger;
        f->capacity = capacity;
    }
    kvf__file_use *u = &f->list[f->n];
    if (!(u->path = strdup(path))) {
        f->failed = true;
        return;
    }
    snprintf(u->option, sizeof u->option, "%s", option);
    snprintf(u->what, sizeof u->what, "%s", what);
    f->n++;
}

void kvf__files_read(kvf__files *files, const char *path, const char *what) { add(files, path, "", what); }
void kvf__files_write(kvf__files *files, const char *option, const char *path) { add(files, path, option, ""); }

void kvf__files_read_model(kvf__files *files, const kvf__cli *cli) {
    char path[KVF__PATH_BYTES], part[KVF__PATH_BYTES];
    if (!kvf__model_find(cli, path)) return; /* opening it says why */
    for (uint32_t i = 0; kvf__model_part(path, i, part); i++)
        kvf__files_read(files, part, i ? "a part of the model" : "the model");
}

void kvf__files_free(kvf__files *files) {
    for (uint32_t i = 0; i < files->n; i++) free(files->list[i].path);
    free(files->list);
    *files = (kvf__files){NULL, 0, 0, false};
}

/* ---- Comparing ------------------------------------------------------------------------------------------------- */

typedef struct place { /* a file that is there; or the folder in which it would be made, and its name */
    bool known, there, regular;
    dev_t device;
    ino_t inode;
    const char *name;
} place;

static place place_of(const char *path, bool output) {
    place p = {.known = true, .there = true};
    struct stat s;
    int got = strcmp(path, "-") ? stat(path, &s) : fstat(output ? STDOUT_FILENO : STDIN_FILENO, &s);
    if (got != 0 && errno == ENOENT && *path) {
        char *folder = strdup(path), *slash = folder ? strrchr(folder, '/') : NULL;
        const char *last = strrchr(path, '/');
        if (slash) slash[slash == folder] = '\0';
        got = folder ? stat(slash ? folder : ".", &s) : -1;
        free(folder);
        p.there = false;
        p.name = last ? last + 1 : path;
    }
    p.known = got == 0;
    if (!p.known) return p;
    p.regular = S_ISREG(s.st_mode);
    p.device = s.st_dev;
    p.inode = s.st_ino;
    return p;
}

/* Pipes and devices may be named twice. */
static bool same_place(const place *a, const place *b) {
    if (!a->known || !b->known || a->there != b->there || a->device != b->device || a->inode != b->inode) return false;
    return a->there ? a->regular : !strcmp(a->name, b->name);
}

static bool check_pair(const kvf__file_use *out, const kvf__file_use *other) {
    if (!other->what[0] && !strcmp(out->path, other->path)) { /* devices too */
        kvf__say("%s and %s would both write to %s: give one of them a file of its own", out->option, other->option,
                 strcmp(out->path, "-") ? kvf__shown(out->path).text : "standard output");
        return false;
    }
    place a = place_of(out->path, true), b = place_of(other->path, !other->what[0]);
    if (!same_place(&a, &b)) return true;
    if (other->what[0])
        kvf__say("%s %s: is %s; writing there would destroy it: name another file", out->option,
                 strcmp(out->path, "-") ? kvf__shown(out->path).text : "standard output", other->what);
    else
        kvf__say("%s %s and %s %s would both write to one file: give one of them a file of its own", out->option,
                 kvf__shown(out->path).text, other->option, kvf__shown(other->path).text);
    return false;
}

bool kvf__files_check(const kvf__files *f) {
    if (f->failed) {
        kvf__say("out of memory");
        return false;
    }
    for (uint32_t i = 0; i < f->n; i++) {
        if (f->list[i].what[0]) continue;
        for (uint32_t k = 0; k < f->n; k++)
            if (k != i && (f->list[k].what[0] || k > i) && !check_pair(&f->list[i], &f->list[k])) return false;
    }
    return true;
}

const char *kvf__files_find(const kvf__files *f, const char *path) {
    place a = place_of(path, true);
    for (uint32_t i = 0; i < f->n; i++) {
        place b = place_of(f->list[i].path, !f->list[i].what[0]);
        if (same_place(&a, &b)) return f->list[i].what[0] ? f->list[i].what : f->list[i].option;
    }
    return NULL;
}

bool kvf__model_part(const char *path, uint32_t i, char part[KVF__PATH_BYTES]) {
    static const char form[] = "-00001-of-00001.gguf"; /* 0: a digit that may be another */
    size_t n = strlen(path), m = sizeof form - 1;
    if (n >= KVF__PATH_BYTES) return false;
    memcpy(part, path, n + 1);
    if (i == 0) return true;
    if (n < m) return false;
    const char *end = path + n - m;
    for (size_t k = 0; k < m; k++)
        if (isdigit((unsigned char)form[k]) ? !isdigit((unsigned char)end[k]) : end[k] != form[k]) return false;
    if (strncmp(end, "-00001", 6) != 0 || i >= strtoul(end + 10, NULL, 10)) return false;
    snprintf(part + n - m, KVF__PATH_BYTES - (n - m), "-%05u-of-%.10s", i + 1, end + 10);
    return true;
}

/* ---- Writing ----------------------------------------------------------------------------------------------------- */

/* 1: locked, or there are no locks here. 0: another file has its name by now. -1: taken. */
static int lock(int fd, const char *path) {
    struct stat a, b;
    if (fstat(fd, &a) != 0 || !S_ISREG(a.st_mode)) return 1;
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) return errno == EWOULDBLOCK ? -1 : 1;
    return stat(path, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

int kvf__open_locked(const char *path, bool append, bool *made) {
    int flags = O_WRONLY | O_CREAT | O_CLOEXEC | (append ? O_APPEND : 0), fd = -1, locked = 0;
    for (int tries = 0; tries < 100 && !locked; tries++) {
        if (fd >= 0) close(fd);
        fd = open(path, flags | O_EXCL, 0666);
        *made = fd >= 0;
        if (fd < 0 && errno == EEXIST) fd = open(path, flags, 0666);
        if (fd < 0) {
            kvf__say("%s: could not be opened for writing: %s", kvf__shown(path).text, strerror(errno));
            return -1;
        }
        locked = lock(fd, path);
    }
    if (locked > 0) return fd;
    kvf__say("%s: another run writes there: wait for its end, or name another file", kvf__shown(path).text);
    close(fd);
    return -1;
}
