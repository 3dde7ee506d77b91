/* tests/real_model.h: where the real model is, if it is here: $KVFOLD_MODEL, else the user's cache folder. */
#ifndef KVF_TESTS_REAL_MODEL_H
#define KVF_TESTS_REAL_MODEL_H

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* NULL when it is not here; the test is then to be skipped. */
static inline const char *kvf_test_real_model(void) {
    static char path[4096];
    const char *named = getenv("KVFOLD_MODEL"), *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (named && *named)
        snprintf(path, sizeof path, "%s", named);
    else if (cache && *cache)
        snprintf(path, sizeof path, "%s/kvfold/SmolLM2-135M-Instruct.Q4_1.gguf", cache);
    else
        snprintf(path, sizeof path, "%s/.cache/kvfold/SmolLM2-135M-Instruct.Q4_1.gguf", home ? home : "");
    return access(path, R_OK) == 0 ? path : NULL;
}

#endif
