/* base/cuda/module.h: the interface of libkvfold_cuda: a kvf_device for each GPU. The module is opened on demand
 * (kvf__cuda_open), so that a program without a GPU never loads CUDA. This header includes no CUDA header. */
#ifndef KVF_BASE_CUDA_MODULE_H
#define KVF_BASE_CUDA_MODULE_H

#include "kvfold/device.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVF__CUDA_MODULE_FILE "libkvfold_cuda.so.0"
#define KVF__CUDA_MODULE_ENTRY "kvf__cuda_device"

/* The entry of the module: the table of GPU number `index`; out->struct_size is the caller's sizeof(kvf_device).
 * KVF_E_UNSUPPORTED: there is no such GPU, or the caller is of another version. */
KVF_API KVF_CHECK kvf_status kvf__cuda_device(uint32_t index, kvf_device *out, kvf_error *err);

/* Opens the module (path NULL: the loader searches for KVF__CUDA_MODULE_FILE). The caller keeps the handle open as long as
 * it uses the device. KVF_E_NOT_FOUND: no such module; KVF_E_UNSUPPORTED as kvf__cuda_device. */
KVF_CHECK kvf_status kvf__cuda_open(const char *path, uint32_t index, void **handle, kvf_device *out, kvf_error *err);
void kvf__cuda_close(void *handle);

#ifdef __cplusplus
}
#endif
#endif
