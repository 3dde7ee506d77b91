/* kvfold-bench [NAME] [options]: runs one benchmark, those of one folder ("model"), or all with their defaults. */
#define _DEFAULT_SOURCE
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "bench/json.h"

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *usage, *summary;
} benchmarks[] = {
    {"pool", kvf__bench_pool, "[-r REPETITIONS] [-b|--blocks BLOCKS]",
     "allocate, append and free of the block manager beside a free list and tables in plain C"},
    {"prefix", kvf__bench_prefix, "[-r REPETITIONS] [-b|--blocks BLOCKS]",
     "match and insert of the prefix cache beside hashing the tokens and touching a header a block"},
    {"attention", kvf__bench_attention, "[-r REPETITIONS] [-t THREADS] [-m MIB] [-p PATH] [-c]",
     "paged attention: decode beside its roof, prefill beside sgemm"},
    {"policy", kvf__bench_policy, "[-r REPETITIONS] [-t THREADS] [-a PATH] [-k K]",
     "compaction of a prompt and eviction while decoding beside sgemm and attention"},
#ifdef KVF_BENCH_ENGINE
    {"policy/share", kvf__bench_share, "[-r REPETITIONS] [-t THREADS] [-a PATH] [-p POLICY[:PRESET],...]",
     "the share of each policy in a layer's time, of a prompt and of decoding"},
    {"model/gemm", kvf__bench_gemm, "[REPETITIONS [MAX_ROWS [WAY...]]]",
     "products with quantised weights beside reading them, oneDNN and OpenBLAS"},
    {"engine", kvf__bench_engine,
     "[-r REPETITIONS] [-t THREADS] [-m MODEL] [-c CONTEXT] [-s SEQUENCES] [-p POLICIES] [-g STEPS] [-i] [-x]",
     "tokens a second of a prompt and of decoding with a context, through the engine"},
    {"rho1", kvf__bench_rho1, "--model FILE [-r PAIRS] [-t THREADS] [-n SEQUENCES] [-l CONTEXT] [-s STEPS]",
     "decode of d2o at rho 1, with the mass and without, beside full"},
#endif
};
enum { N_BENCHMARKS = sizeof benchmarks / sizeof *benchmarks };

static void help(void) {
    puts(
        "usage: kvfold-bench [NAME] [options]\n\n"
        "One JSON line a case. Without NAME all run, with their defaults; a NAME before '/' is all that begin with it.\n"
        "bench/README.md says what the options and the fields mean.\n");
    for (int i = 0; i < N_BENCHMARKS; i++)
        printf("  %s %s\n      %s\n", benchmarks[i].name, benchmarks[i].usage, benchmarks[i].summary);
}

static bool is_named(const char *wanted, const char *name) {
    size_t n = strlen(wanted);
    return strncmp(wanted, name, n) == 0 && (name[n] == '\0' || name[n] == '/');
}

int main(int argc, char **argv) {
    int found = 0, failed = 0;
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            help();
            return 0;
        }
    if (argc > 1 && argv[1][0] == '-') kvf__bench_die("%s: the first argument is a NAME (see --help)", argv[1]);
    for (int i = 0; i < N_BENCHMARKS; i++) {
        char *alone[] = {(char[16]){""}, NULL};
        if (argc > 1 && !is_named(argv[1], benchmarks[i].name)) continue;
        found++;
        optind = 1; /* of getopt, which each benchmark begins anew */
        failed |= argc > 1 ? benchmarks[i].run(argc - 1, argv + 1) : benchmarks[i].run(1, alone);
    }
    if (!found) kvf__bench_die("%s: there is no benchmark of that name (see --help)", argv[1]);
    return failed;
}
