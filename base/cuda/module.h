/* base/cuda/module.h: what libkvfold_cuda offers. The module is opened on demand (kvf__cuda_open), so that a program
 * without a GPU never loads CUDA; C with no CUDA header. */
#ifndef KVF_BASE_CUDA_MODULE_H
#define KVF_BASE_CUDA_MODULE_H

#include "kvfold/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVF__CUDA_MODULE_FILE "libkvfold_cuda.so.0"
#define KVF__CUDA_MODULE_ENTRY "kvf__cuda_module"

/* Pointers into device memory are those of alloc. Calls run on the default stream and return when done. */
typedef struct kvf__cuda_ops {
    size_t struct_size;
    /* Devices that can be used; 0 without a driver, the text then says why. */
    uint32_t (*n_devices)(kvf_error *err);
    kvf_status (*alloc)(size_t bytes, void **out, kvf_error *err);
    void (*free)(void *p);
    kvf_status (*upload)(void *dst, const void *src, size_t bytes, kvf_error *err);
    kvf_status (*download)(void *dst, const void *src, size_t bytes, kvf_error *err);
    /* kvf_copies_run for pages in device memory. items is device memory for copies->n items, at least. Checks every id,
     * stride and alignment before it writes anything. */
    kvf_status (*copies_run)(const kvf_pages *pages, const kvf_score_pages *scores, const kvf_copy_list *copies,
                             kvf_copy *items, kvf_error *err);
} kvf__cuda_ops;

/* The entry of the module. */
KVF_API const kvf__cuda_ops *kvf__cuda_module(void);

/* Opens the module (path NULL: KVF__CUDA_MODULE_FILE by the loader's own search) once for the caller, who keeps the
 * handle open as long as ops are used. KVF_E_NOT_FOUND: no such module; KVF_E_UNSUPPORTED: no device, another version. */
KVF_API KVF_CHECK kvf_status kvf__cuda_open(const char *path, void **handle, const kvf__cuda_ops **ops, kvf_error *err);
KVF_API void kvf__cuda_close(void *handle);

#ifdef __cplusplus
}
#endif
#endif
