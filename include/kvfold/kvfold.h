/* kvfold/kvfold.h: includes every header of the core library, libkvfold, which needs nothing but libc.
 * Block manager, prefix cache, attention, policies, scheduler. libkvfold_engine adds model.h and engine.h.
 * examples/embed.c uses all parts in one program.
 *
 * Simple use
 *     #include <kvfold/kvfold.h>
 *     #include <stdio.h>
 *     int main(void) {
 *         printf("kvfold %s on %s\n", kvf_version(), kvf_device_cpu()->name);
 *     } // cc app.c $(pkg-config --cflags --libs kvfold)
 *
 * Reading order: base.h, device.h, blockmgr.h, prefix.h, attention.h, policy.h, events.h, scheduler.h. profile.h needs only
 * blockmgr.h. Each header begins with an example.
 */
#ifndef KVFOLD_KVFOLD_H
#define KVFOLD_KVFOLD_H

#include "kvfold/attention.h"
#include "kvfold/base.h"
#include "kvfold/blockmgr.h"
#include "kvfold/device.h"
#include "kvfold/events.h"
#include "kvfold/policy.h"
#include "kvfold/prefix.h"
#include "kvfold/profile.h"
#include "kvfold/scheduler.h"

#endif
