/* The probe of a model for policies that need one: --probe FILE, or what `kvfold calibrate` has left in the cache. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tools/cli.h"
#include "tools/digest.h"

bool kvf__probe_path(uint64_t digest, char path[KVF__PATH_BYTES]) {
    char text[KVF__DIGEST_BYTES], name[64];
    kvf__digest_text(digest, text);
    snprintf(name, sizeof name, "probes/%s.probe", text);
    return kvf__cache_path(name, path);
}

bool kvf__probe_exists(const kvf__cli *cli) {
    char model_path[KVF__PATH_BYTES], path[KVF__PATH_BYTES];
    uint64_t digest;
    return cli->probe || (kvf__model_find(cli, model_path) && kvf__digest_model(model_path, true, &digest, NULL) &&
                          kvf__probe_path(digest, path) && access(path, F_OK) == 0);
}

bool kvf__setup_probe(const kvf__cli *cli, const kvf_policy_options *policies, uint32_t n, kvf_probe **out) {
    bool needed = false;
    for (uint32_t i = 0; i < n; i++) needed |= (kvf_policy_needs(&policies[i]) & KVF_NEEDS_PROBE) != 0;
    if (*out || (!needed && !cli->probe)) return true;
    char model_path[KVF__PATH_BYTES], path[KVF__PATH_BYTES], model[KVF__DIGEST_BYTES];
    uint64_t digest;
    if (!kvf__model_path(cli, model_path) || !kvf__digest_model(model_path, cli->quiet, &digest, NULL)) return false;
    kvf__digest_text(digest, model);
    if (cli->probe)
        snprintf(path, sizeof path, "%s", cli->probe);
    else if (!kvf__probe_path(digest, path) || access(path, F_OK) != 0) {
        kvf__say("score probe: there is no probe of this model yet; make one, once: kvfold calibrate%s%s",
                 cli->model ? " --model " : "", cli->model ? kvf__shown(cli->model).text : "");
        return false;
    }
    kvf_error err = {.text = ""};
    kvf_probe_data d = {.struct_size = sizeof d};
    kvf_status st = kvf_probe_open(path, NULL, out, &err);
    if (!st) st = kvf_probe_get(*out, &d);
    if (st) {
        kvf__say("--probe %s", err.text[0] ? err.text : kvf_status_text(st));
        return false;
    }
    if (!d.model[0] || !strcmp(d.model, model)) return true;
    kvf__say("--probe %s: was fitted to another model (digest %s; this one has %s); make one: kvfold calibrate",
             kvf__shown(path).text, d.model, model);
    return false;
}

uint64_t kvf__probe_digest(const kvf_probe *probe) {
    kvf_probe_data d = {.struct_size = sizeof d};
    if (!probe || kvf_probe_get(probe, &d)) return 0;
    return kvf__digest(d.weight, (size_t)d.n_layers * d.n_kv_heads * d.n_embd * sizeof *d.weight);
}
