/* The report page: the parts of tools/page/ around the figures. */
#define _POSIX_C_SOURCE 200809L
#include <stdlib.h>
#include <string.h>

#include "tools/occupancy.h"
#include "tools/text.h"

/* cmake/embed.cmake makes these of the files in tools/page/. */
extern const unsigned char kvf__page_head[], kvf__page_tail[];
extern const size_t kvf__page_head_bytes, kvf__page_tail_bytes;

/* JSON in a script element: no '<' may begin an end tag or a comment. */
static void put_escaped(const char *text, FILE *out) {
    for (const char *p = text; *p;) {
        size_t n = strcspn(p, "<");
        fwrite(p, 1, n, out);
        p += n;
        if (*p) fputs("\\u003c", out), p++;
    }
}

bool kvf__occ_write_page(const kvf__occ *o, const char *path) {
    json_t *x = kvf__occ_json(o);
    char *text = x ? json_dumps(x, JSON_COMPACT | JSON_REAL_PRECISION(9)) : NULL;
    json_decref(x);
    kvf__out_file out;
    if (!text) return kvf__say("--report: out of memory"), false;
    if (!kvf__out_open(&out, path)) return free(text), false;
    fwrite(kvf__page_head, 1, kvf__page_head_bytes, out.file);
    put_escaped(text, out.file);
    fwrite(kvf__page_tail, 1, kvf__page_tail_bytes, out.file);
    free(text);
    return kvf__out_close(&out);
}
