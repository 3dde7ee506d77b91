/* tools/signals.h: the first SIGINT or SIGTERM ends a command after its step; a second one ends the program at once. */
#ifndef KVF_TOOLS_SIGNALS_H
#define KVF_TOOLS_SIGNALS_H

void kvf__signals_catch(void);
int kvf__signal_caught(void); /* its number; 0: none */

#endif
