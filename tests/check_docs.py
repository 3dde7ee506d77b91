#!/usr/bin/env python3
"""Holds the public headers to the rules of the house.

Every KVF_API function has a comment that says what it does, names every parameter (@param a. @param b, c.), ownership
(@own), threads (@threads), errors (@errors) and cost (@cost). Each has a line in tests/test_calls*.c, which try wrong
arguments. Every header compiles alone, as C11 and as C++17. The introduction of each has an example that compiles: the
lines after " * Simple use" that stand five spaces behind the star, either whole functions or the body of one that
returns kvf_status. With --library, the shared library exports what the headers declare and nothing else (kvf__ names are
internal).
"""
import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINE_HEADERS = ("model.h", "probe.h", "runner.h", "engine.h")
TAGS = ("own", "threads", "errors", "cost")
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
DECLARATION = re.compile(r"(?P<comment>/\*\*(?:[^*]|\*(?!/))*\*/\s*)?^KVF_API\s(?P<text>[^;{]*);", re.M)
EXAMPLE = re.compile(r"^ \* Simple use\n((?: \*     .*\n)+)", re.M)
FUNCTION = re.compile(r"^(?!if\b|for\b|while\b|switch\b|do\b|else\b)\w[^;]*\)\s*\{", re.M)
COMMENT_OR_STRING = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)


def parameters(text):
    """Name and parameter names of a declaration without its comments."""
    head, inside = text.split("(", 1)
    name = re.search(r"(\w+)\s*$", head).group(1)
    inside = inside.rsplit(")", 1)[0]
    names, depth, piece, pieces = [], 0, "", []
    for c in inside:
        depth += (c == "(") - (c == ")")
        if c == "," and depth == 0:
            pieces.append(piece)
            piece = ""
        else:
            piece += c
    for piece in [*pieces, piece]:
        pointer = re.search(r"\(\s*\*\s*(\w+)\s*\)", piece)
        plain = re.search(r"(\w+)\s*(\[[^\]]*\]\s*)*$", piece.strip())
        if piece.strip() not in ("void", "", "..."):
            names.append(pointer.group(1) if pointer else plain.group(1))
    return name, names


def wrong_comment(comment, names, statuses):
    """What a function's comment lacks."""
    text = re.sub(r"^\s*\*(?!/) ?", " ", comment.strip()[3:-2], flags=re.M)
    parts = re.split(r"(?:^|\s)@(\w+)\b", text)
    problems = []
    if not re.search(r"\w+\W+\w+.*[.:]", parts[0], re.S):
        problems.append("does not begin with a sentence that says what it does")
    bodies = list(zip(parts[1::2], parts[2::2]))
    documented = []
    for tag, body in bodies:
        if tag == "param":
            words = re.match(r"\s*(\w+(?:\s*,\s*\w+)*)", body)
            words = re.split(r"\s*,\s*", words.group(1)) if words else [""]
            documented += [words[0]] + [w for w in words[1:] if w in names]
        elif not body.strip(" \n.;"):
            problems.append(f"@{tag} is empty")
    for tag in TAGS:
        if tag not in (t for t, _ in bodies):
            problems.append(f"lacks @{tag}")
    problems += [f"@param {n} is missing" for n in names if n not in documented]
    problems += [f"@param {n} names no parameter" for n in documented if n not in names]
    problems += [f"names {s}, which is no status" for s in re.findall(r"\bKVF_E_\w+", text) if s not in statuses]
    return problems


def read_header(path, statuses, n_arguments):
    """The functions that a header declares, and what is wrong with their comments."""
    text = path.read_text(encoding="utf-8")
    found, problems = [], []
    for match in DECLARATION.finditer(text):
        name, names = parameters(COMMENT_OR_STRING.sub(" ", match["text"]))
        line = text.count("\n", 0, match.start("text")) + 1
        found.append(name)
        n_arguments[name] = len(names)
        what = wrong_comment(match["comment"], names, statuses) if match["comment"] else ["has no /** comment */"]
        problems += [f"{path.name}:{line}: {name}: {w}" for w in what]
    n_api = len(re.findall(r"^KVF_API\b", text, re.M))
    if n_api != len(found):
        problems.append(f"{path.name}: {n_api} lines begin with KVF_API, {len(found)} were understood")
    return found, problems


def untried(n_arguments, calls):
    """Functions that no line of the tests of wrong arguments (tests/calls.h) tries, in all of their arguments."""
    tried = {name: len(expect) for name, expect in re.findall(r"\b[SV]\((?:'.', )?(kvf_\w+), \"(\w[\w-]*)\"", calls)}
    return [f"{name}: {n} arguments, of which tests/test_calls*.c try {tried.get(name, 0)}"
            for name, n in n_arguments.items() if n and tried.get(name) != n]


def compile_alone(headers, cc, cxx):
    problems = []
    languages = [(cc, "c", "-std=c11")] + ([(cxx, "c++", "-std=c++17")] if cxx else [])
    for compiler, language, standard in languages:
        for header in headers:
            command = [compiler, "-x", language, standard, *WARNINGS, f"-I{ROOT / 'include'}", "-"]
            run = subprocess.run(command, input=f'#include "kvfold/{header.name}"\n', capture_output=True, text=True)
            if run.returncode:
                problems.append(f"{header.name} does not compile alone as {standard[5:]}:\n{run.stderr}")
    return problems


def example(text):
    """The example in a header's introduction as a C file without its include; None when there is none."""
    found = EXAMPLE.search(text)
    if not found:
        return None
    code = "\n".join(line[7:] for line in found[1].splitlines()) + "\n"
    if FUNCTION.search(code):
        return code
    return f"kvf_status simple_use(void);\nkvf_status simple_use(void) {{\n{code}return KVF_OK;\n}}\n"


def compile_examples(headers, cc):
    problems = []
    for header in headers:
        code = example(header.read_text(encoding="utf-8"))
        if code is None:
            problems.append(f"{header.name}: has no example: a line \" * Simple use\" and lines of code below it")
            continue
        command = [cc, "-x", "c", "-std=c11", *WARNINGS, f"-I{ROOT / 'include'}", "-"]
        run = subprocess.run(command, input=f'#include "kvfold/{header.name}"\n{code}', capture_output=True, text=True)
        if run.returncode:
            problems.append(f"{header.name}: its example does not compile:\n{run.stderr}")
    return problems


def exports(nm, library, declared):
    output = subprocess.run([nm, "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1].split("@")[0] for line in output.splitlines()}
    public = {n for n in names if not n.startswith("kvf__")}
    where = Path(library).name
    problems = [f"{where}: {n} is declared and not exported" for n in sorted(declared - public)]
    return problems + [f"{where}: exports {n}, which no public header declares" for n in sorted(public - declared)]


SELF_TEST = [  # header text, a part of each problem expected
    ("/** Adds two numbers.\n *  @param a, b numbers. @own nothing. @threads any. @errors none. @cost O(1). */\n"
     "KVF_API int kvf_add(int a, int b);\n", []),
    ("/** Calls back.\n *  @param fn called. @param x [n]. @own nothing. @threads any. @errors KVF_E_NONE. @cost O(1). */\n"
     "KVF_API int kvf_call(void (*fn)(int i, int j), const int x[4]);\n", ["KVF_E_NONE, which"]),
    ("KVF_API int kvf_bare(void);\n", ["has no"]),
    ("/* Not a doc comment. */\nKVF_API int kvf_bare(void);\n", ["has no"]),
    ("/** Does it.\n *  @param a x. @own nothing. @threads any. @cost O(1). */\nKVF_API int kvf_f(int a, int b);\n",
     ["lacks @errors", "@param b is missing"]),
    ("/** @param a x. @param c y. @own . @threads any. @errors none. @cost O(1). */\nKVF_API int kvf_g(int a);\n",
     ["does not begin", "@own is empty", "@param c names no"]),
]

def compile_snippets(page, cc):
    """Each block of C in a page of docs/ is a few functions that compile alone."""
    problems = []
    blocks = re.findall(r"^```c\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if not blocks:
        problems.append(f"{page.name}: has no snippet")
    for i, block in enumerate(blocks):
        source = "#include <kvfold/engine.h>\n#include <kvfold/kvfold.h>\n#include <time.h>\n" + block
        command = [cc, "-x", "c", "-std=c11", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-fsyntax-only",
                   f"-I{ROOT / 'include'}", "-"]
        run = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        if run.returncode:
            problems.append(f"{page.name}: snippet {i + 1} does not compile:\n{run.stderr}")
    return problems


EXAMPLE_SELF_TEST = [  # header text, a part of the code expected
    ("/* x.h\n *\n * Simple use\n *     int a = 1;\n *     return a;\n *\n * Rules\n *     none\n */\n",
     "(void) {\nint a = 1;\nreturn a;\nreturn KVF_OK;\n}\n"),
    ("/* x.h\n *\n * Simple use\n *     int f(int a) {\n *         return a;\n *     }\n */\n",
     "int f(int a) {\n    return a;\n}\n"),
]


def self_test():
    problems = []
    with tempfile.TemporaryDirectory() as name:
        header = Path(name) / "x.h"
        for i, (text, expected) in enumerate(SELF_TEST):
            header.write_text(text)
            found = read_header(header, {"KVF_E_IO"}, {})[1]
            if len(found) != len(expected) or not all(any(e in f for f in found) for e in expected):
                problems.append(f"self-test {i}: expected {expected}, found {found}")
    calls = 'V(kvf_a, "a", x) S(\'m\', kvf_b, "i-", x, y)'
    if len(untried({"kvf_a": 1, "kvf_b": 2, "kvf_c": 0}, calls)) or len(untried({"kvf_b": 3, "kvf_d": 1}, calls)) != 2:
        problems.append("self-test: untried")
    for text, expected in EXAMPLE_SELF_TEST:
        if (found := example(text)) is None or expected not in found:
            problems.append(f"self-test: expected {expected!r} in the example, found {found!r}")
    return problems


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--cc", default="cc")
    arguments.add_argument("--cxx", default="")
    arguments.add_argument("--nm", default="nm")
    arguments.add_argument("--library", help="libkvfold.so")
    arguments.add_argument("--engine-library", help="libkvfold_engine.so")
    options = arguments.parse_args()

    headers = sorted((ROOT / "include/kvfold").glob("*.h"))
    statuses = set(re.findall(r"X\((KVF_E_\w+),", (ROOT / "include/kvfold/base.h").read_text(encoding="utf-8")))
    problems, core, engine, n_arguments = self_test(), set(), set(), {}
    for header in headers:
        found, wrong = read_header(header, statuses, n_arguments)
        problems += wrong
        (engine if header.name in ENGINE_HEADERS else core).update(found)
    if not core or not engine:
        problems.append("no function was found in the headers")
    calls = "".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "tests").glob("test_calls*.c")))
    problems += untried(n_arguments, calls)
    problems += compile_alone(headers, options.cc, options.cxx)
    problems += compile_examples(headers, options.cc)
    problems += compile_snippets(ROOT / "docs/embedding.md", options.cc)
    if options.library:
        problems += exports(options.nm, options.library, core)
    if options.engine_library:
        problems += exports(options.nm, options.engine_library, engine)
    print("\n".join(problems) or f"check_docs: {len(headers)} headers, {len(core | engine)} functions, all in order")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
