/* SIGINT and SIGTERM are recorded and checked between steps. SIGBUS: the message names the mapped file. */
#define _POSIX_C_SOURCE 200809L
#include "tools/signals.h"

#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "tools/cli.h"

static volatile sig_atomic_t caught;

static void note(int number) { caught = number; }

void kvf__signals_catch(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = note;
    action.sa_flags = (int)(SA_RESETHAND | SA_RESTART); /* writes go on; a wait for input is in poll() and ends */
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

int kvf__signal_caught(void) { return caught; }

/* ---- Mapped files: within a handler, so that only what is safe there is called ------------------------------------ */

static void put(const char *text) {
    size_t n = strlen(text);
    while (n) {
        ssize_t written = write(STDERR_FILENO, text, n);
        if (written <= 0) return;
        text += written;
        n -= (size_t)written;
    }
}

/* A line of /proc/self/maps: BEGIN-END ... PATH, the path from its first slash. */
typedef struct line {
    uintptr_t begin, end;
    enum { BEGIN, END, REST, PATH } at;
    char path[4096];
    size_t n;
} line;

/* Takes the next character; true: the line is whole. */
static bool take(line *l, char c) {
    if (c == '\n') return true;
    unsigned digit = c >= '0' && c <= '9' ? (unsigned)(c - '0') : c >= 'a' && c <= 'f' ? (unsigned)(c - 'a') + 10 : 16;
    if (l->at <= END && digit < 16)
        *(l->at == BEGIN ? &l->begin : &l->end) = *(l->at == BEGIN ? &l->begin : &l->end) << 4 | digit;
    else if (l->at <= END)
        l->at = l->at == BEGIN ? END : REST;
    if (l->at == REST && c == '/') l->at = PATH;
    if (l->at == PATH && l->n + 1 < sizeof l->path) l->path[l->n++] = c;
    return false;
}

/* The file that is mapped at an address; NULL: none is. */
static const char *file_at(uintptr_t address) {
    static line l;
    char part[4096];
    int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    for (ssize_t n; fd >= 0 && (n = read(fd, part, sizeof part)) > 0;) {
        for (ssize_t i = 0; i < n; i++) {
            if (!take(&l, part[i])) continue;
            l.path[l.n] = '\0';
            if (address >= l.begin && address < l.end) return l.n ? l.path : NULL;
            l = (line){.n = 0};
        }
    }
    return NULL;
}

static void name_file(int number, siginfo_t *info, void *context) {
    static atomic_flag entered = ATOMIC_FLAG_INIT;
    (void)context;
    while (atomic_flag_test_and_set(&entered)) (void)pause(); /* several threads read it: the first one tells */
    const char *path = file_at((uintptr_t)info->si_addr);
    if (!path) { /* no file's fault: it comes again, and ends the program as it would have */
        signal(number, SIG_DFL);
        return;
    }
    put("\nkvfold: ");
    put(path);
    put(": its bytes are gone while it was read: another program has cut it short, or its disk fails. What was answered is "
        "written; put the file back, and --resume goes on with an --output FILE\n");
    _exit(KVF__EXIT_ENGINE);
}

void kvf__signals_guard_maps(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = name_file;
    action.sa_flags = SA_SIGINFO;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, NULL);
}
