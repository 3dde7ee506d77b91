#!/usr/bin/env bash
# The tests, in one command. Usage: scripts/test.sh [--all]
# By itself: one build with AddressSanitizer and UndefinedBehaviorSanitizer, its tests but the long ones, and the checks of the
# tree; what is left out is listed at the end.
# --all: every test. The AddressSanitizer build, the release build, the ThreadSanitizer build, a minute of each fuzz target
# (scripts/fuzz.sh: a fixed seed), format, tidy.
# No test has a limit in time: tests/watch.py ends one that makes no progress. The last line is the sum: "N passed, N failed"
# (and ", N skipped"). Exit code 0 when nothing failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

all=
case "${1:-}" in
'') ;;
--all) all=1 ;;
-h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
*)
    echo "test: $1: must be --all, or left out" >&2
    exit 2
    ;;
esac

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
build_and_test() { # preset, then arguments of the build, "--", of ctest
    local preset=$1 target=()
    shift
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        target+=("$1")
        shift
    done
    [ $# -gt 0 ] && shift
    set -- "$preset" "$@"
    stage "$1: build"
    step "$1" configure cmake --preset "$1" -DKVF_WERROR=ON >"$results/configure.log" || {
        cat "$results/configure.log"
        return
    }
    step "$1" build cmake --build --preset "$1" "${target[@]}" -- --quiet || return
    stage "$1: tests"
    ctest --preset "$1" "${@:2}" -j "$jobs" --output-junit "$PWD/$results/$1.xml" --test-output-size-passed 4000000 \
        --test-output-size-failed 4000000 --no-tests=error || note "$1" failed ctest
}

stage setup
scripts/setup.sh test || {
    echo "0 passed, 1 failed"
    exit 1
}
scripts/fetch_model.sh || echo "test: going on without the model: the tests that need it are skipped"

if [ -z "$all" ]; then
    build_and_test asan --target kvf_short -- -LE long
    stage "checks of the tree"
    for check in includes tree docs; do step checks "$check" python3 "tests/check_$check.py"; done
    step checks format check_format
    stage "left to scripts/test.sh --all"
    echo "the release and ThreadSanitizer builds, the install test, fuzzing, tidy, and of the AddressSanitizer build the long tests:"
    ctest --preset asan -N -L long | sed -n 's/^ *Test *#[0-9]*: //p' | paste -sd ' ' | fold -s -w 118 | sed 's/^/  /'
    stage results
    exec python3 scripts/sum_tests.py "$results" $((SECONDS - begin))
fi

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
