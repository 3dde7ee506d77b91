#!/usr/bin/env bash
# From a fresh clone to answers: packages, the default model, a release build, and a batch of 24 chats that does not fit the KV memory,
# answered twice in the same memory: with a compressed KV cache (policy fold) and with the full one. About two minutes on two cores after the
# first build.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh build
scripts/fetch_model.sh
cmake --preset release --log-level=WARNING
cmake --build --preset release --target kvfold_command

compressed=build/quickstart-fold.jsonl full=build/quickstart-full.jsonl
rm -f "$compressed" "$full" # of an earlier time: a run does not write over answers
run=(run --input examples/chats.jsonl --kv-memory 44MiB --fast-activations --policy fold --rho 0.2 --compare full
    --output "$compressed" --compare-output "$full")
echo
echo "\$ kvfold ${run[*]}"
build/release/kvfold "${run[@]}"
echo
python3 - "$compressed" "$full" <<'END'
import json, sys, textwrap
answers = []
for name in sys.argv[1:]:
    with open(name, encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines]
    answers.append({a["id"]: a["text"] for a in found if "text" in a})
print("Every sixth answer, as far as 40 words:")
for i in sorted(answers[0])[::6]:
    print(f"\n{i}")
    for label, texts in zip(("fold", "full"), answers):
        words = texts[i].split()
        text = " ".join(words[:40]) + (" ..." if len(words) > 40 else "")
        print(textwrap.fill(text, 110, initial_indent=f"    {label}  ", subsequent_indent=" " * 10))
END
echo
echo "All answers: $compressed, $full. Next: build/release/kvfold run --prompt \"...\" and build/release/kvfold --help"
