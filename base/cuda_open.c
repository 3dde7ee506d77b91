/* Opens libkvfold_cuda on demand. */
#include <dlfcn.h>

#include "base/base.h"
#include "base/cuda/module.h"

kvf_status kvf__cuda_open(const char *path, uint32_t index, void **handle, kvf_device *out, kvf_error *err) {
    kvf_status (*entry)(uint32_t, kvf_device *, kvf_error *);
    const char *file = path ? path : KVF__CUDA_MODULE_FILE;
    kvf_error why = {.text = ""};
    kvf_device found = {.struct_size = sizeof found};
    void *module = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!module) return kvf__fail(err, KVF_E_NOT_FOUND, "%s: %s; build it with KVF_CUDA=ON", file, dlerror());
    void *symbol = dlsym(module, KVF__CUDA_MODULE_ENTRY);
    memcpy(&entry, &symbol, sizeof entry); /* ISO C has no cast from an object pointer */
    kvf_status st = KVF_OK;
    if (!symbol)
        st = kvf__fail(err, KVF_E_UNSUPPORTED, "%s: is of another version of kvfold than %s", file, kvf_version());
    else if ((st = entry(index, &found, &why)))
        st = kvf__fail(err, st, "%s: %s", file, why.text);
    if (st) {
        dlclose(module);
        return st;
    }
    *handle = module;
    *out = found;
    return KVF_OK;
}

void kvf__cuda_close(void *handle) {
    if (handle) dlclose(handle);
}
