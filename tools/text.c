/* Messages and units of the command. */
#define _POSIX_C_SOURCE 200809L
#include "tools/text.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"
#include "tools/progress.h"

void kvf__say(const char *format, ...) {
    va_list list;
    va_start(list, format);
    kvf__progress_clear();
    fputs("kvfold: ", stderr);
    vfprintf(stderr, format, list);
    fputc('\n', stderr);
    va_end(list);
}

kvf__short kvf__dashed(const char *name) {
    kvf__short s;
    snprintf(s.text, sizeof s.text, "%s", name);
    for (char *p = s.text; *p; p++)
        if (*p == '_') *p = '-';
    return s;
}

kvf__short kvf__shown(const char *value) { return kvf__shown_bytes(value, strlen(value)); }

kvf__short kvf__shown_bytes(const char *value, size_t n) {
    kvf__short s;
    size_t used = 0, limit = 60;
    bool quote = !n;
    for (size_t i = 0; i < n && !quote; i++) quote = value[i] && strchr(" \t\n\r'", value[i]);
    if (quote) s.text[used++] = '\'';
    size_t i = 0;
    while (i < n && used < limit) {
        size_t length = kvf__utf8_length(value + i, n - i, NULL);
        unsigned char byte = (unsigned char)value[i];
        if (!length || byte < 0x20 || byte == 0x7f) {
            used += (size_t)snprintf(s.text + used, sizeof s.text - used, "\\x%02x", byte);
            i++;
        } else {
            memcpy(s.text + used, value + i, length);
            used += length;
            i += length;
        }
    }
    if (i < n) {
        memcpy(s.text + used, "...", 3);
        used += 3;
    }
    if (quote) s.text[used++] = '\'';
    s.text[used] = '\0';
    return s;
}

kvf__short kvf__show_number(double value) {
    kvf__short s;
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(s.text, sizeof s.text, "%.*g", digits, value);
        double back = strtod(s.text, NULL);
        if (!(back < value) && !(back > value)) break;
    }
    char *exponent = strchr(s.text, 'e');
    if (!exponent) return s;
    if (value < 1e17 && value > -1e17 && exponent[1] == '+') { /* 1e+02 */
        snprintf(s.text, sizeof s.text, "%.0f", value);
        return s;
    }
    char *from = exponent + 1 + (exponent[1] == '+' || exponent[1] == '-'), *to = exponent + 1 + (exponent[1] == '-');
    from += strspn(from, "0");
    memmove(to, from, strlen(from) + 1);
    return s;
}

kvf__short kvf__show_bytes(uint64_t bytes) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    kvf__short s;
    double value = (double)bytes;
    size_t u = 0;
    while (value >= 1024 && u < 4) value /= 1024, u++;
    snprintf(s.text, sizeof s.text, "%.*f %s", u && value < 100 ? 1 : 0, value, units[u]);
    return s;
}

kvf__short kvf__show_count(uint64_t n) {
    kvf__short s;
    char digits[24];
    int length = snprintf(digits, sizeof digits, "%llu", (unsigned long long)n), used = 0;
    for (int i = 0; i < length; i++) {
        if (i && (length - i) % 3 == 0) s.text[used++] = ',';
        s.text[used++] = digits[i];
    }
    s.text[used] = '\0';
    return s;
}

kvf__short kvf__show_seconds(double seconds) {
    kvf__short s;
    if (seconds < 1)
        snprintf(s.text, sizeof s.text, "%.0f ms", seconds * 1e3);
    else if (seconds < 60)
        snprintf(s.text, sizeof s.text, "%.1f s", seconds);
    else if (seconds < 3600)
        snprintf(s.text, sizeof s.text, "%d min %02d s", (int)seconds / 60, (int)seconds % 60);
    else
        snprintf(s.text, sizeof s.text, "%d h %02d min", (int)(seconds / 3600), (int)(seconds / 60) % 60);
    return s;
}

kvf__short kvf__show_rate(uint64_t tokens, double seconds) {
    kvf__short s;
    double rate = seconds > 0 ? (double)tokens / seconds : 0;
    if (rate >= 100)
        snprintf(s.text, sizeof s.text, "%.30s tok/s", kvf__show_count((uint64_t)(rate + 0.5)).text);
    else if (rate > 0)
        snprintf(s.text, sizeof s.text, "%.1f tok/s", rate);
    else
        snprintf(s.text, sizeof s.text, "-");
    return s;
}

size_t kvf__n_characters(const char *text, size_t n_bytes) {
    size_t n = 0;
    for (size_t i = 0; i < n_bytes; i++) n += ((unsigned char)text[i] & 0xc0) != 0x80;
    return n;
}

void kvf__fit(char *out, size_t capacity, const char *text, int columns) {
    size_t used = 0, n = strlen(text);
    for (size_t i = 0; i < n;) {
        const unsigned char *p = (const unsigned char *)text + i;
        size_t length = kvf__utf8_length(text + i, n - i, NULL), bytes = length ? length : 1;
        bool plain = length && *p >= 0x20 && *p != 0x7f && !(*p == 0xc2 && p[1] < 0xa0);
        columns -= length > 2 && memcmp(p, "\xe1\x84\x80", 3) >= 0 ? 2 : 1;
        if (columns < 0 || used + bytes >= capacity) break;
        memcpy(out + used, plain ? text + i : "?", plain ? bytes : 1);
        used += plain ? bytes : 1;
        i += bytes;
    }
    out[used] = '\0';
}

int kvf__terminal_columns(int fd) {
    struct winsize size;
    if (!isatty(fd)) return 0;
    return ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col ? size.ws_col : 80;
}

double kvf__now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
