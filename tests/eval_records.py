#!/usr/bin/env python3
"""Made-up records of kvfold eval, plausible and the same for a seed: what tests of its report read.

Usage: eval_records.py OUT.jsonl [--policies N] [--tasks] [--small] [--seed N]
"""
import argparse
import json
import math
import random

POLICIES = ["fold", "d2o", "h2o", "roco", "snapkv", "pyramidkv", "streaming", "cam", "sirllm", "uniform", "evict",
            "reciprocal", "exp_decay", "d2o:serving", "d2o:authors"]
QUALITY = [.55, 1.15, 1.0, .92, .95, 1.02, 1.9, 1.05, 1.2, 1.1, 1.25, 1.3, 1.35, 1.17, 1.4]  # of h2o's KL
KINDS = ["novel", "essay", "code", "dialogue", "problems"]
LAYERS, BLOCK = 30, 16


def rounded(x):
    return float(f"{x:.6g}")


def run_record():
    return {"record": "run", "measure": "divergence", "version": "0.1.0", "commit": "0" * 12, "threads": 2,
            "model": {"name": "Made Up 135M", "file": "made-up.gguf", "bytes": 1, "xxh3": "00"}, "kv_type": "fp16",
            "block_size": BLOCK, "k": 8, "options": {"rho": [.1, .2, .4, .8]}}


def budget(policy, variance):
    """Relative sizes of the layers: by variance for those that use it."""
    if policy.startswith(("d2o", "evict")):
        weights = [math.exp(-v * 6) for v in variance]
    elif policy == "fold":
        weights = [math.exp(v * 4) for v in variance]
    elif policy == "pyramidkv":
        weights = [2 - 1.5 * i / LAYERS for i in range(LAYERS)]
    else:
        weights = [1] * LAYERS
    total = sum(weights)
    return [w / total * LAYERS for w in weights]


def texts(r, args):
    contexts = [1024, 2048] if args.small else [1024, 2048, 4096, 7936]
    n, tokens = (4, 12) if args.small else (10, 256)
    out = []
    for i in range(n):
        for context in contexts:
            level, variance = r.uniform(2.2, 3.4), [.1 + .3 * abs(math.sin(l * .9)) + r.uniform(0, .03) for l in range(LAYERS)]
            nll = [rounded(max(.01, r.gauss(level, 1.2))) for _ in range(tokens)]
            base = {"source": f"text-{i}", "kind": KINDS[i % len(KINDS)], "context": context, "offset": 1000 * i,
                    "sample": 0, "n_prompt": context, "n_scored": tokens}
            out.append({"record": "text", "measure": "divergence", **base, "full": {"nll": rounded(sum(nll) / tokens), "nll_by_token": nll},
                        "layers": {"density_head_minmax": [rounded(v) for v in variance], "variance": [rounded(v * v) for v in variance]}})
            for p, policy in enumerate(POLICIES[:args.policies]):
                for rho in [.2, .4] if args.small else [.1, .2, .4, .8]:
                    out.append(text_cell(r, base, policy, QUALITY[p], rho, nll, variance))
    return out


def text_cell(r, base, policy, quality, rho, full_nll, variance):
    length, tokens = base["context"], len(full_nll)
    target = math.floor(rho * length * LAYERS / BLOCK)
    cell = {"record": "cell", "measure": "divergence", **base, "policy": policy, "policy_options": {"policy": policy, "rho": rho},
            "rho": rho, "seed": 0, "target_blocks": target, "k": 8}
    if policy == "pyramidkv" and rho == .1 and length == 1024:
        return {**cell, "empty": "a layer's least size is above the target"}
    difficulty = .9 + .2 * (hash_of(base["source"]) % 7) / 7
    mean = quality * .08 * (1 / rho - 1) ** 1.1 * difficulty * r.uniform(.85, 1.15)
    kl = [rounded(mean * r.expovariate(1) * (.6 + .8 * t / tokens)) for t in range(tokens)]
    nll = [rounded(max(.005, n + k * r.uniform(-.6, 2.0))) for n, k in zip(full_nll, kl)]
    agree = [int(r.random() < math.exp(-k * 1.2)) for k in kl]
    share = budget(policy, variance)
    held = target * r.uniform(.975, 1.0)
    return {**cell, "held_blocks": rounded(held), "blocks_by_layer": [rounded(s * held / LAYERS) for s in share],
            "sizes": [round(s * rho * length) for s in share], "nll": rounded(sum(nll) / tokens),
            "kl": rounded(sum(kl) / tokens), "agree": rounded(sum(agree) / tokens), "nll_by_token": nll, "kl_by_token": kl,
            "agree_by_token": agree}


def hash_of(text):
    h = 2166136261
    for c in text.encode():
        h = (h ^ c) * 16777619 % 2 ** 32
    return h


def task_cell(r, base, policy, quality, rho, full_exact, difficulty):
    n = 6
    right = full_exact and r.random() < math.exp(-quality * (1 / rho - 1) * difficulty)
    hits = n if right else r.randrange(n)
    nll = rounded(quality * (1 / rho - 1) * r.uniform(.05, .2))
    return {"record": "cell", **base, "nll": nll, "policy": policy, "policy_options": {"policy": policy}, "rho": rho,
            "target_blocks": 100 * rho, "held_blocks": rounded(99.5 * rho), "n_answer": n, "hits": hits, "exact": int(right),
            "full_hits": n if full_exact else 2, "full_exact": full_exact, "k": 8}


def tasks(r, args):
    out, contexts = [], [1024, 2048] if args.small else [1024, 2048, 4096, 7936]
    rhos = [.2, .4] if args.small else [.1, .2, .4, .8]
    def cells(base, full_exact, difficulty):
        base.update(offset=0, seed=0, n_prompt=base["context"] - 10, n_scored=6)
        out.append({"record": "sample", **base, "full": {"nll": .04, "nll_by_token": [.04] * 6, "hits": 6 * full_exact}, "layers": {}})
        for p, policy in enumerate(POLICIES[:args.policies]):
            for rho in rhos:
                out.append(task_cell(r, base, policy, QUALITY[p], rho, full_exact, difficulty))
    for context in contexts:
        for task, known in (("single", .97), ("multikey", .85), ("multivalue", .75), ("tracking", .3)):
            for placement in ("inside", "after"):
                for sample in range(6 if args.small else 12):
                    cells({"measure": "recall", "source": "recall", "kind": "synthetic", "context": context, "task": task,
                           "placement": placement, "sample": sample}, int(r.random() < known), .1 + .1 * (placement == "after"))
        for depth in (0, .25, .5, .75, 1):
            for sample in range(1 if args.small else 4):
                cells({"measure": "needle", "source": "needle", "kind": "synthetic", "context": context, "task": "needle",
                       "placement": "after", "depth": depth, "sample": sample},
                      int(r.random() < .98 - .1 * (context > 4096)), .12 + .2 * depth * (1 - depth))
    return out


def ablation(r, args):
    out = []
    variants = {"4": [("softmax", {}), ("reciprocal", {"layers": "reciprocal"})], "9": [("1:1", {"nm": "1:1"}), ("3:1", {})]}
    for i in range(4):
        base = {"source": f"text-{i}", "kind": KINDS[i], "context": 1024, "offset": 1000 * i, "sample": 0, "n_scored": 12}
        for table, rows in variants.items():
            for label, options in rows:
                cell = text_cell(r, base, "d2o", 1.1, .2, [2.5] * 12, [.2] * LAYERS)
                out.append({**cell, "policy": label, "policy_options": {"policy": "d2o", **options}, "table": table})
    return out


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out")
    p.add_argument("--policies", type=int, default=len(POLICIES))
    p.add_argument("--tasks", action="store_true")
    p.add_argument("--ablation", action="store_true")
    p.add_argument("--small", action="store_true")
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    r = random.Random(args.seed)
    records = [run_record()] + texts(r, args) + (tasks(r, args) if args.tasks else []) + (ablation(r, args) if args.ablation else [])
    with open(args.out, "w", encoding="utf-8") as f:
        for record in records:
            f.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
