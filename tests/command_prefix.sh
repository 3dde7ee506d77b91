# Part of command.sh, which reads it: prompts that begin alike, and those kept in files.
check prefix_cache <<'END'
from helper import *
shared = "One shared context, told again and again. " * 8
rows = [{"id": i, "prompt": shared + tail, "max_tokens": 5, "prefix_end": 64, "policy": policy, "min_tokens": 16}
        for i, (policy, tail) in enumerate((p, t) for p in ("full", "streaming", "h2o", "d2o") for t in ("a", "bb", "a", "ccc"))]
text = "\n".join(map(json.dumps, rows))
same = lambda out: {r["id"]: (r["token_ids"], r["kv"]) for r in out}
off, _ = batch(text, "--deterministic", "--prefix-cache", "off", "--chunk", "64")
on, _ = batch(text, "--deterministic", "--chunk", "64")
assert same(on) == same(off) and not any("cached_tokens" in r for r in on)
seen = {r["id"]: r for r in batch(text, "--chunk", "64", "--max-running", "1")[0]}
assert all(r["cached_tokens"] == 0 for r in batch(text, "--prefix-cache", "off")[0])
n = seen[0]["prompt_tokens"]
assert seen[0]["cached_tokens"] == 0 and seen[2]["cached_tokens"] == n - 1, [r["cached_tokens"] for r in seen.values()]
# full and streaming find any block, also those of another policy; the others go on from a snapshot.
assert all(seen[i]["cached_tokens"] >= n - 4 for i in range(1, 8)), [r["cached_tokens"] for r in seen.values()]
assert seen[8]["cached_tokens"] == 0 and all(seen[i]["cached_tokens"] >= 64 for i in range(9, 16))
salted = [{"id": i, "prompt": shared, "max_tokens": 2, "cache_salt": s, "policy": "full"} for i, s in enumerate("aba")]
seen = {r["id"]: r for r in batch("\n".join(map(json.dumps, salted)), "--max-running", "1")[0]}
assert seen[0]["cached_tokens"] == seen[1]["cached_tokens"] == 0 < seen[2]["cached_tokens"]
bad = [({"prefix_end": 7}, "prefix_end 7: must be a multiple of the block size 16"), ({"prefix_end": 4096}, "prefix_end 4096: must be"),
       ({"prefix_end": "x"}, "prefix_end: is a text"), ({"cache_salt": "s" * 65}, "cache_salt: has 65 bytes"), ({"cache_salt": 3}, "cache_salt: is a whole number")]
out, _ = batch("\n".join(json.dumps({"prompt": "x", **b}) for b, _ in bad), code=1)
by_line = {r["line"]: r["error"] for r in out}
assert all(words in by_line[i + 1] for i, (_, words) in enumerate(bad)), by_line
line = {"custom_id": "c", "method": "POST", "url": "/v1/completions",
        "body": {"model": "m", "prompt": shared, "max_tokens": 1, "cache_salt": "t", "kvfold": {"prefix_end": 32}}}
lines_ = "\n".join(json.dumps({**line, "custom_id": i}) for i in "ab")
usage = [r["response"]["body"]["usage"] for r in batch(lines_, "--any-model", "--max-running", "1")[0]]
assert [u["prompt_tokens_details"]["cached_tokens"] for u in usage] == [0, usage[0]["prompt_tokens"] - 1], usage
END

check prompts_kept_in_files <<'END'
from helper import *
os.makedirs("kept", exist_ok=True)
context = "A context that many runs share. " * 8
rows = [{"id": i, "prompt": context + t, "prefix_end": 128, "prefix_name": "ctx-1", "max_tokens": 4, "min_tokens": 16, "policy": p}
        for i, (p, t) in enumerate((p, t) for p in ("d2o", "full") for t in ("one", "two"))]
text = "\n".join(map(json.dumps, rows))
same = lambda out: {r["id"]: (r["token_ids"], r["kv"]) for r in out}
arguments = ("--prefix-dir", "kept", "--max-running", "1", "--chunk", "1024")
first, _ = batch(text, *arguments)
assert first[0]["cached_tokens"] == 0 and os.listdir("kept") == ["ctx-1.kvfprompt"], os.listdir("kept")
second, _ = batch(text, *arguments)
assert [r["cached_tokens"] for r in second if r["id"] == 0] == [128], second[0]
path = "kept/ctx-1.kvfprompt"
plain = "\n".join(json.dumps({k: v for k, v in r.items() if k != "prefix_name"}) for r in rows)
assert [same(batch(text, "--deterministic", *arguments)[0]) == same(batch(plain, "--deterministic")[0]) for _ in range(2)] == [True] * 2
assert sorted(os.listdir("kept")) == ["ctx-1.deterministic.kvfprompt", "ctx-1.kvfprompt"]
bad = [({"prefix_name": "../x"}, "prefix_name ../x"), ({"prefix_name": ""}, "prefix_name"), ({"prefix_name": 1}, "prefix_name: is a whole number")]
out, _ = batch("\n".join(json.dumps({"prompt": "x", **b}) for b, _ in bad), *arguments, code=1)
assert all(words in {r["line"]: r["error"] for r in out}[i + 1] for i, (_, words) in enumerate(bad)), out
assert "--prefix-dir" in batch('{"prompt": "x", "prefix_name": "a"}', code=1)[0][0]["error"]
END
check r37_a_folder_of_prompts_is_one <<'END'
from helper import *
open("no-folder", "w").close()
for folder in ("no/such", "", "no-folder", "/dev/null"): # "": not the root of the file system
    out, err = batch('{"prompt": "x", "prefix_name": "r37"}', "--prefix-dir", folder, code=2)
    assert out == [] and "is no directory" in err and not os.path.exists("/r37.kvfprompt"), (folder, out, err)
END
