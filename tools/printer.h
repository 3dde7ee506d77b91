/* tools/printer.h: an answer on standard output while it is generated.
 *
 * Invariant: only whole UTF-8 characters have been printed, and nothing that a stop string will cut off.
 */
#ifndef KVF_TOOLS_PRINTER_H
#define KVF_TOOLS_PRINTER_H

#include <stdbool.h>
#include <stddef.h>

typedef struct kvf__printer {
    const char *const *stop; /* must outlive the printer */
    size_t n_stop;
    char *held; /* bytes that cannot be printed yet */
    size_t n_held, capacity;
    bool used, failed;
} kvf__printer;

/* The bytes of one more token. */
void kvf__printer_add(kvf__printer *printer, const char *bytes, size_t n);
/* Ends the answer: prints the text that was held back, up to a stop string, and a newline if there was any token.
 * False if printing failed. */
bool kvf__printer_end(kvf__printer *printer);

#endif
