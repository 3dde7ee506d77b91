# Part of command.sh, which reads it: one prompt, a batch, its files and reports, several answers.

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
       ({"beam_width": 100}, "--max-running 64: the 100 hypotheses of beam_width run together; give at least --max-running 100")]
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
