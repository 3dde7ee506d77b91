# Part of command.sh, which reads it: replay, recording, the report page, the traces and figures.

cat >report.py <<'END'
import html.parser, json, math, re
from helper import *

VOID = {"meta", "link", "br", "img", "input", "hr"}
class Page(html.parser.HTMLParser):
    """Fails where tags do not nest; keeps the text of the script elements and every attribute."""
    def __init__(self, text):
        super().__init__()
        self.open, self.scripts, self.attributes = [], [], []
        self.feed(text), self.close()
        assert not self.open, self.open
    def handle_starttag(self, tag, attributes):
        self.attributes += attributes
        if tag not in VOID: self.open.append(tag)
        if tag == "script": self.scripts.append((dict(attributes), []))
    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag
    def handle_data(self, data):
        if self.open and self.open[-1] == "script": self.scripts[-1][1].append(data)

def page(path):
    """The figures in a report page, which must be whole and need nothing from outside."""
    text = open(path, encoding="utf-8").read()
    p = Page(text)
    assert text.startswith("<!doctype html>") and not re.search(r"(https?:)?//[a-z0-9-]+\.|@import|url\(", text, re.I)
    assert not [a for a in p.attributes if a[0] in ("src", "href", "srcset", "action")], p.attributes
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    data, code = ("".join(s[1]) for s in p.scripts)
    assert p.scripts[0][0] == {"type": "application/json", "id": "data"} and "<" not in data and "paintAll()" in code
    return json.loads(data)

def chrome(path):
    """The events of a Chrome trace, after its rules: phases, times, nesting of async events, names of processes."""
    trace = json.load(open(path))
    assert trace["displayTimeUnit"] == "ms"
    events, nest, named, last = trace["traceEvents"], {}, set(), {}
    for e in events:
        assert e["ph"] in "MXCbe" and isinstance(e["name"], str) and isinstance(e["pid"], int) and isinstance(e["tid"], int), e
        if e["ph"] == "M":
            named.add(e["pid"])
            continue
        assert e["pid"] in named and isinstance(e["ts"], (int, float)) and e["ts"] >= 0 and math.isfinite(e["ts"]), e
        if e["ph"] == "X": assert e["dur"] >= 0, e
        if e["ph"] == "C":
            assert all(isinstance(v, (int, float)) for v in e["args"].values()), e
            assert e["ts"] >= last.get(e["name"], 0), e
            last[e["name"]] = e["ts"]
    for e in sorted((e for e in events if e["ph"] in "be"), key=lambda e: e["ts"]): # stable, as readers sort
        stack = nest.setdefault((e["cat"], e["id"]), [])
        if e["ph"] == "b": stack.append(e["name"])
        else: assert stack and stack.pop() == e["name"], (e, stack)
    assert not any(nest.values()), nest
    return events

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*$")
SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-z]+="[^"\\\n]*",?)*)\})? (\S+)$')
def prometheus(path):
    """Samples by name, after the rules of the text format: HELP, TYPE, then that family's samples, once each."""
    text, types, samples, family = open(path).read(), {}, {}, None
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split(" ")[2]
            assert NAME.match(family) and family not in types and len(line.split(" ")) > 3, line
            continue
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == family and kind in ("gauge", "counter", "histogram"), line
            types[name] = kind
            assert kind != "counter" or name.endswith("_total"), line
            continue
        name, labels, value = SAMPLE.match(line).groups()
        base = re.sub(r"_(bucket|sum|count)$", "", name) if types.get(family) == "histogram" else name
        assert base == family and family in types, line
        assert (name, labels) not in samples, line
        samples[name, labels] = float(value)
    for name in (n for n, kind in types.items() if kind == "histogram"):
        buckets = [(float(re.search('le="([^"]*)"', l)[1]), v) for (n, l), v in samples.items() if n == name + "_bucket"]
        assert buckets == sorted(buckets) and buckets[-1][0] == math.inf and len({b[0] for b in buckets}) == len(buckets), name
        assert [b[1] for b in buckets] == sorted(b[1] for b in buckets) and buckets[-1][1] == samples[name + "_count", None], name
    return samples
END

check profile_outputs_agree <<'END'
from report import *
common = ("profile", "--policy", "d2o", "--generate", "60", "--seed", "5", "--kv-memory", "48MiB", "--prompt-mean", "300", "--prompt-sigma", "0.5",
          "--prefix-groups", "3")
out, err = run(*common, "--json", "--report", "r.html", "--trace", "t.json", "--metrics", "m.prom", "--record", "x.trace")
assert not err, err
s, data, events, m = json.loads(out), page("r.html"), chrome("t.json"), prometheus("m.prom")
assert s["done"] == s["requests"] == 60 and s["trace_form"] == "made" and s["n_layers"] == 30 and s["policy"] == "d2o"
assert s["peak_blocks"] == data["peak_blocks"] == m["kvfold_blocks_held_max", None] == max(data["series"]["held"]) <= s["n_blocks"]
assert s["steps"] == data["steps"] == m["kvfold_steps_total", None] == sum(e["ph"] == "X" and e["cat"] == "step" for e in events)
series = data["series"]
assert len({len(v) for v in series.values() if isinstance(v, list)}) == 1 and all(len(r) == 30 for r in series["blocks"])
if series["steps_per_point"] == 1:
    assert all(h <= sum(r) and max(r) <= h for r, h in zip(series["blocks"], series["held"])) # peaks, each at its own time
assert all(a <= b for a, b in zip(series["begin_s"][1:], series["end_s"][1:])) and series["end_s"][-1] == data["seconds"]
layers = data["layers"]
assert [l["held_max"] for l in layers] == [max(r[i] for r in series["blocks"]) for i in range(30)] == [m["kvfold_layer_blocks_held_max", f'layer="{i}"'] for i in range(30)]
assert all(l["keep_min"] <= l["keep_mean"] <= l["keep_max"] and 0 < l["density"] < 1 for l in layers)
high = max(layers, key=lambda l: l["density"]); low = min(layers, key=lambda l: l["density"])
assert high["keep_mean"] < low["keep_mean"] # layer_sign 1
pool = data["pool"]
assert pool["freed_blocks"] + pool["cached"] == pool["taken_blocks"] == sum(l["taken_blocks"] for l in layers) and pool["held"] == 0 < pool["cached"]
assert pool["freed_blocks"] == sum(v for (n, _), v in m.items() if n == "kvfold_blocks_freed_total")
assert m["kvfold_block_lifetime_seconds_count", None] == pool["freed_blocks"] and pool["events_dropped"] == 0
requests = {e["id"] for e in events if e["ph"] == "b" and e["name"].startswith("request ")}
assert len(requests) == 60
counters = {e["name"] for e in events if e["ph"] == "C"}
assert {f"layer {l:02}" for l in range(30)} | {"held", "full cache"} <= counters
last = {e["name"]: e["args"]["blocks"] for e in events if e["ph"] == "C"}
peak = max(e["args"]["blocks"] for e in events if e["ph"] == "C" and e["name"] == "held")
assert last["held"] == 0 and 0 < peak <= s["peak_blocks"]
# the recorded trace replays alike, and other forms of the figures say the same
again = json.loads(run("profile", "x.trace", "--seed", "5", "--kv-memory", "48MiB", "--json", "--metrics", "m.json")[0])
whole = json.load(open("m.json"))
# arrivals are written to the microsecond
assert (again["done"], again["prompt_tokens"], again["shared_tokens"]) == (60, s["prompt_tokens"], s["shared_tokens"]) and s["shared_tokens"]
assert whole["peak_blocks"] == again["peak_blocks"] and len(whole["series"]["held"]) == len(whole["series"]["blocks"])
run(*common, "--quiet", "--metrics", "m.csv")
rows = [l.split(",") for l in open("m.csv").read().splitlines()]
assert rows[0][0] == "step" and rows[0][-1] == "layer_29_blocks" and {len(r) for r in rows} == {len(rows[0])}
assert [int(r[rows[0].index("held_blocks")]) for r in rows[1:]] == series["held"]
END

check profile_policies_and_pools <<'END'
from report import *
def go(*more, code=0): return json.loads(run("profile", "--generate", "40", "--seed", "2", "--json", *more, code=code)[0])
full, d2o = go("--policy", "full"), go("--policy", "d2o", "--rho", "0.3")
assert full["peak_blocks"] == full["peak_blocks_full"] and d2o["peak_blocks"] < full["peak_blocks"]
assert full["pool"]["compactions"] == 0 < d2o["pool"]["compactions"] and d2o["rho"] == 0.3
assert all(l["keep_mean"] is None and l["density"] is None for l in full["layers"])
h2o = go("--policy", "h2o", "--rho", "0.3")
assert len({l["keep_mean"] for l in h2o["layers"]}) == 1 and h2o["layers"][0]["density"] is None
small = go("--policy", "full", "--blocks", "6000", "--rate", "50")
assert small["n_blocks"] == 6000 and small["peak_blocks"] <= 6000 and small["queue_steps_max"] > 0 and small["done"] == 40
tight = go("--policy", "full", "--blocks", "2000", code=1)
assert tight["refused"] > 0 and tight["done"] + tight["refused"] == 40
shape = go("--layers", "4", "--kv-heads", "8", "--head-dim", "128", "--kv-dtype", "fp32", "--block-size", "32", "--heads-per-group", "2")
assert shape["n_layers"] == 4 and shape["block_bytes"] == 32 * 2 * 128 * 4 * 2
open("f.txt", "w").write("0.1, 0.2\n0.3 0.4\n")
given = go("--policy", "d2o", "--densities", "f.txt")
assert go("--limit", "2")["policy"] == "full" and go("--limit", "2", "--rho", "0.5")["policy"] == "d2o"
assert [round(l["density"], 9) for l in given["layers"]] == [0.1, 0.2, 0.3, 0.4]
assert go("--speed", "10")["seconds"] < go()["seconds"] and go("--limit", "7")["requests"] == 7
assert go("--arrivals", "bursty", "--rate", "20", "--burst", "20", "--step-ms", "50")["waiting_max"] >= 0
END

check profile_prefix_cache <<'END'
from report import *
common = ("profile", "--generate", "40", "--seed", "4", "--prefix-groups", "2", "--shared-tokens", "128", "--json")
for policy in ("full", "d2o"):
    on = json.loads(run(*common, "--policy", policy, "--report", "c.html", "--metrics", "c.prom")[0])
    off = json.loads(run(*common, "--policy", policy, "--prefix-cache", "off", "--metrics", "o.prom")[0])
    c, m = on["prefix_cache"], prometheus("c.prom")
    shown = page("c.html")["prefix_cache"]
    assert {**shown, "hit_ratio": 0} == {**c, "hit_ratio": 0} and abs(shown["hit_ratio"] - c["hit_ratio"]) < 1e-6, shown
    assert off["prefix_cache"] is None and on["done"] == off["done"] == 40
    assert c["queries"] == 40 and c["query_tokens"] == on["prompt_tokens"] == off["prompt_tokens"]
    assert c["hit_tokens"] == on["shared_tokens"] > 1000 and c["hits"] * 128 == c["hit_tokens"], c # all that is shared
    assert abs(c["hit_ratio"] - c["hit_tokens"] / c["query_tokens"]) < 1e-9
    assert c["hits"] == m["kvfold_prefix_hits_total", None] and c["hit_tokens"] == m["kvfold_prefix_hit_tokens_total", None]
    assert not [name for name, _ in prometheus("o.prom") if "prefix" in name]
    assert policy != "full" or off["pool"]["taken_blocks"] - on["pool"]["taken_blocks"] == c["hit_tokens"] // 16 * 30
nothing = json.loads(run(*common, "--policy", "d2o", "--snapshot-memory", "1")[0]) # one page: no prefix fits
assert nothing["prefix_cache"]["hits"] == 0 and nothing["done"] == 40
END

check profile_public_traces <<'END'
from report import *
import gzip
azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,480,10\n2023-11-16 18:17:04.0319600,318,8\n"
burst = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,47,18,65,Conversation log\n6,ChatGPT,9,0,9,API log\n"
moon = "".join(json.dumps({"timestamp": 1000 * i, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 100 + i]}) + "\n" for i in range(3))
def go(name, text):
    open(name, "wb").write(text if isinstance(text, bytes) else text.encode())
    return json.loads(run("profile", name, "--json", "--quiet")[0])
a, b, c, z = go("a.csv", azure), go("b.csv", burst), go("m.jsonl", moon), go("a.csv.gz", gzip.compress(azure.encode()))
assert (a["trace_form"], a["done"], a["prompt_tokens"], a["output_tokens"]) == ("azure", 2, 798, 18) and z["peak_blocks"] == a["peak_blocks"]
assert (b["trace_form"], b["done"], b["trace_failed"]) == ("burstgpt", 1, 1)
assert (c["trace_form"], c["done"], c["shared_tokens"]) == ("mooncake", 3, 2048)
assert (c["prefix_cache"]["hits"], c["prefix_cache"]["hit_tokens"]) == (2, 2048)
run("profile", "m.jsonl", "--quiet", "--record", "own.trace") # a converter
assert open("own.trace").read().startswith("kvfold-trace 1\narrival_s prompt_tokens output_tokens prefix_group shared_tokens\n0.000000 1100 5 g1 0\n")
out, _ = run("profile", "-", "--json", stdin=azure)
assert json.loads(out)["done"] == 2
END

# ---- Bad input --------------------------------------------------------------------------------------------------
printf 'kvfold-trace 1\narrival_s prompt_tokens output_tokens prefix_group shared_tokens\n1 5 5 - 0\n0 5 5 - 0\n' >back.trace
printf 'kvfold-trace 1\narrival_s prompt_tokens prefix_group shared_tokens\n1 5 - 0\n' >column.trace
printf 'kvfold-trace 1\narrival_s prompt_tokens output_tokens prefix_group shared_tokens\n1 5 5 - 0\n2 5' >torn.trace
refused profile_nothing 2 'nothing to replay: give a TRACE, or --generate N' profile
refused profile_both 2 'x and --generate: give one of them' profile x --generate 3
refused profile_no_file 2 'none.trace' profile none.trace
refused profile_clock_back 2 'back.trace line 4: the clock goes back: arrival 0.000000 s after 1.000000 s' profile back.trace
refused profile_column 2 'column.trace line 2: column output_tokens is missing' profile column.trace
refused profile_torn 2 'torn.trace line 4: has no line end' profile torn.trace
refused profile_twice 2 '--report and --metrics would both write to r' profile --generate 3 --report r --metrics r
refused profile_over_trace 2 'back.trace: is the trace that is read' profile back.trace --record back.trace
refused profile_no_folder 2 'could not be opened for writing' profile --generate 3 --trace none/t.json
printf '0.5 x\n' >word.txt
refused profile_density_word 2 '--densities word.txt: number 2, x: must be 0 or more' profile --generate 3 --densities word.txt
printf '0.5 0.5\n' >two.txt
refused profile_density_count 2 'has 2 numbers: must be one for each of the 3 layers' profile --generate 3 --layers 3 --densities two.txt
refused profile_policy 2 'nosuch' profile --generate 3 --policy nosuch
refused profile_chunk 2 '--chunk 24: must be a multiple of --block-size 16' profile --generate 3 --chunk 24
refused profile_pool_of_nothing 2 'makes 0 blocks' profile --generate 3 --kv-memory 100
if [ -w /dev/full ]; then
    for option in report trace record metrics; do
        refused "profile_full_disk_$option" 3 'could not be written' profile --generate 20 --quiet --$option /dev/full
    done
fi
check profile_keeps_a_trace_it_refuses <<'END'
from report import *
before = open("back.trace").read()
run("profile", "back.trace", "--record", "back.trace", code=2)
assert open("back.trace").read() == before
END

# ---- kvfold run -----------------------------------------------------------------------------------------------------
check run_is_watched <<'END'
from report import *
story = "the old house by the river had a door and a window and a roof of straw " * 4
rows = [json.dumps({"id": i, "prompt": story + str(i) * (i + 1), "max_tokens": 6 + i}) for i in range(5)]
open("w.jsonl", "w").write("\n".join(rows + ["torn"]) + "\n")
args = ("run", "--model", model, "--input", "w.jsonl", "--rho", "0.3", "--min-tokens", "16", "--quiet", "--block-size", "8", "--kv-memory", "16MiB")
plain = answers_of = {r["id"]: r for r in lines(run(*args, code=1)[0]) if "token_ids" in r}
out, _ = run(*args, "--report", "w.html", "--trace", "w.json", "--record", "w.trace", "--metrics", "w.json.prom", code=1)
watched = {r["id"]: r for r in lines(out) if "token_ids" in r}
assert {i: r["token_ids"] for i, r in watched.items()} == {i: r["token_ids"] for i, r in plain.items()} # watching changes nothing
data, events, m = page("w.html"), chrome("w.json"), prometheus("w.json.prom")
done = [r for r in watched.values() if r["finish_reason"] in ("stop", "length")]
assert data["requests"] == len(done) == 5 and data["prompt_tokens"] == sum(r["prompt_tokens"] for r in done)
assert data["output_tokens"] == sum(r["completion_tokens"] for r in done)
assert data["steps"] == m["kvfold_steps_total", None] == sum(e["ph"] == "X" and e["cat"] == "step" for e in events)
assert data["pool"]["held"] == 0 and data["pool"]["compactions"] > 0 and any(e["name"] == "compaction" for e in events)
assert sum(e["ph"] == "b" and e["name"].startswith("request ") for e in events) == 5
trace = [l.split() for l in open("w.trace").read().splitlines()]
n = data["n_layers"]
assert trace[0] == ["kvfold-trace", "1"] and len(trace) == 7
assert [(int(t[1]), int(t[2])) for t in trace[2:]] == [(r["prompt_tokens"], r["completion_tokens"]) for _, r in sorted(watched.items()) if r in done]
assert all(len(t[5].split(",")) == n for t in trace[2:]) and int(trace[3][4]) >= 16 and trace[2][4] == "0" and trace[3][3] == trace[2][3]
# the replay of what was recorded gives every layer the same budgets
r = json.loads(run("profile", "w.trace", "--rho", "0.3", "--min-tokens", "16", "--block-size", "8", "--json")[0])
assert [(l["keep_mean"], l["keep_min"], l["keep_max"]) for l in r["layers"]] == [(l["keep_mean"], l["keep_min"], l["keep_max"]) for l in data["layers"]]
assert all(abs(a["density"] - b["density"]) < 1e-5 for a, b in zip(r["layers"], data["layers"]))
assert r["pool"]["evicted_slots"] == data["pool"]["evicted_slots"] and r["pool"]["compactions"] == data["pool"]["compactions"]
END
check r39_reports_count_requests_and_their_answers <<'END'
from report import *
rows = [json.dumps({"id": i, "prompt": "the old house by the river had a door", "n": n, "max_tokens": 3, "temperature": 1, "ignore_eos": True})
        for i, n in enumerate((3, 1, 2))]
open("n.jsonl", "w").write("\n".join(rows) + "\n")
out, _ = run("run", "--model", model, "--input", "n.jsonl", "--quiet", "--report", "n.html", "--trace", "n.json", "--record", "n.trace", "--metrics", "n.prom")
data, m = page("n.html"), prometheus("n.prom")
n_prompt = lines(out)[0]["prompt_tokens"]
assert (data["requests"], data["answers"], data["prompt_tokens"], data["output_tokens"]) == (3, 6, 3 * n_prompt, 18), data
assert m["kvfold_requests_total", None] == m["kvfold_queue_steps_count", None] == 3 and m["kvfold_answers_total", None] == 6
assert sorted(e["id"] for e in chrome("n.json") if e["ph"] == "b" and e["name"].startswith("request ")) == ["1", "1.1", "1.2", "2", "3", "3.1"]
assert len(open("n.trace").read().splitlines()) == 2 + 6 # a line for each, of one group
END
check r9_r10_r11_r30_figures_of_a_run <<'END'
from report import *
# Prompts that are computed side by side though they begin alike, compactions, more requests than the batch takes, a small pool.
rows = [json.dumps({"id": i, "prompt": "the old house by the river " * 9 + "a door " * (3 + i % 5), "max_tokens": 6 + i % 3}) for i in range(14)]
open("f.jsonl", "w").write("\n".join(rows) + "\n")
run("run", "--model", model, "--input", "f.jsonl", "--output", "f.out", "--policy", "streaming", "--rho", "0.3", "--min-tokens", "16", "--quiet", "--block-size", "8", "--kv-memory", "512KiB",
    "--max-running", "3", "--report", "f.html", "--metrics", "f.prom", "--trace", "f.json")
data, m, text = page("f.html"), prometheus("f.prom"), open("f.prom").read()
for name in re.findall(r"# TYPE (\S+) histogram", text): assert m[name + "_count", None] > 0, name
assert m["kvfold_queue_steps_count", None] == data["requests"] == 14 and m["kvfold_queue_steps_sum", None] > 14
assert data["queue_steps_mean"] > 1 and all(w["queue_steps"] is not None and w["start_s"] >= w["arrival_s"] for w in data["longest_waits"])
pool, c = data["pool"], data["prefix_cache"]
causes = {k: v for k, v in pool.items() if k.startswith("freed_by_")}
assert sum(causes.values()) == pool["freed_blocks"] == sum(v for (n, _), v in m.items() if n == "kvfold_blocks_freed_total"), causes
assert {f'cause="{k[9:]}"' for k in causes} == {l for n, l in m if n == "kvfold_blocks_freed_total"}
assert pool["freed_by_adoption"] > 0 and c["adopted"] > 0
assert pool["freed_by_eviction"] == m["kvfold_prefix_evicted_blocks_total", None] and (pool["freed_by_eviction"] > 0) == (m["kvfold_prefix_evictions_total", None] > 0)
assert 0 < m["kvfold_compaction_freed_bytes_total", None] <= pool["evicted_bytes"] * 2
# held, cached and free are the pool at each moment; what holds tables counts in the full cache too
S = data["series"]
assert all(0 <= h + c <= data["n_blocks"] and h <= most for h, c, most in zip(S["held_after"], S["cached"], S["held"]))
assert S["cached"][-1] == pool["cached"] > 0 and S["held_after"][-1] == pool["held"] == 0 and 0 < max(S["slots_idle"]) <= pool["slots_idle_max"]
assert all(h <= f for h, f in zip(S["held_after"], S["full"])), "above a full cache, though no compaction is under way"
END
check run_tells_of_head_groups <<'END'
from report import *
args = ("run", "--model", model, "--input", "w.jsonl", "--policy", "h2o", "--rho", "0.3", "--min-tokens", "16", "--nm", "7:1", "--quiet", "--block-size", "8", "--kv-memory", "16MiB", "--heads-per-group", "1")
out, _ = run(*args, "--head-budget", "adaptive", "--report", "g.html", "--metrics", "g.prom", code=1)
done = [r for r in lines(out) if r.get("finish_reason") in ("stop", "length")]
data, m, info = page("g.html"), prometheus("g.prom"), json.loads(run("info", model, "--json")[0])
n_groups, n_layers = info["n_kv_heads"], info["n_layers"]
sizes = [r["kv"]["group_sizes"] for r in done]
assert len(sizes) == 5 and all(len(s) == n_layers and all(len(g) == n_groups for g in s) for s in sizes)
assert any(max(g) > min(g) for s in sizes for g in s)
for l in range(n_layers):
    layer = data["layers"][l]
    assert abs(sum(layer["group_keep_mean"]) / n_groups - layer["keep_mean"]) < 1e-6
    for g in range(n_groups):
        mean = sum(s[l][g] for s in sizes) / len(sizes)
        assert abs(mean - layer["group_keep_mean"][g]) < 1e-6 > abs(mean - m["kvfold_group_budget_tokens_mean", f'layer="{l}",group="{g}"'])
out, _ = run(*args, "--report", "g.html", "--metrics", "g.prom", code=1)
assert not any("group_sizes" in (r.get("kv") or {}) for r in lines(out)) and not any(n == "kvfold_group_budget_tokens_mean" for n, _ in prometheus("g.prom"))
assert all(l["group_keep_mean"] is None for l in page("g.html")["layers"])
out, _ = run(*args[:-2], "--budget", "global", "--sinks", "4", "--report", "g.html", code=1) # chooses one KV head to a table
sizes = [(r["kv"]["group_sizes"], r["prompt_tokens"]) for r in lines(out) if r.get("finish_reason") in ("stop", "length")]
for s, n in sizes: assert sum(sum(g) for g in s) == max(int(0.3 * n + 1e-6), 16) * n_layers * n_groups and all(len(g) == n_groups for g in s), (s, n)
assert len(sizes) == 5 and all(l["group_keep_mean"] for l in page("g.html")["layers"])
END
check run_names_are_escaped <<'END'
from report import *
open("</script><b>&.jsonl".replace("/", "_"), "w").write('{"prompt": "x", "max_tokens": 1}\n')
run("run", "--model", model, "--input", "<_script><b>&.jsonl", "--output", "e.out", "--quiet", "--report", "e.html")
assert page("e.html")["source"] == "<_script><b>&.jsonl"
END
refused profile_no_trace 2 'kvfold: no-such: No such file' profile no-such
refused run_report_over_input 2 'is the input; writing there would destroy it' run --model "$model" --input w.jsonl --report w.jsonl
refused run_report_twice 2 'would both write to same' run --model "$model" --input w.jsonl --report same --trace same
refused run_report_no_folder 2 'could not be opened for writing' run --model "$model" --input w.jsonl --output kept.out --report none/r.html
if [ -e kept.out ]; then fail run_report_no_folder_keeps "kept.out was made"; else ok run_report_no_folder_keeps; fi
if [ -w /dev/full ]; then
    for option in report trace record metrics; do
        refused "run_full_disk_$option" 3 'could not be written' run --model "$model" --prompt x --max-tokens 40 --output o --force --quiet --$option /dev/full
    done
fi
