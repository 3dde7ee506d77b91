/* engine.c: libkvfold_engine is found and answers; there is no model here, and it says so. */
#include <kvfold/engine.h>
#include <stdio.h>

int main(void) {
    kvf_model *model = NULL;
    kvf_error err = {.text = ""};
    kvf_status status = kvf_model_open("no-such-file.gguf", NULL, &model, &err);
    printf("%s: %s\n", kvf_status_name(status), err.text);
    return status == KVF_E_IO && !model ? 0 : 1;
}
