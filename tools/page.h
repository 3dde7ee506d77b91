/* tools/page.h: self-contained HTML pages: the files of tools/page/ around figures as JSON. */
#ifndef KVF_TOOLS_PAGE_H
#define KVF_TOOLS_PAGE_H

#include <jansson.h>
#include <stdbool.h>

typedef enum kvf__page { KVF__PAGE_OCCUPANCY, KVF__PAGE_SCORES } kvf__page;

/* Takes ownership of data (NULL: out of memory); numbers are written with that many digits. False after a message,
 * which names the option that asked for the page if the error is not the file's. */
bool kvf__page_write(kvf__page page, json_t *data, int digits, const char *path, const char *option);

#endif
