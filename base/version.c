/* The version. A file of its own: libkvfold_engine contains the rest of base/ and must ask libkvfold for it. */
#include "kvfold/base.h"

#define STR2(x) #x
#define STR(x) STR2(x)
const char *kvf_version(void) { return STR(KVF_VERSION_MAJOR) "." STR(KVF_VERSION_MINOR) "." STR(KVF_VERSION_PATCH); }

uint32_t kvf_version_number(void) { return KVF_VERSION_NUMBER; }
