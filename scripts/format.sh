#!/usr/bin/env bash
# clang-format over every source of the tree, with the options given: -i to write, --dry-run --Werror to check.
set -euo pipefail
cd "$(dirname "$0")/.."

find base blockmgr attention d2o_policy scheduler model engine tools eval bench examples tests fuzz include \
    \( -name '*.c' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' \) -print0 |
    xargs -0 clang-format "$@"
