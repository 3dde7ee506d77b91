#!/usr/bin/env python3
"""kvfold beside llama.cpp: tokens a second on the same GGUF file, in turns, repetition by repetition.

    python3 bench/peer_llama_cpp.py [--bench build/release/kvfold-bench] [--output FILE]

llama.cpp comes as PyPI llama-cpp-python 0.3.16, built from its source package for this CPU (10 to 20 minutes, once) into
a virtual environment that this script makes when it is not there (--venv). Its low-level interface is used as a server
would: one llama_decode a step over all sequences, a KV stream for each (kv_unified off), fp16 K and V, flash attention
off, which is faster on CPUs. What is timed there is llama_decode alone; of kvfold whole steps of the engine, sampling and
log-probabilities included. The peer's sequences go back to the context after each repetition; kvfold's grow.

Prints the lines of `kvfold-bench engine`, each with "peer" (the median of the peer's repetitions between ours) and
"ratio", value over peer: above 1 kvfold is faster.
"""
import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "llama-cpp-python"
VERSION = "0.3.16"
DEFAULT_VENV = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvfold" / f"venv-{PACKAGE}-{VERSION}"
DEFAULT_MODEL = DEFAULT_VENV.parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def say(text):
    print(f"peer_llama_cpp: {text}", file=sys.stderr, flush=True)


def fail(text):
    say(text)
    sys.exit(1)


def in_venv(venv):
    """Goes on in the virtual environment, which is made first when it is not there."""
    python = venv / "bin" / "python"
    have = [str(python), "-c", f"import importlib.metadata as m; assert m.version('{PACKAGE}') == '{VERSION}'"]
    if not python.exists() or subprocess.run(have, stderr=subprocess.DEVNULL).returncode:
        say(f"making {venv}: builds {PACKAGE} {VERSION} from source, 10 to 20 minutes")
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-binary", PACKAGE, f"{PACKAGE}=={VERSION}"]
        subprocess.run(pip, check=True)
    if Path(sys.prefix).resolve() != venv.resolve():
        os.execv(str(python), [str(python), *sys.argv])


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bench", type=Path, default=ROOT / "build" / "release" / "kvfold-bench", help="the program")
    p.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="a GGUF file")
    p.add_argument("--venv", type=Path, default=DEFAULT_VENV, help="virtual environment, made when it is not there")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--context", type=int, default=2048, help="tokens of the prompt, and of context while decoding")
    p.add_argument("--sequences", default="1,8,32", help="numbers of sequences that decode side by side")
    p.add_argument("--policies", default="full,d2o")
    p.add_argument("--repetitions", type=int, default=5)
    p.add_argument("--steps", type=int, default=8, help="of a decode repetition")
    p.add_argument("--output", type=Path, help="also writes the lines there")
    return p.parse_args()


class Peer:
    """A llama.cpp context whose sequences all hold the same prompt."""

    def __init__(self, args):
        import llama_cpp as api

        self.api, self.context, self.steps = api, args.context, args.steps
        self.n_max = max(int(n) for n in args.sequences.split(","))
        self.quiet = api.llama_log_callback(lambda level, text, data: None)
        api.llama_log_set(self.quiet, None)
        api.llama_backend_init()
        model_params = api.llama_model_default_params()
        self.model = api.llama_model_load_from_file(str(args.model).encode(), model_params)
        if not self.model:
            fail(f"{args.model}: llama.cpp does not open it")
        self.n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        p = api.llama_context_default_params()
        p.n_ctx = self.n_max * (args.context + 256)
        p.n_batch = max(args.context, self.n_max)
        p.n_ubatch = 512
        p.n_seq_max = self.n_max
        p.n_threads = p.n_threads_batch = args.threads
        p.type_k = p.type_v = api.GGML_TYPE_F16
        p.flash_attn = False
        p.kv_unified = False
        p.no_perf = True
        self.ctx = api.llama_init_from_model(self.model, p)
        if not self.ctx:
            fail("llama.cpp finds no memory for its context")
        self.memory = api.llama_get_memory(self.ctx)
        self.batch = api.llama_batch_init(p.n_batch, 0, 1)
        self.filled = False

    def run(self, rows):
        """One llama_decode; rows: (token, position, sequence, whether logits are wanted)."""
        b = self.batch
        b.n_tokens = len(rows)
        for i, (token, pos, seq, logits) in enumerate(rows):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = token, pos, 1, logits
            b.seq_id[i][0] = seq
        begin = time.perf_counter()
        status = self.api.llama_decode(self.ctx, b)
        self.api.llama_synchronize(self.ctx)
        seconds = time.perf_counter() - begin
        if status:
            fail(f"llama_decode: status {status}")
        if not math.isfinite(self.api.llama_get_logits(self.ctx)[0]):
            fail("llama.cpp's logits are not finite")
        return seconds

    def token(self, i):
        return 1000 + i * 7919 % (self.n_vocab - 2000)

    def prefill(self):
        """Tokens a second of the prompt, into sequence 0."""
        self.api.llama_memory_clear(self.memory, False)
        self.filled = False
        n = self.context
        return n / self.run([(self.token(i), i, 0, i == n - 1) for i in range(n)])

    def fill(self):
        self.prefill()
        for seq in range(1, self.n_max):
            self.api.llama_memory_seq_cp(self.memory, 0, seq, -1, -1)
        self.filled = True

    def decode(self, n):
        """Tokens a second of n sequences side by side."""
        if not self.filled:
            self.fill()
        seconds = 0
        for step in range(self.steps):
            seconds += self.run([(self.token(step + i), self.context + step, i, 1) for i in range(n)])
        for seq in range(n):
            self.api.llama_memory_seq_rm(self.memory, seq, self.context, -1)
        return n * self.steps / seconds


def compare(args, peer, options):
    """The lines of one run of kvfold-bench, with the peer's turns before each of its repetitions."""
    command = [str(args.bench), "engine", "-i", "-m", str(args.model), "-t", str(args.threads), "-c", str(args.context)]
    command += ["-s", args.sequences, "-p", args.policies, "-r", str(args.repetitions), "-g", str(args.steps)]
    ours = subprocess.Popen(command + options, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    rates = []
    for text in ours.stdout:
        line = json.loads(text)
        if "turn" in line:
            rates.append(peer.prefill() if line["turn"] == "prefill" else peer.decode(line["sequences"]))
            ours.stdin.write("\n")
            ours.stdin.flush()
            continue
        measured = sorted(rates[1:])  # the first warms up
        line["peer"] = statistics.median(measured)
        line["peer_p5"], line["peer_p95"] = measured[0], measured[-1]
        line["ratio"] = line["value"] / line["peer"]
        line["peer_name"] = f"llama.cpp, {PACKAGE} {VERSION}"
        line["activations"] = "fast" if options else "fp32"
        rates = []
        yield line
    if ours.wait():
        fail(f"{args.bench}: exit code {ours.returncode}")


def has_fast_activations(bench):
    """Whether the build can take activations in 8 bits (kvfold run --fast-activations; here -x)."""
    text = subprocess.run([str(bench), "--help"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return "[-x]" in text


def main():
    args = arguments()
    if not args.bench.exists():
        fail(f"{args.bench}: not there; build it with: cmake --preset release && cmake --build --preset release")
    if not args.model.exists():
        fail(f"{args.model}: not there; scripts/fetch_model.sh fetches the default model")
    if args.repetitions < 1 or args.context < 256:
        fail("--repetitions must be at least 1, --context at least 256")
    if not shutil.which("cc") and not args.venv.exists():
        fail("a C and a C++ compiler are needed to build llama.cpp")
    in_venv(args.venv)
    peer = Peer(args)
    lines = []
    for options in [[], ["-x"]] if has_fast_activations(args.bench) else [[]]:
        for line in compare(args, peer, options):
            line = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in line.items()}
            print(json.dumps(line), flush=True)
            lines.append(line)
    if args.output:
        args.output.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
