#!/usr/bin/env bash
# From a fresh clone to answers: packages, the default model, a release build, and ten prompts answered twice, with a
# D2O-compressed KV cache and with the full one. A minute or two on two cores after the first build.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh build
scripts/fetch_model.sh
cmake --preset release --log-level=WARNING
cmake --build --preset release --target kvfold_command

answers=build/quickstart.jsonl
rm -f "$answers" # of an earlier start
echo
echo "\$ kvfold run --input examples/prompts.jsonl --output $answers --policy d2o --rho 0.2 --compare full"
build/release/kvfold run --input examples/prompts.jsonl --output "$answers" --policy d2o --rho 0.2 --compare full
echo
python3 - "$answers" <<'END'
import json, sys, textwrap
for line in open(sys.argv[1], encoding="utf-8"):
    answer = json.loads(line)
    if answer.get("id") in ("capital", "story"):
        print(f'{answer["id"]} ({answer["prompt_tokens"]} tokens in, {answer["completion_tokens"]} out):')
        for line in answer["text"].strip().splitlines():
            print(textwrap.fill(line, 110, initial_indent="    ", subsequent_indent="    "))
END
echo
echo "All answers: $answers. Next: build/release/kvfold run --prompt \"...\" and build/release/kvfold --help"
