/* tools/page.h: self-contained HTML pages: files of HTML and scripts around figures as JSON. */
#ifndef KVF_TOOLS_PAGE_H
#define KVF_TOOLS_PAGE_H

#include <jansson.h>
#include <stdbool.h>

typedef struct kvf__page { /* what stands before and after the figures; cmake/embed.cmake makes these of files */
    const unsigned char *head, *tail;
    size_t head_bytes, tail_bytes;
} kvf__page;

/* Takes ownership of data (NULL: out of memory); numbers are written with that many digits. False after a message,
 * which names the option that asked for the page if the error is not the file's. */
bool kvf__page_write(kvf__page page, json_t *data, int digits, const char *path, const char *option);

#endif
