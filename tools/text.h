/* tools/text.h: text for people: messages, escaped values, units. */
#ifndef KVF_TOOLS_TEXT_H
#define KVF_TOOLS_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct kvf__short { /* a small text by value */
    char text[96];
} kvf__short;

/* "kvfold: ..." and a line end on stderr, over a progress line when one is shown. */
void kvf__say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* A name with '-' for '_'. */
kvf__short kvf__dashed(const char *name);

/* A value for a message: cut at about 60 bytes, quoted when empty or with blanks, control and broken bytes as \xNN. */
kvf__short kvf__shown(const char *value);
/* The same of n bytes, among which may be zeros. */
kvf__short kvf__shown_bytes(const char *value, size_t n);

/* A number in the fewest digits that read back as the same number: 2.0000001, 0.1, 1e30. */
kvf__short kvf__show_number(double value);

/* "45.2 MiB", "23,301", "12.3 s", "812 tok/s"; a rate without time is "-". */
kvf__short kvf__show_bytes(uint64_t bytes);
kvf__short kvf__show_count(uint64_t n);
kvf__short kvf__show_seconds(double seconds);
kvf__short kvf__show_rate(uint64_t tokens, double seconds);

/* Columns of the terminal at a descriptor, now; 0 where it is none. */
int kvf__terminal_columns(int fd);

/* The beginning of text that fits in that many columns, control and broken bytes as '?'. A character from U+1100 on
 * counts as two columns, which no terminal exceeds in any locale. */
void kvf__fit(char *out, size_t capacity, const char *text, int columns);

/* Monotonic seconds. */
double kvf__now(void);

/* Characters of UTF-8: each byte but continuations begins one. */
size_t kvf__n_characters(const char *text, size_t n_bytes);

#endif
