#!/usr/bin/env bash
# All benchmarks, quick settings: their JSON lines into bench/results/, in a file with the CPU's name. Builds the release
# preset first. Usage: scripts/bench.sh [PROGRAM], a kvfold-bench that is built already.
set -euo pipefail
cd "$(dirname "$0")/.."

program=${1:-}
if [ -z "$program" ]; then
    cmake --preset release >/dev/null
    cmake --build --preset release --target kvfold-bench -- --quiet
    program=build/release/kvfold-bench
fi

cpu=$(sed -n 's/^model name[[:space:]]*: *//p' /proc/cpuinfo 2>/dev/null | head -n 1)
name=$(printf '%s' "${cpu:-unknown}" | sed 's/[^A-Za-z0-9.]\{1,\}/-/g; s/^-//; s/-$//')
mkdir -p bench/results
results=bench/results/$name.jsonl
lines=$(mktemp "$results.XXXXXX")
trap 'rm -f "$lines"' EXIT

load=$(cut -d ' ' -f 1 /proc/loadavg 2>/dev/null || echo unknown)
echo "load before: $load" >&2
"$program" pool >>"$lines"
"$program" policy -r 9 >>"$lines"
"$program" attention -r 5 -m 256 >>"$lines"
"$program" model/gemm 3 32 >>"$lines"
model=${XDG_CACHE_HOME:-$HOME/.cache}/kvfold/SmolLM2-135M-Instruct.Q4_1.gguf # of scripts/fetch_model.sh
if [ -f "$model" ]; then
    "$program" rho1 --model "$model" -s 2 >>"$lines"
    "$program" rho1 --model "$model" -s 2 -n 8 -l 512 >>"$lines"
fi
chmod 644 "$lines"
mv "$lines" "$results"
echo "$results: $(wc -l <"$results") lines" >&2
