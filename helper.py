def chat(custom_id, text="Hi", **body):
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 3, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
def completion(custom_id, text="Once upon", **body):
    body = {"model": "tiny", "prompt": text, "max_tokens": 3, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
def openai(rows, *arguments, code=0):
    out, err = batch("\\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), "--served-model-name", "tiny", *arguments, code=code)
    for r in out:
        assert list(r) == ["id", "custom_id", "response", "error"] and list(r["response"]) == ["status_code", "request_id", "body"], r
        assert (r["response"]["status_code"] == 200) == (r["error"] is None)
    return {r["custom_id"]: r["response"]["body"] for r in out}, out, err
