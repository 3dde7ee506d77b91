/* tests/peak.h: what a piece of a test takes at most of real memory. */
#ifndef KVF_TESTS_PEAK_H
#define KVF_TESTS_PEAK_H

#include <stdio.h>
#include <unistd.h>

/* Bytes of this process that are in memory now. */
static inline size_t resident_bytes(void) {
    unsigned long all = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%lu %lu", &all, &resident) != 2) resident = 0;
    if (f) fclose(f);
    return (size_t)resident * (size_t)sysconf(_SC_PAGESIZE);
}

#endif
