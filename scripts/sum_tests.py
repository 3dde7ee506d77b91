#!/usr/bin/env python3
"""Sums up a folder of test results: the JUnit files that ctest writes, and files of lines "STAGE STATUS COUNT NAME".

A Criterion binary counts by its "Synthesis:" line and its [SKIP] lines, anything else counts one. The last line printed is
"N passed, N failed" (and ", N skipped"); the exit code is 1 when something failed or nothing passed.
Usage: sum_tests.py FOLDER [SECONDS], or --self-test
"""
import re
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

SYNTHESIS = re.compile(r"Synthesis: Tested: (\d+) \| Passing: (\d+) \| Failing: (\d+) \| Crashing: (\d+)")


def count_case(case):
    """Counts of one ctest test, and the lines that tell what failed or was skipped."""
    name, output = case.get("name"), case.findtext("system-out") or ""
    failed = case.find("failure") is not None or case.get("status") == "fail"
    if not failed and (case.find("skipped") is not None or case.get("status") in ("notrun", "disabled")):
        return Counter(skipped=1), [f"skipped: {name}"]
    synthesis = SYNTHESIS.findall(output)
    if not synthesis:
        return (Counter(failed=1), [f"failed: {name}"]) if failed else (Counter(passed=1), [])
    skipped = re.findall(r"^\[SKIP\] (.*)$", output, re.M)
    counts = Counter(skipped=len(skipped))
    for _, passing, failing, _ in synthesis:  # those that crash are among the failing
        counts.update(passed=int(passing), failed=int(failing))
    lines = [f"skipped: {s}" for s in skipped]
    lines += [f"failed: {f}" for f in re.findall(r"^\[FAIL\] ([^ ]+?):? ", output, re.M)]
    if failed and not counts["failed"]:  # every test passed, and a sanitizer or the exit code still says no
        counts["failed"] += 1
        lines.append(f"failed: {name}: see its output")
    return counts, lines


def read_folder(folder):
    """Counts by stage, and the lines to show."""
    stages, lines = {}, []
    for path in sorted(folder.glob("*.xml")):
        # Tests write what they like; XML does not take every byte.
        text = re.sub(r"[\x00-\x08\x0b-\x1f\ufffe\uffff]", "?", path.read_text(encoding="utf-8", errors="replace"))
        for case in ElementTree.fromstring(text.encode()).iter("testcase"):
            counts, told = count_case(case)
            stages.setdefault(path.stem, Counter()).update(counts)
            lines += [f"{path.stem}: {line}" for line in told]
    for path in sorted(folder.glob("*.txt")):
        for line in path.read_text(encoding="utf-8").splitlines():
            stage, status, count, name = line.split(" ", 3)
            stages.setdefault(stage, Counter())[status] += int(count)
            if status != "passed":
                lines.append(f"{stage}: {status}: {name}")
    # ctest's own failure is told by the tests that failed.
    for stage, counts in stages.items():
        if f"{stage}: failed: ctest" in lines and counts["failed"] > 1:
            lines.remove(f"{stage}: failed: ctest")
            counts["failed"] -= 1
    return stages, lines


SELF_TEST = """<testsuite>
<testcase name="a" status="run"><system-out>[SKIP] s::x: no model
[====] Synthesis: Tested: 3 | Passing: 3 | Failing: 0 | Crashing: 0 </system-out></testcase>
<testcase name="b" status="fail"><failure/><system-out>[FAIL] s::y: (0.00s)
[FAIL] s::z: CRASH!
[====] Synthesis: Tested: 5 | Passing: 3 | Failing: 2 | Crashing: 1 </system-out></testcase>
<testcase name="leaks" status="fail"><failure/><system-out>
[====] Synthesis: Tested: 2 | Passing: 2 | Failing: 0 | Crashing: 0
LeakSanitizer: \x01</system-out></testcase>
<testcase name="plain" status="run"><system-out>ok</system-out></testcase>
<testcase name="away" status="notrun"><skipped/><system-out></system-out></testcase>
<testcase name="broken" status="fail"><failure/><system-out></system-out></testcase>
</testsuite>"""


def self_test():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "x.xml").write_text(SELF_TEST)
        (folder / "x.txt").write_text("x failed 1 ctest\nx passed 1 build\n")
        (folder / "y.txt").write_text("y failed 1 ctest\n")
        stages, lines = read_folder(folder)
    good = stages == {"x": Counter(passed=10, failed=4, skipped=2), "y": Counter(failed=1)} and len(lines) == 7
    print("sum_tests: self-test passed" if good else f"self-test: {stages} {lines}")
    return 0 if good else 1


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    stages, lines = read_folder(Path(sys.argv[1]))
    for line in sorted(lines, key=lambda text: "failed:" in text):
        print(line)
    total = Counter()
    for stage, counts in stages.items():
        total.update(counts)
        print(f"{stage}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    if len(sys.argv) > 2:
        print(f"in {sys.argv[2]} s")
    skipped = f", {total['skipped']} skipped" if total["skipped"] else ""
    print(f"{total['passed']} passed, {total['failed']} failed{skipped}")
    return 1 if total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
