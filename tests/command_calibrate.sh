# Part of command.sh, which reads it: probes, made, found, and refused.

refused calibrate_few 2 '--prompts 4: must be a whole number from 5 to 100000' calibrate --model "$model" --prompts 4
refused calibrate_long 2 'for the repetition' calibrate --model "$model" --prompts 5 --context 4000
refused calibrate_no_text 2 'no_such_file: No such file' calibrate --model "$model" --text no_such_file
refused probe_missing 2 'make one, once: kvfold calibrate' run --model "$model" --prompt a --policy d2o --score probe
check fold_without_a_probe <<'END'
from helper import *
ask = ("run", "--model", model, "--prompt", "ab", "--max-tokens", "2", "--policy")
for name in "fold", "fold:attention":
    out, err = run(*ask, name, "--json")
    assert json.loads(out)["preset"] == (name[5:] or "repeat"), out
    assert ("there is no probe of this model, so each prompt is repeated" in err) == (name == "fold"), err
END
check calibrate <<'END'
from helper import *
import glob
options = ("calibrate", "--model", model, "--prompts", "6", "--context", "128", "--threads", "1")
told = json.loads(run(*options, "--json")[0])
assert told["prompts"] == 6 and told["held_out"] == 1 and told["context"] == 128, told
assert len(told["explained_by_head"]) == 2 and all(len(x) == 2 and all(y <= 1 for y in x) for x in told["explained_by_head"]), told
files = glob.glob(os.environ["XDG_CACHE_HOME"] + "/kvfold/probes/*.probe")
assert files == [told["file"]], (files, told)
out, _ = run(*options, "--output", "own.gguf")
assert b"explains" in out and b"own.gguf" in out and open("own.gguf", "rb").read() == open(files[0], "rb").read()
open("text.txt", "w").write("It was a fine day. Nobody spoke of it. The clouds went by! " * 40)
run(*options, "--output", "of_text.gguf", "--text", "text.txt")
assert open("of_text.gguf", "rb").read() != open("own.gguf", "rb").read()
run(*options[:-2], "--output", "/nowhere/at/all", code=3)
# It is found, and it decides.
ask = ("run", "--model", model, "--prompt", "Some words that are long enough to be compressed. " * 4, "--raw", "--policy", "d2o",
       "--score", "probe", "--merge", "none", "--min-tokens", "16", "--rho", "0.3", "--max-tokens", "24", "--deterministic", "--quiet")
found = run(*ask)[0]
assert found == run(*ask, "--probe", "own.gguf")[0]
assert run(*ask, "--budget", "global", "--heads-per-group", "1")[0]
# fold ranks by it, on the command line and in a line.
out, err = run("run", "--model", model, "--prompt", "ab", "--max-tokens", "2", "--policy", "fold", "--json")
assert json.loads(out)["preset"] == "probe" and "no probe" not in err, (out, err)
lines = [{"id": i, "prompt": "ab", "max_tokens": 2, "policy": "fold", **more} for i, more in enumerate(({}, {"preset": "attention"}))]
open("fold.jsonl", "w").write("".join(json.dumps(x) + "\n" for x in lines))
out, _ = run("run", "--model", model, "--input", "fold.jsonl", "--policy", "fold", "--quiet")
print(out)
END
check probes_that_do_not_fit <<'END'
from helper import *
ask = ("run", "--model", model, "--prompt", "a", "--policy", "d2o", "--score", "probe", "--probe")
data = open("own.gguf", "rb").read()
at = data.index(b"kvfold-probe.model") + 18 + 4 + 8 # name, type, length
open("other.gguf", "wb").write(data[:at] + b"0" * 16 + data[at + 16:])
assert "another model (digest 0000000000000000" in run(*ask, "other.gguf", code=2)[1]
open("torn.gguf", "wb").write(data[:len(data) // 2])
assert "torn.gguf" in run(*ask, "torn.gguf", code=2)[1]
assert "is no probe" in run(*ask, model, code=2)[1]
assert "no_such" in run(*ask, "no_such", code=2)[1]
line = json.dumps({"id": 1, "prompt": "ab", "policy": "d2o", "score": "probe", "max_tokens": 2}) + "\n"
out, err = run("run", "--model", model, "--input", "-", "--quiet", stdin=line, code=1)
assert "--probe" in json.loads(out)["error"], out
END
check probe_resume <<'END'
from helper import *
import shutil
open("in.jsonl", "w").write("".join(json.dumps({"id": i, "prompt": "word %d " % i * 12, "max_tokens": 2}) + "\n" for i in range(3)))
options = ("run", "--model", model, "--input", "in.jsonl", "--output", "out.jsonl", "--policy", "h2o", "--score", "probe", "--quiet", "--probe")
run(*options, "own.gguf")
run(*options, "own.gguf", "--resume")
err = run(*options, "of_text.gguf", "--resume", code=2)[1]
assert "probe" in err, err
END
