/* tools/signals.h: the first SIGINT or SIGTERM ends a command after its step; a second one ends the program at once. A file
 * that is mapped and loses its bytes ends it with an error that names the file. */
#ifndef KVF_TOOLS_SIGNALS_H
#define KVF_TOOLS_SIGNALS_H

void kvf__signals_catch(void);
int kvf__signal_caught(void); /* its number; 0: none */

/* From now on SIGBUS, which a mapped file raises where its bytes are gone, ends with KVF__EXIT_ENGINE and the file's name. Every line
 * that was answered is in its file by then, so that --resume goes on. */
void kvf__signals_guard_maps(void);

#endif
