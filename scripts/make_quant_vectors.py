#!/usr/bin/env python3
"""Blocks of every GGUF tensor type and the floats that the PyPI package `gguf` makes of them: what the dequantisers are
tested against, bit by bit. Needs gguf (0.19 made what is stored) and numpy.

    make_quant_vectors.py tests/data/quant_vectors.json

Bytes are random, but for the scales: of moderate size in some blocks, at the edges of what a half can be in others.
"""
import json
import sys

import gguf
import numpy as np

N_RANDOM = 4
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
EDGES = [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00]


def blocks_of(name, size, random):
    """Blocks with random scales, then for each edge one of random bytes, of all zeros or of all ones around it."""
    offsets = HALVES[name]
    n_edges = len(EDGES)
    blocks = random.integers(0, 256, (N_RANDOM + n_edges, size), dtype=np.uint8)
    for i, block in enumerate(blocks):
        if i >= N_RANDOM and i % 3:
            block[:] = 0 if i % 3 == 1 else 255
        for at in offsets:
            half = random.integers(0, 0x4000) if i < N_RANDOM else EDGES[(i - N_RANDOM + at) % n_edges]
            block[at : at + 2] = np.frombuffer(np.uint16(half | (random.integers(0, 2) << 15 if i < N_RANDOM else 0)), np.uint8)
    return blocks


def plain_of(name, random):
    """Values of 2 bytes: random ones, and every kind of edge."""
    edges = EDGES if name == "F16" else [0, 0x8000, 1, 0x807F, 0x0080, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0]
    return np.concatenate([random.integers(0, 0x7C00 if name == "F16" else 0x7F80, 22), edges]).astype("<u2").view(np.uint8)


def main(out):
    random = np.random.default_rng(20240611)
    cases = []
    for name in ["F16", "BF16", *HALVES]:
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        source = plain_of(name, random) if elements == 1 else blocks_of(name, size, random).reshape(-1)
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(source.copy(), kind).astype("<f4")
        assert values.size == source.size // size * elements
        cases.append({"type": name, "number": int(kind), "blocks": source.tobytes().hex(), "floats": values.tobytes().hex()})
    with open(out, "w") as f:
        f.write('{"note": "by scripts/make_quant_vectors.py; bytes in hexadecimal, floats little endian", "cases": [\n')
        f.write(",\n".join(json.dumps(c, separators=(",", ":")) for c in cases) + "]}\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
