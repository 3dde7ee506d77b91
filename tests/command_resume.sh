# Part of command.sh, which reads it: going on with an output.
# ---- Going on ------------------------------------------------------------------------------------------------
refused resume_to_stdout 2 '--resume: needs' run --model "$model" --input two.jsonl --resume
refused resume_prompt 2 '--resume: needs' run --model "$model" --prompt x --output o --resume
refused resume_compare 2 '--resume and --compare' run --model "$model" --input two.jsonl --output o --resume --compare full
refused force_alone 2 '--force: needs --output FILE' run --model "$model" --input two.jsonl --force
refused bad_sync 2 '--sync' run --model "$model" --input two.jsonl --sync often
check killed_three_times <<'END'
from helper import *
import random, time
seed = random.randrange(1 << 30)
print("seed", seed)
rng = random.Random(seed)
def talk(i):
    return [{"role": "system", "content": "You are brief."}, {"role": "user", "content": f"Question {i}: " + "why? " * (i % 9)},
            {"role": "assistant", "content": "Because."}, {"role": "user", "content": "And then?"}]
forms = {"own": [{"id": f"c{i}", "messages": talk(i), "max_tokens": 20 + i % 13} for i in range(64)],
         "openai": [chat(f"c{i}", messages=talk(i), max_tokens=20 + i % 13) for i in range(64)]}
def read(path):
    rows = {}
    for r in lines(open(path, "rb").read()):
        if "kvfold" in r: continue
        key = r.get("custom_id", r.get("id"))
        assert key not in rows, key
        rows[key] = r["response"]["body"]["choices"] if "response" in r else (r["text"], r["token_ids"], r["finish_reason"])
    return rows
for form, rows in forms.items():
    open("in", "w").write("\n".join(map(json.dumps, rows)))
    base = ["run", "--model", model, "--input", "in", "--quiet", "--any-model", "--max-running", "8", "--output"]
    run(*base, "whole-" + form)
    out, left, killed = "cut-" + form, 0, 0
    for kill in range(3): # when some more lines are there
        p = subprocess.Popen([kvfold, *base, out, "--resume"], stderr=subprocess.PIPE)
        wanted = left + rng.randrange(1, 16)
        while p.poll() is None and (not os.path.exists(out) or open(out, "rb").read().count(b"\n") < wanted): time.sleep(0.001)
        killed += p.poll() is None
        p.kill()
        p.wait()
        assert b"Sanitizer" not in p.stderr.read()
        n = open(out, "rb").read().count(b"\n") if os.path.exists(out) else 0
        assert n >= left, (n, left)
        left = n
    assert killed, "every run ended before it was killed"
    with open(out, "ab") as f: f.write(b'{"id": "c1", "te')
    run(*base, out, "--resume")
    whole, cut = read("whole-" + form), read(out)
    assert len(whole) == 64 and whole == cut, [(k, whole[k], cut.get(k)) for k in whole if whole[k] != cut.get(k)][:2]
    assert os.path.exists(out + ".kvfold-header.json") == (form == "openai")
    before = open(out, "rb").read()
    run(*base, out, "--resume")
    assert open(out, "rb").read() == before
END
check resume_keeps_and_redoes <<'END'
from helper import *
rows = [{"id": "a", "prompt": "x", "max_tokens": 2}, {"id": "b", "prompt": ""}, {"prompt": "y", "max_tokens": 2}, {"id": "d", "prompt": "z", "max_tokens": 2}]
def write(rows):
    open("in", "w").write("\n".join(map(json.dumps, rows)))
base = ["run", "--model", model, "--input", "in", "--output", "r"]
write(rows)
run(*base, code=1)
first = answers("r")
assert {r["id"]: r["finish_reason"] == "error" for r in first} == {"a": False, "b": True, 3: False, "d": False}
rows[1].update(prompt="now good", max_tokens=2)
write(rows)
os.chmod("r", 0o640)
os.symlink("r", "link")
before = open("r", "rb").read()
for more, text in ((("--seed", "3"), "seed 0 (now 3)"), (("--rho", "0.3"), "rho"), (("--temperature", "0.5"), "temperature null (now 0.5)"),
                   (("--system", "S"), "system null"), (("--kv-dtype", "fp32"), "kv-dtype"),
                   (("--deterministic",), "deterministic false (now true)"),
                   (("--fast-activations",), "fast-activations false (now true)")):
    _, err = run(*base, "--resume", *more, code=2)
    assert text in err and "--force" in err and open("r", "rb").read() == before, err
base[-1] = "link"
_, err = run(*base, "--resume", "--threads", "1", "--max-running", "3", "--kv-memory", "8MiB", "--sync", "line")
assert "3 lines are done, 1 errors are tried again" in err and "done before" in err, err
second = answers("r")
assert os.path.islink("link") and os.stat("r").st_mode & 0o777 == 0o640
assert [r for r in second if r["id"] != "b"] == [r for r in first if r["id"] != "b"] and second[-1]["id"] == "b" and len(second) == 4
_, err = run(*base, "--resume", "--force", "--seed", "3")
assert "--force" in err and lines(open("r", "rb").read())[0]["kvfold"]["options"]["seed"] == 3 and answers("r") == second
open("plain", "w").write('{"precious": 1}\n')
assert "has no header" in run(*base[:-1], "plain", "--resume", code=2)[1] and open("plain").read() == '{"precious": 1}\n'
open("torn", "w").write('{"kvfold": {"for')
run(*base[:-1], "torn", "--resume")
assert len(answers("torn")) == 4 and not [f for f in os.listdir(".") if f.endswith(".kvfold-part")]
END
check r33_r27_what_the_memory_cut_short_says_so_and_is_done_again <<'END'
from helper import *
rows = [{"id": "a", "prompt": "hello there", "max_tokens": 100, "ignore_eos": True},
        chat("b", max_tokens=100, n=2, ignore_eos=True), {"id": "c", "prompt": "x", "max_tokens": 4}]
open("in", "w").write("\n".join(map(json.dumps, rows)))
def go(size, *more):
    _, err = run("run", "--model", model, "--any-model", "--input", "in", "--output", "cut", "--policy", "full", "--prefix-cache", "off",
                 "--block-size", "8", "--kv-memory", size, *more)
    found = {}
    for r in answers("cut"):
        for c in r["response"]["body"]["choices"] if "response" in r else [r]:
            assert c["finish_reason"] == "length"
            found.setdefault(r.get("custom_id", r.get("id")), []).append((c.get("limited_by"), c.get("kv_memory_bytes")))
    return found, err
for f in [f for f in os.listdir(".") if f.startswith("cut")]: os.unlink(f)
found, err = go("16KiB")
assert found == {"a": [("kv_memory", 16384)], "b": [("kv_memory", 16384)] * 2, "c": [(None, None)]}, found
assert "2 requests ended early" in err or "3 requests ended early" in err, err
assert 'warning: in line 2, id "b" is preempted' in err or 'warning: in line 1, id "a" is preempted' in err, err
before = open("cut", "rb").read()
again, err = go("16KiB", "--resume") # the same would come of it
assert again == found and open("cut", "rb").read() == before and "3 lines are done" in err, err
found, err = go("1MiB", "--resume")
assert "1 lines are done" in err and "2 that less KV memory cut short are done again" in err, err
assert found == {"a": [(None, None)], "b": [(None, None)] * 2, "c": [(None, None)]}, found
END
check lines_are_compared_by_what_they_mean <<'END'
from helper import *
rows = [{"id": "a", "prompt": "x", "max_tokens": 2, "temperature": 0, "stop": ["zz"]}, chat("b", max_tokens=2, n=1)]
def write(rows): open("in", "w").write("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
base = ["run", "--model", model, "--any-model", "--input", "in", "--output", "meant", "--quiet"]
write(rows)
run(*base)
before = open("meant", "rb").read()
same = [json.dumps({**rows[0], "max_tokens": 2.0, "temperature": 0.0, "top_k": None}),
        json.dumps({**rows[1], "body": {**rows[1]["body"], "max_tokens": 2e0, "n": 1.0, "user": None, "seed": None,
                                        "messages": [{"role": "user", "content": "Hi", "name": None}]}})]
write(same)
run(*base, "--resume")
assert open("meant", "rb").read() == before
for i, row in ((0, {**rows[0], "max_tokens": 3}), (0, {**rows[0], "top_k": 0}), (0, {**rows[0], "stop": [None, "zz"]}),
               (1, {**rows[1], "body": {**rows[1]["body"], "temperature": 0.5}})):
    changed = list(same)
    changed[i] = row
    write(changed)
    assert f"line {i + 1}: meant has the answer to another line" in run(*base, "--resume", code=2)[1], row
END
check large_ids_keep_their_digits <<'END'
from helper import *
for id in ("9007199254740993", "-9223372036854775808", '"1e16"'):
    text = f'{{"id": {id}, "prompt": "x", "max_tokens": 1}}\n'
    assert batch(text)[0][0]["id"] == json.loads(id)
for id in ("1e16", "9007199254740993.0", "-1e300"):
    out, _ = batch(f'{{"id": {id}, "prompt": "x"}}\n{{"id": {id}, "prompt": NaN}}\n', code=1)
    assert [r["id"] for r in out] == [1, 2] and "must be written with all its digits" in out[0]["error"], out
assert batch('{"id": 7.0, "prompt": "x", "max_tokens": 1}')[0][0]["id"] == 7
out, _ = batch("".join(f'{{"id": "{"i" * 1000}{i}", "prompt": "x", "max_tokens": 1}}\n' for i in (1, 2, 1)), code=1)
assert sorted("error" in r for r in out) == [False, False, True] and "an earlier line has it" in [r for r in out if "error" in r][0]["error"]
END
check further_answers_to_one_line_are_dropped <<'END'
from helper import *
rows = [{"id": i, "prompt": "x", "max_tokens": 1} for i in ("a", "b", "c")]
open("in", "w").write("\n".join(map(json.dumps, rows)))
base = ["run", "--model", model, "--input", "in", "--output", "twice"]
run(*base, "--quiet")
head, *answered = open("twice", "rb").read().splitlines(True)
whole = head + b"".join(answered)
for order in ((0, 0, 1, 2), (0, 1, 2, 1, 0), (0, 0, 0)):
    open("twice", "wb").write(head + b"".join(answered[i] for i in order))
    _, err = run(*base, "--resume")
    assert f"{len(order) - len(set(order))} further answers to lines that have one are dropped" in err, err
    assert sorted(open("twice", "rb").read().splitlines()) == sorted(whole.splitlines())
    run(*base, "--quiet", "--resume")
END
