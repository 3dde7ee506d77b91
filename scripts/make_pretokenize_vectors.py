#!/usr/bin/env python3
"""Cuts texts into words with PyPI tokenizers, by the definitions that models were published with, and writes them down:
what model/pretokenize.c is tested against. Needs PyPI tokenizers.

    make_pretokenize_vectors.py tests/data/pretokenize_vectors.json

The texts, and for each pre-tokenizer the lengths in bytes of the words of each text.
"""
import json
import random
import sys

import tokenizers
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r"\s+(?!\S)|\s+")


def split(pattern):
    return Split(Regex(pattern), behavior="isolated")


# The second expression of "default" is GPT-2's; that one is the library's own.
GPT2 = ByteLevel(add_prefix_space=False, use_regex=True)
KINDS = {
    "gpt-2": GPT2,
    "smollm": Sequence([Digits(individual_digits=True), GPT2]),
    "llama-bpe": split(LLAMA3 % "{1,3}"),
    "qwen2": split(LLAMA3 % ""),
    "default": Sequence([split(r"[\p{P}\$\+<=>\^~\|]+"),
                         split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
                         split(r"\p{N}+"), split(r"[0-9][0-9][0-9]")]),
}
TEXTS = [
    "a", " ", "  ", "   a", "a ", "a  ", "Hello  world's 1234, x", "1", "12", "123", "1234", "1234567890", "12 345 6789", " 7", "  77",
    "3.14159e-10", "0x1F 1,234,567.89", "2024-01-31T12:30", "x2y33z444w5555", "٣٤٥٦ ४५६७ 五六 Ⅷ ½ ²³ ①",
    "I'm you're he's we've they'd I'll don't", "I'M YOU'RE HE'S WE'VE THEY'D I'LL DON'T", "'s 't 're 've 'm 'll 'd", "''s 'x '",
    "it's'll", "'\u017f 'S \u2019s don\u2019t", "'lla 'red 'sa", "o'clock rock'n'roll", "'ſ 'K 'ſa",
    "\n", "\n\n", "\r\n\r\n", "a\nb", "a\n\nb", "a \n b", "a\n  b", "  \n\n  ", "a\r\nb\rc", "x;\n\n\ty", "!\n\n?", " !\n", "...\r\n...", "\t\t\tif",
    "a\t b", " \t \n\t ", "end.   ", "\n \n \n", "a\u000bb\u000cc", "\x1c\x1d\x1e\x1f a\x1cb",
    "Déjà vu: où est le café?", "Привет, мир! Как дела?", "你好，世界。这是一个测试。", "日本語のテキスト、カタカナ。", "날씨가 좋다!", "مرحبا بالعالم ١٢٣",
    "नमस्ते दुनिया", "สวัสดีชาวโลก", "e\u0301a\u0308", "\U0001f642\U0001f642 \U0001f468\u200d\U0001f469\u200d\U0001f467", "x\U0001f642y 1\ufe0f\u20e3",
    "a\u00a0b", "a\u2003b\u2028c\u2029d", "a\u0085b", "a\u180eb", "a\u200bb", "\ufeffa", "a\u3000\u3000b", "ﬁ ǅ ʰ ª º", "\U0001d400\U0001d7ce", "\u2160\u2170",
    "f(x) = x**2 + 3*y;", "if (a && b || !c) { return a->b[0]; }", "#include <stdio.h>\n\nint main(void) {\n    return 0;\n}\n",
    "file:///a?b=c&d=%20", "<|im_start|>user\nhi<|im_end|>\n", "$100 + 5% = ^~|`", "a_b-c", "--help", "snake_case camelCase", "«¿qué?» — „ja“ …",
    "\u00ad\u00b4\u00a8", "€5 £6 ¥7 5° ©2024", "\ufffd\ufffd", "\u0e01\u0e33 \u0300", "   leading", "\u00a0\u00a0x", "x\u00a0\u00a0", "\u3000\n\u3000x",
]


def random_texts(rng, n):
    pieces = [" ", "  ", "\n", "\r\n", "\t", "a", "Bc", "é", "ж", "中文", "깰", "\U0001f642", "1", "23", "4567", "٣", "½", "'s", "'LL", "'", ".", ",",
              "!?", "-", "_", "\u00a0", "\u3000", "\u2028", "\u0301", "$", "^", "(", "\u200b", "\u0085"]
    for _ in range(n):
        yield "".join(rng.choice(pieces) for _ in range(rng.randrange(2, 14)))


def words(kind, text):
    bounds = [bound for _, bound in kind.pre_tokenize_str(text)]
    assert [a for a, _ in bounds] == [0] + [b for _, b in bounds][:-1] and bounds[-1][1] == len(text), text
    return [len(text[a:b].encode()) for a, b in bounds]


def main(out):
    texts = TEXTS + list(random_texts(random.Random(9), 150))
    dump = lambda x: json.dumps(x, ensure_ascii=True, separators=(",", ":"))
    with open(out, "w") as f:
        f.write('{"note": "by scripts/make_pretokenize_vectors.py with tokenizers %s",\n' % tokenizers.__version__)
        f.write(' "texts": [\n%s],\n "kinds": {\n' % ",\n".join(dump(text) for text in texts))
        lists = ('"%s": [\n%s]' % (name, ",\n".join(dump(words(kind, text)) for text in texts)) for name, kind in KINDS.items())
        f.write(",\n".join(lists) + "}}\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
