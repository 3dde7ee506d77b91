#!/usr/bin/env python3
"""Whether answers of `kvfold run --deterministic` are the same to the byte however they were come by.

determinism.py KVFOLD MODEL [--form own|openai] [--part kill|vary] [--seed N] [--requests N] [--answers N] [OPTIONS of run...]

A batch of conversations (several turns, texts of different lengths, greedy and sampled with seeds, some with several
samples, some with log-probabilities, under each policy) is run in both line forms. kill: runs that are killed with
SIGKILL three times at random moments and gone on with by --resume. vary: other sizes of the batch, threads, chunks,
little KV memory (requests are preempted), another order of lines. Each must give the lines of a run left alone."""
import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time

POLICIES = [{"policy": "full"}, {"policy": "h2o", "rho": 0.4, "min_tokens": 16},
            {"policy": "streaming", "rho": 0.4, "min_tokens": 16}, {"policy": "d2o", "rho": 0.3, "min_tokens": 16},
            {"policy": "d2o", "preset": "serving", "rho": 0.5, "min_tokens": 16},
            {"policy": "h2o", "rho": 0.4, "min_tokens": 16, "nm": "7:1", "head_budget": "adaptive", "head_floor": 0},
            {"policy": "snapkv", "rho": 0.4, "window": 8, "score_window": 16, "head_budget": "adaptive"}]
WORDS = "the a block page token cache river stone why how where green seven keeps folds runs holds again more than".split()


def conversations(n, context, answers, rng):
    """Message lists with what is asked for; lengths up to what a context of few tokens, one a letter, has room for."""
    letters = (context - answers) // 3 if context < 1024 else 3000
    for i in range(n):
        def text(share):
            size, words = int(letters * share * rng.random()), []
            while sum(map(len, words)) + len(words) < size:
                words.append(rng.choice(WORDS))
            return " ".join(words) or "Go on."
        turns = rng.randrange(4)
        messages = [{"role": "system", "content": "You are brief."}] if i % 2 else []
        for _ in range(turns):
            messages.append({"role": "user", "content": text(0.3)})
            messages.append({"role": "assistant", "content": text(0.2)})
        messages.append({"role": "user", "content": f"Number {i}: " + text(0.4)})
        ask = {"max_tokens": rng.randint(answers // 3, answers)}
        if i % 3:
            ask |= {"temperature": [0.7, 1.0, 1.3][i % 3], "seed": 1000 + i}
        if i % 4 == 1:
            ask |= {"top_p": 0.9}
        if i % 8 == 5:
            ask |= {"n": 2 + i % 2}
        yield messages, ask, POLICIES[i % len(POLICIES)], i % 3 == 1


def lines_of(form, rows):
    for i, (messages, ask, policy, logprobs) in enumerate(rows):
        if form == "own":
            yield {"id": f"c{i}", "messages": messages, **ask, **policy, **({"logprobs": 3} if logprobs else {})}
        elif i % 4 == 3: # a completion, of the last text
            body = {"model": "m", "prompt": messages[-1]["content"], "temperature": 0, **ask, "kvfold": policy}
            body |= {"logprobs": 2} if logprobs else {}
            yield {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body}
        else:
            body = {"model": "m", "messages": messages, "temperature": 0, **ask, "kvfold": policy}
            body |= {"logprobs": True, "top_logprobs": 3} if logprobs else {}
            yield {"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}


class Job:
    def __init__(self, arguments, form, folder, rng):
        self.arguments, self.form, self.folder, self.rng = arguments, form, folder, rng
        info = json.loads(subprocess.run([arguments.kvfold, "info", arguments.model, "--json"], check=True, capture_output=True).stdout)
        rows = conversations(arguments.requests, info["n_context"] if "n_context" in info else 2048, arguments.answers, random.Random(7))
        self.lines = [json.dumps(r) for r in lines_of(form, rows)]
        self.input = self.write("in.jsonl", self.lines)

    def write(self, name, lines):
        path = os.path.join(self.folder, name)
        with open(path, "w") as f:
            f.write("\n".join(lines) + "\n")
        return path

    def command(self, output, *more, input=None):
        a = self.arguments
        return [a.kvfold, "run", "--model", a.model, "--input", input or self.input, "--output", output, "--deterministic",
                "--quiet", "--any-model", *a.options, *more]

    def run(self, name, *more, input=None):
        output, begin = os.path.join(self.folder, name), time.monotonic()
        more += ("--force",) if "--resume" not in more else ()
        p = subprocess.run(self.command(output, *more, input=input), capture_output=True)
        assert p.returncode == 0 and b"Sanitizer" not in p.stderr, (p.returncode, p.stderr[-2000:])
        if "--kv-memory" in more:
            assert json.loads(p.stdout)["preemptions"] > 0, "no request was preempted: --tight is too much"
        return output, time.monotonic() - begin

    def read(self, output, numbered=True):
        """Each answer's bytes by id; not numbered: without what is made of the line's number."""
        answers = {}
        with open(output, "rb") as f:
            for line in f:
                assert line.endswith(b"\n"), line[-80:]
                value = json.loads(line)
                if "kvfold" in value:
                    assert value["kvfold"]["options"]["deterministic"] is True, value
                    continue
                key = value.get("custom_id", value.get("id"))
                assert key not in answers, f"{key} is there twice"
                if not numbered and "response" in value:
                    del value["id"], value["response"]["request_id"], value["response"]["body"]["id"]
                answers[key] = line if numbered else json.dumps(value).encode()
        assert len(answers) == len(self.lines), f"{len(answers)} answers for {len(self.lines)} lines"
        return answers

    def compare(self, what, whole, other, numbered=True):
        a, b = self.read(whole, numbered), self.read(other, numbered)
        differ = [k for k in a if a[k] != b[k]]
        assert not differ, f"{self.form}, {what}: {len(differ)} answers differ\n{a[differ[0]]}\n{b[differ[0]]}"
        print(f"{self.form}: {what}: {len(a)} answers, equal to the byte", flush=True)

    @staticmethod
    def count(path):
        return open(path, "rb").read().count(b"\n") if os.path.exists(path) else 0

    def kill(self, whole):
        out, killed = os.path.join(self.folder, "cut"), []
        for _ in range(3): # at a random share of what is left to do, and a random moment after it
            left = self.count(out)
            wanted = left + self.rng.uniform(0.05, 0.5) * (len(self.lines) - left)
            p = subprocess.Popen(self.command(out, "--resume"), stderr=subprocess.PIPE)
            while p.poll() is None and self.count(out) < wanted:
                time.sleep(0.001)
            time.sleep(self.rng.uniform(0, 0.02))
            if p.poll() is None:
                p.kill()
                killed.append(self.count(out))
            assert b"Sanitizer" not in p.stderr.read()
            p.wait()
            assert self.count(out) >= left, f"{left} lines became {self.count(out)}"
        assert killed, "every run ended before it was killed"
        self.run("cut", "--resume")
        self.compare(f"killed at {killed} lines, gone on with", whole, out)

    def vary(self, whole):
        order = self.lines[:]
        self.rng.shuffle(order)
        shuffled = self.write("shuffled.jsonl", order)
        for what, options in [("batches of 3 on one thread", ["--max-running", "3", "--threads", "1"]),
                              ("chunks of 32 on two threads", ["--chunk", "32", "--threads", "2"]),
                              ("little memory, on three threads", ["--kv-memory", self.arguments.tight, "--threads", "3", "--json"])]:
            self.compare(what, whole, self.run("other", *options)[0])
        self.compare("another order", whole, self.run("other", "--max-running", "9", input=shuffled)[0], False)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("kvfold")
    p.add_argument("model")
    p.add_argument("--form", choices=["own", "openai"])
    p.add_argument("--part", choices=["kill", "vary"])
    p.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    p.add_argument("--requests", type=int, default=64)
    p.add_argument("--answers", type=int, default=48)
    p.add_argument("--tight", default="64MiB")
    arguments, arguments.options = p.parse_known_args()
    print("seed", arguments.seed, flush=True)
    for form in [arguments.form] if arguments.form else ["own", "openai"]:
        with tempfile.TemporaryDirectory() as folder:
            job = Job(arguments, form, folder, random.Random(arguments.seed))
            whole, wall = job.run("whole")
            print(f"{form}: {len(job.lines)} lines in {wall:.1f} s", flush=True)
            if arguments.part != "vary":
                job.kill(whole)
            if arguments.part != "kill":
                job.vary(whole)


if __name__ == "__main__":
    sys.exit(main())
