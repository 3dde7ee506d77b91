/* SIGINT and SIGTERM: noted, and looked at between steps. */
#define _POSIX_C_SOURCE 200809L
#include "tools/signals.h"

#include <signal.h>
#include <string.h>

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
