# Part of command.sh, which reads it: kvfold eval, its records and going on with them.
refused eval_no_text_file 2 'eval divergence: give --text FILE' eval divergence --model "$model"
refused eval_no_dialogue 2 'eval multiturn: give --dialogue FILE' eval multiturn --model "$model"
refused eval_words 2 'one argument too many for kvfold eval nll; texts are given with --text' eval nll a b
refused eval_unknown_policy 2 '--policies h20: policy h20: there is full' eval recall --model "$model" --policies h20
refused eval_unknown_preset 2 'policy d2o has default, paper' eval recall --model "$model" --policies d2o:best
refused eval_full 2 'the full cache is what all are measured against' eval recall --model "$model" --policies 'h2o;full'
refused eval_twice 2 'h2o stands there already; give one of the two another label: LABEL=h2o' eval recall --model "$model" --policies 'h2o;h2o'
refused eval_label_twice 2 'a stands there already; give one of the two another label: LABEL=d2o,sinks=1' eval recall --model "$model" --policies 'a=h2o;a=d2o,sinks=1'
refused eval_cam_merge 2 'merge average: policy cam' eval recall --model "$model" --policies 'cam,merge=average'
refused eval_missing_file 2 '--text none.txt: No such file' eval nll --model "$model" --text none.txt
# What an option is not for is told, and not left aside.
refused eval_policy_of_single 2 '--policy: has no say in eval divergence: --policies says what is measured' eval divergence --model "$model" --text x --policy h2o
refused eval_preset_of_single 2 '--preset: has no say in eval ablation: it is for eval nll --prompt N; leave it out' eval ablation --model "$model" --text x --preset paper
refused eval_policies_of_ablation 2 '--policies: has no say in eval ablation: it is for eval nll, divergence, needle, recall and multiturn' eval ablation --model "$model" --policies h2o
refused eval_depths_of_needle 2 '--depths: has no say in eval recall: it is for eval needle; leave it out' eval recall --model "$model" --depths 0.5
refused eval_samples_of_tasks 2 '--samples: has no say in eval nll: it is for eval needle and recall;' eval nll --model "$model" --samples 3
refused eval_scored_of_places 2 '--scored: has no say in eval needle' eval needle --model "$model" --scored 3
refused eval_html_of_report 2 '--html: has no say in eval nll: it is for eval report;' eval nll --model "$model" --html x.html
refused eval_json_of_others 2 '--json: has no say in eval nll: it is for eval nll --prompt N and report;' eval nll --model "$model" --json
refused eval_rhos_of_single 2 '--rhos: has no say in eval nll --prompt' eval nll --model "$model" --text x --prompt 5 --rhos 0.1
refused eval_output_of_single 2 '--output: has no say in eval nll --prompt' eval nll --model "$model" --text x --prompt 5 --output x.jsonl
refused eval_resume_stdout 2 '--resume: needs --output FILE' eval nll --model "$model" --text x --resume
refused eval_force_stdout 2 '--force: needs --output FILE' eval nll --model "$model" --text x --output - --force
refused eval_rhos_of_report 2 '--rhos: has no say in eval report: it is for eval nll, divergence, needle, recall, multiturn and ablation; leave it out' eval report x.jsonl --rhos 0.2
refused eval_model_of_report 2 '--model: has no say in eval report: it is for eval nll, divergence, needle, recall, multiturn, ablation and nll --prompt N; leave it out' eval report x.jsonl --model x.gguf
refused eval_merge_of_report 2 '--merge-keys: has no say in eval report' eval report --merge-keys 1 x.jsonl
refused eval_default_of_others 2 '--windows: has no say in eval recall' eval recall --model "$model" --windows 1
refused eval_output_of_report 2 '--output: has no say in eval report' eval report x.jsonl --output y.jsonl
refused eval_shared_option 2 'rho is the same for all: --rhos says' eval recall --model "$model" --policies h2o,rho=0.4
refused eval_shared_k 2 'evict_every is the same for all: give --evict-every' eval recall --model "$model" --policies h2o,evict_every=4
refused eval_bad_option 2 'options are written OPTION=VALUE' eval recall --model "$model" --policies h2o,sinks
refused eval_unknown_option 2 'snks' eval recall --model "$model" --policies h2o,snks=4
refused eval_bad_value 2 'sinks few' eval recall --model "$model" --policies h2o,sinks=few
refused eval_no_policy 2 '--policies x=: must be [LABEL=]POLICY' eval recall --model "$model" --policies x=
refused eval_rho_alone 2 '--rho: has no say here: --rhos says' eval recall --model "$model" --rho 0.2
refused eval_rhos 2 '--rhos 0.2,x: must be numbers from' eval recall --model "$model" --rhos 0.2,x
refused eval_rho_of_none 2 '--rhos 0: must be numbers' eval recall --model "$model" --rhos 0
refused eval_rho_twice 2 '--rhos .2,.2: has 0.2 twice' eval recall --model "$model" --rhos .2,.2
refused eval_contexts 2 '--contexts 12.5: must be whole numbers' eval recall --model "$model" --contexts 12.5
refused eval_tasks 2 '--tasks single,two: must be single' eval recall --model "$model" --tasks single,two
refused eval_tables 2 '--tables 5: must be all, or tables out of' eval ablation --model "$model" --tables 5
refused eval_short_context 2 'alone ha' eval recall --model "$model" --contexts 20
refused eval_groups 2 "must divide the model's" eval recall --model "$model" --heads-per-group 3
refused eval_long_context 2 "the model's context" eval recall --model "$model" --contexts 100000 --samples 1 --tasks single
refused eval_memory 2 'with one policy beside the full cache needs' eval recall --model "$model" --contexts 300 --kv-memory 64KiB
check eval_divergence <<'END'
from helper import *
words = ("The river ran past the mill and the miller slept. " "Nobody came by, and the wheel turned. ").split()
open("a.txt", "w").write(" ".join(words * 40))
open("b.c", "w").write("int f(int x) { return x + 1; }\n" * 60)
base = ["eval", "divergence", "--model", model, "--text", "novel:mill=a.txt", "--text", "code=b.c", "--contexts", "96,160",
        "--scored", "20", "--rhos", "0.4,0.8", "--policies", "h2o;d2o:authors;loose=d2o,redistribute=0,nm=1:1;snap=snapkv,score_window=16,window=16;snap8=snapkv,score_window=8,window=8", "--quiet"]
out = run(*base, "--output", "whole.jsonl")
assert out[0] == b""
rows = lines(open("whole.jsonl", "rb").read())
assert rows == lines(run(*base)[0])
head, rest = rows[0], rows[1:]
assert head["record"] == "run" and head["measure"] == "divergence" and head["k"] == 8 and head["block_size"] == 16
assert len(head["model"]["xxh3"]) == 16 and head["model"]["bytes"] == os.path.getsize(model)
assert set(head["options"]["texts"]) == {"mill", "b"} and head["policies"] == ["h2o", "d2o:authors", "loose", "snap", "snap8"]
texts = [r for r in rest if r["record"] == "text"]
cells = [r for r in rest if r["record"] == "cell"]
assert len(texts) == 4 and len(cells) == 4 * 5 * 2 and len(rest) == len(texts) + len(cells)
n_layers = head["model"]["layers"]
for t in texts:
    assert len(t["full"]["nll_by_token"]) == t["n_scored"] == 20
    assert abs(sum(t["full"]["nll_by_token"]) / 20 - t["full"]["nll"]) < 1e-4
    assert len(t["layers"]["density_head_minmax"]) == len(t["layers"]["variance"]) == n_layers
# Equal memory, from the records alone.
import math
n_figures = 0
for c in cells:
    assert c["target_blocks"] == math.floor(c["rho"] * c["context"] * n_layers / 16 + 1e-6), c
    if "empty" in c:
        assert "kl" not in c and c["empty"], c
        continue
    n_figures += 1
    assert c["held_blocks"] <= 1.01 * c["target_blocks"] and c["rho_used"] <= c["rho"], c
    assert len(c["kl_by_token"]) == len(c["nll_by_token"]) == len(c["agree_by_token"]) == 20
    assert abs(sum(c["kl_by_token"]) / 20 - c["kl"]) < 1e-4 and abs(sum(c["agree_by_token"]) / 20 - c["agree"]) < 1e-9
    assert all(x > -1e-9 for x in c["kl_by_token"]) and c["kl_by_token"][0] == 0 and c["agree_by_token"][0] == 1
    assert len(c["blocks_by_layer"]) == len(c["sizes"]) == n_layers
    if c["policy_options"]["budget_unit"] == "block" and c["policy"] == "h2o":
        assert [(s + 8) // 16 for s in c["sizes"]] == c["blocks_by_layer"] and sum(c["blocks_by_layer"]) == c["held_blocks"], c
assert n_figures >= len(cells) / 2
lowered = [c for c in cells if c["policy"] != "h2o" and "empty" not in c and c["rho_used"] < c["rho"]]
assert {c["policy"] for c in lowered} >= {"loose", "snap", "snap8"}, lowered
assert all(c["held_blocks"] > 0.7 * c["target_blocks"] for c in lowered if c["rho"] == 0.8), "lowered too far"
assert any(c["kl"] > 1e-6 for c in cells if "kl" in c)
# Against the command that scores one text with one policy.
for c in cells:
    if c["policy"] != "h2o" or c["source"] != "mill": continue
    one = json.loads(run("eval", "nll", "--model", model, "--text", "a.txt", "--prompt", str(c["context"]), "--max-tokens", "20",
                         "--policy", "h2o", "--rho", str(c["rho"]), "--min-tokens", "0", "--budget-unit", "block", "--evict-every", "8", "--json")[0])
    assert all(abs(a - b) < 1e-3 for a, b in zip(one["nll"], c["nll_by_token"])), (one["nll"], c["nll_by_token"])
    assert one["sizes"] == c["sizes"]
nll = lines(run("eval", "nll", *base[2:])[0])
assert not any("kl" in r for r in nll)
by = lambda rows: {(r["source"], r["context"], r["policy"], r["rho"]): r.get("nll") for r in rows if r["record"] == "cell"}
assert by(nll) == by(rows)
assert "h2o" in run("eval", "report", "whole.jsonl")[0].decode()
END
# Head groups with sizes of their own: equal memory from the records alone, and what they tell of the groups.
check eval_head_groups <<'END'
from helper import *
import math
rows = lines(run("eval", "divergence", "--model", model, "--text", "novel:mill=a.txt", "--contexts", "96,160", "--scored", "20", "--rhos", "0.4,0.6,0.8",
                 "--heads-per-group", "1", "--block-size", "8", "--quiet", "--policies", "h2o;ada=h2o,head_budget=adaptive,nm=7:1,head_floor=0;"
                 "ratios=d2o,redistribute=0,head_budget=adaptive;full0=h2o,head_budget=adaptive,full_layers=0")[0])
cells, n_layers, unequal = [r for r in rows if r["record"] == "cell"], rows[0]["model"]["layers"], 0
n_groups = json.loads(run("info", model, "--json")[0])["n_kv_heads"]
assert len(cells) == 2 * 3 * 4 and n_groups > 1
for c in cells:
    assert c["target_blocks"] == math.floor(c["rho"] * c["context"] * n_layers / 8 + 1e-6) * n_groups, c
    if "empty" in c:
        assert c["policy"] == "full0" and "group_sizes" not in c, c
        continue
    assert c["held_blocks"] <= 1.01 * c["target_blocks"], c
    if c["policy"] == "h2o":
        assert "group_sizes" not in c
        continue
    groups, k = c["group_sizes"], 4
    assert len(groups) == n_layers and all(len(g) == n_groups and sum(g) == s * n_groups for g, s in zip(groups, c["sizes"])), c
    unequal += sum(min(g) < max(g) for g in groups)
    if c["policy"] == "full0": assert groups[0] == [c["n_prompt"]] * n_groups
    else: assert sum(math.ceil((s + k) / 8) for g in groups for s in g) == c["held_blocks"], c
assert unequal > 10, unequal
END
# One threshold over all tables: one KV head to a table unless another number is given, and equal memory.
check eval_one_threshold <<'END'
from helper import *
import math
unequal = 0
n_groups = json.loads(run("info", model, "--json")[0])["n_kv_heads"]
for given, tables in ((), n_groups), (("--heads-per-group", str(n_groups)), 1):
    rows = lines(run("eval", "divergence", "--model", model, "--text", "novel:mill=a.txt", "--contexts", "160", "--scored", "10", "--rhos", "0.4,0.6",
                     "--block-size", "8", "--quiet", "--policies", "h2o;one=h2o,budget=global,sinks=4,nm=15:1,head_floor=0.1", *given)[0])
    assert rows[0]["options"]["heads_per_group"] == n_groups // tables, rows[0]
    for c in (r for r in rows if r["record"] == "cell"):
        n = c["group_sizes"] if c["policy"] == "one" else [[s] * tables for s in c["sizes"]]
        assert c["target_blocks"] == math.floor(c["rho"] * 160 * len(n) / 8 + 1e-6) * tables and c["held_blocks"] <= 1.01 * c["target_blocks"], c
        assert all(len(g) == tables for g in n) and sum(math.ceil((s + 4) / 8) for g in n for s in g) == c["held_blocks"], c
        unequal += c["policy"] == "one" and len({s for g in n for s in g}) > 1
assert unequal > 1, unequal
END
check eval_goes_on <<'END'
from helper import *
import random, signal, time
base = ["eval", "divergence", "--model", model, "--text", "novel:mill=a.txt", "--text", "code=b.c", "--contexts", "96,160",
        "--scored", "20", "--rhos", "0.4,0.8", "--policies", "h2o;d2o:authors;streaming", "--batch", "4", "--windows", "2"]
run(*base, "--output", "w")
whole = open("w", "rb").read()
assert "--output w: has records" in run(*base, "--output", "w", code=2)[1] and open("w", "rb").read() == whole
seed = random.randrange(1 << 30)
print("seed", seed)
rng = random.Random(seed)
for cut in [0, 1, whole.index(b"\n"), whole.index(b"\n") + 1, len(whole) - 1, len(whole)] + [rng.randrange(len(whole)) for _ in range(6)]:
    open("c", "wb").write(whole[:cut])
    run(*base, "--output", "c", "--resume")
    assert open("c", "rb").read() == whole, cut
n_killed, left = 0, 0
if os.path.exists("k"): os.remove("k")
for kill in range(3):
    p = subprocess.Popen([kvfold, *base, "--output", "k", "--resume", "--quiet"], stderr=subprocess.PIPE)
    while p.poll() is None and (not os.path.exists("k") or open("k", "rb").read().count(b"\n") < left + 3): time.sleep(0.001)
    n_killed += p.poll() is None
    p.kill()
    p.wait()
    left = open("k", "rb").read().count(b"\n")
assert n_killed, "every run ended before it was killed"
run(*base, "--output", "k", "--resume")
assert open("k", "rb").read() == whole
# More of the same goes on too; another text, model or option does not.
more = [*base, "--output", "k", "--resume"]
more[more.index("--rhos") + 1] = "0.4,0.8,0.6"
n_cells = sum(r["record"] == "cell" for r in lines(whole))
assert f"{n_cells} cells are done" in run(*more)[1]
rows = lines(open("k", "rb").read())
keys = [json.dumps([r[k] for k in ("source", "context", "offset", "policy", "rho")]) for r in rows if r["record"] == "cell"]
assert len(keys) == len(set(keys)) == 8 * 3 * 3
grown = open("k", "rb").read()
for change, word in ((["--block-size", "32"], "block-size 16 (now 32)"), (["--kv-dtype", "fp32"], "kv-dtype"), (["--deterministic"], "deterministic")):
    err = run(*more, *change, code=2)[1]
    assert word in err and "--force" in err and open("k", "rb").read() == grown, err
open("a2.txt", "w").write(open("a.txt").read() + " And then it rained.")
other = ["novel:mill=a2.txt" if x == "novel:mill=a.txt" else x for x in more]
assert "text mill" in run(*other, code=2)[1]
assert "--force: k was written with text mill" in run(*other, "--force")[1]
open("bad", "wb").write(whole.split(b"\n")[0] + b"\nnot a record\n")
assert "bad line 2: is no record" in run(*base, "--output", "bad", "--resume", code=2)[1]
open("bad", "wb").write(b'{"id": 1}\n')
assert "begins with a run" in run(*base, "--output", "bad", "--resume", code=2)[1]
assert run(*base, "--output", "no/such/file", code=2)[1]
# A signal: what is whole is there, and the rest follows.
if os.path.exists("s"): os.remove("s")
p = subprocess.Popen([kvfold, *base, "--output", "s"], stderr=subprocess.PIPE)
while p.poll() is None and (not os.path.exists("s") or open("s", "rb").read().count(b"\n") < 3): time.sleep(0.001)
p.send_signal(signal.SIGINT)
err = p.stderr.read().decode()
assert p.wait() in (130, 0) and "Sanitizer" not in err, err
if p.returncode == 130: assert "interrupted" in err and "--resume" in err, err
run(*base, "--output", "s", "--resume")
assert open("s", "rb").read() == whole
full = subprocess.run([kvfold, *base], stdout=open("/dev/full", "w"), stderr=subprocess.PIPE)
assert full.returncode == 3 and b"standard output" in full.stderr, full
END
check eval_tasks <<'END'
from helper import *
base = ["eval", "recall", "--model", model, "--contexts", "400", "--samples", "2", "--rhos", "0.5", "--policies", "h2o;streaming", "--quiet"]
rows = lines(run(*base, "--seeds", "0,7")[0])
cells = [r for r in rows if r["record"] == "cell"]
assert len(cells) == 8 * 2 * 2 * 2 * 2, len(cells) # tasks, placements, samples, seeds, policies
for c in cells:
    assert c["task"] in ("single", "multikey", "multivalue", "tracking", "words", "names", "table", "code") and c["placement"] in ("inside", "after")
    assert c["n_prompt"] == c["context"] == 400 and c["n_answer"] == c["n_scored"] and c["source"] == "generated"
    assert 0 <= c["hits"] <= c["n_answer"] and c["exact"] == (c["hits"] == c["n_answer"]) and 0 <= c["depth"] <= 1
    assert c["full_exact"] == (c["full_hits"] == c["n_answer"]) and c["held_blocks"] <= 1.01 * c["target_blocks"]
assert all(c["n_answer"] == (15 if c["task"] == "multivalue" else 5) for c in cells if c["task"] not in ("words", "names"))
assert all(c["n_answer"] > 5 for c in cells if c["task"] in ("words", "names")) # a byte a token
assert run(*base, "--seeds", "7", "--tasks", "tracking", "--deterministic")[0] == run(*base, "--seeds", "7", "--tasks", "tracking", "--deterministic")[0]
own = [r for r in lines(run(*base, "--seeds", "7", "--tasks", "tracking")[0]) if r["record"] == "cell"]
assert own == [c for c in cells if c["task"] == "tracking" and c["seed"] == 7]
assert any(a["nll"] != b["nll"] for a in cells for b in cells if a["seed"] != b["seed"] and a["sample"] == b["sample"] and a["task"] == b["task"])
open("essay.txt", "w").write("It was a fine day. Nobody spoke of it. The clouds went by! " * 60)
needle = [r for r in lines(run("eval", "needle", *base[2:], "--depths", "0,0.5,1", "--placement", "inside", "--text", "essay=essay.txt")[0]) if r["record"] == "cell"]
assert len(needle) == 3 * 2 * 2 and {c["depth"] for c in needle} == {0, 0.5, 1} and {c["task"] for c in needle} == {"needle"}
assert {c["source"] for c in needle} == {"essay"} and {c["kind"] for c in needle} == {"essay"}
assert "--text essay: has" in run("eval", "needle", *base[2:], "--contexts", "5000", "--context", "9000", "--text", "essay.txt", code=2)[1]
open("short.txt", "w").write("A short text.")
assert "--text short: has" in run("eval", "nll", "--model", model, "--text", "short.txt", "--quiet", code=2)[1]
assert "another text is named short too" in run("eval", "nll", "--model", model, "--text", "short.txt", "--text", "short.txt", code=2)[1]
open("short.txt", "wb").write(b"A sh\xff")
assert "--text short.txt: byte 5" in run("eval", "nll", "--model", model, "--text", "short.txt", code=2)[1]
assert "no/such" in run("eval", "nll", "--model", model, "--text", "no/such", code=2)[1]
assert "KIND:NAME=FILE" in run("eval", "nll", "--model", model, "--text", "novel=", code=2)[1]
table = [r for r in lines(run("eval", "ablation", "--model", model, "--text", "essay.txt", "--contexts", "128", "--scored", "8", "--rhos", "0.5",
                              "--tables", "6,7,8", "--quiet")[0]) if r["record"] == "cell"]
assert {c["table"] for c in table} == {"6", "7", "8"} and all(c["measure"] == "divergence" for c in table)
assert len({(c["table"], c["policy"]) for c in table}) == len(table) >= 8
by = {(c["table"], c["policy"]): c["kl"] for c in table}
assert by["6", "without merging"] == by["8", "none"] != by["6", "d2o"] == by["8", "exponential"] == by["7", "key"] != by["7", "value"]
END
check eval_rho_one <<'END'
from helper import *
open("a.txt", "w").write("The river ran past the mill and the miller slept, and nobody came by. " * 20)
rows = [r for r in lines(run("eval", "divergence", "--model", model, "--text", "a.txt", "--contexts", "128", "--scored", "20", "--rhos", "1",
                             "--policies", "h2o;d2o;streaming;snapkv;d2o:authors", "--quiet")[0]) if r["record"] == "cell"]
# At 1 nothing would be evicted, and more held than the prompt had: those that evict run with less, as at any other rho.
for c in rows[:3]:
    assert "empty" not in c and 0.8 < c["rho_used"] < 1 and c["held_blocks"] <= c["target_blocks"] == 8 * len(c["blocks_by_layer"]), c
    assert c["rho"] == 1 and c["kl"] >= 0 and sum(c["sizes"]) < 128 * len(c["sizes"]), c
assert len(rows) == 5
# What a record says it ran with is what it ran with: the same rho and options by themselves have the same figures.
rows = [r for r in lines(run("eval", "nll", "--model", model, "--text", "a.txt", "--contexts", "128", "--scored", "20", "--rhos", "0.5,1",
                             "--policies", "h2o;d2o;snapkv;pyramidkv;cam;sirllm", "--quiet")[0]) if r["record"] == "cell" and "empty" not in r]
n_lowered = 0
for c in rows:
    options = [x for k, v in c["policy_options"].items() for x in ("--" + k.replace("_", "-"), v)]
    one = json.loads(run("eval", "nll", "--model", model, "--text", "a.txt", "--prompt", "128", "--max-tokens", "20", "--json", *options,
                         "--rho", repr(c["rho_used"]))[0])
    assert abs(one["mean_nll"] - c["nll"]) < 1e-5, (c["policy"], c["rho"], c["rho_used"], one["mean_nll"], c["nll"])
    n_lowered += c["rho_used"] < c["rho"]
assert len(rows) >= 10 and n_lowered >= 4, (len(rows), n_lowered)
# A prompt and what is scored may fill the model's context: the last token is not computed.
base = ["eval", "nll", "--model", model, "--text", "a.txt", "--contexts", "128", "--scored", "20", "--rhos", "0.5", "--policies", "h2o", "--quiet"]
cell = lambda *more: [r["nll_by_token"] for r in lines(run(*base, *more)[0]) if r["record"] == "cell"]
assert cell("--context", "148") == cell() and len(cell()[0]) == 20
assert "the model's context 147" in run(*base, "--context", "147", code=2)[1]
END
check eval_dialogues <<'END'
from helper import *
turns = [{"role": "system", "content": "Be brief."}]
for i in range(12):
    turns += [{"role": "user", "content": f"What is {i} and {i}?"}, {"role": "assistant", "content": f"It is {2 * i}."}]
turns[-1]["scored"] = False
open("d.jsonl", "w").write(json.dumps({"id": "sums", "turns": turns}) + "\n\n" + json.dumps({"turns": turns[1:9]}) + "\n")
base = ["eval", "multiturn", "--model", model, "--dialogue", "d.jsonl", "--contexts", "300", "--rhos", "0.5", "--policies", "h2o"]
out, err = run(*base, "--scored", "20")
rows = [r for r in lines(out) if r["record"] == "cell"]
assert len(rows) == 1 and "line 3: no answer follows its first 300 tokens; left out" in err, err
c = rows[0]
assert c["task"] == "dialogue" and c["source"] == "d" and c["kind"] == "dialogue" and c["placement"] == "after"
assert 200 < c["n_prompt"] <= 300 and 0 < c["n_scored"] <= 20 and c["kl"] > 0 and 0 <= c["agree"] <= 1
assert len(c["kl_by_token"]) == len(c["nll_by_token"]) == c["n_answer"] == c["n_scored"] and c["hits"] <= c["n_answer"]
# The tokens: the first answers are the prompt, with the whole of their turns; all that counts is in later answers.
long = [r for r in lines(run(*base, "--scored", "100000", "--quiet")[0]) if r["record"] == "cell"][0]
short = [r for r in lines(run(*base, "--scored", "1", "--quiet")[0]) if r["record"] == "cell"][0]
assert long["n_prompt"] == short["n_prompt"] == c["n_prompt"] and 0 < short["n_scored"] <= c["n_scored"] < long["n_scored"]
os.makedirs("e", exist_ok=True)
open("e/d.jsonl", "w").write(open("d.jsonl").read())
assert "another file is named d too" in run(*base, "--dialogue", "e/d.jsonl", code=2)[1]
bad = (("[1]", "`turns`"), ("{", "not JSON"), ('{"turns": []}', "`turns`"), ('{"turns": [{"role": "user"}]}', "turn 0: must be an object"),
       ('{"turns": [{"role": "assistant", "content": "x"}]}', "turn 0: user and assistant must take turns"),
       ('{"turns": [{"role": "user", "content": "x"}, {"role": "user", "content": "x"}]}', "turn 1: user and assistant"),
       ('{"turns": [{"role": "judge", "content": "x"}]}', "turn 0: user"))
for text, word in bad:
    open("bad.jsonl", "w").write(text + "\n")
    err = run("eval", "multiturn", "--model", model, "--dialogue", "bad.jsonl", code=2)[1]
    assert word in err and "bad.jsonl line 1" in err, (text, err)
open("bad.jsonl", "w").write(json.dumps({"turns": turns[1:5]}) + "\n")
assert "no dialogue has an answer after" in run("eval", "multiturn", "--model", model, "--dialogue", "bad.jsonl", "--quiet", code=2)[1]
END
