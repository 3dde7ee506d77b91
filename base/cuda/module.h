/* base/cuda/module.h: the interface of libkvfold_cuda. The module is opened on demand (kvf__cuda_open), so that a program
 * without a GPU never loads CUDA. This header includes no CUDA header. */
#ifndef KVF_BASE_CUDA_MODULE_H
#define KVF_BASE_CUDA_MODULE_H

#include "kvfold/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVF__CUDA_MODULE_FILE "libkvfold_cuda.so.0"
#define KVF__CUDA_MODULE_ENTRY "kvf__cuda_module"

/* Device memory comes from `alloc`. Calls run on the default stream and return when done. */
typedef struct kvf__cuda_ops {
    size_t struct_size;
    /* Number of usable devices; 0 without a driver, and err then says why. */
    uint32_t (*n_devices)(kvf_error *err);
    kvf_status (*alloc)(size_t bytes, void **out, kvf_error *err);
    void (*free)(void *p);
    kvf_status (*upload)(void *dst, const void *src, size_t bytes, kvf_error *err);
    kvf_status (*download)(void *dst, const void *src, size_t bytes, kvf_error *err);
    /* kvf_copies_run for pages in device memory. items: device memory for at least copies->n items. Checks every id,
     * stride and alignment before it writes anything. */
    kvf_status (*copies_run)(const kvf_pages *pages, const kvf_score_pages *scores, const kvf_copy_list *copies,
                             kvf_copy *items, kvf_error *err);
} kvf__cuda_ops;

/* The entry of the module. */
KVF_API const kvf__cuda_ops *kvf__cuda_module(void);

/* Opens the module (path NULL: the loader searches for KVF__CUDA_MODULE_FILE). The caller keeps the handle open as long as
 * it uses ops. KVF_E_NOT_FOUND: no such module; KVF_E_UNSUPPORTED: no device, or a module of another version. */
KVF_CHECK kvf_status kvf__cuda_open(const char *path, void **handle, const kvf__cuda_ops **ops, kvf_error *err);
void kvf__cuda_close(void *handle);

#ifdef __cplusplus
}
#endif
#endif
