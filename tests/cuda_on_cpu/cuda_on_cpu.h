/* tests/cuda_on_cpu/cuda_on_cpu.h: settings and counters of the stand-in, for tests. */
#ifndef KVF_TESTS_CUDA_ON_CPU_H
#define KVF_TESTS_CUDA_ON_CPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cuda_on_cpu_order { CUDA_ON_CPU_ASCENDING, CUDA_ON_CPU_DESCENDING, CUDA_ON_CPU_RANDOM } cuda_on_cpu_order;

/* The order in which the threads of later launches run; seed is for the random one. */
void cuda_on_cpu_set_order(cuda_on_cpu_order order, uint64_t seed);
/* What was wrong with the last launch, "" when nothing was. */
const char *cuda_on_cpu_error(void);
/* Threads that have run since the program began. */
uint64_t cuda_on_cpu_n_threads(void);

#ifdef __cplusplus
}
#endif
#endif
