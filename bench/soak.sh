#!/usr/bin/env bash
# The long random test: seed ranges of tests/main_prefix_random.c, every operation audited and compared with the model.
# What has run stands in bench/results/soak.jsonl, a line a range; a range that stands there for this commit is not run
# again, so that a run may be stopped at any time and gone on with.
#   bench/soak.sh [--first SEED] [--ranges N] [--seeds N] [--operations N] [--processes N] [--build DIR] [--output FILE]
#   bench/soak.sh --total [--output FILE]
# Exit code 1 when a range failed: its line has the seed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

first=1000000 ranges=1000 seeds=100 operations=10000 processes=2 build=build/release total=0
output=bench/results/soak.jsonl
while [ $# -gt 0 ]; do
    case $1 in
    --total) total=1 && shift && continue ;;
    --first | --ranges | --seeds | --operations | --processes)
        [[ ${2:-} =~ ^[1-9][0-9]{0,11}$ ]] || {
            echo "soak: $1 ${2:-}: must be a number from 1 on" >&2
            exit 2
        }
        declare "${1#--}=$2"
        ;;
    --build | --output) declare "${1#--}=${2:?}" ;;
    *)
        echo "soak: $1: is none of --first --ranges --seeds --operations --processes --build --output --total" >&2
        exit 2
        ;;
    esac
    shift 2
done

# Adds up, by commit; a range that stands there twice counts once.
add_up() {
    python3 - "$output" <<'PY'
import json, sys
commits = {}
for line in open(sys.argv[1]):
    r = json.loads(line)
    commits.setdefault(r["commit"], {})[r["first_seed"], r["seeds"], r["operations"]] = r
for commit, runs in commits.items():
    runs = sorted(runs.values(), key=lambda r: r["first_seed"])
    for a, b in zip(runs, runs[1:]):
        if a["first_seed"] + a["seeds"] > b["first_seed"]:
            sys.exit(f"soak: {commit}: ranges from {a['first_seed']} and {b['first_seed']} overlap: not added up")
    failed = [r for r in runs if r["result"] != "passed"]
    good = [r for r in runs if r["result"] == "passed"]
    print(f"{commit} (blockmgr {runs[0]['blockmgr']}): {sum(r['operations'] for r in good):,} operations, "
          f"{sum(r['seeds'] for r in good):,} seeds, {sum(r['seconds'] for r in good):,.0f} s, {len(failed)} ranges failed"
          + "".join(f"; {r['result']}" for r in failed))
PY
}
if [ "$total" = 1 ]; then
    add_up
    exit
fi

commit=$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
blockmgr=$(git rev-parse --short=12 HEAD:blockmgr 2>/dev/null || echo unknown)
[ -z "$(git status --porcelain -- blockmgr base include tests bench/soak.sh 2>/dev/null)" ] || commit=$commit-dirty
if [ ! -f "$build/CMakeCache.txt" ]; then
    cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release || exit 1
fi
cmake --build "$build" --target main_prefix_random -- --quiet || exit 1
# A copy, since a run of hours would not end where it began if the program were built again meanwhile.
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
cp "$build/tests/main_prefix_random" "$folder/program" || exit 1
mkdir -p "$(dirname "$output")" && touch "$output" || exit 1
done_before=$(grep -F "\"commit\": \"$commit\"" "$output" | grep -F '"result": "passed"')

# One range; its line is appended in one write.
one() { # first seed
    local begin=${EPOCHREALTIME/./} text result seconds
    grep -qF "\"first_seed\": $1, \"seeds\": $seeds, \"operations\": $((seeds * operations))," <<<"$done_before" && return
    text=$("$folder/program" "$1" "$seeds" "$operations" 2>&1)
    local status=$?
    [ $status -lt 128 ] || [ $status = 134 ] || [ $status = 139 ] || return 2 # stopped from outside: nothing is known
    seconds=$(((${EPOCHREALTIME/./} - begin) / 1000))
    result=passed
    [ $status = 0 ] || result="failed: $(tr '\n"\\' ' ' <<<"${text: -300}")"
    printf '{"first_seed": %s, "seeds": %s, "operations": %s, "seconds": %d.%03d, "commit": "%s", "blockmgr": "%s", "result": "%s"}\n' \
        "$1" "$seeds" $((seeds * operations)) $((seconds / 1000)) $((seconds % 1000)) "$commit" "$blockmgr" "$result" \
        >>"$output"
    [ $status = 0 ] || touch "$folder/failed"
}
worker() { # which of them
    for ((i = $1; i < ranges; i += processes)); do one $((first + i * seeds)) || return; done
}
for ((p = 0; p < processes; p++)); do worker "$p" & done
wait
add_up
[ ! -e "$folder/failed" ]
