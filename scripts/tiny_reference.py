#!/usr/bin/env python3
"""Logits of a Llama, Mistral or Qwen2 GGUF in double precision, by a reader that shares nothing with the library: what the forward pass
is tested against. Needs numpy.

    tiny_reference.py MODEL.gguf ID...           logits after each id, one JSON line each
    tiny_reference.py --make FILE.json           writes the tiny models of tests/tiny_models.h and stores their logits

A file has the rows of Q and K for rotation in pairs (2i, 2i + 1), one of qwen2 for rotation of halves (i, i + d/2). The
script also puts them into the other order, rotates the other way, and fails unless both agree.
"""
import json
import os
import struct
import subprocess
import sys
import tempfile

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STEP = 23  # every so many logits are stored


class Gguf:
    def __init__(self, path):
        with open(path, "rb") as f:
            self.bytes = f.read()
        self.at = 0
        magic, self.version = self.take("<4sI")
        assert magic == b"GGUF" and self.version in (2, 3), "not a GGUF v2 or v3 file"
        n_tensors, n_keys = self.take("<QQ")
        self.keys = {}
        for _ in range(n_keys):
            name = self.text()
            self.keys[name] = self.value(self.take("<I")[0])
        infos = []
        for _ in range(n_tensors):
            name = self.text()
            dims = self.take("<%dQ" % self.take("<I")[0])
            infos.append((name, dims) + self.take("<IQ"))
        align = self.keys.get("general.alignment", 32)
        start = (self.at + align - 1) // align * align
        self.tensors = {name: self.tensor(dims, kind, start + offset) for name, dims, kind, offset in infos}

    def take(self, fmt):
        out = struct.unpack_from(fmt, self.bytes, self.at)
        self.at += struct.calcsize(fmt)
        return out

    def text(self):
        n = self.take("<Q")[0]
        self.at += n
        return self.bytes[self.at - n : self.at].decode("utf-8", "replace")

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind == 9:
            element, n = self.take("<IQ")
            return [self.value(element) for _ in range(n)]
        return self.take("<" + SCALARS[kind])[0]

    def tensor(self, dims, kind, at):
        n = int(np.prod(dims))
        if kind in (0, 1):
            x = np.frombuffer(self.bytes, "<f4" if kind == 0 else "<f2", n, at).astype(np.float64)
        elif kind == 30:
            x = (np.frombuffer(self.bytes, "<u2", n, at).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        else:
            elements, size, decode = BLOCKS[kind]
            raw = np.frombuffer(self.bytes, np.uint8, n // elements * size, at).reshape(-1, size)
            x = decode(raw)
        return x.reshape(dims[::-1])


def halves(raw):
    return raw.copy().view("<f2").astype(np.float64)


def bits(raw, n):
    """Fields of n bits: every byte gives 8 / n of them, the lowest first."""
    return (raw[..., None] >> np.arange(0, 8, n)) & ((1 << n) - 1)


def nibbles(raw):
    """All low halves, then all high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1).astype(np.float64)


def q5(raw, high):
    return nibbles(raw) + 16 * bits(high, 1).reshape(len(raw), 32)


def k_scales(raw):
    """The 8 scales and 8 minima of 6 bits, read as the three rows of four bytes that they are packed in."""
    a, b, c = (raw[:, i : i + 4].astype(int) for i in (0, 4, 8))
    return np.hstack([a % 64, c % 16 + a // 64 * 16]), np.hstack([b % 64, c // 16 + b // 64 * 16])


def k_block(raw, high):
    """Q4_K; with 32 bytes of fifth bits Q5_K."""
    scale, least = k_scales(raw[:, 4:16])
    q = nibbles(raw[:, -128:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    if high:
        q = q + 16 * bits(raw[:, 16:48], 1).transpose(0, 2, 1)
    x = halves(raw[:, :2])[..., None] * scale[..., None] * q - halves(raw[:, 2:4])[..., None] * least[..., None]
    return x.reshape(-1, 256)


def q6_k(raw):
    out = np.empty((len(raw), 256))
    for i in range(256):  # one element after another, by the format's description
        half, run, j = i // 128, i // 32 % 4, i % 32
        low = raw[:, half * 64 + run % 2 * 32 + j] >> (4 * (run // 2)) & 15
        q = low.astype(int) + 16 * (raw[:, 128 + half * 32 + j] >> (2 * run) & 3)
        out[:, i] = halves(raw[:, 208:])[:, 0] * raw[:, 192 + i // 16].astype(np.int8) * (q - 32.0)
    return out


BLOCKS = {  # type: elements, bytes, what decodes rows of bytes
    2: (32, 18, lambda r: halves(r[:, :2]) * (nibbles(r[:, 2:]) - 8)),
    3: (32, 20, lambda r: halves(r[:, :2]) * nibbles(r[:, 4:]) + halves(r[:, 2:4])),
    6: (32, 22, lambda r: halves(r[:, :2]) * (q5(r[:, 6:], r[:, 2:6]) - 16)),
    7: (32, 24, lambda r: halves(r[:, :2]) * q5(r[:, 8:], r[:, 4:8]) + halves(r[:, 2:4])),
    8: (32, 34, lambda r: halves(r[:, :2]) * r[:, 2:].astype(np.int8)),
    12: (256, 144, lambda r: k_block(r, False)),
    13: (256, 176, lambda r: k_block(r, True)),
    14: (256, 210, q6_k),
}


def norm(x, weight, epsilon):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


def rotate(x, angles, halves):
    """x: (tokens, heads, d); angles: (tokens, d / 2)."""
    c, s = np.cos(angles)[:, None], np.sin(angles)[:, None]
    out = x.copy()
    n = angles.shape[1]
    a, b = (slice(0, n), slice(n, 2 * n)) if halves else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    out[..., a] = x[..., a] * c - x[..., b] * s
    out[..., b] = x[..., a] * s + x[..., b] * c
    return out


def frequencies(model, key, n_rot):
    f = key("rope.freq_base", 10000.0) ** (-np.arange(0, n_rot, 2, dtype=np.float64) / n_rot)
    kind = key("rope.scaling.type", "linear")
    factor = key("rope.scaling.factor", key("rope.scale_linear", 1.0))
    if kind == "linear":
        f = f / factor
    elif kind == "llama3":  # as Llama 3.1's configuration describes it, by wavelengths
        original, low, high = key("rope.scaling.original_context_length"), 1.0, 4.0
        length = 2 * np.pi / f
        smooth = (original / length - low) / (high - low)
        between = (1 - smooth) * f / factor + smooth * f
        f = np.where(length > original / low, f / factor, np.where(length < original / high, f, between))
    else:
        assert kind == "none", kind
    return f / model.tensors.get("rope_freqs.weight", 1)


def logits(model, ids, other=False):
    """other: with the rows of Q and K in the order that the file does not have."""
    t, arch = model.tensors, model.keys["general.architecture"]
    key = lambda name, *default: model.keys.get(arch + "." + name, *default)
    n_q, n_kv, n_embd = key("attention.head_count"), key("attention.head_count_kv"), key("embedding_length")
    epsilon, d, n = key("attention.layer_norm_rms_epsilon"), key("attention.key_length", n_embd // n_q), len(ids)
    n_rot = key("rope.dimension_count", d)
    assert n_rot == d
    window = key("attention.sliding_window", n)
    angles = np.arange(n)[:, None] * frequencies(model, key, n_rot)
    in_halves = arch == "qwen2"

    def heads(weight, bias, n_heads, x):
        if other:  # of a head: row 2i of one order is row i of the other, row 2i + 1 is row i + d/2
            split, order = ((2, d // 2), (0, 2, 1, 3)) if in_halves else ((d // 2, 2), (0, 2, 1, 3))
            reorder = lambda a: a.reshape(n_heads, *split, -1).transpose(order).reshape(n_heads * d, -1)
            weight, bias = reorder(weight), reorder(bias)[:, 0]
        return rotate((x @ weight.T + bias).reshape(n, n_heads, d), angles, in_halves != other)

    x = t["token_embd.weight"][ids]
    for layer in range(key("block_count")):
        w = lambda name: t["blk.%d.%s.weight" % (layer, name)]
        b = lambda name: t["blk.%d.%s.bias" % (layer, name)] if arch == "qwen2" else np.zeros(len(w(name)))
        h = norm(x, w("attn_norm"), epsilon)
        q, k = heads(w("attn_q"), b("attn_q"), n_q, h), heads(w("attn_k"), b("attn_k"), n_kv, h)
        v = (h @ w("attn_v").T + b("attn_v")).reshape(n, n_kv, d)
        k, v = (np.repeat(a, n_q // n_kv, axis=1) for a in (k, v))
        score = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(d)
        score[:, np.triu(np.ones((n, n), bool), 1) | np.tril(np.ones((n, n), bool), -window)] = -np.inf
        p = np.exp(score - score.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        x = x + np.einsum("hij,jhd->ihd", p, v).reshape(n, -1) @ w("attn_output").T
        h = norm(x, w("ffn_norm"), epsilon)
        gate = h @ w("ffn_gate").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w("ffn_up").T)) @ w("ffn_down").T
    return norm(x, t["output_norm.weight"], epsilon) @ t.get("output.weight", t["token_embd.weight"]).T


def checked_logits(path, ids):
    model = Gguf(path)
    out, other = logits(model, ids), logits(model, ids, other=True)
    assert np.abs(out - other).max() < 1e-9 * np.abs(out).max(), "the two rotation orders disagree"
    return out


WRITER = r"""
#include "tests/tiny_models.h"
int main(int argc, char **argv) {
    for (int i = 0; argc > 1 && i < TINY_CASES; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", argv[1], tiny_cases[i].name);
        if (kvf_test_write_tiny_model(path, &tiny_cases[i].params)) return 1;
        printf("%s\n", tiny_cases[i].name);
    }
    for (unsigned i = 0; i < TINY_TOKENS; i++) printf("%u ", tiny_token(i));
    return 0;
}
"""


def fnv1a(data):
    h = 0xCBF29CE484222325
    for b in data:
        h = ((h ^ b) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return "%016x" % h


def make(out):
    with tempfile.TemporaryDirectory() as tmp:
        source, program = os.path.join(tmp, "writer.c"), os.path.join(tmp, "writer")
        with open(source, "w") as f:
            f.write(WRITER)
        cc = [os.environ.get("CC", "cc"), "-std=c11", "-O1", "-ffp-contract=off", "-I", ROOT, "-I", ROOT + "/include"]
        subprocess.check_call(cc + [source, ROOT + "/base/base.c", "-o", program, "-lm"])
        *names, tokens = subprocess.check_output([program, tmp], text=True).split("\n")
        ids = [int(t) for t in tokens.split()]
        cases = []
        for name in names:
            path = os.path.join(tmp, name)
            rows = checked_logits(path, ids)[:, ::STEP]
            with open(path, "rb") as f:
                digest = fnv1a(f.read())
            rounded = [[float("%.7g" % x) for x in row] for row in rows]
            cases.append({"name": name, "fnv1a": digest, "logits": rounded})
    with open(out, "w") as f:
        f.write('{"note": "by scripts/tiny_reference.py, in double precision; logits: every step-th, after each id",\n')
        f.write(' "step": %d, "ids": %s, "cases": [\n' % (STEP, json.dumps(ids)))
        f.write(",\n".join(json.dumps(c, separators=(",", ":")) for c in cases) + "]}\n")


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--make":
        make(sys.argv[2])
    elif len(sys.argv) > 2:
        for line in checked_logits(sys.argv[1], [int(a) for a in sys.argv[2:]]):
            print(json.dumps([round(float(x), 7) for x in line]))
    else:
        sys.exit(__doc__)
