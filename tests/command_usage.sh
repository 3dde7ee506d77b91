# Part of command.sh, which reads it: help, wrong options, the small commands.

# ---- Help and usage ---------------------------------------------------------------------------------
check help <<'END'
from helper import *
out, _ = run("--help")
assert out.count(b"\n") <= 24 and b"kvfold run --prompt" in out
assert run("help")[0] == out
assert run("--help")[0].count(b"\n") <= 23 and max(map(len, out.decode().splitlines())) <= 80
for command in (["run"], ["tokenize"], ["info"], ["eval"], ["profile"], ["eval", "report"]):
    text, _ = run(*command, "--help")
    assert run("help", *command)[0] == text and b"Usage: kvfold " + " ".join(command).encode() in text
    assert text.count(b"\n") <= 23 or command == ["eval", "report"], text
    whole = run(*command, "--help-all")[0]
    assert run("help", *command, "--help-all")[0] == whole and run("help", *command, "help-all")[0] == whole
    for words in (text, whole): assert max(map(len, words.decode().splitlines())) <= 80, [l for l in words.decode().splitlines() if len(l) > 80]
report = run("eval", "report", "--help")[0]
assert b"--html" in report and b"--json" in report and b"--text" not in report and b"--rho" not in report
assert report == run("eval", "--help", "report")[0] and b"--baseline" in run("help", "eval", "report", "baseline")[0]
listed = run("run", "--help-policies")[0].decode()
policies = listed.split("\n\n")[0].splitlines()[1:]
assert len(policies) == 16 and all(len(l.split()) > 2 and l.startswith("  ") and l[2] != " " for l in policies), policies # a line each
assert "d2o:serving" in listed and "--help-policies" in run("run", "--help")[0].decode() and run("profile", "--help-policies")[0].decode() == listed
assert "no option" in run("help", "info", "--help-policies", code=2)[1]
text, _ = run("run", "--help-all")
assert b"on average over the layers" in b" ".join(text.split()).split(b"--min-tokens X")[1][:120]  # one layer may get less
for option in ("rho", "budget-tokens", "min-tokens", "merge", "redistribute", "kv-memory", "block-size", "chunk", "threads"):
    assert b"--" + option.encode() in text, option
assert b"--rho" in run("help", "run", "rho")[0]
assert run("--version")[0].startswith(b"kvfold ")
END
# Each names the option, its value, and what would do.
check refused_options_name_the_remedy <<'END'
from helper import *
info = json.loads(run("info", model, "--json")[0])
run_ = ("run", "--model", model, "--prompt", "x", "--max-tokens", "2")
def refusal(*arguments):
    err = run(*arguments, code=2)[1]
    assert err.startswith("kvfold: ") and err.count("\n") == 1, err
    return err[len("kvfold: "):-1]
cases = [("kv-memory", "1000", "give at least --kv-memory "), ("kv-memory", "1KiB", "give at least --kv-memory "),
         ("host-memory", "5", "give at least --host-memory "), ("chunk", "17", "must be a multiple of the block size 16"),
         ("context", "4000000000", f"must be in [2, {info['n_context']}]"), ("heads-per-group", "1000", "must divide the model's "),
         ("policy", "d3o", "there is full, d2o"), ("preset", "d3o", "policy d2o has default"), ("threshold", "0.1", "needs budget global"),
         ("full-layers", "99", "must be in [0, "), ("budget-bytes", "16", "give at least --budget-bytes "), ("score-mix", "0.5", "needs score probe")]
for option, value, remedy in cases:
    code = 1 if option == "budget-bytes" else 2 # of the request
    said = run(*run_, f"--{option}", value, code=code)[1].splitlines()[0]
    assert said.startswith(f"kvfold: --{option} {value}: ") and remedy in said, said
    if "give at least" not in said or option == "budget-bytes": continue
    given = said.split("give at least ")[1].split()
    assert run(*run_, *given)[0] is not None # what it says would do does
# Every option of a policy, by the library's own table.
text = run("help", "run", "policy")[0] and run("run", "--help-all")[0].decode().split("Policy: which")[1].split("Occupancy")[0]
options = [l.split()[0] for l in text.splitlines() if l.startswith("  --") and l.split()[0] not in ("--policy", "--preset")]
assert len(options) > 20, options
for option in options:
    said = refusal(*run_, option, "no-such-value")
    assert said.startswith(f"{option} no-such-value: must be "), said
# In a line of the input the same failures name its fields, and options where only these decide.
for row, said in (({"rho": 7}, "rho 7: must be in "), ({"policy": "d3o"}, "policy d3o: there is full"), ({"preset": "x", "policy": "d2o"}, "preset x: policy d2o has"),
                  ({"budget_bytes": 16}, "budget_bytes 16: "), ({"token_ids": [5] * info["n_context"]}, f"--context {info['n_context']}: a prompt of "),
                  ({"policy": "d2o", "score": "probe"}, "score probe needs a probe of this model: give --probe FILE")):
    row = row if "token_ids" in row else {"prompt": "x", **row}
    text = batch(json.dumps({**row, "max_tokens": 2}), code=1)[0][0]["error"]
    assert text.startswith(said), (row, text)
long = batch(json.dumps({"token_ids": [5] * 20, "max_tokens": 2}), "--context", "16", code=1)[0][0]["error"]
assert long == "--context 16: a prompt of 20 tokens, and one must follow; shorten it, or give at least --context 21", long
END
check help_at_the_terminals_width <<'END'
from helper import *
import fcntl, pty, re, struct, termios
def at(columns, *arguments):
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    p = subprocess.Popen([kvfold, *arguments], stdout=inner)
    os.close(inner)
    text = b""
    try:
        while part := os.read(outer, 65536): text += part
    except OSError: pass
    assert p.wait(60) == 0
    return text.decode().replace("\r", "").splitlines()
words = lambda lines: re.sub(r"\| +", "|", " ".join(lines)).split()
whole = at(80, "run", "--help-all")
for columns in (50, 64, 80, 132):
    for arguments in (("run", "--help"), ("run", "--help-all"), ("eval", "--help-all"), ("profile", "--help-all"), ("run", "--help-policies")):
        lines_ = at(columns, *arguments)
        assert all(len(l) <= columns or " " not in l.strip() for l in lines_), (columns, arguments, [l for l in lines_ if len(l) > columns])
    assert words(at(columns, "run", "--help-all")) == words(whole)
assert len(at(132, "run", "--help-all")) < len(whole)
END
refused no_command_word 2 'unknown command rum: did you mean run?' rum
refused option_before_command 2 'options follow a command' --prompt x
refused unknown_option 2 'did you mean --prompt?' run --promt x
refused unknown_option_far 2 '--help-all lists' run --zzzzzz x
refused missing_value 2 'needs a value' run --prompt
refused missing_value_before_option 2 'needs a value' run --prompt --quiet
refused flag_with_value 2 'takes no value' run --json=1 --prompt x
refused extra_word 2 'one argument too many' run --prompt x y
refused nothing_to_do 2 'give --prompt TEXT or --input FILE' run
refused prompt_and_input 2 'give one of them' run --prompt x --input y
refused bad_count 2 '--max-running 0: must be a whole number from 1' run --prompt x --max-running 0
refused bad_count_text 2 '--max-tokens 1e3' run --prompt x --max-tokens 1e3
refused bad_count_large 2 '--threads 99999999999999999999' run --prompt x --threads 99999999999999999999
refused bad_size 2 '--kv-memory 512MB: must be a size' run --prompt x --kv-memory 512MB
refused bad_size_zero 2 '--kv-memory 0' run --prompt x --kv-memory 0
refused bad_number 2 '--temperature nan' run --prompt x --temperature nan
refused bad_choice 2 '--kv-dtype fp8: must be one of fp16|bf16|fp32' run --prompt x --kv-dtype fp8
refused bad_block_size 2 '--block-size 12: must be one of' run --prompt x --block-size 12
refused bad_rho 2 '--rho 1.5' run --prompt x --rho 1.5
refused bad_rho_zero 2 '--rho 0' run --prompt x --rho 0
refused bad_rho_of_full 2 '--rho 7' run --prompt x --policy full --rho 7
refused bad_budget 2 '--budget-tokens' run --prompt x --budget-tokens 15 --model "$model"
refused bad_policy 2 '--policy d3o' run --prompt x --policy d3o
refused bad_preset 2 'no-such' run --prompt x --preset no-such
refused bad_compare 2 '--compare: ' run --prompt x --compare nothing
refused empty_stop 2 '--stop' run --prompt x --stop ''
refused compare_output_alone 2 'give --compare' run --prompt x --compare-output f
refused json_and_results 2 'standard output' run --input f --json
refused two_outputs_one_file 2 'a file of its own' run --prompt x --output f --stats f
refused no_model 2 'no-such.gguf' run --prompt x --model no-such.gguf
refused no_input 2 'kvfold: no-such.jsonl: No such file' run --input no-such.jsonl --model "$model"
refused input_is_folder 2 'Is a directory' run --input . --model "$model"
refused small_memory 2 '--kv-memory 1000' run --prompt x --model "$model" --kv-memory 1000
refused bad_chunk 2 '--chunk 17' run --prompt x --model "$model" --chunk 17
refused long_context 2 '--context 4000000000' run --prompt x --model "$model" --context 4000000000
refused output_in_no_folder 2 'no-such/out' run --prompt x --model "$model" --output no-such/out
refused tokenize_nothing 2 'give one of TEXT' tokenize
refused tokenize_two 2 'give one of TEXT' tokenize x --file y
refused decode_word 2 'whole numbers' tokenize --model "$model" --decode 1,x
refused decode_outside 2 'vocabulary' tokenize --model "$model" --decode 4294967295
refused eval_measure 2 'eval ppl: the measures are nll, divergence' eval ppl
refused eval_no_measure 2 'MEASURE is missing' eval
refused eval_no_prompt 2 'give --prompt N' eval nll --ids x
refused eval_no_text 2 'one of --ids FILE and --text FILE' eval nll --prompt 3
HOME=$work XDG_CACHE_HOME=$work refused default_model_missing 2 'scripts/fetch_model.sh' run --prompt x
printf 'not a model' >broken.gguf
refused broken_model 2 'broken.gguf' info broken.gguf

# ---- The small commands -------------------------------------------------------------------------------
check tokenize <<'END'
from helper import *
text = "Hello, wörld!  12\n"
a, _ = run("tokenize", text, "--model", model, "--json")
ids = json.loads(a)["token_ids"]
assert ids and json.loads(a)["n_tokens"] == len(ids)
open("text", "w", encoding="utf-8").write(text)
for source in (("--file", "text"), ("--file", "-"), ("--", text)):
    b, _ = run("tokenize", "--model", model, "--json", *source, stdin=text)
    assert json.loads(b)["token_ids"] == ids, source
plain, _ = run("tokenize", text, "--model", model)
assert [int(l.split()[0]) for l in plain.decode().splitlines()] == ids
back, _ = run("tokenize", "--decode", ",".join(map(str, ids)), "--model", model, "--json")
assert json.loads(back)["text"].lstrip() == text, back
back, _ = run("tokenize", "--decode", json.dumps(ids), "--model", model)
assert back.decode().lstrip() == text + "\n"
assert json.loads(run("tokenize", "", "--model", model, "--json")[0])["token_ids"] == []
END
check info <<'END'
from helper import *
d = json.loads(run("info", model, "--json")[0])
assert d == json.loads(run("info", "--model", model, "--json")[0])
assert d["kv_bytes_per_token_fp16"] == d["n_layers"] * d["n_kv_heads"] * d["head_dim"] * 4
assert d["kv_bytes_per_token_fp32"] == 2 * d["kv_bytes_per_token_fp16"]
assert d["n_vocab"] > 0 and d["n_context"] > 0 and d["architecture"]
text = run("info", model)[0].decode()
assert d["architecture"] in text and "KV cache, fp16" in text
END
check eval_nll <<'END'
from helper import *
ids = [i % 50 + 5 for i in range(100)]
json.dump(ids, open("ids.json", "w"))
json.dump({"token_ids": ids}, open("object.json", "w"))
base = ["eval", "nll", "--model", model, "--prompt", "80", "--json", "--kv-dtype", "fp32"]
full = json.loads(run(*base, "--ids", "ids.json", "--policy", "full")[0])
assert len(full["nll"]) == 20 and full["scored_tokens"] == 20 and full["prompt_tokens"] == 80
assert all(x >= 0 for x in full["nll"]) and abs(sum(full["nll"]) / 20 - full["mean_nll"]) < 1e-6
assert full["held_tokens"] == full["full_tokens"] and full["rho"] == 1 and set(full["sizes"]) == {80}
one = json.loads(run(*base, "--ids", "object.json", "--policy", "d2o", "--rho", "1")[0])
assert one["nll"] == full["nll"] and one["dropped"] == 0
d2o = json.loads(run(*base, "--ids", "-", "--min-tokens", "16", "--rho", "0.25", stdin=json.dumps(ids))[0])
n_layers = json.loads(run("info", model, "--json")[0])["n_layers"]
assert len(d2o["sizes"]) == n_layers == len(d2o["density"]) == len(d2o["blocks"])
assert sum(d2o["sizes"]) == 20 * n_layers and d2o["held_tokens"] < full["held_tokens"]
assert d2o["merged"] + d2o["dropped"] > 0 and len(d2o["nll"]) == 20
short = json.loads(run(*base, "--ids", "ids.json", "--policy", "full", "--max-tokens", "5")[0])
assert len(short["nll"]) == 5
assert b"perplexity" in run(*[a for a in base if a != "--json"], "--ids", "ids.json")[0]
for text, word in (("[1, -1]", "entry 1"), ("{}", "must be a list"), ("[1,", "not JSON"), ("[]", "at least one"), ("[1, 2]", "--prompt 80")):
    assert word in run(*base, "--ids", "-", stdin=text, code=2)[1], text
open("text.txt", "w").write("The quick brown fox jumps over the lazy dog. " * 20)
assert len(json.loads(run(*base, "--text", "text.txt", "--max-tokens", "4")[0])["nll"]) == 4
open("text.txt", "wb").write(b"abc\xff")
assert "byte 4" in run(*base, "--text", "text.txt", code=2)[1]
END
check r41_nll_beside_the_full_caches <<'END'
from helper import *
ids = [i * i % 50 + 5 for i in range(160)]
json.dump(ids, open("ids.json", "w"))
base = ["eval", "nll", "--model", model, "--ids", "ids.json", "--prompt", "100", "--min-tokens", "16"]
def ran(*more): return json.loads(run(*base, "--json", *more)[0])
full = ran("--policy", "full")
assert full["full"] == {"mean_nll": full["mean_nll"], "perplexity": full["perplexity"]} and full["nll_difference"] == 0
for more in ([], ["--rho", "0.3", "--deterministic"], ["--policy", "streaming"], ["--policy", "snapkv", "--heads-per-group", "1"], ["--rho", "1"]):
    one = ran(*more)
    assert abs(one["full"]["mean_nll"] - full["mean_nll"]) < 1e-3, (more, one["full"], full["mean_nll"])
    assert abs(one["nll_difference"] - (one["mean_nll"] - one["full"]["mean_nll"])) < 1e-9 and (one["nll_difference"] == 0) == (more == ["--rho", "1"])
    text = run(*base, *more, "--quiet")[0].decode()
    beside = f"  full cache      {one['full']['mean_nll']:.4f} (the difference is {one['nll_difference']:+.4f})\n"
    assert (beside in text) == (more != ["--rho", "1"]), (text, beside)
size = str(json.loads(run("info", model, "--json")[0])["kv_bytes_per_token_fp16"] * 16 * 8) # the prompt's and a little
tight = ran("--policy", "streaming", "--kv-memory", size)
assert tight["full"] is None and tight["nll_difference"] is None and len(tight["nll"]) == 60
assert "it finds no room in --kv-memory" in run(*base, "--policy", "streaming", "--kv-memory", size, "--quiet")[0].decode()
END

check eval_help_has_the_defaults_of_eval <<'END'
from helper import *
import re
def fallbacks(*topic):
    text = " ".join(run(*topic)[0].decode().split())
    text = text[text.index("Policy: which"):]
    return dict(re.findall(r" --([a-z-]+) X .*?\[([^][]*)\](?= --| Defaults)", text)), text
of_run, all_run = fallbacks("run", "--help-all")
of_eval, all_eval = fallbacks("eval", "--help-all")
other = {k for k in of_run if of_run[k] != of_eval.get(k)}
assert other == {"rho", "min-tokens", "budget-unit", "evict-every", "cam-seed"} and len(of_run) > 30, (other, of_run)
assert "[d2o]" in " ".join(run("eval", "--help", "policy")[0].decode().split()) and "a line of the input" not in all_eval.lower()
assert "hidden state" in all_run, "a help text is cut"
# As a record has them, where the command line says nothing.
open("text", "w").write("The old house by the river had a door. " * 60)
out = lines(run("eval", "nll", "--model", model, "--text", "text", "--contexts", "64", "--scored", "8", "--quiet")[0])
found = json.dumps(out)
assert '"budget_unit": "block"' in found and '"evict_every": "8"' in found and '"min_tokens": "0"' in found, [r.keys() for r in out]
END

check r36_what_a_run_reserves_is_told_before <<'END'
from helper import *
def reserved(*more): return json.loads(run("info", model, "--json", *more)[0])["run_memory_bytes"]
few, many = reserved(), reserved("--max-running", "65536")
assert few["reserved"] == sum(v for k, v in few.items() if k != "reserved") and many["reserved"] > few["reserved"] + (256 << 20), (few, many)
assert all(many[k] > few[k] for k in ("tables", "scheduler", "policies", "activations", "buffers")) and many["pages"] == few["pages"]
assert reserved("--host-memory", "8MiB")["host"] >= 8 << 20 and reserved("--kv-memory", "8MiB")["pages"] < few["pages"] / 32
text = run("info", model, "--max-running", "65536")[0].decode()
assert "a run reserves up to" in text and "policy state" in text, text
begin = "kvfold: reserves up to "
out, err = run("run", "--model", model, "--input", "-", "--max-running", "65536", stdin='{"prompt": "x", "max_tokens": 1}\n')
assert err.startswith(begin) and "block tables" in err and err.split("\n")[0].count("iB") == len([v for v in many.values() if v]), err
for more in (("--input", "-", "--quiet"), ("--prompt", "x", "--max-tokens", "1")):
    assert begin not in run("run", "--model", model, *more)[1]
assert "must be" in run("info", model, "--chunk", "7", code=2)[1]
END
