# Part of command.sh, which reads it: lines in the form of OpenAI batch files.
check openai_form <<'END'
from helper import *
parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
rows = [chat("c"), completion("t"), chat("p", [*parts]), completion("l", ["Once upon"]), chat("2", n=2, seed=5, temperature=1),
        chat("5", seed=5, temperature=1), chat("6", seed=6, temperature=1),
        chat("lp", logprobs=True, top_logprobs=3), completion("tlp", logprobs=2), completion("tlp0", logprobs=0),
        chat("harmless", user="u", stream=False, frequency_penalty=0, presence_penalty=0.0, logit_bias={}, tools=None, stop=None,
             response_format={"type": "text"}, metadata={"a": "b"}, service_tier="auto", tool_choice="none", max_completion_tokens=2),
        chat("own", "word " * 60, kvfold={"policy": "h2o", "rho": 0.5, "min_tokens": 16}), completion("ids", [5, 6, 7]),
        completion("ids2", [[5, 6, 7]]), completion("long", max_tokens=None)]
by_id, out, err = openai(rows)
assert err == "" and len(out) == len(rows) and all(r["error"] is None for r in out), (err, out)
assert len({r["id"] for r in out}) == len(rows) == len({b["id"] for b in by_id.values()})
b = by_id["c"]
assert list(b) == ["id", "object", "created", "model", "choices", "usage"] and b["object"] == "chat.completion" and b["model"] == "tiny"
c = b["choices"][0]
assert list(c) == ["index", "message", "logprobs", "finish_reason", "stop_reason"] and c["message"]["role"] == "assistant" and c["logprobs"] is None
assert b["usage"]["total_tokens"] == b["usage"]["prompt_tokens"] + b["usage"]["completion_tokens"] and b["usage"]["completion_tokens"] <= 3
t = by_id["t"]
assert t["object"] == "text_completion" and list(t["choices"][0]) == ["index", "text", "logprobs", "finish_reason", "stop_reason"]
assert by_id["p"]["choices"] == b["choices"] and by_id["l"]["choices"] == t["choices"]
two = by_id["2"]["choices"]
assert [x["index"] for x in two] == [0, 1]
assert [x["message"] for x in two] == [by_id[k]["choices"][0]["message"] for k in "56"]
assert by_id["2"]["usage"]["completion_tokens"] == sum(by_id[k]["usage"]["completion_tokens"] for k in "56")
for t in by_id["lp"]["choices"][0]["logprobs"]["content"]:
    top = t["top_logprobs"]
    assert t["logprob"] <= 0 and len(top) == 3 and top[0]["logprob"] == t["logprob"], t
    assert [x["logprob"] for x in top] == sorted((x["logprob"] for x in top), reverse=True)
    assert all(bytes(x["bytes"]).decode("utf-8", "replace") == x["token"] or "\ufffd" in x["token"] for x in top)
lp = by_id["tlp"]["choices"][0]["logprobs"]
assert [len(v) for v in lp.values()] == [by_id["tlp"]["usage"]["completion_tokens"]] * 4
assert list(lp) == ["tokens", "token_logprobs", "top_logprobs", "text_offset"] and lp["text_offset"][0] == 0
assert by_id["tlp0"]["choices"][0]["logprobs"]["top_logprobs"] is None
assert by_id["ids"]["usage"]["prompt_tokens"] == 3 and by_id["ids"]["choices"] == by_id["ids2"]["choices"]
assert by_id["long"]["usage"]["completion_tokens"] <= 16
END
check openai_example <<'END'
from helper import *
out, err = run("run", "--model", model, "--input", os.environ["examples"] + "/openai_batch.jsonl", "--any-model", "--quiet")
by_id = {r["custom_id"]: r["response"]["body"] for r in lines(out)}
assert sorted(by_id) == ["request-1", "request-2", "request-3"] and all(b["model"] == "gpt-4o-mini" for b in by_id.values())
assert len(by_id["request-2"]["choices"]) == 2
END
check openai_bad_lines <<'END'
from helper import *
image = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:"}}]
tool = {"type": "function", "function": {"name": "f"}}
bad = [("image", chat("image", image), "messages[0].content[1]: is image_url", 400, "unsupported_content"),
       ("tools", chat("tools", tools=[tool]), "tools: is not supported", 400, "unsupported_parameter"),
       ("unknown", chat("unknown", temprature=1), "did you mean temperature", 400, "unknown_parameter"),
       ("model", chat("model", model="gpt-4o"), "model gpt-4o: the model that runs here is tiny", 404, "model_not_found"),
       ("url", {**chat("url"), "url": "/v1/embeddings"}, "url /v1/embeddings", 400, "invalid_url"),
       ("get", {**chat("get"), "method": "GET"}, "method GET", 400, "invalid_line"),
       ("key", {**chat("key"), "extra": 1}, "extra: unknown field", 400, "invalid_line"),
       ("nobody", {"custom_id": "nobody", "method": "POST", "url": "/v1/completions"}, "body: is missing", 400, "invalid_line"),
       ("list", {**chat("list"), "body": []}, "body: is a list", 400, "invalid_line"),
       ("nomodel", chat("nomodel", model=None), "model: is null", 400, "invalid_value"),
       ("notext", completion("notext", prompt=None), "prompt: is missing", 400, "missing_required_parameter"),
       ("wrong", completion("wrong", messages=[]), "messages: unknown field of this endpoint", 400, "unknown_parameter"),
       ("stream", chat("stream", stream=True), "stream: is not supported", 400, "unsupported_parameter"),
       ("penalty", chat("penalty", frequency_penalty=0.5), "must be 0", 400, "unsupported_parameter"),
       ("json", chat("json", response_format={"type": "json_object"}), "response_format", 400, "unsupported_parameter"),
       ("hot", chat("hot", temperature=2.5), "temperature 2.5: must be from 0 to 2", 400, "invalid_value"),
       ("n", chat("n", n=0), "n 0: must be from 1", 400, "invalid_value"),
       ("top", chat("top", top_logprobs=3), "needs logprobs true", 400, "invalid_value"),
       ("many", chat("many", logprobs=True, top_logprobs=21), "top_logprobs 21", 400, "invalid_value"),
       ("role", chat("role", messages=[{"role": "tool", "content": "x"}]), "messages[0].role tool", 400, "unsupported_parameter"),
       ("policy", chat("policy", kvfold={"policy": "nope"}), "nope", 400, "invalid_value"),
       ("option", chat("option", kvfold={"rhoo": 1}), "kvfold.rhoo", 400, "unknown_parameter"),
       ("prompts", completion("prompts", ["a", "b"]), "holds 2", 400, "unsupported_parameter"),
       ("huge", completion("huge", "word " * 20000), "context is", 400, "context_length_exceeded"),
       (None, {"method": "POST", "url": "/v1/completions", "body": {}}, "custom_id: is missing", 400, "invalid_custom_id"),
       (None, {**chat("x"), "custom_id": 5}, "custom_id: is a whole number", 400, "invalid_custom_id"),
       ("good", chat("good"), "an earlier line has it", 400, "duplicate_custom_id"),
       (None, '{"custom_id": "torn', "not JSON", 400, "invalid_json"), (None, "[1", "not JSON", 400, "invalid_json")]
rows = [chat("good")] + [b[1] for b in bad] + [completion("last")]
_, out, err = openai(rows, code=1)
errors = {r["error"]["line"]: r for r in out if r["error"]}
assert {r["custom_id"] for r in out if not r["error"]} == {"good", "last"}, out
assert sorted(errors) == list(range(2, len(bad) + 2)), sorted(errors)
for i, (custom_id, _, text, status, code) in enumerate(bad):
    r = errors[i + 2]
    e = r["response"]["body"]["error"]
    assert r["custom_id"] == custom_id and text in e["message"] and r["error"]["message"] == e["message"], (text, r)
    assert (r["response"]["status_code"], e["code"], r["error"]["code"]) == (status, code, code), r
    assert list(e) == ["message", "type", "param", "code"] and e["type"] == "invalid_request_error", r
    assert f"standard input line {i + 2}: " in err
assert errors[2]["response"]["body"]["error"]["param"] == "messages[0].content[1]" and errors[3]["error"]["param"] == "tools"
for more in (("--any-model",), ("--served-model-name", "gpt-4o")):
    assert not openai([chat("m", model="gpt-4o")], *more)[1][0]["error"]
name = os.path.basename(model).removesuffix(".gguf")
assert not any(r["error"] for r in openai([chat("m", model=name), chat("o", model="org/" + name)])[1])
END
check mixed_forms <<'END'
from helper import *
rows = [json.dumps(chat("a")), "torn", '{"id": "b", "prompt": "x", "max_tokens": 1}', "torn", '{"custom_id": torn']
out, err = batch("\n".join(rows), "--any-model", code=1)
forms = {r["line"] if "line" in r else r["error"]["line"]: "custom_id" in r for r in out if r.get("error")}
assert forms == {2: True, 4: False, 5: True} and {r.get("custom_id", r.get("id")) for r in out if not r.get("error")} == {"a", "b"}
END
