/* kvfold/kvfold.h: the core library, libkvfold: block manager, attention, policies, scheduler. It needs libc alone.
 * Read in this order: base.h, device.h, blockmgr.h, prefix.h, attention.h, policy.h, scheduler.h; profile.h at any time.
 * libkvfold_engine adds model.h and engine.h. */
#ifndef KVFOLD_KVFOLD_H
#define KVFOLD_KVFOLD_H

#include "kvfold/attention.h"
#include "kvfold/base.h"
#include "kvfold/blockmgr.h"
#include "kvfold/device.h"
#include "kvfold/policy.h"
#include "kvfold/prefix.h"
#include "kvfold/profile.h"
#include "kvfold/scheduler.h"

#endif
