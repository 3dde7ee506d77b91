/* The name of a request in messages. */
#include <stdio.h>

#include "engine/internal.h"

kvf__name kvf__live_name(const kvf__live *r) {
    kvf__name name;
    if (r->label)
        snprintf(name.text, sizeof name.text, "%s", r->label);
    else
        snprintf(name.text, sizeof name.text, "request %llu", (unsigned long long)(r->group ? r->group->id : r->id));
    return name;
}
