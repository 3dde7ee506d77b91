# Part of command.sh, which reads it: signals, outputs that must survive, what messages say.

# ---- Control tokens in a text --------------------------------------------------------------------------------
check tokenize_control_tokens <<'END'
from helper import *
def ids(*arguments, **more): return json.loads(run("tokenize", "--model", model, "--json", *arguments, **more)[0])["token_ids"]
def text(i, *more): return json.loads(run("tokenize", "--model", model, "--json", "--decode", str(i), *more)[0])["text"]
shown = {i: text(i, "--special") for i in range(3)}
control = [i for i in shown if shown[i] and not text(i)]
assert control, shown
for i in control:
    whole = f"a{shown[i]}b"
    assert i in ids(whole) and ids(whole) == ids("--special", whole) == ids("--file", "-", stdin=whole)
    plain = ids("--plain", whole)
    assert i not in plain and plain == ids("--file", "-", "--plain", stdin=whole) and len(plain) > len(ids(whole))
END
check tokenize_golden <<'END'
from helper import *
if json.loads(run("info", model, "--json")[0])["n_vocab"] == 49152: # SmolLM2
    for case in json.load(open(os.environ["here"] + "/data/smollm2_tokenize.json"))["tokenize"]:
        out, _ = run("tokenize", "--model", model, "--json", "--", case["text"])
        assert json.loads(out)["token_ids"] == case["ids"], (case, out)
END
refused plain_and_special 2 'give one of them' tokenize x --plain --special
refused plain_decode 2 'not for --decode' tokenize --decode 1 --plain
refused special_message 2 '--special: --prompt without --raw' run --model "$model" --prompt x --special
check help_of_templates <<'END'
from helper import *
assert "without a default system message" in " ".join(run("help", "run", "chat-template")[0].decode().split())
END

# ---- A model that is cut short ----------------------------------------------------------------------------------
check r32_a_model_cut_short_is_named <<'END'
from helper import *
import shutil
line = '{"prompt": "a%d", "max_tokens": 3}\n'
for end in ("answered", "resumed"):
    shutil.copy(model, "cut.gguf")
    arguments = ["run", "--model", "cut.gguf", "--input", "-", "--output", "cut.jsonl", "--quiet"]
    if end == "resumed":
        run(*arguments, "--resume", stdin="".join(line % i for i in range(20)))
        assert sorted(x["id"] for x in answers("cut.jsonl")) == list(range(1, 21))
        break
    p = subprocess.Popen([kvfold, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    p.stdin.write((line % 0).encode()); p.stdin.flush()
    while not os.path.exists("cut.jsonl") or open("cut.jsonl").read().count("\n") < 2: assert p.poll() is None
    os.truncate("cut.gguf", 0)
    _, err = p.communicate("".join(line % i for i in range(1, 20)).encode(), timeout=60)
    assert p.returncode == 4 and b"cut.gguf: its bytes are gone" in err and b"--resume" in err, (p.returncode, err[-500:])
    assert [x["id"] for x in answers("cut.jsonl")] == [1]
END

# ---- Signals and waits ----------------------------------------------------------------------------------------
check interrupt_while_output_is_blocked <<'END'
from helper import *
import fcntl, signal, time
open("bad", "w").write("not JSON\n" * 3000)
cases = (("--input", "bad"), ("--prompt", "x", "--raw", "--max-tokens", "50", "--quiet"))
for arguments in cases:
    r, w = os.pipe()
    fcntl.fcntl(w, fcntl.F_SETFL, os.O_NONBLOCK)
    filled = 0
    try:
        while True: filled += os.write(w, b"\n" * 4096)
    except BlockingIOError: pass
    fcntl.fcntl(w, fcntl.F_SETFL, 0)
    with open("err", "wb") as err:
        p = subprocess.Popen([kvfold, "run", "--model", model, *arguments], stdin=subprocess.DEVNULL, stdout=w, stderr=err)
    os.close(w)
    while not int(open(f"/proc/{p.pid}/status").read().split("SigCgt:")[1].split()[0], 16) >> signal.SIGINT - 1 & 1: time.sleep(0.02)
    time.sleep(0.5)
    p.send_signal(signal.SIGINT)
    time.sleep(0.3)
    with os.fdopen(r, "rb") as f: text = f.read()[filled:]
    said = open("err").read()
    assert p.wait(60) == 130 and "Interrupted" not in said and "interrupted:" in said, (arguments, p.returncode, said[-500:])
    assert text, arguments
    if arguments[0] == "--input": assert [x["line"] for x in lines(text)] == list(range(1, text.count(b"\n") + 1))
END
check idle_non_blocking_input <<'END'
from helper import *
import fcntl, time
r, w = os.pipe()
fcntl.fcntl(r, fcntl.F_SETFL, os.O_NONBLOCK)
p = subprocess.Popen([kvfold, "run", "--model", model, "--input", "-", "--quiet"], stdin=r, stdout=subprocess.PIPE)
def ticks(): return sum(map(int, open(f"/proc/{p.pid}/stat").read().rsplit(")", 1)[1].split()[11:13]))
os.write(w, b'{"prompt": "x", "max_tokens": 1}\n')
assert json.loads(p.stdout.readline())["id"] == 1
time.sleep(0.3)
if os.path.exists(f"/proc/{p.pid}/stat"):
    before = ticks()
    time.sleep(1)
    assert ticks() - before < os.sysconf("SC_CLK_TCK") // 4, ticks() - before
os.write(w, b'{"prompt": "y", "max_tokens": 1}\n')
os.close(w)
assert json.loads(p.stdout.readline())["id"] == 2 and p.wait(60) == 0
END

# ---- Outputs ---------------------------------------------------------------------------------------------------
check outputs_of_a_run_that_never_starts <<'END'
from helper import *
base = ["run", "--model", model, "--input", "two.jsonl"]
run(*base, "--output", "keep.jsonl", "--quiet")
with open("keep.jsonl", "a") as f: f.write('{"torn')
kept = open("keep.jsonl", "rb").read()
for more in (("--output", "keep.jsonl", "--force", "--kv-memory", "1KiB"), ("--output", "keep.jsonl", "--force", "--stats", "no-such/x"),
             ("--output", "no-such/x", "--stats", "keep.jsonl"), ("--output", "keep.jsonl", "--resume", "--stats", "no-such/x"),
             ("--output", "keep.jsonl", "--force", "--compare", "full", "--compare-output", "no-such/x"),
             ("--output", "keep.jsonl", "--resume", "--kv-memory", "1KiB"),
             ("--output", "no-such/x", "--compare", "full", "--compare-output", "keep.jsonl")):
    run(*base, *more, code=2)
    assert open("keep.jsonl", "rb").read() == kept, more
run(*base, "--output", "new.jsonl", "--stats", "no-such/x", code=2)
run(*base, "--output", "no-such/x", "--stats", "new.jsonl", code=2)
assert not os.path.exists("new.jsonl")
run(*base, "--output", "keep.jsonl", "--force", "--quiet")
assert len(answers("keep.jsonl")) == 2
END
check one_file_by_two_names <<'END'
from helper import *
base = ["run", "--model", model, "--input", "two.jsonl"]
for more in (("--output", "x1", "--stats", "./x1"), ("--output", "x1", "--compare", "full", "--compare-output", "./x1"),
             ("--output", "x1", "--resume", "--stats", "./x1")):
    for there in (False, True):
        if there: open("x1", "w").write("precious")
        assert "a file of its own" in run(*base, *more, code=2)[1]
        assert os.path.exists("x1") == there and (not there or open("x1").read() == "precious")
        if there: os.unlink("x1")
open("x1", "w").write("")
os.link("x1", "x2")
assert "a file of its own" in run(*base, "--output", "x1", "--stats", "x2", code=2)[1]
with open("x1", "a") as f:
    p = subprocess.run([kvfold, *base, "--stats", "x2"], stdout=f, stderr=subprocess.PIPE)
    assert p.returncode == 2 and b"a file of its own" in p.stderr, p
END

# ---- What messages and reports say -------------------------------------------------------------------------------
check memory_in_the_words_of_the_command <<'END'
from helper import *
info = json.loads(run("info", model, "--json")[0])
page = info["kv_bytes_per_token_fp16"] * 16 # one block in every layer
kib = -(-page * 4 // 1024)
row = json.dumps({"token_ids": [5] * 200, "max_tokens": 2})
for row, help in ((row, "shorten the prompt"), (json.dumps({"token_ids": [5] * 20, "max_tokens": 300, "budget_tokens": 200}), "budget_tokens")):
    out, err = batch(row, "--kv-memory", f"{kib}KiB", code=1)
    text = out[0]["error"]
    assert text.startswith(f"--kv-memory {kib}KiB: a prompt of ") and help in text, text
    assert not any(name in text for name in ("kv_bytes", "n_blocks", "max_new")), text
    size = text.split("give at least --kv-memory ")[1]
    out = batch(row, "--kv-memory", size)[0]
    assert out[0]["finish_reason"] != "error"
    unit = {"KiB": 1 << 10, "MiB": 1 << 20}[size[-3:]]
    less = int(size[:-3]) * unit - unit
    assert "give at least --kv-memory " + size in batch(row, "--kv-memory", str(less), code=1)[0][0]["error"]
json.dump([5] * 210, open("many.json", "w"))
err = run("eval", "nll", "--model", model, "--ids", "many.json", "--prompt", "200", "--kv-memory", f"{kib}KiB", code=1)[1]
assert "eval: --kv-memory " in err and "a prompt of 200 tokens" in err and "give at least --kv-memory " in err, err
END
check full_memory_ends_requests_early <<'END'
from helper import *
info = json.loads(run("info", model, "--json")[0])
size = str(info["kv_bytes_per_token_fp16"] * 16 * 3)
rows = [{"id": "early", "token_ids": [5] * 20, "max_tokens": 100}, {"id": "whole", "token_ids": [5] * 20, "max_tokens": 2}]
text = "\n".join(map(json.dumps, rows))
base = ["run", "--model", model, "--input", "-", "--policy", "full", "--max-running", "1", "--kv-memory", size]
out, err = run(*base, stdin=text)
by_id = {r["id"]: r for r in lines(out)}
early = by_id["early"]
if early["finish_reason"] == "length":
    assert early["completion_tokens"] < 100 and "1 request ended early: the KV memory was full (--kv-memory)\n" in err, err
    summary = json.loads(run(*base, "--output", "o1", "--json", stdin=text)[0])
    assert summary["ended_early"] == 1 and summary["full_tokens"] > 0
    kv = early["kv"]
    figures = [kv[k] for k in ("held_tokens", "full_tokens", "blocks", "kept")]
    assert all(f is None for f in figures) or all(figures) and all(kv["blocks"]), kv
    err = run(*base, stdin=json.dumps(rows[0]))[1]
    assert ("held at the end    -\n" in err) == (kv["full_tokens"] is None), err
_, err = run(*base, stdin=json.dumps(rows[1]))
assert "ended early" not in err
_, err = run("run", "--model", model, "--input", "-", "--context", "24", stdin=json.dumps(rows[0]))
assert "ended early" not in err
END
refused host_too_small 2 '--host-memory 5' run --prompt x --model "$model" --host-memory 5
refused preempt_how 2 '--preempt' run --prompt x --model "$model" --preempt never
check preempted_to_the_host_and_back <<'END'
from helper import *
info = json.loads(run("info", model, "--json")[0])
size, host = (str(info["kv_bytes_per_token_fp16"] * 16 * n) for n in (12, 40))
text = "\n".join(json.dumps(completion(f"p{i}", "Once upon a time" * (i % 3 + 1), max_tokens=90, ignore_eos=True)) for i in range(6))
base = ["run", "--model", model, "--input", "-", "--policy", "full", "--deterministic", "--quiet", "--json", "--prefix-cache", "off",
        "--served-model-name", "tiny"]
def told(name, *more):
    summary = json.loads(run(*base, "--output", name, *more, stdin=text)[0])
    rows = [r for r in lines(open(name, "rb").read()) if "kvfold" not in r]
    return summary, sorted((r["custom_id"], r["response"]["body"]["choices"][0]["text"]) for r in rows)
roomy, there = told("roomy")
assert roomy["preemptions"] == roomy["swapped_out"] == 0
for how in ("swap", "auto", "recompute"):
    summary, gone = told("tight-" + how, "--kv-memory", size, "--host-memory", host, "--preempt", how)
    assert gone == there, how
    assert summary["preemptions"] > 0 and summary["swapped_in"] == summary["swapped_out"], summary
    if how == "swap": assert 0 < summary["host_bytes_max"] <= int(host) and summary["swapped_out"] > 0, summary
    if how == "recompute": assert summary["host_bytes_max"] == summary["swapped_out"] == 0, summary
END
check cached_prompts_come_back_from_the_host <<'END'
from helper import *
info = json.loads(run("info", model, "--json")[0])
size, host = (str(info["kv_bytes_per_token_fp16"] * 16 * n) for n in (14, 80))
order = [0, 1, 2, 3, 0, 2, 1, 3, 3, 0, 1, 2]
rows = [{"id": i, "token_ids": [5 + (k * j + k) % 40 for j in range(90)], "max_tokens": 6} for i, k in enumerate(order)]
text = "\n".join(map(json.dumps, rows))
base = ["run", "--model", model, "--input", "-", "--deterministic", "--quiet", "--json", "--chunk", "16", "--max-running", "1",
        "--snapshot-memory", "1MiB"]
def told(name, policy, *more):
    summary = json.loads(run(*base, "--output", name, "--policy", policy, *more, stdin=text)[0])
    return summary, [(r["id"], r["text"]) for r in lines(open(name, "rb").read()) if "kvfold" not in r]
for policy in "full", "d2o":
    _, there = told("plain-" + policy, policy, "--prefix-cache", "off")
    tight = ["--kv-memory", size, "--host-memory", host]
    off, same = told("stay-" + policy, policy, *tight, "--prefix-offload", "off")
    on, back = told("back-" + policy, policy, *tight)
    assert there == same == back, policy
    assert off["prefix_cache"]["offloaded"] == off["prefix_cache"]["host_hit_tokens"] == 0, off
    c = on["prefix_cache"]
    assert c["offloaded"] > 0 and c["loaded"] > 0 and c["host_hit_tokens"] > 0, c
    assert on["prefill"]["tokens"] < off["prefill"]["tokens"], (on["prefill"], off["prefill"])
END
check presets_have_names <<'END'
from helper import *
rows = [{"id": i, "token_ids": [5 + (i * j) % 40 for j in range(60)], "max_tokens": 2} for i in range(2)]
text = "\n".join(map(json.dumps, rows))
base = ["run", "--model", model, "--input", "-", "--output", "o2", "--force", "--stats", "s2", "--policy", "d2o"]
_, err = run(*base, "--compare", "d2o:serving", stdin=text)
assert [l for l in err.splitlines() if l.startswith("policy ")][0].split(None, 1)[1].split("  ")[0] == "d2o, rho 0.2"
assert "d2o:serving, rho 0.2" in err, err
steps = lines(open("s2", "rb").read())
assert {(s["policy"], s["preset"]) for s in steps} == {("d2o", None), ("d2o", "serving")}
summary = json.loads(run(*base, "--preset", "authors", "--compare", "full", "--json", stdin=text)[0])
assert summary["preset"] == "authors" and summary["compare"]["preset"] is None
END
check second_run_says_what_failed_there_alone <<'END'
from helper import *
info = json.loads(run("info", model, "--json")[0])
size = str(info["kv_bytes_per_token_fp16"] * 16 * 4)
rows = ["not JSON", json.dumps({"token_ids": [5] * 20, "max_tokens": 200}), json.dumps({"token_ids": [5] * 20, "max_tokens": 2})]
arguments = ["run", "--model", model, "--input", "-", "--quiet", "--policy", "full", "--budget-tokens", "150", "--kv-memory", size]
_, err = run(*arguments, "--compare", "d2o", stdin="\n".join(rows), code=1)
said = [l for l in err.splitlines() if l]
assert len(said) == 2 and "standard input line 1: not JSON" in said[0] and "--compare: standard input line 2: " in said[1], err
END
check options_that_are_no_flags <<'END'
from helper import *
for name, value in (("rho", True), ("rho", False), ("full_layers", True), ("full_layers", [True]), ("budget_tokens", False), ("nm", [3, True]), ("sinks", True)):
    out, err = batch(json.dumps({"prompt": "x", name: value}), code=1)
    assert out[0]["error"].startswith(name + ": "), (name, value, out)
    body = {"model": "tiny", "prompt": "x", "kvfold": {name: value}}
    out = openai([{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}], code=1)[1]
    assert name + ": " in out[0]["error"]["message"], out
assert batch('{"prompt": "x", "redistribute": true, "max_tokens": 1}')[0][0]["finish_reason"] != "error"
END

# ---- The terminal ------------------------------------------------------------------------------------------------------
check r40_r44_progress_keeps_to_the_terminal <<'END'
from helper import *
import fcntl, pty, select, signal, struct, termios, time
open("many.jsonl", "w").write("\n".join(json.dumps({"token_ids": [5, 6, 7, 8 + i % 9], "max_tokens": 30}) for i in range(20000)))
def shown(columns, *arguments):
    """What stands on the line after each redraw, by the width it was drawn at."""
    outer, inner = pty.openpty()
    size = lambda n: fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, n, 0, 0))
    size(columns[0])
    p = subprocess.Popen([kvfold, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=inner)
    found, begin = {}, time.time()
    for n in columns:
        size(n)
        text = b""
        while (text.count(b"\r\033[K") < 3 or n == 120 and b" left, " not in text) and p.poll() is None and time.time() - begin < 60:
            if select.select([outer], [], [], 0.1)[0]: text += os.read(outer, 65536)
        found[n] = text.decode().split("\r\033[K")[2:] # the first may have been drawn before
        assert found[n], (n, p.poll(), text)
    p.send_signal(signal.SIGINT)
    p.wait(60)
    return found
for arguments in (("profile", "--generate", "200000", "--layers", "2"),
                  ("run", "--model", model, "--input", "many.jsonl", "--output", "/dev/null", "--max-running", "4", "--policy", "d2o")):
    for n, drawn in shown((44, 2, 120), *arguments).items():
        assert all(len(l) < n and "\n" not in l for l in drawn), (n, drawn)
        if n == 120: assert any(" done, " in l and " left, " in l for l in drawn), drawn
for more in ((), ("--quiet",)): # no terminal, nothing
    _, err = run("profile", "--generate", "3000", *more)
    assert "\r" not in err and " left" not in err, err
END

# ---- The order of the queue -------------------------------------------------------------------------------------
check order_of_the_queue <<'END'
from helper import *
rows = [{"id": i, "token_ids": [5 + i] * n, "max_tokens": 2, "priority": p, "deadline": d}
        for i, (n, p, d) in enumerate(((30, 0, 50), (30, 1, 40), (9, -1, 10), (20, 2, 0), (20, 1, 20)))]
def order(how, rows=rows): return [r["id"] for r in batch("\n".join(map(json.dumps, rows)), "--max-running", "1", *how)[0]]
assert order([]) == order(["--order", "arrival"]) == [0, 1, 2, 3, 4]
assert order(["--order", "priority"]) == [3, 1, 4, 0, 2]
assert order(["--order", "deadline"]) == [2, 4, 1, 0, 3] # without one: a minute
assert order(["--order", "shortest"]) == [2, 3, 4, 0, 1]
alike = [{"id": i, "token_ids": [5 + i % 2] * 70, "max_tokens": 1} for i in range(6)]
assert order(["--order", "prefix", "--chunk", "16"], alike) == [0, 2, 4, 1, 3, 5]
one = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x", "max_tokens": 1}}
rows = [{**one, "custom_id": str(p), "body": {**one["body"], "kvfold": {"priority": p}}} for p in (1, 3, 2)]
assert [r["custom_id"] for r in batch("\n".join(map(json.dumps, rows)), "--max-running", "1", "--any-model", "--order", "priority")[0]] == list("321")
bad = [({"priority": 1001}, "priority 1001: must be a whole number from -1000 to 1000"), ({"priority": 0.5}, "priority 0.5: must be"),
       ({"priority": "high"}, "priority: is a text, must be a whole number"), ({"deadline": -1}, "deadline -1: must be from 0"),
       ({"deadline": "soon"}, "deadline: is a text, must be a number")]
out, _ = batch("\n".join(json.dumps({"prompt": "x", **b}) for b, _ in bad), code=1)
by_line = {r["line"]: r["error"] for r in out}
assert all(words in by_line[i + 1] for i, (_, words) in enumerate(bad)), by_line
assert "--order HOW" in run("run", "--help-all")[0].decode()
END
refused order_how 2 '--order' run --prompt x --model "$model" --order fifo
