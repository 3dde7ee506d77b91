/* Opens libkvfold_cuda on demand. */
#include <dlfcn.h>

#include "base/base.h"
#include "base/cuda/module.h"

kvf_status kvf__cuda_open(const char *path, void **handle, const kvf__cuda_ops **ops, kvf_error *err) {
    const kvf__cuda_ops *(*entry)(void);
    const char *file = path ? path : KVF__CUDA_MODULE_FILE;
    kvf_error why = {.text = ""};
    void *module = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!module) return kvf__fail(err, KVF_E_NOT_FOUND, "%s: %s; build it with KVF_CUDA=ON", file, dlerror());
    void *symbol = dlsym(module, KVF__CUDA_MODULE_ENTRY);
    memcpy(&entry, &symbol, sizeof entry); /* ISO C has no cast from an object pointer */
    const kvf__cuda_ops *found = symbol ? entry() : NULL;
    kvf_status st = KVF_OK;
    if (!found || found->struct_size != sizeof *found)
        st = kvf__fail(err, KVF_E_UNSUPPORTED, "%s: is of another version of kvfold than %s", file, kvf_version());
    else if (!found->n_devices(&why))
        st = kvf__fail(err, KVF_E_UNSUPPORTED, "%s: %s", file, why.text);
    if (st) {
        dlclose(module);
        return st;
    }
    *handle = module;
    *ops = found;
    return KVF_OK;
}

void kvf__cuda_close(void *handle) {
    if (handle) dlclose(handle);
}
