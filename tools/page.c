/* HTML pages: files around the figures, those of tools/page/ for the occupancy. */
#define _POSIX_C_SOURCE 200809L
#include "tools/page.h"

#include <stdlib.h>
#include <string.h>

#include "tools/occupancy.h"
#include "tools/text.h"

extern const unsigned char kvf__occupancy_head[], kvf__occupancy_tail[];
extern const size_t kvf__occupancy_head_bytes, kvf__occupancy_tail_bytes;

/* JSON in a script element: no '<' may begin an end tag or a comment. */
static void put_escaped(const char *text, FILE *out) {
    for (const char *p = text; *p;) {
        size_t n = strcspn(p, "<");
        fwrite(p, 1, n, out);
        p += n;
        if (*p) fputs("\\u003c", out), p++;
    }
}

bool kvf__page_write(kvf__page page, json_t *data, int digits, const char *path, const char *option) {
    char *text = data ? json_dumps(data, JSON_COMPACT | JSON_REAL_PRECISION((size_t)digits)) : NULL;
    json_decref(data);
    kvf__out_file out;
    if (!text) return kvf__say("--%s: out of memory", option), false;
    if (!kvf__out_open(&out, path)) return free(text), false;
    fwrite(page.head, 1, page.head_bytes, out.file);
    put_escaped(text, out.file);
    fwrite(page.tail, 1, page.tail_bytes, out.file);
    free(text);
    return kvf__out_close(&out);
}

bool kvf__occ_write_page(const kvf__occ *o, const char *path) {
    kvf__page page = {kvf__occupancy_head, kvf__occupancy_tail, kvf__occupancy_head_bytes, kvf__occupancy_tail_bytes};
    return kvf__page_write(page, kvf__occ_json(o), 9, path, "report");
}
