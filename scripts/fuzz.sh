#!/usr/bin/env bash
# Builds the libFuzzer targets of fuzz/ and runs each, two at a time. Usage: scripts/fuzz.sh [SECONDS [TARGET...]]
# SECONDS of each target: 20; `scripts/fuzz.sh 60` is the long form. Exit code 1 when one crashed (its input then lies in
# build/fuzz/found/), 77 when clang or its libFuzzer is missing. build/fuzz/results.txt has a line a target.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

seconds=${1:-20}
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
mkdir -p "$build/found" "$build/logs"
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
mkdir -p "$build/corpus/gguf"
if ! "$build/fuzz/kvfold-fuzz-seeds" "$build/corpus/gguf"; then
    echo "fuzz failed 1 seeds" >>"$build/results.txt"
    exit 1
fi

# What a run finds new stays in build/fuzz/corpus/TARGET and is where the next begins, beside the stored inputs.
run() { # target
    local options=(-max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=4096 -print_final_stats=1)
    local stored="fuzz/corpus/$1" log="$build/logs/$1.txt" status=passed
    [ "$1" = gguf ] && options+=(-max_len=16384)
    [ -f "fuzz/$1.dict" ] && options+=(-dict="fuzz/$1.dict")
    mkdir -p "$build/corpus/$1"
    "$build/fuzz/kvfold-fuzz-$1" "${options[@]}" -artifact_prefix="$build/found/$1-" "$build/corpus/$1" "$stored" \
        >"$log" 2>&1 || status=failed
    if [ "$status" = failed ]; then
        grep -v '^#[0-9]' "$log" | tail -60
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
    echo "fuzz: an input that fails lies in $build/found/; again: $build/fuzz/kvfold-fuzz-TARGET FILE"
    exit 1
fi
