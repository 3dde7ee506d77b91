#!/bin/sh
# The kvfold command from outside: command.sh BINARY MODEL QUANTISED [PART...]. Prints "ok NAME" or "FAIL NAME" per case, then the
# sum. MODEL is any GGUF file; nothing here depends on what it answers. QUANTISED, of a tiny model, is for what quantised
# weights change. A part is a file command_PART.sh beside this one; by default all are run.
set -u
if [ $# -lt 3 ]; then
    echo "usage: command.sh BINARY MODEL QUANTISED [PART...]" >&2
    exit 2
fi
kvfold=$(realpath "$1")
model=$(realpath "$2")
quantised=$(realpath "$3")
here=$(realpath "$(dirname "$0")")
examples=$(realpath "$here/../examples")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 2
LC_ALL=C
XDG_CACHE_HOME=$work/cache
export kvfold model examples here LC_ALL XDG_CACHE_HOME
passed=0
failed=0

ok() {
    passed=$((passed + 1))
    echo "ok $1"
}
fail() { # name, what was seen
    failed=$((failed + 1))
    echo "FAIL $1"
    printf '%s\n' "$2" | head -c 2000 | sed 's/^/    /'
}
# refused NAME CODE TEXT ARGUMENTS...: exits with CODE, says TEXT on stderr, prints nothing on stdout.
refused() {
    name=$1 code=$2 text=$3
    shift 3
    "$kvfold" "$@" >out 2>err </dev/null
    got=$?
    if [ $got -eq "$code" ] && [ ! -s out ] && grep -qF -- "$text" err && ! grep -q 'Sanitizer\|runtime error' err; then
        ok "$name"
    else
        fail "$name" "exit $got, expected $code and: $text; stderr: $(cat err)"
    fi
}
# check NAME: runs the Python program on stdin; it fails by an exception.
check() {
    if python3 - >log 2>&1; then ok "$1"; else fail "$1" "$(cat log)"; fi
}
cat >helper.py <<'END'
import json, os, subprocess
kvfold, model = os.environ["kvfold"], os.environ["model"]
def run(*arguments, code=0, stdin="", file=None, **more):
    given = {"stdin": file} if file else {"input": stdin.encode() if isinstance(stdin, str) else stdin}
    p = subprocess.run([kvfold, *arguments], capture_output=True, timeout=300, **given, **more)
    assert p.returncode == code, (arguments, p.returncode, p.stdout[-500:], p.stderr[-1500:])
    assert b"Sanitizer" not in p.stderr and b"runtime error" not in p.stderr, p.stderr[-3000:]
    return p.stdout, p.stderr.decode()
def lines(text):
    return [json.loads(x) for x in text.splitlines()]
def answers(path): # of an output file, after its header
    rows = lines(open(path, "rb").read())
    assert list(rows[0]) == ["kvfold"], rows[0]
    return rows[1:]
def batch(text, *arguments, code=0):
    out, err = run("run", "--model", model, "--input", "-", "--quiet", *arguments, code=code, stdin=text)
    return lines(out), err
def chat(custom_id, text="Hi", **body):
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 3, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
def completion(custom_id, text="Once upon", **body):
    body = {"model": "tiny", "prompt": text, "max_tokens": 3, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
def openai(rows, *arguments, code=0):
    text = "\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows)
    out, err = batch(text, "--served-model-name", "tiny", *arguments, code=code)
    for r in out:
        assert list(r) == ["id", "custom_id", "response", "error"], r
        assert list(r["response"]) == ["status_code", "request_id", "body"], r
        assert (r["response"]["status_code"] == 200) == (r["error"] is None)
    return {r["custom_id"]: r["response"]["body"] for r in out}, out, err
END
printf '{"prompt": "x", "max_tokens": 2}\n{"prompt": "y", "max_tokens": 2}\n' >two.jsonl
PYTHONPATH=$work
export PYTHONPATH

shift 3
if [ $# -eq 0 ]; then
    for file in "$here"/command_*.sh; do
        part=${file##*/command_}
        set -- "$@" "${part%.sh}"
    done
fi
for part; do
    # shellcheck disable=SC1090
    . "$here/command_$part.sh"
done

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
