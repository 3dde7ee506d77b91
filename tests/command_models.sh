# Part of command.sh, which reads it: what model files say, and lack.

check r22_messages_without_a_chat_template <<'END'
from helper import *
data = open(model, "rb").read()
if len(data) < 1 << 24 and data.count(b"tokenizer.chat_template") == 1:
    open("untold.gguf", "wb").write(data.replace(b"tokenizer.chat_template", b"tokenizer.chat_untold__"))
    line = json.dumps({"id": "a", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}) + "\n"
    says = "has no chat template"
    for template, ok in (("auto", False), ("none", True), ("chatml", True)):
        options = ("run", "--model", "untold.gguf", "--quiet", "--chat-template", template)
        out, err = run(*options, "--input", "-", "--output", "-", stdin=line, code=0 if ok else 1)
        answer = json.loads(out)
        assert ("error" not in answer) == ok and (says in json.dumps(answer)) != ok, (template, answer)
        out, err = run(*options, "--prompt", "Hi", "--max-tokens", "2", code=0 if ok else 1)
        assert (says in err) != ok, (template, err)
    run("run", "--model", "untold.gguf", "--quiet", "--prompt", "Hi", "--raw", "--max-tokens", "2")
assert "if the file has no template, name one" in " ".join(run("help", "run", "chat-template")[0].decode().split())
END

check r5_warns_of_unknown_tensors <<'END'
from helper import *
import struct
data = open(model, "rb").read()
first = struct.pack("<Q", 17) + b"token_embd.weight"
if len(data) < 1 << 24 and data.count(first) == 1:
    at, name = data.index(first), b"extra" + b"x" * 20 + b".weight" # an entry of 64 bytes, of a type that nobody reads
    entry = struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 32, 99, 0)
    assert len(entry) == 64
    count = struct.unpack("<Q", data[8:16])[0]
    open("more.gguf", "wb").write(data[:8] + struct.pack("<Q", count + 1) + data[16:at] + entry + data[at:])
    options = ("run", "--model", "more.gguf", "--prompt", "Hi", "--max-tokens", "4")
    out, err = run(*options)
    assert err.count("warning: ") == 1 and f"tensor {name.decode()}: architecture" in err and "skipped" in err, err
    plain, _ = run("run", "--model", model, "--prompt", "Hi", "--max-tokens", "4")
    assert out == plain
    assert "warning" not in run(*options, "--quiet")[1]
END
