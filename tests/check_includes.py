#!/usr/bin/env python3
"""Fails on an #include that climbs the floors of the house.

A folder may include itself, what stands below it, and the public headers; folders on one floor do not include one
another; tools/ and examples/ see public headers and base/ alone, eval/ sees tools/ too; tests/, bench/ and fuzz/, which check and measure parts,
see all.
Libraries other than libc are named here with the folders that may use them. Usage: check_includes.py [ROOT]. It first
proves itself on a made-up tree.
"""
import re
import sys
import tempfile
from pathlib import Path

FLOORS = {"base": 0, "blockmgr": 1, "comm": 2, "attention": 2, "d2o_policy": 2, "model": 3, "scheduler": 3, "engine": 4}
USERS = {"tools": (), "eval": ("tools",), "bindings": (), "examples": ()}  # public headers and base/, and these folders
ANYTHING = ("tests", "bench", "fuzz")
LIBRARIES = [  # header pattern, folders that may include it
    (r"dnnl.*", ("model", "bench", "tests")),
    (r"pcre2\.h", ("model", "tests")),
    (r"jansson\.h", ("tools", "eval", "bench", "tests")),
    (r"(zlib|zstd)\.h", ("tools", "tests")),
    (r"xxhash\.h", ("blockmgr", "engine", "tools", "bench")),
    (r"criterion/.*", ("tests",)),
    (r"cuda.*|cublas.*|nccl.*|mpi\.h", ("*/cuda", "comm", "tests")),
]
SUFFIXES = {".c", ".h", ".cu", ".cuh", ".cpp", ".hpp"}
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.M)


def folder_of(path):
    """The folder whose floor counts, for a path relative to the root."""
    return path.parts[0] if len(path.parts) > 1 else ""


def resolve(root, source, name):
    """The file an include means, relative to the root, or None for one of the system."""
    for base in (source.parent, root, root / "include"):
        candidate = (base / name).resolve()
        if candidate.is_file() and candidate.is_relative_to(root):
            return candidate.relative_to(root)
    return None


def wrong_library(folder, source, name):
    for pattern, folders in LIBRARIES:
        if re.fullmatch(pattern, name):
            allowed = folder in folders or ("*/cuda" in folders and "cuda" in source.parts[:-1])
            return None if allowed else f"only {', '.join(folders)} may include it"
    return None


def wrong_target(folder, target):
    """Why a file of `folder` may not include `target`, or None."""
    to = folder_of(target)
    if to == "include" or to == folder or folder in ANYTHING:
        return None
    if folder == "include":
        return "public headers include public headers alone"
    if folder in USERS:
        may = ("base", *USERS[folder])
        return None if to in may else f"{folder}/ may include public headers and {', '.join(may)} alone"
    if folder not in FLOORS:
        return f"{folder}/ has no floor: name it in check_includes.py"
    if to not in FLOORS:
        return f"{to}/ stands above {folder}/"
    if FLOORS[to] < FLOORS[folder]:
        return None
    where = "on the same floor as" if FLOORS[to] == FLOORS[folder] else "above"
    return f"{to}/ stands {where} {folder}/"


def check(root):
    problems, n_files, n_includes = [], 0, 0
    folders = ("include", *FLOORS, *USERS, *ANYTHING)
    for source in sorted(p for f in folders for p in (root / f).rglob("*") if p.suffix in SUFFIXES):
        path = source.relative_to(root)
        folder, text = folder_of(path), source.read_text(encoding="utf-8")
        n_files += 1
        for match in INCLUDE.finditer(text):
            n_includes += 1
            quote, name = match.groups()
            target = resolve(root, source, name)
            if target:
                why = wrong_target(folder, target)
            elif quote == '"':
                why = "no such file in the tree"
            else:
                why = wrong_library(folder, path, name)
            if why:
                line = text.count("\n", 0, match.start()) + 1
                problems.append(f"{path}:{line}: includes {name}: {why}")
    return problems, n_files, n_includes


SELF_TEST = [  # file, its include, whether that is wrong
    ("base/a.c", '"kvfold/base.h"', False),
    ("base/b.c", '"blockmgr/blockmgr.h"', True),
    ("base/c.c", "<blockmgr/blockmgr.h>", True),
    ("base/d.c", "<stdio.h>", False),
    ("base/e.c", "<pcre2.h>", True),
    ("base/f.c", "<cuda_runtime.h>", True),
    ("base/cuda/g.cu", "<cuda_runtime.h>", False),
    ("base/cuda/h.cu", '"../base.h"', False),
    ("base/cuda/i.cu", '"../../blockmgr/blockmgr.h"', True),
    ("blockmgr/j.c", '"base/base.h"', False),
    ("blockmgr/k.c", '"missing.h"', True),
    ("attention/l.c", '"d2o_policy/policy.h"', True),
    ("d2o_policy/cpu/m.c", '"d2o_policy/policy.h"', False),
    ("scheduler/n.c", '"kvfold/policy.h"', False),
    ("scheduler/o.c", '"model/model.h"', True),
    ("engine/p.c", '"model/model.h"', False),
    ("tools/q.c", '"base/base.h"', False),
    ("tools/r.c", '"engine/engine.h"', True),
    ("tools/s.c", '"engine/engine.h" // a word', True),
    ("tools/w.c", '"eval/eval.h"', True),
    ("eval/x.c", '"tools/cli.h"', False),
    ("eval/y.c", '"engine/engine.h"', True),
    ("examples/t.c", '"blockmgr/blockmgr.h"', True),
    ("tests/u.c", '"engine/engine.h"', False),
    ("include/kvfold/v.h", '"base/base.h"', True),
]


def self_test():
    with tempfile.TemporaryDirectory() as name:
        root = Path(name).resolve()
        shared = ["include/kvfold/base.h", "include/kvfold/policy.h", "base/base.h", "blockmgr/blockmgr.h",
                  "d2o_policy/policy.h", "model/model.h", "engine/engine.h", "tools/cli.h", "eval/eval.h"]
        for path in shared:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text("")
        for path, include, _ in SELF_TEST:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(f"/* x */\n  #  include {include}\n")
        found = {p.split(":")[0] for p in check(root)[0]}
        expected = {path for path, _, wrong in SELF_TEST if wrong}
        return [f"self-test: {p} was {'not ' if p in expected else ''}reported" for p in sorted(found ^ expected)]


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    problems, n_files, n_includes = check(root)
    if n_includes == 0:
        problems.append(f"{root}: no include was found")
    problems += self_test()
    print("\n".join(problems) or f"check_includes: {n_files} files, {n_includes} includes, none climbs")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
