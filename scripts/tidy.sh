#!/usr/bin/env bash
# clang-tidy over the sources of the libraries and the command; the checks are those of .clang-tidy.
# Usage: scripts/tidy.sh BUILD_FOLDER [FILE...]
set -euo pipefail
cd "$(dirname "$0")/.."

build=${1:?usage: scripts/tidy.sh BUILD_FOLDER [FILE...]}
shift
files=("$@")
if [ ${#files[@]} -eq 0 ]; then
    mapfile -t files < <(find base blockmgr attention d2o_policy scheduler model engine tools eval -name '*.c' | sort)
fi
# xargs runs on after a failure and then says so; what clang-tidy counts and hides is no news.
printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P "$(nproc)" clang-tidy --quiet -p "$build" 2> >(grep -vE '^[0-9]+ warnings? .*generated' >&2)
