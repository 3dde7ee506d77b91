#!/usr/bin/env bash
# All tests, in one command: AddressSanitizer build, release build, ThreadSanitizer build, a minute of each fuzz target
# (scripts/fuzz.sh: a fixed seed), format, tidy. The last line is the sum: "N passed, N failed, N skipped". Exit code 0
# when nothing failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

results=build/test-results
mkdir -p "$results"
rm -f "$results"/*
jobs=$(nproc)
begin=$SECONDS

# Each stage leaves one file of lines "STAGE passed|failed|skipped COUNT NAME" for scripts/sum_tests.py.
note() { # stage, status, name
    printf '%s %s 1 %s\n' "$1" "$2" "$3" >>"$results/$1.txt"
}
stage() {
    printf '\n== %s (at %d s)\n' "$1" $((SECONDS - begin))
}
# A step that counts as one test: step STAGE NAME COMMAND...
step() {
    local stage=$1 name=$2
    shift 2
    if "$@"; then note "$stage" passed "$name"; else
        note "$stage" failed "$name"
        return 1
    fi
}
check_format() {
    local output
    output=$(scripts/format.sh --dry-run --Werror 2>&1) && return
    echo "to be formatted with scripts/format.sh -i:"
    printf '%s\n' "$output" | sed -n 's/^\([^ :]*\):[0-9]*:[0-9]*: error:.*/  \1/p' | sort | uniq -c
    return 1
}
build_and_test() { # preset
    stage "$1: build"
    step "$1" configure cmake --preset "$1" -DKVF_WERROR=ON >"$results/configure.log" || {
        cat "$results/configure.log"
        return
    }
    step "$1" build cmake --build --preset "$1" -- --quiet || return
    stage "$1: tests"
    ctest --preset "$1" -j "$jobs" --output-junit "$PWD/$results/$1.xml" --test-output-size-passed 4000000 \
        --test-output-size-failed 4000000 --no-tests=error || note "$1" failed ctest
}

stage setup
scripts/setup.sh test || {
    echo "0 passed, 1 failed"
    exit 1
}
scripts/fetch_model.sh || echo "test: going on without the model: the tests that need it are skipped"

build_and_test asan
build_and_test release
build_and_test tsan

stage fuzz
scripts/fuzz.sh
case $? in
0 | 1) cp build/fuzz/results.txt "$results/fuzz.txt" || note fuzz failed results ;;
77) note fuzz skipped "every target: clang with libFuzzer is missing" ;;
*) note fuzz failed fuzz.sh ;;
esac

stage "format and tidy"
step checks format check_format
step checks tidy scripts/tidy.sh build/release

stage results
python3 scripts/sum_tests.py "$results" $((SECONDS - begin))
