/* tools/signals.h: the first SIGINT or SIGTERM ends a command after its step; a second one ends the program at once. If a
 * mapped file is cut short, the command ends with an error that names the file. */
#ifndef KVF_TOOLS_SIGNALS_H
#define KVF_TOOLS_SIGNALS_H

void kvf__signals_catch(void);
int kvf__signal_caught(void); /* its number; 0: none */

/* From now on SIGBUS, which reading past the end of a shortened mapped file raises, ends the command with KVF__EXIT_ENGINE
 * and the file's name. Every answered line is in its file by then, so --resume can continue. */
void kvf__signals_guard_maps(void);

#endif
