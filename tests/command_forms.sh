# Part of command.sh, which reads it: what both forms of a line and of an answer have to say.

check stop_reason_tells_a_stop_string_from_an_end_token <<'END'
from helper import *
many = {"prompt": "Once upon", "n": 24, "seed": 3, "temperature": 2, "max_tokens": 60}
rows = [{"id": "end", **many}, {"id": "on", **many, "ignore_eos": True}, {"id": "stop", **many, "stop": ["zzzzz", "e", "a"]},
        {"id": "best", **many, "n": 4, "best_of": 24, "stop": "e"},
        {"id": "beams", "prompt": "Once", "beam_width": 8, "n": 8, "stop": ["e", "a", "o"], "max_tokens": 20}]
bodies = [completion("c" + r["id"], "Once upon", **{k: v for k, v in r.items() if k not in ("id", "prompt")}) for r in rows[:4]]
out, _ = batch("\n".join(map(json.dumps, rows + bodies)), "--served-model-name", "tiny")
by_id = {r["custom_id"]: r["response"]["body"]["choices"] if "custom_id" in r else r for r in out if "custom_id" in r}
by_id.update({r["id"]: r["choices"] for r in out if "choices" in r})
ends = {key: {(c["finish_reason"], c["stop_reason"]) for c in choices} for key, choices in by_id.items()}
assert len(ends) == 9 and ends["end"] == ends["cend"] == {("stop", None), ("length", None)}, ends
assert ends["on"] == ends["con"] == {("length", None)} and {("stop", "e"), ("stop", "a")} <= ends["stop"] == ends["cstop"], ends
assert ("stop", "e") in ends["best"] == ends["cbest"] and {r for _, r in ends["beams"]} & {"e", "a", "o"}, ends
assert not any(s in c["text"] for key in ("stop", "cstop") for c in by_id[key] for s in ("e", "a"))
assert "must be true or false" in batch('{"prompt": "x", "ignore_eos": 1}', code=1)[0][0]["error"]
END
check r19_log_probabilities_of_completions <<'END'
from helper import *
rows = [completion(f"l{i}", ["\U0001f600\u4e2d", "Once upon"][i % 2], temperature=2, seed=i, max_tokens=40, logprobs=5, n=4,
                   **({"stop": ["e", "\ufffd"]} if i % 3 == 0 else {})) for i in range(6)]
n_bytes = n_whole = 0
for body in openai(rows)[0].values():
    for c in body["choices"]:
        lp, text = c["logprobs"], c["text"]
        offsets = lp["text_offset"] + [len(text)]
        assert len({len(v) for v in lp.values()}) == 1 and offsets[0] == 0 and offsets == sorted(offsets), c
        for i, token in enumerate(lp["tokens"]):
            top = lp["top_logprobs"][i]
            assert len(top) == 5 + (token not in list(top)[:5]) and top[token] == lp["token_logprobs"][i], (token, top)
            values = list(top.values())
            assert values == sorted(values, reverse=True), top
            n_bytes += token.startswith("bytes:")
            if token.isascii() and token.isprintable() and not token.startswith(("bytes:", "<", "token_id:")):
                part = text[offsets[i]:offsets[i] + len(token)] # a stop string may have cut it off
                n_whole += part == token
                assert part == token[:len(part)] and (part == token or offsets[i] + len(part) == len(text)), (i, token, c)
assert n_bytes > 50 and n_whole > 50, (n_bytes, n_whole)
END
check r23_records_with_zero_bytes <<'END'
from helper import *
open("r23.jsonl", "w").write('{"record": "cell\\u0000", "source": "a"}\n{"record": "cell", "source": "a\\u0000"}\n')
err = run("eval", "report", "r23.jsonl", code=2)[1]
assert r"r23.jsonl:1: record: holds a zero byte: cell\x00" in err and r"r23.jsonl:2: source: holds a zero byte: a\x00" in err, err
END
check r25_marks_and_ids_of_broken_lines <<'END'
from helper import *
mark = "\ufeff"
rows = [mark + '{"id": "a", "prompt": "x", "max_tokens": 1}', mark + '{"id": "b", "prompt": "x", "max_tokens": 1}', mark,
        mark + mark + json.dumps(chat("c")), '{"id": "d", "prompt": "x", "top_p": NaN}', '{"custom_id": "e", "body": {"a": 1, "a": 2}}',
        '{"prompt": "\\ud800", "id": 7.0}', '{"id": "d", "prompt": "x"}']
out, err = batch("\n".join(rows), "--any-model", code=1)
good = {r.get("custom_id", r["id"]) for r in out if not r.get("error")}
bad = {(r.get("custom_id", r["id"]), (r["error"] if "custom_id" in r else r)["line"]) for r in out if r.get("error")}
assert good == {"a", "b", "c"} and bad == {("d", 5), ("e", 6), (7, 7), ("d", 8)}, (good, bad)
END
check r28_options_show_their_value_as_written <<'END'
from helper import *
for option, value in (("temperature", "100.0000001"), ("top-p", "1.00000001"), ("rho", "1.0000001"), ("length-penalty", "-100.00001"),
                      ("kv-memory", "1.50000001"), ("min-tokens", "1e3"), ("seed", "1e3")):
    assert f"--{option} {value}: must be" in run("run", "--prompt", "x", f"--{option}={value}", code=2)[1], option
err = run("run", "--prompt", "x", "--model", model, "--beam-width", "2", "--temperature", "0.10000001", "--quiet", code=1)[1]
assert "temperature 0.10000001: beam search" in err, err
_, err = run("run", "--prompt", "x", "--model", model, "--max-tokens", "1", "--policy", "d2o", "--rho", "0.20000001", "--compare", "full")
assert "d2o, rho 0.20000001" in err, err
END
check r39_requests_and_answers_are_told_apart <<'END'
from helper import *
import pty, time
rows = [{"id": i, "prompt": "Once upon", "n": 1 + i % 3, "temperature": 1, "max_tokens": 4, "ignore_eos": True} for i in range(9)]
rows += [{"id": "b", "prompt": "x", "n": 2, "best_of": 5, "max_tokens": 1}, {"id": "w", "prompt": "x", "n": 2, "beam_width": 4, "max_tokens": 1}]
text = "\n".join([*map(json.dumps, rows), "torn", '{"prompt": "x", "n": 129}'])
base = ["run", "--model", model, "--input", "-", "--output", "r39.jsonl"]
def go(*more, **how):
    open("r39.jsonl", "w").close()
    return run(*base, *more, **how)
_, err = go(stdin=text, code=1)
shown = dict(l.split(None, 1) for l in err.splitlines() if l.startswith(("requests ", "answers ")))
n = sum(1 + i % 3 for i in range(9)) + 4
assert shown["requests"] == "13: 11 done, 2 error" and shown["answers"].startswith(f"{n}: "), shown
s = json.loads(go("--json", "--compare", "full", stdin=text, code=1)[0])
for s in s, s["compare"]:
    assert s["requests"] == {"total": 13, "done": 11, "error": 2, "unfinished": 0, "done_before": 0}, s["requests"]
    a = s["answers"]
    assert a["total"] == n == a["stop"] + a["length"] and a["error"] == a["unfinished"] == 0, a
size = str(json.loads(run("info", model, "--json")[0])["kv_bytes_per_token_fp16"] * 16 * 6)
early = json.dumps({"token_ids": [5] * 20, "n": 3, "max_tokens": 200, "ignore_eos": True})
s = json.loads(go("--json", "--policy", "full", "--kv-memory", size, stdin=early)[0])
assert s["requests"]["total"] == 1 and s["answers"]["length"] == 3 and s["ended_early"] == 1, s
a, b = pty.openpty()
open("r39.jsonl", "w").close()
p = subprocess.Popen([kvfold, *base], stdin=subprocess.PIPE, stderr=b)
for i in range(2):
    p.stdin.write(json.dumps({"id": i, "prompt": "x", "n": 3, "max_tokens": 2}).encode() + b"\n")
    p.stdin.flush()
    while i == 0 and open("r39.jsonl").read().count("\n") < 2: time.sleep(0.02)
    time.sleep(0.3)
p.stdin.close()
assert p.wait(60) == 0
said = os.read(a, 60000).decode()
assert ": requests 1 done, answers 3, " in said, said
END

# A line takes no more memory than a prompt of the whole context; one that is longer is skipped, not kept.
check a_line_of_any_length_takes_little_memory <<'END'
from helper import *
import threading
def peak(parts, code): # of a run that reads these from a pipe: KiB, answers
    p = subprocess.Popen([kvfold, "run", "--model", model, "--input", "-", "--quiet"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                         stderr=subprocess.DEVNULL)
    def feed():
        for part in parts: p.stdin.write(part)
        p.stdin.close()
    writer = threading.Thread(target=feed)
    writer.start()
    out = p.stdout.read()
    writer.join()
    _, status, usage = os.wait4(p.pid, 0)
    p.returncode = os.waitstatus_to_exitcode(status)
    assert p.returncode == code, (p.returncode, out[-500:])
    return usage.ru_maxrss, {r.get("custom_id", r.get("id")): r for r in lines(out)}
good = b'{"id": 1, "prompt": "x", "max_tokens": 1}\n'
least, _ = peak([good], 0)
word, n = b"word " * 200000, 1000000
long = [(b'{"id": "p", "prompt": "', *[word] * 48, b'"}\n'), (b'{"messages": [{"role": "user", "content": "', *[word] * 48, b'"}], "id": "behind"}\n'),
        (*[b" " * n] * 48, b"\n"), (*[b"[" * n] * 48, b"\n"),
        (b'{"custom_id": "c", "body": {"prompt": "', *[word] * 48, b'"}}\n')] # few bytes here: a child begins with its parent's peak
most, found = peak([good] + [part for parts in long for part in parts] + [good.replace(b"1,", b"2,", 1)], 1)
assert most - least < 24 << 10, (least, most)
assert found.pop("c")["response"]["body"]["error"]["code"] == "line_too_long"
assert {i: r.get("error", "")[:14] for i, r in found.items()} == {i: "is longer than" for i in ("p", 3, 4, 5)} | {1: "", 2: ""}, found
# Within the limit: what cannot fit is refused before it becomes tokens.
many = b'{"id": "t", "token_ids": [' + b"1," * 90000 + b"1]}\n"
text = b'{"id": "p", "prompt": "' + word[:n // 2] + b'"}\n{"id": "m", "messages": [{"role": "user", "content": "' + word[:n // 2] + b'"}]}\n'
most, found = peak([good, many, text], 1)
said = {i: r.get("error") for i, r in found.items()}
assert "values, must have at most" in said["t"] and "prompt of 500000 bytes: has at least" in said["p"], said
assert "messages of 500000 bytes: has at least" in said["m"] and said[1] is None and most - least < 24 << 10, (said, least, most)
END
