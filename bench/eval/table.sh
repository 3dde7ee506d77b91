#!/usr/bin/env bash
# The tables of docs/results.md: every policy over eight texts, four contexts and four memories, and over tasks of recall.
#   bench/eval/table.sh --texts DIR [--output DIR] [--program kvfold] [--policies LIST] [--contexts LIST] [--rhos LIST]
#                       [--scored N] [--recall-contexts LIST] [--tasks LIST] [--samples N] [--kvfold "OPTION..."] [WHAT...]
# WHAT, all of them if none is named: divergence recall needle report. Goes on where it stopped: records stay. report
# writes docs/results/ and pages beside the records; fold was tuned on the texts in `tuned`, which have a file of their own.
# DIR has the prose that the project does not carry, UTF-8, named KIND_NAME.txt (novel, essay, problems). Beside it are
# measured: this project's C code, its dialogues as a text, and Python's reference (pydoc_data/topics.py).
set -euo pipefail
cd "$(dirname "$0")/../.."

texts="" output=build/eval program=build/release/kvfold policies=all contexts=1024,2048,4096,7936 rhos=0.1,0.2,0.4,0.8
scored=256 recall_contexts=1024 samples=20 kvfold="" what=()
tasks=single,multikey,multivalue,tracking,words,names,table,code tuned=jack_sheppard,news_from_nowhere,problems_gsm8k,kvfold
while [ $# -gt 0 ]; do
    case $1 in
    --texts | --output | --program | --policies | --contexts | --rhos | --scored | --recall-contexts | --tasks | --samples | --kvfold)
        name=${1#--}
        [ $# -gt 1 ] || { echo "table: $1: needs a value" >&2 && exit 2; }
        declare "${name//-/_}=$2"
        shift 2
        ;;
    divergence | recall | needle | report) what+=("$1") && shift ;;
    *) echo "table: $1: must be divergence, recall, needle, report or an option, which the head of this file lists" >&2 && exit 2 ;;
    esac
done
[ -d "$texts" ] || { echo "table: --texts: must be a folder of texts named KIND_NAME.txt" >&2 && exit 2; }
[ ${#what[@]} -gt 0 ] || what=(divergence recall needle report)
mkdir -p "$output"

# Made once, so that a run that goes on has the same.
[ -e "$output/code_kvfold.txt" ] || head -c 200000 <(cat engine/*.c scheduler/*.c blockmgr/*.c) >"$output/code_kvfold.txt"
[ -e "$output/text_reference.txt" ] || python3 - "$output" <<'PY'
import json, pydoc_data.topics, sys
folder = sys.argv[1]
speaker = {"system": "Setting", "user": "Question", "assistant": "Answer"}
with open(f"{folder}/dialogue_talks.txt", "w") as f:
    for line in open("bench/eval/dialogues.jsonl"):
        for turn in json.loads(line)["turns"]:
            f.write(f"{speaker[turn['role']]}: {turn['content']}\n\n")
topics = pydoc_data.topics.topics
with open(f"{folder}/text_reference.txt", "w") as f:
    f.write("\n\n".join(topics[t] for t in sorted(topics, key=str.lower))[:200000])
PY
list=()
for file in "$texts"/*_*.txt "$output"/*_*.txt; do
    base=$(basename "$file" .txt)
    kind=${base%%_*}
    case $kind in
    novel | essay | code | dialogue | problems | text) ;;
    worked) kind=problems ;;
    *) echo "table: $file: $kind is no kind of text, left out" >&2 && continue ;;
    esac
    list+=("$kind:${base#*_}=$file")
done

# shellcheck disable=SC2086 # options are words
run() { "$program" eval "$@" --policies "$policies" --rhos "$rhos" --batch 96 --resume $kvfold; }
for measure in "${what[@]}"; do
    case $measure in
    divergence) # the short contexts of all texts first, so that a table of them stands early
        for context in ${contexts//,/ }; do
            for text in "${list[@]}"; do
                run divergence --text "$text" --contexts "$context" --scored "$scored" \
                    --output "$output/divergence.jsonl"
            done
        done
        ;;
    recall) run recall --tasks "$tasks" --contexts "$recall_contexts" --samples "$samples" --output "$output/recall.jsonl" ;;
    needle) run needle --contexts "$recall_contexts" --samples "$samples" --output "$output/needle.jsonl" ;;
    report)
        mkdir -p docs/results
        report() { # name, title, options and files
            printf '# %s\n\nWritten by bench/eval/table.sh. How to read it: [eval.md](../eval.md#reading-a-report).\n\n' "$2" >"docs/results/$1.md"
            "$program" eval report "${@:3}" --baseline best --markdown "$output/$1.md" --html "$output/$1.html" >"$output/$1.txt"
            cat "$output/$1.md" >>"docs/results/$1.md"
        }
        report held-out "Texts that fold was not tuned on" "$output"/divergence*.jsonl --except "$tuned"
        report tuned "Texts that fold was tuned on" "$output"/divergence*.jsonl --only "$tuned"
        [ ! -e "$output/recall.jsonl" ] || report recall "Recall" "$output"/recall*.jsonl
        [ ! -e "$output/needle.jsonl" ] || report needle "Needles" "$output"/needle*.jsonl
        ;;
    esac
done
