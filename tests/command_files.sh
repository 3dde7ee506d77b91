# Part of command.sh, which reads it: files that are there already, other models, other lines, full disks, two runs at once.

# A model of more than two MiB whose middle can be changed: padding in front of the tensors, among the keys, and behind them.
cat >files.py <<'XEOF'
import shutil, struct, time
from helper import *
def padded(path, change=0, pad=1 << 21):
    b = open(model, "rb").read()
    key, text = b"x.pad", b"a" * (pad - 8 - 5 - 4 - 8)
    n_kv = struct.unpack_from("<Q", b, 16)[0]
    b = b[:16] + struct.pack("<Q", n_kv + 1) + struct.pack("<Q", 5) + key + struct.pack("<IQ", 8, len(text)) + text + b[24:]
    b = bytearray(b)
    if change: b[-(change // 4 * 4)] ^= 1 # the lowest byte of a weight
    open(path, "wb").write(b + bytes(pad))
def rows_of(n, **more): return [{"prompt": f"Line {i} of them", "max_tokens": 2, **more} for i in range(n)]
def put(path, rows): open(path, "w").write("\n".join(map(json.dumps, rows)) + "\n")
def bytes_of(path): return open(path, "rb").read()
XEOF

# ---- Which model it was ------------------------------------------------------------------------------------------
check r16_another_model_is_refused <<'END'
from files import *
padded("one.gguf"); padded("two.gguf", 4096)
assert len(bytes_of("one.gguf")) == len(bytes_of("two.gguf")) > 1 << 22
put("in", rows_of(2))
base = ["run", "--input", "in", "--output", "r16", "--quiet"]
run(*base, "--model", "one.gguf")
before = bytes_of("r16")
_, err = run(*base, "--model", "two.gguf", "--resume", code=2)
assert "model digest" in err and bytes_of("r16") == before, err
run(*base, "--model", "one.gguf", "--resume")
time.sleep(0.15)
run(*base, "--model", "one.gguf", "--resume") # its digest is kept from here on
kept = os.listdir("cache/kvfold/digests")
assert kept
# The same name, size, inode and time of change: another model all the same.
s = os.stat("one.gguf")
changed = bytes_of("two.gguf")
with open("one.gguf", "r+b") as f: f.write(changed)
os.utime("one.gguf", ns=(s.st_atime_ns, s.st_mtime_ns))
assert "model digest" in run(*base, "--model", "one.gguf", "--resume", code=2)[1]
# A cache that says nonsense, or cannot be written, is none.
padded("one.gguf")
for name in os.listdir("cache/kvfold/digests"): open("cache/kvfold/digests/" + name, "w").write("kvfold-digest 1 x")
run(*base, "--model", "one.gguf", "--resume")
for home in ("/dev/null/x", ""): run(*base, "--model", "one.gguf", "--resume", env={**os.environ, "XDG_CACHE_HOME": home, "HOME": "/dev/null"})
END
check r16_kept_prompts_of_another_model <<'END'
from files import *
padded("one.gguf"); padded("two.gguf", 4096)
os.makedirs("r16-kept", exist_ok=True)
row = json.dumps({"prompt": "A context that many runs share. " * 8, "prefix_name": "c", "max_tokens": 3})
def go(m):
    out, err = run("run", "--model", m, "--input", "-", "--prefix-dir", "r16-kept", stdin=row)
    return lines(out)[0]["cached_tokens"], err
assert go("one.gguf")[0] == 0 < go("one.gguf")[0]
first = bytes_of("r16-kept/c.kvfprompt")
cached, err = go("two.gguf")
assert cached == 0 and "warning: r16-kept/c.kvfprompt: was made with another model; the prompt is computed" in err, err
assert bytes_of("r16-kept/c.kvfprompt") != first and go("two.gguf")[0] > 0
END

# ---- Which lines they were ----------------------------------------------------------------------------------------
check r24_lines_are_known_again <<'END'
from files import *
def openai_rows(n): return [{"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": f"Line {i}", "max_tokens": 2}} for i in range(n)]
base = ["run", "--model", model, "--any-model", "--quiet"]
for form, rows in (("plain", rows_of(5)), ("named", [{"id": f"n{i}", **r} for i, r in enumerate(rows_of(5))]), ("openai", openai_rows(5))):
    for piped in (False, True):
        out, name = f"r24-{form}-{piped}", "standard input" if piped else "in"
        def go(*more, code=0):
            return run(*base, "--input", "-" if piped else "in", "--output", out, *more, code=code, stdin=open("in").read() if piped else "")[1]
        put("in", rows)
        go()
        whole = bytes_of(out)
        go("--resume")
        # Spaces and the order of fields change nothing.
        open("in", "w").write("".join(json.dumps(dict(reversed(r.items())), separators=(" , ", ":  ")) + "\n" for r in rows))
        go("--resume")
        assert bytes_of(out) == whole
        changed = [dict(r) for r in rows]
        if form == "openai": changed[3]["body"] = {**rows[3]["body"], "prompt": "Another"}
        else: changed[3]["prompt"] = "Another"
        put("in", changed)
        err = go("--resume", code=2)
        assert f"--resume: {name} line 4: {out} has the answer to another line" in err and bytes_of(out) == whole, err
        go("--resume", "--force")
        assert bytes_of(out) == whole
        put("in", (openai_rows(6)[5:] if form == "openai" else rows_of(1, max_tokens=1)) + rows)
        if form == "plain":
            err = go("--resume", code=2)
            assert f"--resume: {name} line 1: " in err and "lines before it were added" in err and bytes_of(out) == whole, err
        else:
            go("--resume")
            assert bytes_of(out)[:len(whole)] == whole and bytes_of(out).count(b"\n") == whole.count(b"\n") + 1
# An error tells no hash: its line may be mended.
put("in", [{"id": "a", "prompt": ""}, {"id": "b", "prompt": "x", "max_tokens": 1}])
run(*base, "--input", "in", "--output", "r24-e", code=1)
put("in", [{"id": "a", "prompt": "mended", "max_tokens": 1}, {"id": "b", "prompt": "x", "max_tokens": 1}])
run(*base, "--input", "in", "--output", "r24-e", "--resume")
assert sorted(r["id"] for r in answers("r24-e")) == ["a", "b"]
# An output from before answers told a hash.
old = lines(bytes_of("r24-e"))
old[0]["kvfold"]["format"] = 1
put("r24-e", [{k: v for k, v in r.items() if k != "line_hash"} for r in old])
before = bytes_of("r24-e")
_, err = run(*base, "--input", "in", "--output", "r24-e", "--resume", code=2)
assert "header format 1 (now 2" in err and "--force" in err and bytes_of("r24-e") == before, err
_, err = run(*base[:-1], "--input", "in", "--output", "r24-e", "--resume", "--force")
assert "2 answers tell no hash of their lines" in err and len(answers("r24-e")) == 2, err
END

# ---- Files that may not grow ---------------------------------------------------------------------------------------
check r26_a_limit_is_a_full_disk <<'END'
from files import *
import resource
def limited(n, *arguments, code=3):
    return run(*arguments, code=code, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (n, resource.RLIM_INFINITY)))[1]
put("in", rows_of(12))
base = ["run", "--model", model, "--input", "in", "--quiet"]
run(*base, "--output", "r26-whole")
err = limited(3000, *base, "--output", "r26")
assert "r26: File too large" in err and "the run stops here" in err, err
run(*base, "--output", "r26", "--resume")
same = lambda path: {r["id"]: r["text"] for r in answers(path)}
assert same("r26") == same("r26-whole") and len(answers("r26")) == 12
for option in ("report", "trace", "metrics", "record", "stats"):
    size = 200 if option in ("record", "stats") else 1000
    err = limited(size, *base, f"--{option}", "r26-" + option)
    assert f"r26-{option}: " in err, err
    if option != "stats": limited(size, "profile", "--generate", "40", "--quiet", f"--{option}", "r26-p-" + option)
os.makedirs("r26-kept", exist_ok=True)
put("in-kept", rows_of(1, prompt="A context that many runs share. " * 8, prefix_name="p"))
err = limited(1000, "run", "--model", model, "--input", "in-kept", "--quiet", "--prefix-dir", "r26-kept")
assert "r26-kept/p.kvfprompt: writing failed: File too large" in err and os.listdir("r26-kept") == [], (err, os.listdir("r26-kept"))
# Going on needs a new file, for which there is no room: what was there stays.
with open("r26", "a") as f: f.write('{"id": 99, "text": "", "finish_reason": "error"}\n{"id": 98, "text": "", "finish_reason": "stop"}\n')
before = bytes_of("r26")
assert "File too large" in limited(1000, *base, "--output", "r26", "--resume") and bytes_of("r26") == before
open("r26.txt", "w").write("The old house by the river had a door. " * 60)
err = limited(1500, "eval", "divergence", "--model", model, "--text", "r26.txt", "--contexts", "64", "--scored", "8", "--rhos", "0.5", "--output", "r26-cells", "--quiet")
assert "r26-cells: File too large" in err, err
END

# ---- Outputs that are inputs ----------------------------------------------------------------------------------------
check r31_nothing_is_written_over_what_is_read <<'END'
from files import *
put("in", rows_of(1))
open("text", "w").write("The old house by the river had a door. " * 60)
run("profile", "--generate", "3", "--quiet", "--record", "t.trace")
open("dens", "w").write("0.5 0.5")
shutil.copy(model, "m.gguf")
os.link("m.gguf", "hard.gguf"); os.symlink("m.gguf", "soft.gguf"); os.symlink(os.getcwd(), "folder")
measure = ["eval", "divergence", "--model", "m.gguf", "--contexts", "64", "--scored", "4", "--rhos", "0.5", "--policies", "h2o", "--quiet"]
run(*measure, "--text", "text", "--output", "cells")
model_names = ("m.gguf", "./m.gguf", "folder/m.gguf", os.path.abspath("m.gguf"), "folder/../" + os.path.basename(os.getcwd()) + "/m.gguf", "hard.gguf", "soft.gguf")
before = {p: bytes_of(p) for p in ("m.gguf", "in", "text", "t.trace", "dens", "cells")}
def bad(what, *arguments):
    _, err = run(*arguments, code=2)
    assert f"is {what}; writing there would destroy it" in err, (arguments, err)
    for p, b in before.items(): assert bytes_of(p) == b, (arguments, p)
base = ["run", "--model", "m.gguf", "--input", "in"]
for name in model_names: bad("the model", *base, "--output", name, "--force")
for option in ("--report", "--trace", "--record", "--metrics", "--stats", "--output"):
    bad("the model", *base, option, "hard.gguf")
    bad("the input", *base, option, "folder/in")
bad("the model", *base, "--output", "x", "--resume", "--stats", "soft.gguf")
bad("the model", *base, "--compare", "full", "--compare-output", "m.gguf")
bad("the model", "run", "--model", "m.gguf", "--prompt", "x", "--output", "soft.gguf", "--force")
os.link("m.gguf", "y.kvfold-header.json"); os.link("m.gguf", "z.kvfold-part")
for output in "yz": bad("the model", *base, "--output", output)
for end in ("header.json", "part"): assert f"--stats and --output (a file beside) would both write to w.kvfold-{end}" in run(*base, "--output", "w", "--stats", "w.kvfold-" + end, code=2)[1]
bad("the model", *measure, "--text", "text", "--output", "soft.gguf", "--force")
bad("a text", *measure, "--text", "novel=text", "--output", "./text", "--force")
for option in ("--report", "--trace", "--record", "--metrics"):
    bad("the trace that is read", "profile", "t.trace", option, "folder/t.trace")
    bad("the densities", "profile", "t.trace", "--densities", "dens", "--layers", "2", option, "./dens")
for option in ("--html", "--markdown"): bad("a file of records that is read", "eval", "report", "cells", option, "folder/cells")
# Standard input and output are files as well.
with open("in", "rb") as f: assert "is the input" in run("run", "--model", "m.gguf", "--input", "-", "--output", "in", "--force", code=2, file=f)[1]
with open("m.gguf", "ab") as f: p = subprocess.run([kvfold, *base], stdout=f, stderr=subprocess.PIPE)
assert p.returncode == 2 and b"standard output: is the model" in p.stderr, p
assert all(bytes_of(p) == b for p, b in before.items())
# A kept prompt's file is named by a line.
os.makedirs("kept31", exist_ok=True)
os.link("m.gguf", "kept31/c.kvfprompt")
out, _ = run("run", "--model", "m.gguf", "--input", "-", "--prefix-dir", "kept31", "--quiet", stdin='{"prompt": "x", "prefix_name": "c", "max_tokens": 1}', code=1)
assert "is the model" in lines(out)[0]["error"] and os.path.samefile("kept31/c.kvfprompt", "m.gguf")
# Parts of a split model are known by their names.
shutil.copy(model, "s-00001-of-00002.gguf"); open("s-00002-of-00002.gguf", "w").write("part")
_, err = run("run", "--model", "s-00001-of-00002.gguf", "--input", "in", "--output", "s-00002-of-00002.gguf", "--force", code=2)
assert "is a part of the model" in err and open("s-00002-of-00002.gguf").read() == "part", err
END

# ---- Two runs at once ------------------------------------------------------------------------------------------------
check r34_a_second_run_is_refused <<'END'
from files import *
import fcntl
put("in", rows_of(3, max_tokens=1))
def begin(*arguments):
    p = subprocess.Popen([kvfold, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    p.stdin.write(b'{"id": "first", "prompt": "x", "max_tokens": 1}\n'); p.stdin.flush()
    return p
def wait_for(done):
    for _ in range(3000):
        if done(): return
        time.sleep(0.01)
    assert False
base = ["run", "--model", model, "--quiet", "--input"]
os.symlink("r34", "r34-link")
p = begin(*base, "-", "--output", "r34")
wait_for(lambda: os.path.exists("r34") and bytes_of("r34").count(b"\n") == 2)
there = bytes_of("r34")
for more in (("--output", "r34", "--resume"), ("--output", "r34", "--force"), ("--output", "r34-link", "--force"), ("--stats", "r34"),
             ("--output", "r34-b", "--report", "r34"), ("--output", "r34-b", "--record", "./r34")):
    _, err = run(*base, "in", *more, code=2)
    assert "another run writes there" in err and bytes_of("r34") == there and not os.path.exists("r34-b"), (more, err)
_, err = p.communicate(b'{"id": "last", "prompt": "x", "max_tokens": 1}\n', timeout=60)
assert p.returncode == 0 and [r["id"] for r in answers("r34")] == ["first", "last"], err
# Going on with an output that is rewritten: the lock is that of the new file, and goes with the process.
with open("r34", "a") as f: f.write('{"id": "bad", "text": "", "finish_reason": "error"}\n{"id": "odd", "text": "", "finish_reason": "stop"}\n')
p = begin(*base, "-", "--output", "r34", "--resume")
wait_for(lambda: b'"bad"' not in bytes_of("r34"))
assert "another run writes there" in run(*base, "in", "--output", "r34", "--resume", code=2)[1]
p.kill(); p.communicate()
run(*base, "in", "--output", "r34", "--resume")
assert len(answers("r34")) == 6
# Pipes and devices are nobody's.
for option in ("--output", "--report", "--stats"): run(*base, "in", option, "/dev/null")
os.mkfifo("r34-pipe")
for option in ("--report", "--trace", "--record", "--metrics", "--stats"): # opened once: the first close is the reader's end
    reader = subprocess.Popen(["cat", "r34-pipe"], stdout=subprocess.PIPE)
    run(*base, "in", option, "r34-pipe")
    assert reader.communicate(timeout=60)[0], option
# A folder of kept prompts is shared.
os.makedirs("r34-kept", exist_ok=True)
row = json.dumps({"prompt": "A context that many runs share. " * 8, "prefix_name": "c", "max_tokens": 2}).encode()
runs = [subprocess.Popen([kvfold, *base, "-", "--prefix-dir", "r34-kept"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)]
for r in runs: r.stdin.write(row); r.stdin.close()
texts = {json.loads(r.stdout.read())["text"] for r in runs}
assert len(texts) == 1 and [r.wait(60) for r in runs] == [0] * 3 and os.listdir("r34-kept") == ["c.kvfprompt"], os.listdir("r34-kept")
open("r34.txt", "w").write("The old house by the river had a door. " * 60)
with open("r34-cells", "a") as f:
    fcntl.flock(f, fcntl.LOCK_EX)
    for more in ((), ("--resume",), ("--force",)):
        assert "another run writes there" in run("eval", "divergence", "--model", model, "--text", "r34.txt", "--contexts", "64", "--scored", "4", "--rhos", "0.5", "--output", "r34-cells", *more, code=2)[1]
END

# ---- Answers that are there ------------------------------------------------------------------------------------------
check r35_answers_are_not_emptied <<'END'
from files import *
put("in", rows_of(2))
base = ["run", "--model", model, "--quiet"]
run(*base, "--input", "in", "--output", "r35")
os.symlink("r35", "r35-link")
before = bytes_of("r35")
for more in (("--input", "in", "--output", "r35"), ("--input", "in", "--output", "r35-link"), ("--prompt", "x", "--output", "r35"),
             ("--input", "in", "--output", "r35", "--compare", "full")):
    _, err = run(*base, *more, code=2)
    assert "has answers already" in err and "--force writes over them" in err and bytes_of("r35") == before, err
open("notes", "w").write("precious")
run(*base, "--input", "in", "--output", "notes", code=2)
assert open("notes").read() == "precious"
run(*base, "--input", "in", "--output", "r35", "--force")
assert {r["id"] for r in answers("r35")} == {1, 2}
open("r35-empty", "w").write("")
run(*base, "--input", "in", "--output", "r35-empty")
for option in ("--report", "--metrics", "--stats", "--record", "--trace"):
    open("r35-other", "w").write("of an earlier run")
    run(*base, "--input", "in", option, "r35-other")
    assert "of an earlier run" not in open("r35-other").read()
assert "overwrite the answers" in " ".join(run("help", "run", "force")[0].decode().split())
END

check r35_closed_streams_are_not_the_files <<'END'
from files import *
put("in", rows_of(1, max_tokens=1)); put("many", rows_of(9)); open("junk", "w").write("junk\n")
base = ["run", "--model", model, "--output", "r35-closed", "--force"]
def closed(name, code, *fds):
    def close():
        for fd in fds: os.close(fd)
    p = subprocess.run([kvfold, *base, "--input", name], preexec_fn=close, close_fds=False)
    assert p.returncode == code, (name, fds, p)
for fds in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)):
    run(*base, "--quiet", "--input", "many")
    closed("in", 0, *fds)
    assert [r["id"] for r in answers("r35-closed")] == [1], fds
    closed("junk", 1, *fds)
    assert [r["finish_reason"] for r in answers("r35-closed")] == ["error"], fds
END

# ---- Kept prompts that are no use --------------------------------------------------------------------------------------
check r37_damaged_prompts_are_computed_anew <<'END'
from files import *
os.makedirs("r37", exist_ok=True)
path = "r37/c.kvfprompt"
rows = [json.dumps({"id": i, "prompt": "A context that many runs share. " * 8, "prefix_name": "c", "max_tokens": 3}) for i in range(3)]
def go(*more, code=0):
    out, err = run("run", "--model", model, "--input", "-", "--prefix-dir", "r37", "--max-running", "1", "--policy", "full", *more, stdin="\n".join(rows), code=code)
    return {r["id"]: (r["token_ids"], r.get("cached_tokens")) for r in lines(out)}, err
first, _ = go()
whole = bytes_of(path)
loaded, err = go()
assert loaded[0][1] > 0 == first[0][1] and "warning" not in err
def patched(at, value): return whole[:at] + value + whole[at + len(value):]
kinds = {"is no prompt file: it has ": [b"", b"text", whole[:207]], "does not begin with KVFPROMP": [patched(0, b"X")], "version 9": [patched(8, b"\x09")],
         "a header of 209 bytes": [patched(12, b"\xd1")],
         f"is torn: {len(whole) - 209} bytes follow its header, which says {len(whole) - 208}": [whole[:-1]],
         "is torn: ": [whole + b"x", whole[:208], patched(184, b"\x01\x02")],
         "the checksum of its bytes is": [patched(16, b"\x07"), patched(60, b"x"), whole[:-1] + bytes([whole[-1] ^ 1])]}
for text, files in kinds.items():
    for b in files:
        open(path, "wb").write(b)
        got, err = go()
        assert got == first and err.count("warning: " + path) == 1 and text in err and "saved there anew" in err, (text, got, err)
        assert bytes_of(path) == whole
assert go()[0] == loaded
open(path, "wb").write(b"text")
assert "warning" not in go("--quiet")[1] and bytes_of(path) == whole
got, err = go("--kv-dtype", "fp32")
assert "kv_dtype" in err and got[0][1] == 0 and bytes_of(path) != whole, err
open(path, "wb").write(whole)
got, err = go("--context", "128", code=1) # it stays for who has the room
assert "the context is 128" in err and bytes_of(path) == whole, err
os.remove(path); os.mkdir(path)
got, err = go(code=3)
assert got == first and "is no regular file" in err and "renaming failed" in err, err
os.rmdir(path)
os.mkfifo(path) # nobody writes there: no wait for it
got, err = go()
assert got == first and "is no regular file" in err and bytes_of(path) == whole, err
os.remove(path)
os.symlink("nowhere", path)
go()
assert bytes_of(path) == whole
END
