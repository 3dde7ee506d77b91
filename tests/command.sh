#!/bin/sh
# The kvfold command from outside: command.sh BINARY MODEL [QUANTISED]. Prints "ok NAME" or "FAIL NAME" per case, then the
# sum. MODEL is any GGUF file; nothing here depends on what it answers. QUANTISED, of a tiny model, is for what quantised
# weights change.
set -u
if [ $# -lt 2 ] || [ $# -gt 3 ]; then
    echo "usage: command.sh BINARY MODEL [QUANTISED]" >&2
    exit 2
fi
kvfold=$(realpath "$1")
model=$(realpath "$2")
quantised=$(realpath "${3:-$2}")
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
END
PYTHONPATH=$work
export PYTHONPATH

# ---- Help and usage ---------------------------------------------------------------------------------
check help <<'END'
from helper import *
out, _ = run("--help")
assert out.count(b"\n") <= 24 and b"kvfold run --prompt" in out
assert run("help")[0] == out
assert run("--help")[0].count(b"\n") <= 23 and max(map(len, out.decode().splitlines())) <= 80
for command in (["run"], ["tokenize"], ["info"], ["eval"], ["profile"], ["eval", "report"]):
    text, _ = run(*command, "--help")
    assert run("help", *command)[0] == text and b"Usage: kvfold " + " ".join(command).encode() in text
    assert text.count(b"\n") <= 23 or command == ["eval", "report"], text
    whole = run(*command, "--help-all")[0]
    assert run("help", *command, "--help-all")[0] == whole and run("help", *command, "help-all")[0] == whole
    for words in (text, whole): assert max(map(len, words.decode().splitlines())) <= 80, [l for l in words.decode().splitlines() if len(l) > 80]
report = run("eval", "report", "--help")[0]
assert b"--html" in report and b"--json" in report and b"--text" not in report and b"--rho" not in report
assert report == run("eval", "--help", "report")[0] and b"--baseline" in run("help", "eval", "report", "baseline")[0]
listed = run("run", "--help-policies")[0].decode()
policies = listed.split("\n\n")[0].splitlines()[1:]
assert len(policies) == 14 and all(len(l.split()) > 2 and l.startswith("  ") and l[2] != " " for l in policies), policies # a line each
assert "d2o:serving" in listed and "--help-policies" in run("run", "--help")[0].decode() and run("profile", "--help-policies")[0].decode() == listed
assert "no option" in run("help", "info", "--help-policies", code=2)[1]
text, _ = run("run", "--help-all")
assert b"on average over the layers" in b" ".join(text.split()).split(b"--min-tokens X")[1][:120]  # one layer may get less
for option in ("rho", "budget-tokens", "min-tokens", "merge", "redistribute", "kv-memory", "block-size", "chunk", "threads"):
    assert b"--" + option.encode() in text, option
assert b"--rho" in run("help", "run", "rho")[0]
assert run("--version")[0].startswith(b"kvfold ")
END
check help_at_the_terminals_width <<'END'
from helper import *
import fcntl, pty, struct, termios
def at(columns, *arguments):
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    p = subprocess.Popen([kvfold, *arguments], stdout=inner)
    os.close(inner)
    text = b""
    try:
        while part := os.read(outer, 65536): text += part
    except OSError: pass
    assert p.wait(60) == 0
    return text.decode().replace("\r", "").splitlines()
words = lambda lines: " ".join(lines).split()
whole = at(80, "run", "--help-all")
for columns in (50, 64, 80, 132):
    for arguments in (("run", "--help"), ("run", "--help-all"), ("eval", "--help-all"), ("profile", "--help-all"), ("run", "--help-policies")):
        lines_ = at(columns, *arguments)
        assert all(len(l) <= columns or " " not in l.strip() for l in lines_), (columns, arguments, [l for l in lines_ if len(l) > columns])
    assert words(at(columns, "run", "--help-all")) == words(whole)
assert len(at(132, "run", "--help-all")) < len(whole)
END
refused no_command_word 2 'unknown command rum: did you mean run?' rum
refused option_before_command 2 'options follow a command' --prompt x
refused unknown_option 2 'did you mean --prompt?' run --promt x
refused unknown_option_far 2 '--help-all lists' run --zzzzzz x
refused missing_value 2 'needs a value' run --prompt
refused missing_value_before_option 2 'needs a value' run --prompt --quiet
refused flag_with_value 2 'takes no value' run --json=1 --prompt x
refused extra_word 2 'one argument too many' run --prompt x y
refused nothing_to_do 2 'give --prompt TEXT or --input FILE' run
refused prompt_and_input 2 'give one of them' run --prompt x --input y
refused bad_count 2 '--max-running 0: must be a whole number from 1' run --prompt x --max-running 0
refused bad_count_text 2 '--max-tokens 1e3' run --prompt x --max-tokens 1e3
refused bad_count_large 2 '--threads 99999999999999999999' run --prompt x --threads 99999999999999999999
refused bad_size 2 '--kv-memory 512MB: must be a size' run --prompt x --kv-memory 512MB
refused bad_size_zero 2 '--kv-memory 0' run --prompt x --kv-memory 0
refused bad_number 2 '--temperature nan' run --prompt x --temperature nan
refused bad_choice 2 '--kv-dtype fp8: must be one of fp16|bf16|fp32' run --prompt x --kv-dtype fp8
refused bad_block_size 2 '--block-size 12: must be one of' run --prompt x --block-size 12
refused bad_rho 2 '--rho 1.5' run --prompt x --rho 1.5
refused bad_rho_zero 2 '--rho 0' run --prompt x --rho 0
refused bad_rho_of_full 2 '--rho 7' run --prompt x --policy full --rho 7
refused bad_budget 2 '--budget-tokens' run --prompt x --budget-tokens 15 --model "$model"
refused bad_policy 2 '--policy d3o' run --prompt x --policy d3o
refused bad_preset 2 'no-such' run --prompt x --preset no-such
refused bad_compare 2 '--compare: ' run --prompt x --compare nothing
refused empty_stop 2 '--stop' run --prompt x --stop ''
refused compare_output_alone 2 'give --compare' run --prompt x --compare-output f
refused json_and_results 2 'standard output' run --input f --json
refused two_outputs_one_file 2 'a file of its own' run --prompt x --output f --stats f
refused no_model 2 'no-such.gguf' run --prompt x --model no-such.gguf
refused no_input 2 'kvfold: no-such.jsonl: No such file' run --input no-such.jsonl --model "$model"
refused input_is_folder 2 'Is a directory' run --input . --model "$model"
refused small_memory 2 '--kv-memory 1000' run --prompt x --model "$model" --kv-memory 1000
refused bad_chunk 2 '--chunk 17' run --prompt x --model "$model" --chunk 17
refused long_context 2 '--context 4000000000' run --prompt x --model "$model" --context 4000000000
refused output_in_no_folder 2 'no-such/out' run --prompt x --model "$model" --output no-such/out
refused tokenize_nothing 2 'give one of TEXT' tokenize
refused tokenize_two 2 'give one of TEXT' tokenize x --file y
refused decode_word 2 'whole numbers' tokenize --model "$model" --decode 1,x
refused decode_outside 2 'vocabulary' tokenize --model "$model" --decode 4294967295
refused eval_measure 2 'eval ppl: the measures are nll, divergence' eval ppl
refused eval_no_measure 2 'MEASURE is missing' eval
refused eval_no_prompt 2 'give --prompt N' eval nll --ids x
refused eval_no_text 2 'one of --ids FILE and --text FILE' eval nll --prompt 3
HOME=$work XDG_CACHE_HOME=$work refused default_model_missing 2 'scripts/fetch_model.sh' run --prompt x
printf 'not a model' >broken.gguf
refused broken_model 2 'broken.gguf' info broken.gguf

# ---- The small commands -------------------------------------------------------------------------------
check tokenize <<'END'
from helper import *
text = "Hello, wörld!  12\n"
a, _ = run("tokenize", text, "--model", model, "--json")
ids = json.loads(a)["token_ids"]
assert ids and json.loads(a)["n_tokens"] == len(ids)
open("text", "w", encoding="utf-8").write(text)
for source in (("--file", "text"), ("--file", "-"), ("--", text)):
    b, _ = run("tokenize", "--model", model, "--json", *source, stdin=text)
    assert json.loads(b)["token_ids"] == ids, source
plain, _ = run("tokenize", text, "--model", model)
assert [int(l.split()[0]) for l in plain.decode().splitlines()] == ids
back, _ = run("tokenize", "--decode", ",".join(map(str, ids)), "--model", model, "--json")
assert json.loads(back)["text"].lstrip() == text, back
back, _ = run("tokenize", "--decode", json.dumps(ids), "--model", model)
assert back.decode().lstrip() == text + "\n"
assert json.loads(run("tokenize", "", "--model", model, "--json")[0])["token_ids"] == []
END
check info <<'END'
from helper import *
d = json.loads(run("info", model, "--json")[0])
assert d == json.loads(run("info", "--model", model, "--json")[0])
assert d["kv_bytes_per_token_fp16"] == d["n_layers"] * d["n_kv_heads"] * d["head_dim"] * 4
assert d["kv_bytes_per_token_fp32"] == 2 * d["kv_bytes_per_token_fp16"]
assert d["n_vocab"] > 0 and d["n_context"] > 0 and d["architecture"]
text = run("info", model)[0].decode()
assert d["architecture"] in text and "KV cache, fp16" in text
END
check eval_nll <<'END'
from helper import *
ids = [i % 50 + 5 for i in range(100)]
json.dump(ids, open("ids.json", "w"))
json.dump({"token_ids": ids}, open("object.json", "w"))
base = ["eval", "nll", "--model", model, "--prompt", "80", "--json", "--kv-dtype", "fp32"]
full = json.loads(run(*base, "--ids", "ids.json", "--policy", "full")[0])
assert len(full["nll"]) == 20 and full["scored_tokens"] == 20 and full["prompt_tokens"] == 80
assert all(x >= 0 for x in full["nll"]) and abs(sum(full["nll"]) / 20 - full["mean_nll"]) < 1e-6
assert full["held_tokens"] == full["full_tokens"] and full["rho"] == 1 and set(full["sizes"]) == {80}
one = json.loads(run(*base, "--ids", "object.json", "--policy", "d2o", "--rho", "1")[0])
assert one["nll"] == full["nll"] and one["dropped"] == 0
d2o = json.loads(run(*base, "--ids", "-", "--min-tokens", "16", "--rho", "0.25", stdin=json.dumps(ids))[0])
n_layers = json.loads(run("info", model, "--json")[0])["n_layers"]
assert len(d2o["sizes"]) == n_layers == len(d2o["density"]) == len(d2o["blocks"])
assert sum(d2o["sizes"]) == 20 * n_layers and d2o["held_tokens"] < full["held_tokens"]
assert d2o["merged"] + d2o["dropped"] > 0 and len(d2o["nll"]) == 20
short = json.loads(run(*base, "--ids", "ids.json", "--policy", "full", "--max-tokens", "5")[0])
assert len(short["nll"]) == 5
assert b"perplexity" in run(*[a for a in base if a != "--json"], "--ids", "ids.json")[0]
for text, word in (("[1, -1]", "entry 1"), ("{}", "must be a list"), ("[1,", "not JSON"), ("[]", "at least one"), ("[1, 2]", "--prompt 80")):
    assert word in run(*base, "--ids", "-", stdin=text, code=2)[1], text
open("text.txt", "w").write("The quick brown fox jumps over the lazy dog. " * 20)
assert len(json.loads(run(*base, "--text", "text.txt", "--max-tokens", "4")[0])["nll"]) == 4
open("text.txt", "wb").write(b"abc\xff")
assert "byte 4" in run(*base, "--text", "text.txt", code=2)[1]
END
check r41_nll_beside_the_full_caches <<'END'
from helper import *
ids = [i * i % 50 + 5 for i in range(160)]
json.dump(ids, open("ids.json", "w"))
base = ["eval", "nll", "--model", model, "--ids", "ids.json", "--prompt", "100", "--min-tokens", "16"]
def ran(*more): return json.loads(run(*base, "--json", *more)[0])
full = ran("--policy", "full")
assert full["full"] == {"mean_nll": full["mean_nll"], "perplexity": full["perplexity"]} and full["nll_difference"] == 0
for more in ([], ["--rho", "0.3", "--deterministic"], ["--policy", "streaming"], ["--policy", "snapkv", "--heads-per-group", "1"], ["--rho", "1"]):
    one = ran(*more)
    assert abs(one["full"]["mean_nll"] - full["mean_nll"]) < 1e-3, (more, one["full"], full["mean_nll"])
    assert abs(one["nll_difference"] - (one["mean_nll"] - one["full"]["mean_nll"])) < 1e-9 and (one["nll_difference"] == 0) == (more == ["--rho", "1"])
    text = run(*base, *more, "--quiet")[0].decode()
    beside = f"  full cache      {one['full']['mean_nll']:.4f} (the difference is {one['nll_difference']:+.4f})\n"
    assert (beside in text) == (more != ["--rho", "1"]), (text, beside)
size = str(json.loads(run("info", model, "--json")[0])["kv_bytes_per_token_fp16"] * 16 * 8) # the prompt's and a little
tight = ran("--policy", "streaming", "--kv-memory", size)
assert tight["full"] is None and tight["nll_difference"] is None and len(tight["nll"]) == 60
assert "it finds no room in --kv-memory" in run(*base, "--policy", "streaming", "--kv-memory", size, "--quiet")[0].decode()
END

# ---- One prompt ---------------------------------------------------------------------------------------
check prompt <<'END'
from helper import *
base = ["run", "--model", model, "--prompt", "Hello there", "--max-tokens", "12"]
text, err = run(*base)
assert err.count("\n") == 1 and "prefill" in err and "decode" in err and "\033" not in err, err
more = run(*base, "--verbose")[1]
assert "prefill" in more and "tokens kept" in more and "Blocks per layer" not in more and "\033" not in more, more # r43: equal bars say nothing
assert run(*base, "--quiet")[1] == ""
summary = json.loads(run(*base, "--json")[0])
result = summary["result"]
assert text.decode("utf-8") == result["text"] + "\n"
assert summary["requests"]["total"] == 1 and summary["policy"] == "full" and summary["rho"] == 1
assert summary["blocks_held_max"] > 0 and len(summary["blocks_per_layer"]) == summary["n_layers"]
assert run(*base, "--quiet", "--output", "one.jsonl")[0] == b""
assert lines(open("one.jsonl", "rb").read()) == [result]
raw = json.loads(run(*base, "--json", "--raw")[0])["result"]
assert raw["prompt_tokens"] <= result["prompt_tokens"]
assert "UTF-8" in run("run", "--model", model, "--prompt", b"a\xff", "--quiet", code=1)[1]
assert run("run", "--model", model, "--prompt", "", "--raw", "--quiet", code=1)[1]
END
check stop_strings_are_never_printed <<'END'
from helper import *
base = ["run", "--model", model, "--prompt", "Hello there", "--raw", "--quiet", "--max-tokens", "40"]
whole = run(*base)[0].decode()[:-1]
if len(whole) > 6:
    for length in (1, 3):
        stop = whole[4:4 + length]
        text = run(*base, "--stop", "never to be seen", "--stop", stop)[0].decode()[:-1]
        assert text == whole[:whole.index(stop)], (whole, stop, text)
END

check r43_one_line_of_figures_after_one_answer <<'END'
from helper import *
base = ["run", "--model", model, "--prompt", "One two three four. " * 12, "--max-tokens", "6"]
for more in ([], ["--policy", "d2o", "--rho", "0.3", "--min-tokens", "16"], ["--policy", "streaming"], ["--n", "2"], ["--output", "o.jsonl"]):
    out, err = run(*base, *more)
    assert err.count("\n") == 1 and "+ " in err and " tokens in " in err and "KV " in err, (more, err)
    assert ("d2o, rho 0.3" in err) == ("d2o" in more) and "full" not in err, (more, err)
assert "Blocks per layer" in run(*base, "--rho", "0.8", "--min-tokens", "16", "--full-layers", "0", "--verbose")[1]
assert "tokens kept" in run(*base, "--compare", "d2o")[1] # two columns are a table
open("one.in", "w").write('{"prompt": "x", "max_tokens": 2}\n')
err = run("run", "--model", model, "--input", "one.in")[1]
assert "tokens kept" in err and "Blocks per layer" not in err, err
END
refused quiet_and_verbose 2 'give one of them' run --prompt x --quiet --verbose
check default_policy <<'END'
from helper import *
row = {"prompt": "One two three four. " * 12, "max_tokens": 3}
def ran(*more, **fields): return batch(json.dumps({**row, **fields}), *more)[0][0]["kv"]
def is_of(kv, policy, rho): return kv["policy"] == policy and kv["rho"] == rho
assert is_of(ran(), "full", 1) and is_of(ran(policy="h2o", min_tokens=16), "h2o", 0.2)
assert is_of(ran(rho=0.3), "d2o", 0.3) and is_of(ran(preset="serving"), "d2o", 0.2) and is_of(ran(merge="none"), "d2o", 0.2)
assert is_of(ran("--rho", "0.4"), "d2o", 0.4) and is_of(ran("--preset", "serving"), "d2o", 0.2)
assert is_of(ran("--rho", "0.4", policy="full"), "full", 1) and is_of(ran("--policy", "full", rho=0.3), "full", 1)
assert is_of(ran("--rho", "0.4", policy="h2o"), "h2o", 0.4) and is_of(ran("--policy", "full", "--rho", "0.4"), "full", 1)
def summary(body, *more):
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": row["prompt"], "max_tokens": 2, **body}}
    return json.loads(run("run", "--model", model, "--input", "-", "--any-model", "--json", "--output", "/dev/null", *more, stdin=json.dumps(line))[0])
assert summary({})["effective_ratio"] == 1 and summary({"kvfold": {"rho": 0.2, "min_tokens": 16}})["effective_ratio"] < 0.6
def compared(*more):
    s = summary({}, *more)
    return s["policy"], s["rho"], s["compare"]["policy"], s["compare"]["rho"]
assert compared("--compare", "d2o", "--rho", "0.3") == ("full", 1, "d2o", 0.3)
assert compared("--compare", "full", "--rho", "0.3") == ("d2o", 0.3, "full", 1) and compared("--compare", "full") == ("d2o", 0.2, "full", 1)
assert compared("--compare", "h2o", "--rho", "0.3", "--preset", "serving") == ("d2o", 0.3, "h2o", 0.3)
END
check memory_is_short_and_a_policy_would_help <<'END'
from helper import *
import re
size = str(json.loads(run("info", model, "--json")[0])["kv_bytes_per_token_fp16"] * 16 * 50)
text = "\n".join(json.dumps({"token_ids": [5 + (i * j) % 40 for j in range(300)], "max_tokens": 20}) for i in range(12))
base = ["run", "--model", model, "--input", "-", "--output", "/dev/null", "--chunk", "64", "--kv-memory", size, "--prefix-cache", "off"]
def said(*more, text=text): return [l for l in run(*base, *more, stdin=text)[1].splitlines() if "docs/results.md" in l]
found = said()
assert len(found) == 1, found
now, then = map(int, re.search(r"holds (\d+) of these requests at once; --policy d2o --rho 0.3 would hold about (\d+) ", found[0]).groups())
summary = json.loads(run(*base, "--json", "--quiet", "--policy", "d2o", "--rho", "0.3", stdin=text)[0])
assert 1 <= now <= 3 and 0.6 * then <= summary["batch_size_reached"] <= 1.5 * then and then > 2 * now, (found, summary["batch_size_reached"])
assert not said("--policy", "full") and not said("--rho", "0.5") and not said("--quiet") and not said("--max-running", "1")
assert not said(text=text.splitlines()[0]) # nobody waits
END

# ---- A batch -------------------------------------------------------------------------------------------
check batch <<'END'
from helper import *
rows = [{"id": "a", "prompt": "Once upon a time", "max_tokens": 5}, {"prompt": "x", "max_tokens": 3},
        {"id": 77, "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}], "max_tokens": 4},
        {"id": "t", "token_ids": [5, 6, 7], "max_tokens": 2, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3, "stop": ["zz"]},
        {"id": "h", "prompt": "A longer text. " * 30, "policy": "h2o", "rho": 0.3, "min_tokens": 16, "max_tokens": 2},
        {"id": "m", "prompt": "A longer text. " * 30, "merge": "mass", "min_tokens": 16, "full_layers": [], "max_tokens": 2},
        {"id": "q", "prompt": "A longer text. " * 30, "score": "prompt_plus_current", "min_tokens": 16, "max_tokens": 2},
        {"id": "f", "prompt": "x", "policy": "full", "rho": 0.5, "max_tokens": 1},
        {"id": "1", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        {"id": "10", "messages": [{"role": "user", "content": "<|im_end|>"}], "max_tokens": 1}]
rows[5].pop("full_layers")
text = "\ufeff" + "\r\n".join(json.dumps(r) for r in rows[:2]) + "\n\n  \n" + "\n".join(json.dumps(r) for r in rows[2:])
out, err = batch(text)
by_id = {r["id"]: r for r in out}
assert err == "" and set(by_id) == {"a", 2, 77, "t", "h", "m", "q", "f", "1", "10"} and len(out) == 10
n_layers = json.loads(run("info", model, "--json")[0])["n_layers"]
for r in out:
    assert list(r) == ["id", "text", "token_ids", "finish_reason", "stop_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "kv"], r
    assert r["finish_reason"] in ("stop", "length") and len(r["token_ids"]) == r["completion_tokens"] > 0
    assert len(r["kv"]["blocks"]) == n_layers and r["kv"]["held_tokens"] <= r["kv"]["full_tokens"]
assert by_id["10"]["prompt_tokens"] > by_id["1"]["prompt_tokens"] + 2  # a control token in a content is so much text
assert by_id["t"]["prompt_tokens"] == 3 and by_id["a"]["completion_tokens"] <= 5
assert by_id["h"]["kv"]["policy"] == "h2o" and by_id["h"]["kv"]["rho"] == 0.3 and by_id["h"]["kv"]["dropped"] > 0
assert by_id["a"]["kv"]["policy"] == "full" and by_id["a"]["kv"]["rho"] == 1
assert by_id["m"]["kv"]["policy"] == "d2o" and by_id["m"]["kv"]["rho"] == 0.2 # an option of a policy, and none named
assert by_id["f"]["kv"]["policy"] == "full" and by_id["f"]["kv"]["rho"] == 1 and by_id["f"]["kv"]["dropped"] == 0
END
check bad_lines_cost_themselves_alone <<'END'
from helper import *
bad = ['not json', '[1]', '{"id": 1.5, "prompt": "x"}', '{"prompt": "x", "promt": "y"}', '{"id": "n"}',
       '{"prompt": "x", "token_ids": [1]}', '{"prompt": ""}', '{"token_ids": []}', '{"token_ids": [4000000000]}',
       '{"token_ids": [1, "2"]}', '{"prompt": 5}', '{"messages": "x"}', '{"messages": []}',
       '{"messages": [{"role": "user"}]}', '{"messages": [{"role": "robot", "content": "x"}]}',
       '{"prompt": "x", "max_tokens": 0}', '{"prompt": "x", "max_tokens": 1.5}', '{"prompt": "x", "max_tokens": 99999999999999999999}',
       '{"prompt": "x", "temperature": -1}', '{"prompt": "x", "top_p": 2}', '{"prompt": "x", "seed": -1}',
       '{"prompt": "x", "stop": ""}', '{"prompt": "x", "stop": [1]}', '{"prompt": "x", "rho": 0}', '{"prompt": "x", "rho": 1.01}',
       '{"prompt": "x", "rho": "null"}', '{"prompt": "x", "budget_tokens": 15}', '{"prompt": "x", "policy": "nope"}',
       '{"prompt": "x", "policy": 3}', '{"prompt": "x", "preset": "nope"}', '{"prompt": "x", "merge": "nope"}',
       '{"prompt": "x", "prompt": "y"}', '{"id": "good", "prompt": "second use"}', '{"prompt": "%s"}' % ("word " * 20000)]
first = '{"id": "good", "prompt": "x", "max_tokens": 2}\n'
last = '\n{"id": "last", "prompt": "x", "max_tokens": 2}\n'
invalid = b'{"id": "u", "prompt": "\xc3("}'
text = (first + "\n".join(bad) + "\n").encode() + invalid + last.encode()
out, err = batch(text, code=1)
good = [r for r in out if r["finish_reason"] != "error"]
errors = {r["line"]: r for r in out if r["finish_reason"] == "error"}
assert {r["id"] for r in good} == {"good", "last"} and len(good) == 2, good
assert sorted(errors) == list(range(2, len(bad) + 3)), sorted(errors)
for n, r in errors.items():
    assert r["error"] and r["text"] == "" and r["token_ids"] == [], r
    assert f"standard input line {n}: {r['error']}\n" in err, (n, r["error"], err)
assert errors[2]["id"] == 2 and errors[6]["id"] == "n" and errors[len(bad)]["id"] == "good"
END
check ids <<'END'
from helper import *
rows = [{"id": 3, "prompt": "x", "max_tokens": 1}, {"id": "3", "prompt": "x", "max_tokens": 1}, {"prompt": "x", "max_tokens": 1}]
out, err = batch("\n".join(map(json.dumps, rows)), code=1)
assert "line 3: id 3" in err and sorted(r["finish_reason"] == "error" for r in out) == [False, False, True]
END
check many_lines <<'END'
from helper import *
rows = [{"id": f"r{i}", "token_ids": [5 + i % 7, 6, 7], "max_tokens": 1 + i % 3} for i in range(400)]
out, err = batch("\n".join(map(json.dumps, rows)), "--max-running", "8")
assert sorted(r["id"] for r in out) == sorted(r["id"] for r in rows)
END
check same_answers_in_any_company <<'END'
from helper import *
rows = [{"id": i, "token_ids": list(range(5, 30 + i)), "max_tokens": 6} for i in range(6)]
text = "\n".join(map(json.dumps, rows))
a, b = batch(text, "--max-running", "1")[0], batch(text, "--max-running", "6")[0]
assert [r["id"] for r in a] == list(range(6))
assert {r["id"]: r["kv"]["blocks"] for r in a} == {r["id"]: r["kv"]["blocks"] for r in b}
END
check answers_before_the_input_ends <<'END'
from helper import *
p = subprocess.Popen([kvfold, "run", "--model", model, "--input", "-", "--quiet"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
for i in range(3):
    p.stdin.write(b'{"prompt": "x", "max_tokens": 2}\n')
    p.stdin.flush()
    assert json.loads(p.stdout.readline())["id"] == i + 1
p.stdin.close()
assert p.stdout.read() == b"" and p.wait(60) == 0
END
check interrupt <<'END'
from helper import *
import signal, time
p = subprocess.Popen([kvfold, "run", "--model", model, "--input", "-", "--output", "cut.jsonl"], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
p.stdin.write(b'{"id": "short", "prompt": "x", "max_tokens": 1}\n')
p.stdin.flush()
for _ in range(600):
    if os.path.exists("cut.jsonl") and open("cut.jsonl").read().count("\n") == 2: break
    time.sleep(0.05)
p.send_signal(signal.SIGINT)
err = p.stderr.read().decode()
assert p.wait(60) == 130 and "Sanitizer" not in err and "--resume goes on from here" in err, (p.returncode, err)
assert [r["id"] for r in answers("cut.jsonl")] == ["short"]
END

# ---- Files and reports ------------------------------------------------------------------------------------
printf '{"prompt": "x", "max_tokens": 2}\n{"prompt": "y", "max_tokens": 2}\n' >two.jsonl
refused full_disk_output 3 '/dev/full: No space left on device' run --model "$model" --input two.jsonl --output /dev/full
refused full_disk_stats 3 '/dev/full: No space left on device' run --model "$model" --input two.jsonl --output o --stats /dev/full
"$kvfold" run --model "$model" --input two.jsonl --quiet >/dev/full 2>err
[ $? -eq 3 ] && grep -q 'standard output: No space' err && ok full_disk_stdout || fail full_disk_stdout "$(cat err)"
"$kvfold" run --model "$model" --prompt x --max-tokens 3 --quiet >/dev/full 2>err
[ $? -eq 3 ] && grep -q 'standard output: No space' err && ok full_disk_prompt || fail full_disk_prompt "$(cat err)"
cp two.jsonl same.jsonl
refused output_over_input 2 'is the input' run --model "$model" --input same.jsonl --output ./same.jsonl
cmp -s two.jsonl same.jsonl && ok input_is_kept || fail input_is_kept "$(cat same.jsonl)"
check compare_and_stats <<'END'
from helper import *
rows = [{"id": i, "token_ids": [5 + (i * j) % 40 for j in range(200)], "max_tokens": 4} for i in range(4)]
text = "\n".join(map(json.dumps, rows))
open("rows.jsonl", "w").write(text)
for name, stdin in (("rows.jsonl", ""), ("-", text)):
    out, err = run("run", "--model", model, "--input", name, "--output", "a", "--force", "--compare", "full", "--compare-output", "b", "--json",
                   "--stats", "s", "--rho", "0.2", "--min-tokens", "16", stdin=stdin)
    summary = json.loads(out)
    assert summary["policy"] == "d2o" and summary["compare"]["policy"] == "full"
    assert summary["requests"]["total"] == summary["compare"]["requests"]["total"] == 4
    assert summary["effective_ratio"] < 0.5 and summary["compare"]["effective_ratio"] == 1
    assert summary["merged"] + summary["dropped"] > 0 == summary["compare"]["dropped"]
    assert sum(summary["blocks_per_layer"]) < sum(summary["compare"]["blocks_per_layer"])
    a, b = answers("a"), lines(open("b", "rb").read())
    assert sorted(r["id"] for r in a) == sorted(r["id"] for r in b) == [0, 1, 2, 3]
    assert all(r["kv"]["policy"] == "full" for r in b)
    steps = lines(open("s", "rb").read())
    assert [s["step"] for s in steps if s["policy"] == "d2o"] == list(range(1, summary["steps"] + 1))
    assert sum(s["decode_tokens"] for s in steps if s["policy"] == "full") == summary["compare"]["decode"]["tokens"]
    assert all(len(s["blocks"]) == summary["n_layers"] and s["free_blocks"] <= summary["blocks_total"] for s in steps)
_, err = run("run", "--model", model, "--input", "rows.jsonl", "--output", "a", "--force", "--policy", "d2o", "--compare", "h2o", "--min-tokens", "16")
assert "d2o, rho 0.2" in err and "h2o, rho 0.2" in err and "preemptions" in err
_, err = run("run", "--model", model, "--input", "two.jsonl", "--output", "a", "--force", "--compare", "full", "--quiet")
assert err == ""
END
check r42_compare_says_which_answers_are_the_same <<'END'
from helper import *
rows = [{"id": i, "token_ids": [5 + (i * j * j + j) % 40 for j in range(60 + i)], "max_tokens": 8, "n": 1 + i % 2, "temperature": i % 2, "seed": i,
         "rho": 1 if i % 3 == 0 else 0.3}
        for i in range(12)] + ["not JSON"]
open("rows.jsonl", "w").write("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
base = ["run", "--model", model, "--output", "a", "--force", "--compare", "streaming", "--compare-output", "b", "--policy", "d2o", "--min-tokens", "16", "--deterministic"]
out, _ = run(*base, "--input", "rows.jsonl", "--json", code=1)
def samples(rows): return {(r["id"], i): c for r in rows if r["finish_reason" if "finish_reason" in r else "id"] != "error"
                           for i, c in enumerate(r.get("choices", [r]))}
a, b = samples(answers("a")), samples(lines(open("b", "rb").read()))
assert len(a) == len(b) == 18
def parts(x, y): return None if x == y else next((i for i, (s, t) in enumerate(zip(x, y)) if s != t), min(len(x), len(y))) + 1
at = {k: parts(a[k]["token_ids"], b[k]["token_ids"]) for k in a}
assert {k: c["differs_at"] for k, c in b.items()} == at and not any("differs_at" in c for c in a.values())
differ = sorted(x for x in at.values() if x)
assert 0 < len(differ) < 18, at
wanted = {"compared": 18, "same": 18 - len(differ), "differ_at_median": differ[(len(differ) - 1) // 2],
          "differ_at_earliest": differ[0], "differ_at_latest": differ[-1]}
told = json.loads(out)["compare"]["answers"]
assert {k: told[k] for k in wanted} == wanted, (out, differ)
err = run(*base, "--input", "rows.jsonl", code=1)[1]
assert f"{18 - len(differ)} of 18 answers are the same with both; the other" in err and "part" in err.split("the same with both")[1], err
body = lambda r: {"model": "m", "prompt": r["token_ids"], **{k: r[k] for k in ("max_tokens", "n", "temperature", "seed")}, "kvfold": {"rho": r["rho"]}}
open("rows.jsonl", "w").write("\n".join(json.dumps({"custom_id": str(r["id"]), "method": "POST", "url": "/v1/completions", "body": body(r)}) for r in rows[:-1]))
run(*base, "--input", "rows.jsonl", "--any-model")
told = {(int(r["custom_id"]), c["index"]): c["kvfold"]["differs_at"] for r in lines(open("b", "rb").read()) for c in r["response"]["body"]["choices"]}
assert told == at and '"kvfold"' not in open("a").read()
err = run("run", "--model", model, "--prompt", "x", "--max-tokens", "3", "--compare", "full", "--policy", "streaming")[1]
assert "1 of 1 answers are the same with both\n" in err, err
END

# ---- Packed input ------------------------------------------------------------------------------------------
check packed_input <<'END'
from helper import *
import gzip, shutil
rows = [{"id": i, "token_ids": [5 + i * i % 97, 6, 7], "max_tokens": 1} for i in range(1500)]
text = "\n".join(map(json.dumps, rows)).encode()
parts = {"gz": gzip.compress(text[:5000]) + gzip.compress(text[5000:]) + bytes(64)}
if shutil.which("zstd"):
    pack = lambda b: subprocess.run(["zstd", "-q", "-c"], input=b, capture_output=True, check=True).stdout
    parts["zst"] = pack(text[:5000]) + pack(text[5000:40000]) + pack(text[40000:])
for name, packed in parts.items():
    open("named.wrongly", "wb").write(packed)
    out, err = run("run", "--model", model, "--input", "named.wrongly", "--quiet", "--max-running", "256")
    assert sorted(r["id"] for r in lines(out)) == list(range(1500)), name
    torn = packed[:len(packed) * 3 // 4]
    out, err = batch(torn, "--max-running", "256", code=1)
    assert 10 < len(out) < 1500 and all(r["finish_reason"] != "error" for r in out), (name, len(out))
    assert "standard input: the" in err and "torn or corrupt after line" in err and "too early" in err, err
    bad = packed[:len(packed) // 2] + bytes(b ^ 0x55 for b in packed[len(packed) // 2:])
    assert "torn or corrupt after line" in batch(bad, "--max-running", "256", code=1)[1]
open("packed", "wb").write(gzip.compress(b'{"prompt": "x", "max_tokens": 1}\n'))
out, _ = run("run", "--model", model, "--input", "packed", "--quiet", "--compare", "full")
assert len(lines(out)) == 1
assert "not JSON" in batch("\x1f\n", code=1)[1] and "not JSON" in batch("P", code=1)[1] and batch("")[0] == []
END

. "$here/command_openai.sh"
. "$here/command_forms.sh"
. "$here/command_models.sh"

# ---- Several answers ----------------------------------------------------------------------------------------
check samples_and_logprobs <<'END'
from helper import *
rows = [{"id": "n", "prompt": "x", "n": 3, "seed": 7, "temperature": 1, "max_tokens": 4, "logprobs": 2},
        *({"id": i, "prompt": "x", "seed": 7 + i, "temperature": 1, "max_tokens": 4, "logprobs": True} for i in range(3)),
        {"id": "off", "prompt": "x", "max_tokens": 1, "logprobs": False}, {"id": "0", "prompt": "x", "max_tokens": 2, "logprobs": 0}]
out, _ = batch("\n".join(map(json.dumps, rows)))
by_id = {r["id"]: r for r in out}
n = by_id["n"]
assert list(n) == ["id", "choices", "prompt_tokens", "completion_tokens", "cached_tokens"] and [c["index"] for c in n["choices"]] == [0, 1, 2]
for i, c in enumerate(n["choices"]):
    assert c["token_ids"] == by_id[i]["token_ids"] and c["text"] == by_id[i]["text"]
    assert [t["token_id"] for t in c["logprobs"]] == c["token_ids"] and all(len(t["top_logprobs"]) == 2 for t in c["logprobs"])
    assert all(abs(a["logprob"] - b["logprob"]) < 1e-4 for a, b in zip(c["logprobs"], by_id[i]["logprobs"]))
assert n["completion_tokens"] == sum(len(c["token_ids"]) for c in n["choices"]) and "logprobs" not in by_id["off"]
assert all(t["top_logprobs"] == [] and t["logprob"] < 0 for t in by_id["0"]["logprobs"])
bad = ['{"prompt": "x", "n": 0}', '{"prompt": "x", "n": 129}', '{"prompt": "x", "logprobs": 21}', '{"prompt": "x", "logprobs": "yes"}',
       '{"prompt": "x", "logprobs": -1}']
assert [r["finish_reason"] for r in batch("\n".join(bad), code=1)[0]] == ["error"] * 5
END
refused best_of_of_beams 2 '--best-of 8: beam search has none; leave out --best-of or --beam-width' run --model "$model" --prompt x --n 4 --beam-width 4 --best-of 8
refused best_of_below_n 2 '--best-of 2: must be at least --n, 4' run --model "$model" --prompt x --n 4 --best-of 2
check best_of_and_beams <<'END'
from helper import *
base = {"prompt": "Once upon", "seed": 7, "temperature": 1, "max_tokens": 6, "policy": "d2o", "min_tokens": 16}
beams = {**base, "temperature": 0, "beam_width": 4, "n": 3}
rows = [{"id": "all", **base, "n": 6}, {"id": "best", **base, "n": 2, "best_of": 6}, {"id": "one", **base, "best_of": 6},
        {"id": "beams", **beams}, {"id": "longer", **beams, "length_penalty": 0, "logprobs": 2}, {"id": "plain", **base}]
out, _ = batch("\n".join(map(json.dumps, rows)))
by_id = {r["id"]: r for r in out}
keys = ["index", "text", "token_ids", "finish_reason", "stop_reason", "completion_tokens", "score", "kv"]
order = sorted(by_id["all"]["choices"], key=lambda c: -c["score"])
best = by_id["best"]["choices"]
assert [list(c) for c in best] == [keys] * 2 and [c["index"] for c in best] == [0, 1]
assert [c["token_ids"] for c in best] == [c["token_ids"] for c in order[:2]] and by_id["one"]["token_ids"] == best[0]["token_ids"]
assert list(by_id["one"]) == ["id", "text", "token_ids", "finish_reason", "stop_reason", "score", "prompt_tokens", "completion_tokens", "cached_tokens", "kv"]
for r in (by_id["beams"], by_id["longer"]):
    scores = [c["score"] for c in r["choices"]]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True) and len({str(c["token_ids"]) for c in r["choices"]}) == 3
for c in by_id["longer"]["choices"]:
    assert abs(sum(t["logprob"] for t in c["logprobs"]) - c["score"]) < 1e-5 and all(len(t["top_logprobs"]) == 2 for t in c["logprobs"])
for r in (by_id["all"], by_id["beams"]):
    assert all(sum(c["kv"]["blocks"]) == c["kv"]["own_blocks"] + c["kv"]["shared_blocks"] for c in r["choices"])
assert by_id["all"]["choices"][0]["kv"]["shared_blocks"] >= 0 and "own_blocks" not in by_id["plain"]["kv"] and "score" not in by_id["plain"]
bad = [({"best_of": 2, "n": 3}, "best_of 2: must be at least n, 3"), ({"best_of": 129}, "best_of 129"), ({"beam_width": 0}, "beam_width 0"),
       ({"beam_width": 2, "n": 3}, "beam_width 2: must be at least n, 3"), ({"beam_width": 4, "temperature": 1}, "temperature 1"),
       ({"beam_width": 4, "best_of": 4}, "best_of 4"), ({"length_penalty": "x"}, "length_penalty: is a text"), ({"length_penalty": 101}, "length_penalty 101"),
       ({"beam_width": 100}, "beam_width 100: must be from n 1 to 64, the lesser of 128 and --max-running")]
out, _ = batch("\n".join(json.dumps({"prompt": "x", **b}) for b, _ in bad), code=1)
by_line = {r["line"]: r["error"] for r in out}
assert all(words in by_line[i + 1] for i, (_, words) in enumerate(bad)), by_line
line = {"custom_id": "c", "method": "POST", "url": "/v1/completions",
        "body": {"model": "m", "prompt": "Once upon", "n": 2, "best_of": 6, "seed": 7, "max_tokens": 6, "kvfold": {"min_tokens": 16}}}
body = batch(json.dumps(line), "--any-model")[0][0]["response"]["body"]
assert [c["text"] for c in body["choices"]] == [c["text"] for c in best]
chosen = batch('{"prompt": "Once upon", "max_tokens": 6}', "--n", "3", "--beam-width", "4", "--min-tokens", "16")[0][0]["choices"]
assert [c["token_ids"] for c in chosen] == [c["token_ids"] for c in by_id["beams"]["choices"]]
END


. "$here/command_prefix.sh"
. "$here/command_resume.sh"
. "$here/command_files.sh"
. "$here/command_edges.sh"
. "$here/command_profile.sh"
. "$here/command_eval.sh"

if [ $# -eq 3 ]; then
    for options in "" "--part vary --fast-activations" "--part vary --heads-per-group 1"; do
        # shellcheck disable=SC2086
        if python3 "$here/determinism.py" "$kvfold" "$quantised" --tight 160KiB $options >log 2>&1; then
            ok "deterministic_answers $options"
        else
            fail "deterministic_answers $options" "$(tail -c 1900 log)"
        fi
    done
fi

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
