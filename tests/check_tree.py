#!/usr/bin/env python3
"""Fails on what no file of the tree may hold: paths of one machine, host names in scripts, unfinished work, built files,
files of more than 700 lines that are no data, an invariant's number that two READMEs have. It looks at what git knows or would
add; in a tree without git, at everything but build folders.
"""
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 700
# Data, text under a licence of its own, and this file, which has to name what it looks for.
ANY_LENGTH = re.compile(r"tests/data/|LICENSE$|.*\.jsonl?$")
ANY_WORD = re.compile(r"tests/data/|LICENSE$|tests/check_tree\.py$")
SCRIPT = re.compile(r".*\.(sh|cmake|cmake\.in)$|(.*/)?CMakeLists\.txt$|CMakePresets\.json$|scripts/|\.ci/")
BUILT = re.compile(r".*\.(o|so(\.\d+)*|a|pyc|gguf|cubin|fatbin)$|(.*/)?(a\.out|core)$")
MACHINE_PATH = re.compile(r"(?<![\w.~$})/-])/(home|root|work|farm|tmp|Users)/[\w.]")
HOST = re.compile(r"\b(https?|ftp|ssh|git)://", re.I)
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")


def files():
    git = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"],
                         capture_output=True, text=True)
    if git.returncode == 0:
        names = git.stdout.split("\0")
    else:
        names = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*")]
        names = [n for n in names if not re.match(r"\.git/|build[-/]|.*__pycache__/", n)]
    return sorted(n for n in names if n and (ROOT / n).is_file())


def wrong_lines(name, text):
    """Problems of a text file, as (line, what)."""
    found = []
    for i, line in enumerate(text.splitlines(), 1):
        if not ANY_WORD.match(name):
            for match in MACHINE_PATH.finditer(line):
                found.append((i, f"a path of one machine: {match[0]}"))
            for match in UNFINISHED.finditer(line):
                found.append((i, f"unfinished work: {match[0]}"))
        if SCRIPT.match(name) and HOST.search(line):
            found.append((i, "names a host: packages are taken by name, through the ordinary clients"))
    n_lines = text.count("\n")
    if n_lines > MAX_LINES and not ANY_LENGTH.match(name):
        found.append((n_lines, f"more than {MAX_LINES} lines"))
    return found


def numbered(texts):
    """What is wrong with the numbers of invariants: a README's are marked **X1**, and each number is used once."""
    problems, seen = [], {}
    for name, text in texts.items():
        section = re.search(r"^#* *Invariants\n(.*?)(?=^#|^Reading order|\Z)", text, re.M | re.S)
        if not section:
            continue
        problems += [f"{name}: invariant {n}: mark it **X{n}** with the folder's letter"
                     for n in re.findall(r"^(\d+)\. ", section[1], re.M)]
        for number in re.findall(r"^- \*\*([A-Z]\d+)\*\*", section[1], re.M):
            if number in seen:
                problems.append(f"{name}: invariant {number} is also in {seen[number]}")
            seen[number] = name
    return problems


SELF_TEST = [  # name, text, problems
    ("a.c", 'x = "/%s/me/x";\n' % "home", 1),
    ("a.c", "/* see ../work/x, $HOME/root/x and ~/tmp/x */\n", 0),
    ("a.md", "written to /tmp/out.json\n", 1),
    ("a.c", "/* TODO: more */\n", 1),
    ("a.sh", "curl https://example.org/x\n", 1),
    ("a.md", "see https://example.org/x\n", 0),
    ("a.sh", 'mktemp -d "${TMPDIR:-/tmp}/kvfold.XXXXXX"\n', 0),
    ("a.c", "\n" * 701, 1),
    ("tests/data/a.json", "\n" * 701, 0),
]


def main():
    problems = [f"self-test {i}: {len(wrong_lines(name, text))} problems, expected {expected}"
                for i, (name, text, expected) in enumerate(SELF_TEST) if len(wrong_lines(name, text)) != expected]
    example = {"a": "Invariants\n- **A1** x\n- **A2** y\n", "b": "## Invariants\n1. z\n- **A2** y\n# More\n2. no\n"}
    if len(numbered(example)) != 2:
        problems.append("self-test: numbered")
    names, texts = files(), {}
    if not names:
        problems.append(f"{ROOT}: no files")
    for name in names:
        if BUILT.match(name):
            problems.append(f"{name}: a built file")
            continue
        data = (ROOT / name).read_bytes()
        if b"\0" in data:
            continue
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            if not name.startswith("tests/data/"):
                problems.append(f"{name}: is not UTF-8")
            continue
        problems += [f"{name}:{line}: {what}" for line, what in wrong_lines(name, text)]
        if name.endswith("README.md"):
            texts[name] = text
    problems += numbered(texts)
    print("\n".join(problems) or f"check_tree: {len(names)} files, all in order")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
