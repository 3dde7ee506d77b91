/* The public functions for prefill and decode: they check arguments, divide the workspace and choose the path. */
#include "attention/call.h"

#include <stdint.h>

int kvf_cpu_has_path(kvf_cpu_path path) {
    switch (path) {
    case KVF_CPU_AUTO:
    case KVF_CPU_REF:
    case KVF_CPU_SCALAR: return 1;
    case KVF_CPU_AVX2: return kvf__cpu_detect().avx2_fma_f16c;
    case KVF_CPU_AVX512: return kvf__cpu_detect().avx512;
    }
    return 0;
}

static kvf_status choose(kvf_cpu_path *path, kvf_error *err) {
    if ((unsigned)*path > KVF_CPU_AVX512)
        return kvf__fail(err, KVF_E_INVALID, "path %d: must be a kvf_cpu_path", (int)*path);
    if (!kvf_cpu_has_path(*path))
        return kvf__fail(err, KVF_E_UNSUPPORTED, "path %d: this CPU lacks %s; use KVF_CPU_AUTO", (int)*path,
                         *path == KVF_CPU_AVX2 ? "AVX2, FMA or F16C" : "AVX-512 F, BW, VL or DQ");
    if (*path == KVF_CPU_AUTO) {
        kvf__cpu cpu = kvf__cpu_detect();
        *path = cpu.avx512 ? KVF_CPU_AVX512 : cpu.avx2_fma_f16c ? KVF_CPU_AVX2 : KVF_CPU_SCALAR;
    }
    return KVF_OK;
}

static kvf_status run(kvf_stream *stream, const kvf_attention *a, kvf__call_kind kind, kvf_error *err) {
    kvf__call c;
    kvf__workspace w;
    kvf_status st = kvf__call_check(&c, stream, a, kind, err);
    if (st) return st;
    kvf_cpu_path path = c.a.path;
    st = choose(&path, err);
    if (st || c.token_begin == c.token_end) return st;
    if (!kvf__workspace_layout(&w, NULL, c.n_threads, c.pages.head_dim, c.a.n_q_heads, c.n_kv_heads, c.max_slots,
                               c.a.seq_end - c.a.seq_begin, c.token_end - c.token_begin))
        return kvf__fail(err, KVF_E_OVERFLOW, "workspace: its size wraps for %u slots and %u query rows", c.max_slots,
                         c.token_end - c.token_begin);
    if (!c.a.workspace || c.a.workspace_bytes < w.bytes)
        return kvf__fail(err, KVF_E_INVALID, "workspace_bytes %zu: this call needs %zu (kvf_attention_workspace_bytes)",
                         c.a.workspace ? c.a.workspace_bytes : (size_t)0, w.bytes);
    if ((uintptr_t)c.a.workspace % KVF__CACHE_LINE)
        return kvf__fail(err, KVF_E_INVALID, "workspace: must be aligned to %u bytes", KVF__CACHE_LINE);
    size_t spare = c.a.workspace_bytes - w.bytes;
    kvf__workspace_layout(&w, c.a.workspace, c.n_threads, c.pages.head_dim, c.a.n_q_heads, c.n_kv_heads, c.max_slots,
                          c.a.seq_end - c.a.seq_begin, c.token_end - c.token_begin);
    w.rest_bytes += spare;
    if (path == KVF_CPU_REF) return kind == KVF__PREFILL ? kvf__ref_prefill(&c, &w, err) : kvf__ref_decode(&c, &w, err);
    return kind == KVF__PREFILL ? kvf__cpu_prefill(stream, &c, &w, path, err)
                                : kvf__cpu_decode(stream, &c, &w, path, err);
}

kvf_status kvf_attention_prefill(kvf_stream *stream, const kvf_attention *a, kvf_error *err) {
    return run(stream, a, KVF__PREFILL, err);
}

kvf_status kvf_attention_decode(kvf_stream *stream, const kvf_attention *a, kvf_error *err) {
    return run(stream, a, KVF__DECODE, err);
}
