#!/usr/bin/env bash
# All benchmarks, quick settings: their JSON lines into bench/results/, in a file with the CPU's name. Builds the release
# preset first. Usage: scripts/bench.sh [--plots] [--peer] [PROGRAM], a kvfold-bench that is built already.
#   --plots  draws them too (bench/plot.py), in a virtual environment with matplotlib when python3 has none
#   --peer   also compares with llama.cpp (bench/peer_llama_cpp.py): builds it the first time, then takes 5 minutes
set -euo pipefail
cd "$(dirname "$0")/.."

plots= peer= program=
for argument in "$@"; do
    case "$argument" in
    --plots) plots=yes ;;
    --peer) peer=yes ;;
    -*)
        echo "bench: $argument: must be --plots, --peer or a program" >&2
        exit 2
        ;;
    *) program=$argument ;;
    esac
done
if [ -z "$program" ]; then
    cmake --preset release >/dev/null
    cmake --build --preset release --target kvfold-bench -- --quiet
    program=build/release/kvfold-bench
fi

cache=${XDG_CACHE_HOME:-$HOME/.cache}/kvfold
cpu=$(sed -n 's/^model name[[:space:]]*: *//p' /proc/cpuinfo 2>/dev/null | head -n 1)
name=$(printf '%s' "${cpu:-unknown}" | sed 's/[^A-Za-z0-9.]\{1,\}/-/g; s/^-//; s/-$//')
mkdir -p bench/results
results=bench/results/$name.jsonl
lines=$(mktemp "$results.XXXXXX")
trap 'rm -f "$lines"' EXIT

load=$(cut -d ' ' -f 1 /proc/loadavg 2>/dev/null || echo unknown)
echo "load before: $load" >&2
"$program" pool >>"$lines"
"$program" prefix >>"$lines"
"$program" policy -r 5 >>"$lines"
"$program" attention -r 5 >>"$lines"
"$program" model/gemm 3 32 >>"$lines"
model=$cache/SmolLM2-135M-Instruct.Q4_1.gguf
if [ -e "$model" ]; then
    "$program" engine -s 1,8 -r 3 >>"$lines"
    "$program" rho1 --model "$model" -s 2 >>"$lines"
    "$program" rho1 --model "$model" -s 2 -n 8 -l 512 >>"$lines"
else
    echo "engine, rho1: left out, scripts/fetch_model.sh fetches their model" >&2
fi
chmod 644 "$lines"
mv "$lines" "$results"
echo "$results: $(wc -l <"$results") lines" >&2

if [ -n "$peer" ]; then
    python3 bench/peer_llama_cpp.py --bench "$program" --output "bench/results/$name-peer.jsonl"
fi
if [ -n "$plots" ]; then
    python=python3
    if ! python3 -c 'import matplotlib' 2>/dev/null; then
        python=$cache/venv-plots/bin/python
        [ -x "$python" ] || python3 -m venv "$cache/venv-plots"
        "$python" -c 'import matplotlib' 2>/dev/null || "$python" -m pip install --quiet matplotlib
    fi
    "$python" bench/plot.py bench/results/"$name"*.jsonl
fi
