#!/usr/bin/env bash
# Builds the libFuzzer targets of fuzz/ and runs each, two at a time, from the stored corpus with a fixed seed: the same
# inputs in the same order each time, as far as the time goes. Usage: scripts/fuzz.sh [--explore] [SECONDS [TARGET...]]
# SECONDS of each target: 60. --explore: another seed each time, beginning with what earlier such runs found. Exit code 1
# when one failed (its input lies in build/fuzz/found/ and is printed in base64), 77 when clang or its libFuzzer is missing.
# build/fuzz/results.txt has a line a target.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

explore=
if [ "${1:-}" = --explore ]; then
    explore=1
    shift
fi
seconds=${1:-60}
targets=("${@:2}")
[ ${#targets[@]} -gt 0 ] || targets=(gguf tokenizer lines policy)
if ! [[ $seconds =~ ^[1-9][0-9]{0,5}$ ]]; then
    echo "fuzz: $seconds: must be a number of seconds from 1" >&2
    exit 2
fi
for target in "${targets[@]}"; do
    if [ ! -d "fuzz/corpus/$target" ]; then
        echo "fuzz: $target: no such target; there are: $(cd fuzz/corpus && echo *)" >&2
        exit 2
    fi
done

build=build/fuzz
mkdir -p "$build/logs"
rm -rf "$build/found"
mkdir "$build/found"
: >"$build/results.txt"
if ! echo 'int LLVMFuzzerTestOneInput(const char *p, unsigned long n) { return p && n ? 0 : 0; }' |
    clang -x c -fsanitize=fuzzer,address,undefined -o "$build/probe" - 2>"$build/logs/probe.txt"; then
    echo "fuzz: skipped: clang with libFuzzer is missing (packages clang and libclang-rt-dev)"
    exit 77
fi
if ! { cmake --preset fuzz -DKVF_WERROR=ON && cmake --build --preset fuzz -- --quiet; } >"$build/logs/build.txt" 2>&1; then
    cat "$build/logs/build.txt"
    echo "fuzz failed 1 build" >>"$build/results.txt"
    exit 1
fi
rm -rf "$build/seeds"
mkdir "$build/seeds"
if ! "$build/fuzz/kvfold-fuzz-seeds" "$build/seeds"; then
    echo "fuzz failed 1 seeds" >>"$build/results.txt"
    exit 1
fi

# An input that failed, so that it can be had from a log alone.
show() { # file
    echo "fuzz: $1 ($(wc -c <"$1") bytes), in base64; \`base64 -d >FILE\` gives it back:"
    base64 "$1"
}
run() { # target
    local options=(-max_total_time="$seconds" -timeout=30 -rss_limit_mb=4096 -max_len=4096 -print_final_stats=1)
    local log="$build/logs/$1.txt" status=passed corpus=("fuzz/corpus/$1") file new="$build/explored/$1"
    if [ -z "$explore" ]; then
        options+=(-seed=1)
        new="$build/new/$1"
        rm -rf "$new"
    fi
    [ "$1" = gguf ] && options+=(-max_len=16384) && corpus+=("$build/seeds")
    [ -f "fuzz/$1.dict" ] && options+=(-dict="fuzz/$1.dict")
    mkdir -p "$new" # inputs that reach something new go into the first folder
    "$build/fuzz/kvfold-fuzz-$1" "${options[@]}" -artifact_prefix="$build/found/$1-" "$new" "${corpus[@]}" >"$log" 2>&1 ||
        status=failed
    if [ "$status" = failed ]; then
        grep -av '^#[0-9]' "$log" | tail -60
        for file in "$build/found/$1-"*; do
            [ -f "$file" ] && show "$file"
        done
    fi
    echo "fuzz: $1: $status: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs in $seconds s," \
        "coverage $(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -1)"
    echo "fuzz $status 1 $1" >>"$build/results.txt"
}
i=0
for target in "${targets[@]}"; do
    run "$target" &
    i=$((i + 1))
    [ $((i % 2)) -eq 0 ] && wait
done
wait
if grep -q failed "$build/results.txt"; then
    echo "fuzz: an input that fails, again: $build/fuzz/kvfold-fuzz-TARGET FILE"
    exit 1
fi
