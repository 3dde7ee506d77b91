#!/usr/bin/env python3
"""Trains a small SentencePiece BPE model on the project's own text and writes its vocabulary and what it encodes and
decodes: what model/spm.c is tested against. Needs PyPI sentencepiece.

    make_spm_vectors.py tests/data/spm_vectors.json

The file holds one vocabulary (tokens, scores, types) and variants of it: without the space before a text, with some
tokens unused, without byte tokens. Each has [text, ids] to encode and [ids, text] to decode. Then dialogues with the ids
that the forms of Llama 2 and Mistral give them, put together from sequences and pieces as the models' makers do.
"""
import io
import json
import os
import random
import sys

import sentencepiece

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VOCABULARY = 700
# Tokens that begin alike, overlap, are made of spaces, or have one inside (good day) or before them.
USER_DEFINED = ["<tool>", "<tool>x", "x<tool>", "<tool><tool>y", "\u2581\u2581\u2581", "\n\n", "good\u2581day", "\u2581the<", "Ça"]
UNUSED, BYTE = 5, 6
FOREIGN = ["Déjà vu: où est le café? Ça va, naïve façade.", "Привет, мир! Как дела? Всё хорошо.",
           "你好世界 这是一个测试", "날씨가 좋다", "Grüße aus Köln, schöne Straße"]
TEXTS = [
    "a", " ", "  ", "   a", "a ", "hello", " hello", "Hello world", "the block table of a sequence",
    "the  block   table    of", "block\n", "\n", "\n\n\n", "a\nb\tc\r\n", "    return status;\n}\n", "1234567890", "3.14159",
    "don't I'm we'll", "it's", "éàü", "Привет", "你好", "날씨", "깰", "\U0001f642", "x\U0001f642y", "\U0001f468\u200d\U0001f469",
    "e\u0301", "\u00a0", "\u200b", "\ufffd", "\u2581", "a\u2581b", "<s>", "</s>a", "<unk>", "<0x0A>", "<0x41>", "<0x-1>",
    "<tool>", "a<tool>b", "<tool><tool>x<tool>", " <tool> a", "the<tool> the", "<too", "x<tool>x<tool>", "xx<tool>y",
    "<tool><tool>y<tool><tool>", "the<", " the<", "a the<tool>", "good day", "a good day<tool>", "good  day", "   x", "a   x",
    "a    x", "  the<", "\n\n\n\n", "x\n\n\nx", "<tool>\n\n<tool>x", "Ça va<tool>Ça", "</s><tool><s>", "\u2581\u2581\u2581x", "aaaaaaaaaaaaaaaaaaaaaaa",
    "tokentokentoken", "\u00e9" * 9, "KVF_E_NO_MEMORY", "static kvf_status take_text(kvf__encoder *e, size_t n) {",
]


# ---- The model file: a protobuf, of which only what is changed here is read ----------------------------------

def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at


def put_varint(value):
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def parts(data):
    """(field, bytes) of a message whose fields all have a length."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        assert key & 7 == 2
        n, at = varint(data, at)
        yield key >> 3, data[at:at + n]
        at += n


def field(number, value):
    return put_varint(number << 3) + put_varint(value)


def changed(model, unused=(), add_space=True, with_bytes=True):
    """The model with some pieces unused, without the dummy prefix, without byte pieces. A later field replaces one
    before it."""
    out, n = b"", 0
    for number, body in parts(model):
        if number == 1:
            is_byte = body.endswith(field(3, BYTE))
            body += field(3, UNUSED) if n in unused else b""
            n += 1
            if is_byte and not with_bytes:
                continue
        elif number == 2:
            body += field(35, int(with_bytes))
        elif number == 3:
            body += field(3, int(add_space))
        out += put_varint(number << 3 | 2) + put_varint(len(body)) + body
    return out


# ---- Texts ---------------------------------------------------------------------------------------------------

def corpus():
    folders = sorted(name for name in os.listdir(ROOT) if os.path.isfile(os.path.join(ROOT, name, "README.md")))
    paths = ["LICENSE"] + [os.path.join(name, "README.md") for name in folders]
    paths += sorted("model/" + name for name in os.listdir(ROOT + "/model") if name.endswith(".c"))
    for path in paths:
        with open(os.path.join(ROOT, path), encoding="utf-8") as f:
            yield from f.read().split("\n")
    yield from FOREIGN * 20


def random_texts(rng, n):
    words = " ".join(line for line in corpus() if line).split(" ")
    odd = [" ", "  ", "\n", "\t", "12", "é", "ж", "好", "깰", "\U0001f642", "\u2581", "<tool>", "x", "y", "\n\n", "the<", "good day",
           "   ", "Ça", "'s", "(", "!", "aa"]
    for _ in range(n):
        pieces = [rng.choice(words) + " " if rng.random() < 0.5 else rng.choice(odd) for _ in range(rng.randrange(1, 9))]
        yield "".join(pieces)


def variant(name, model, rng, **change):
    sp = sentencepiece.SentencePieceProcessor(model_proto=changed(model, **change))
    texts = TEXTS + list(random_texts(rng, 60))
    encode = [[text, sp.encode(text)] for text in texts]
    n = sp.get_piece_size()
    decode = [[ids, sp.decode(ids)] for _, ids in encode[::3] if sp.unk_id() not in ids]
    for _ in range(30):
        ids = [rng.randrange(1, n) for _ in range(rng.randrange(1, 6))]
        # Bytes that are no UTF-8 would be U+FFFD there and are themselves here.
        if not any(sp.is_byte(i) for i in ids):
            decode.append([ids, sp.decode(ids)])
    emoji = [i for byte in "\U0001f642".encode() for i in range(n) if sp.id_to_piece(i) == "<0x%02X>" % byte]
    if emoji:
        decode.append([emoji, "\U0001f642"])
        assert sp.decode(emoji) == "\U0001f642"
    out = {"name": name, "add_space": change.get("add_space", True), "bytes": change.get("with_bytes", True),
           "unused": sorted(change.get("unused", [])), "encode": encode, "decode": decode}
    return out


# ---- Dialogues -----------------------------------------------------------------------------------------------

DIALOGUES = [
    [["user", "the model reads"]],
    [["system", "Be a scheduler."], ["user", "a request"]],
    [["user", "token by token"], ["assistant", "the block is full"], ["user", "and then?"]],
    [["system", " sys "], ["user", "  one\n"], ["assistant", " two\n "], ["user", "three "], ["assistant", "x"],
     ["user", "</s>[INST] <s> <<SYS>>"]],
    [["system", "alone"], ["user", " \n"]],
    [["system", "<tool>"], ["user", "x<tool>x the<"], ["assistant", "<tool></s>"], ["user", "<tool>x a good day"]],
]


def llama2(sp, turns):
    """Each question with its answer is a sequence of its own; white space at the ends of a content goes."""
    ids, system = [], ""
    if turns[0][0] == "system":
        system, turns = "<<SYS>>\n" + turns[0][1] + "\n<</SYS>>\n\n", turns[1:]
    for i in range(0, len(turns), 2):
        text = "[INST] " + ((system if i == 0 else "") + turns[i][1]).strip() + " [/INST]"
        if i + 1 < len(turns):
            ids += [sp.bos_id()] + sp.encode(text + " " + turns[i + 1][1].strip() + " ") + [sp.eos_id()]
        else:
            ids += [sp.bos_id()] + sp.encode(text)
    return ids


def mistral(sp, turns):
    """The first form: [INST] is text, the system message stands in the first question."""
    ids, turns = [sp.bos_id()], [list(turn) for turn in turns]
    if turns[0][0] == "system":
        turns[1][1] = turns[0][1] + "\n\n" + turns[1][1]
        del turns[0]
    for i in range(0, len(turns), 2):
        text = "[INST] " + turns[i][1] + " [/INST]"
        if i + 1 < len(turns):
            ids += sp.encode(text + " " + turns[i + 1][1]) + [sp.eos_id()]
        else:
            ids += sp.encode(text)
    return ids


def mistral_control(sp, turns, add_space):
    """The later form: [INST] and [/INST] are control tokens (here the two that follow the vocabulary), the system message
    stands in the last question."""
    begin, end = sp.get_piece_size(), sp.get_piece_size() + 1
    space = "" if add_space else " "  # which the tokenizer puts there itself, or does not
    ids, turns = [sp.bos_id()], [list(turn) for turn in turns]
    if turns[0][0] == "system":
        turns[-1][1] = turns[0][1] + "\n\n" + turns[-1][1]
        del turns[0]
    for role, content in turns:
        ids += [begin] + sp.encode(space + content) + [end] if role == "user" else sp.encode(space + content) + [sp.eos_id()]
    return ids


def dialogues(model):
    forms = [("llama2", llama2, False, True), ("mistral", mistral, False, True), ("mistral", mistral_control, True, True),
             ("mistral", mistral_control, True, False)]
    for name, form, control, add_space in forms:
        sp = sentencepiece.SentencePieceProcessor(model_proto=changed(model, add_space=add_space))
        for turns in DIALOGUES:
            yield {"template": name, "control": control, "add_space": add_space, "messages": turns,
                   "ids": form(sp, turns, add_space) if control else form(sp, turns)}


def main(out):
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(list(corpus())), model_writer=buffer, model_type="bpe", vocab_size=VOCABULARY,
        byte_fallback=True, split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True, character_coverage=0.9995, user_defined_symbols=USER_DEFINED, num_threads=1,
        minloglevel=2)
    model = buffer.getvalue()
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(sp.get_piece_size())
    types = [next(t for t, f in ((2, sp.is_unknown), (3, sp.is_control), (BYTE, sp.is_byte), (1, lambda _: True)) if f(i))
             for i in ids]
    for text in USER_DEFINED:
        types[sp.piece_to_id(text)] = 4
    rng = random.Random(5)
    unused = {i for i in ids if types[i] == 1 and len(sp.id_to_piece(i)) > 1 and rng.random() < 0.3}
    variants = [variant("plain", model, rng), variant("no_prefix", model, rng, add_space=False),
                variant("unused", model, rng, unused=unused), variant("no_bytes", model, rng, with_bytes=False)]
    dump = lambda x: json.dumps(x, ensure_ascii=True, separators=(",", ":"))
    with open(out, "w") as f:
        f.write('{"note": "by scripts/make_spm_vectors.py with sentencepiece %s",\n' % sentencepiece.__version__)
        f.write(' "tokens": %s,\n' % dump([sp.id_to_piece(i) for i in ids]))
        f.write(' "scores": %s,\n' % dump([sp.get_score(i) for i in ids]))
        f.write(' "types": %s,\n "variants": [\n' % dump(types))
        for i, v in enumerate(variants):
            head = {k: v[k] for k in v if k not in ("encode", "decode")}
            f.write(dump(head)[:-1])
            for key in ("encode", "decode"):
                f.write(',\n"%s": [\n%s]' % (key, ",\n".join(dump(case) for case in v[key])))
            f.write("}%s\n" % ("," if i + 1 < len(variants) else "],"))
        f.write(' "chat": [\n%s]}\n' % ",\n".join(dump(dialogue) for dialogue in dialogues(model)))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
