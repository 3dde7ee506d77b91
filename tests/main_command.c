/* Runs command.sh, the tests of the kvfold command, with tiny random models: all of them, or main_command PART. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/gguf_writer.h"

enum { SKIP = 77 };

/* The command lies in the build folder, above this program's. */
static int find_command(char *path, size_t capacity) {
    char self[3000];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    for (int up = 0; n > 0 && up < 2; n--)
        if (self[n - 1] == '/') up++;
    if (n <= 0) return 0;
    self[n] = '\0';
    snprintf(path, capacity, "%s/kvfold", self);
    return access(path, X_OK) == 0;
}

int main(int argc, char **argv) {
    char command[3100], model[256], quantised[256];
    if (!find_command(command, sizeof command)) {
        puts("skipped: the kvfold command was not built");
        return SKIP;
    }
    struct tiny_model_params params = {.seed = 1};
    gw_temp_path(model, sizeof model);
    int bad = kvf_test_write_tiny_model(model, &params);
    params.weight_type = GW_Q4_1;
    gw_temp_path(quantised, sizeof quantised);
    bad = kvf_test_write_tiny_model(quantised, &params) || bad;
    pid_t child = bad ? -1 : fork();
    if (child == 0) {
        execlp("sh", "sh", KVF_SOURCE_DIR "/tests/command.sh", command, model, quantised,
               argc > 1 ? argv[1] : (char *)NULL, (char *)NULL);
        _exit(127);
    }
    int status = -1;
    if (child < 0 || waitpid(child, &status, 0) != child) status = -1;
    unlink(model);
    unlink(quantised);
    return status == 0 ? 0 : 1;
}
