// consumer.cpp: the public headers from C++.
#include <kvfold/kvfold.h>

#include <cstdio>

int main() {
    kvf_manager_config config;
    kvf_manager_config_init(&config, sizeof config);
    config.n_layers = 2;
    config.n_kv_heads = 1;
    config.n_blocks = 8;
    kvf_manager *manager = nullptr;
    kvf_error err{};
    if (kvf_status status = kvf_manager_create(&config, &manager, &err)) {
        std::fprintf(stderr, "%s: %s\n", kvf_status_name(status), err.text);
        return 1;
    }
    kvf_seq seq = 0;
    kvf_occupancy occupancy{};
    occupancy.struct_size = sizeof occupancy;
    kvf_copy_list copies{};
    kvf_append_item item{};
    item.n_tokens = 20;
    bool ok = kvf_seq_create(manager, &seq) == KVF_OK;
    item.seq = seq;
    ok = ok && kvf_append(manager, &item, 1, &copies) == KVF_OK &&
         kvf_occupancy_read(manager, &occupancy, nullptr, 0) == KVF_OK && occupancy.blocks.n_held == 4;
    kvf_manager_destroy(manager);
    std::printf("kvfold %s: %u blocks held\n", kvf_version(), occupancy.blocks.n_held);
    return ok ? 0 : 1;
}
