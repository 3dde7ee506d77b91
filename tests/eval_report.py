#!/usr/bin/env python3
"""kvfold eval report, against the same figures computed here. Usage: eval_report.py KVFOLD"""
import html.parser
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
KVFOLD, WORK = sys.argv[1], Path(tempfile.mkdtemp(prefix="kvfold."))


def run(*args, code=0):
    p = subprocess.run([KVFOLD, "eval", "report", *map(str, args)], capture_output=True, text=True)
    assert p.returncode == code, (args, p.returncode, p.stderr)
    assert not re.search("Sanitizer|runtime error", p.stderr), p.stderr
    return p.stdout, p.stderr


def records(name, *args):
    path = WORK / name
    subprocess.run([sys.executable, HERE / "eval_records.py", path, "--small", *args], check=True)
    return path, [json.loads(line) for line in path.read_text().splitlines()]


def write(name, lines):
    path = WORK / name
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


# ---- The same statistics, again -------------------------------------------------------------------------------

def splitmix(state):
    mask = 2 ** 64 - 1
    while True:
        state = (state + 0x9e3779b97f4a7c15) & mask
        x = ((state ^ state >> 30) * 0xbf58476d1ce4e5b9) & mask
        x = ((x ^ x >> 27) * 0x94d049bb133111eb) & mask
        yield x ^ x >> 31


def percentile(values, share):
    values = sorted(values)
    at = share * (len(values) - 1)
    k = int(at)
    return values[k] if k + 1 == len(values) else values[k] + (values[k + 1] - values[k]) * (at - k)


def bootstrap(units, statistic):
    """units: lists of rows that are drawn together; statistic: of a list of rows."""
    draws, n, values = splitmix(1), len(units), []
    for _ in range(10000):
        rows = [row for _ in range(n) for row in units[(next(draws) >> 32) * n >> 32]]
        values.append(statistic(rows))
    value = statistic([row for unit in units for row in unit])
    return [value, percentile(values, .025), percentile(values, .975)]


def mean(rows):
    return sum(rows) / len(rows)


def ratio(rows):
    return sum(a for a, _ in rows) / sum(b for _, b in rows)


def near(found, expected, tolerance=2e-6):
    assert len(found) == len(expected), (found, expected)
    for f, e in zip(found, expected):
        assert abs(f - e) <= tolerance * max(1, abs(e)), (found, expected)


def place(cell):
    return tuple(cell.get(k, 0 if k in ("offset", "sample") else None)
                 for k in ("source", "context", "offset", "sample", "task", "placement", "depth"))


def cells_of(lines, **wanted):
    out = {}
    for line in lines:
        if line["record"] == "cell" and all(line.get(k) == v for k, v in wanted.items()):
            out[place(line)] = line
    return out


def section(report, measure, table=None):
    return next(s for s in report["sections"] if s["measure"] == measure and s["table"] == table)


def group(section, by, **wanted):
    return next(g for g in section["groups"] if g["by"] == by and all(g[k] == v for k, v in wanted.items()))


def score(section, group, policy, rho):
    return group["scores"][section["policies"].index(policy)][section["rhos"].index(rho)]


# ---- Checks ---------------------------------------------------------------------------------------------------

def check_texts():
    path, lines = records("texts.jsonl", "--policies", "4")
    report = json.loads(run(path, "--json")[0])
    s, full = section(report, "divergence"), {place(t)[:3]: t for t in lines if t["record"] == "text"}
    assert s["figure"] == "kl" and s["baselines"] == ["h2o", "h2o"] and s["contexts"] == [1024, 2048]
    assert s["policies"] == ["fold", "d2o", "h2o", "roco"] and s["rhos"] == [.2, .4]
    for policy, rho in (("fold", .2), ("roco", .4)):
        mine = cells_of(lines, policy=policy, rho=rho, table=None)
        base = cells_of(lines, policy="h2o", rho=rho, table=None)
        for by, cells in (("all", mine), ("context", {k: c for k, c in mine.items() if c["context"] == 2048})):
            g = group(s, by, context=2048 if by == "context" else None)
            found = score(s, g, policy, rho)
            assert found["n"] == found["paired"] == g["units"] == len(cells) and not found["empty"]
            near(found["kl"], bootstrap([[c["kl"]] for c in cells.values()], mean))
            near(found["agree"], bootstrap([[c["agree"]] for c in cells.values()], mean))
            more = [[c["nll"] - full[k[:3]]["full"]["nll"]] for k, c in cells.items()]
            near(found["nll_more"], bootstrap(more, mean))
            near(found["ratio"], bootstrap([[(c["kl"], base[k]["kl"])] for k, c in cells.items()], ratio))
            near(found["more"], bootstrap([[c["kl"] - base[k]["kl"]] for k, c in cells.items()], mean))
            held = [c["held_blocks"] / c["target_blocks"] for c in cells.values()]
            near([found["held"], found["held_most"]], [mean(held), max(held)])
    sources = json.loads(run(path, "--json", "--resample", "sources")[0])
    t = section(sources, "divergence")
    units = {}
    for k, c in cells_of(lines, policy="fold", rho=.2).items(): units.setdefault(k[0], []).append(c["kl"])
    near(score(t, group(t, "all"), "fold", .2)["kl"], bootstrap(list(units.values()), mean))
    g = group(s, "context and kind", context=1024, kind="code")
    kinds = [c["kl"] for c in cells_of(lines, policy="fold", rho=.2).values() if c["kind"] == "code" and c["context"] == 1024]
    near(score(s, g, "fold", .2)["kl"][:1], [mean(kinds)])
    return path, lines, report


def check_split(path, lines):
    only = json.loads(run(path, "--json", "--only", "text-0,text-2")[0])
    rest = json.loads(run(path, "--json", "--except", "text-1,text-3")[0])
    assert only["sections"] == rest["sections"] and only["left_out"] == rest["left_out"] > 0
    s = section(only, "divergence")
    assert {u["source"] for u in s["units"]} == {"text-0", "text-2"}
    near(score(s, group(s, "all"), "d2o", .4)["kl"][:1], [mean([c["kl"] for c in cells_of(lines, policy="d2o", rho=.4).values()
                                                               if c["source"] in ("text-0", "text-2")])])
    _, err = run(path, "--only", "text-9", code=2)
    assert "--only text-9: no record is of that source; there are text-0" in err, err
    _, err = run(path, "--only", "text-0", "--except", "text-0", code=2)
    assert "no records are left" in err, err


def check_baselines(path, lines):
    best = section(json.loads(run(path, "--json", "--baseline", "best")[0]), "divergence")
    for i, rho in enumerate((.2, .4)):
        means = {p: mean([c["kl"] for c in cells_of(lines, policy=p, rho=rho).values()]) for p in ("d2o", "h2o", "roco")}
        assert best["baselines"][i] == min(means, key=means.get), (means, best["baselines"])
    named = section(json.loads(run(path, "--json", "--baseline", "fold")[0]), "divergence")
    assert named["baselines"] == ["fold", "fold"] and score(named, group(named, "all"), "fold", .2)["ratio"] == [1, 1, 1]
    _, err = run(path, "--baseline", "h3o", code=2)
    assert "--baseline h3o: no record is of that policy; there are best, fold, d2o, h2o, roco" in err, err
    # a policy with gaps is not the best of those without: here roco misses one place
    gaps = [c for c in lines if not (c.get("policy") == "roco" and c["source"] == "text-0" and c["context"] == 1024)]
    some = section(json.loads(run(write("gaps.jsonl", gaps), "--json", "--baseline", "best")[0]), "divergence")
    assert "roco" not in some["baselines"], some["baselines"]
    found = score(some, group(some, "all"), "roco", .2)
    assert found["missing"] == 1 and found["paired"] == found["n"] == group(some, "all")["units"] - 1, found


def check_tasks():
    path, lines = records("tasks.jsonl", "--policies", "12", "--tasks", "--ablation")
    report = json.loads(run(path, "--json")[0])
    assert [(s["measure"], s["table"]) for s in report["sections"]] == [
        ("divergence", None), ("recall", None), ("needle", None), ("divergence", "4"), ("divergence", "9")]
    s, counted, dropped = section(report, "recall"), {}, 0
    mine = cells_of(lines, measure="recall", policy="fold", rho=.2)
    for g in (g for g in s["groups"] if g["by"] == "cell"):
        cells = {k: c for k, c in mine.items() if (c["task"], c["placement"], c["context"]) == (g["task"], g["placement"], g["context"])}
        full = mean([c["full_exact"] for c in cells.values()])
        near([g["full"]], [full])
        assert g["units"] == len(cells) and g["counts"] == (full >= .6), g
        near(score(s, g, "fold", .2)["exact"][:1], [mean([c["exact"] for c in cells.values()])])
        if g["counts"]: counted.update(cells)
        dropped += not g["counts"]
    assert dropped and counted
    near([group(s, "all")["full"]], [mean([c["full_exact"] for c in counted.values()])])
    near([group(s, "all")["full_hits"]], [mean([c["full_hits"] / c["n_answer"] for c in counted.values()])])
    order = [place(u) for u in s["units"] if place(u) in counted]
    order.sort(key=list(mine).index)  # the units' order is that of the records
    for figure, of in (("exact", lambda c: c["exact"]), ("hits", lambda c: c["hits"] / c["n_answer"])):
        near(score(s, group(s, "all"), "fold", .2)[figure], bootstrap([[of(counted[k])] for k in order], mean))
    for g in (g for g in s["groups"] if g["by"] == "task and placement"):
        inside = [c["exact"] for c in counted.values() if (c["task"], c["placement"]) == (g["task"], g["placement"])]
        near(score(s, g, "fold", .2)["exact"][:1], [mean(inside)])
    for table, base in (("4", "softmax"), ("9", "3:1")):  # the variant that is d2o as it is
        ablation = section(report, "divergence", table)
        assert ablation["baselines"] == [base] and group(ablation, "all")["units"] == 4, ablation["baselines"]
    assert "reciprocal" in section(report, "divergence", "4")["policies"]  # the name is the table's own
    near(score(s, group(s, "all"), "fold", .2)["nll_more"][:1], [mean([c["nll"] - .04 for c in counted.values()])])
    text, _ = run(path)
    assert "Ablation, table 9: heavy hitters" in text and "Not counted" in text and "tracking, inside, context 1,024" in text
    return path


def check_cells(lines):
    """Duplicates, empty cells, cells that hold too much, policies of one label."""
    cell = next(c for c in lines if c.get("policy") == "fold" and c["rho"] == .2)
    again = {**cell, "kl": 5.0, "unknown": [1, {"x": 2}]}
    report = json.loads(run(write("again.jsonl", lines), write("more.jsonl", [again]), "--json")[0])
    assert report["replaced"] == 1
    s = section(report, "divergence")
    at = [place(u) for u in s["units"]].index(place(cell))
    assert s["values"]["kl"][s["policies"].index("fold")][s["rhos"].index(.2)][at] == 5
    longer = [{**c, "n_scored": 24} for c in lines if c["record"] != "run"]  # other places: not what is there replaced
    report = json.loads(run(write("longer.jsonl", lines + longer), "--json")[0])
    assert report["replaced"] == 0 and group(section(report, "divergence"), "all")["units"] == 2 * group(s, "all")["units"]
    empty = {k: cell[k] for k in ("record", "measure", "source", "kind", "context", "offset", "sample", "n_scored", "policy", "rho")}
    empty.update(policy_options=cell["policy_options"], empty="no | budget meets it")
    full = {**next(c for c in lines if c.get("policy") == "fold" and c["rho"] == .4)}
    full["held_blocks"] = full["target_blocks"] * 1.02
    path = write("empty.jsonl", lines + [empty, full])
    s = section(json.loads(run(path, "--json")[0]), "divergence")
    found = score(s, group(s, "all"), "fold", .2)
    assert found["empty"] == 1 and found["why"] == "no | budget meets it" and found["n"] == found["paired"] == group(s, "all")["units"] - 1
    assert score(s, group(s, "all"), "fold", .4)["over"] == 1
    text, _ = run(path, "--markdown", WORK / "empty.md")
    for out in (text, (WORK / "empty.md").read_text()):
        assert "fold at rho 0.2: 1 empty: no | budget meets it" in out and "fold at rho 0.4: 1 held more than 101%" in out, out
    other = [{**c, "policy_options": {"policy": "h2o", "merge": "mass", "rho": c["rho"]}} for c in lines if c.get("policy") == "h2o"]
    names = section(json.loads(run(write("other.jsonl", lines + other), "--json")[0]), "divergence")["policies"]
    assert "h2o" in names and "h2o merge=mass" in names, names


def check_lines(lines):
    """What is no record is told by file and line, and costs itself alone."""
    torn = json.dumps(lines[-1])
    path = WORK / "torn.jsonl"
    bad = ["{broken", "[1]", '{"a": 1}', '{"record": "other"}', '{"record": "cell", "measure": "nll", "source": "x", "policy": "p"}',
           '{"record": "cell", "measure": "nll", "source": "x", "policy": "p", "rho": 0.5}',
           '{"record": "cell", "measure": "nll", "source": "x", "policy": "p", "rho": 0.5, "nll_by_token": [1, 2], "kl_by_token": [1]}',
           '{"record": "cell", "measure": "nll", "source": "x", "policy": "p", "rho": 0.5, "nll": 1, "group_sizes": [[1, 2], [3]]}',
           '{"record": "cell", "measure": "nll", "source": 5, "policy": "p", "rho": "x", "nll": 1}', ""]
    path.write_text("".join(json.dumps(x) + "\n" for x in lines[:-1]) + "\n".join(bad) + "\n" + torn[:len(torn) // 2])
    out, err = run(path, "--json", code=1)
    n = len(lines) - 1
    for i, what in enumerate(["not JSON", "is a list, no record", "has no `record`", "record other: this version", "rho is missing",
                              "the cell has no figures", "kl_by_token: is not as long",
                              "group_sizes: must be a list of a list of numbers", "source is missing"], n + 1):
        assert re.search(rf"{re.escape(str(path))}:{i}: .*{re.escape(what)}", err), (what, err)
    assert f"{path}:{n + len(bad) + 1}: a torn line" in err, err
    assert json.loads(out)["bad_lines"] == 10
    many = write("many.jsonl", lines + ["{"] * 25)
    err = run(many, code=1)[1]
    assert err.count("not JSON") == 10 and "15 more such lines" in err, err


def check_usage(path, lines):
    for args, what in ((("/nonexistent",), "No such file"), ((), "name the files"), ((write("none.jsonl", lines[:1]),), "no cells"),
                       ((path, "--html", path), "is a file of records that is read"),
                       ((path, "--html", WORK / "x", "--markdown", WORK / "x"), "would both write to"),
                       ((path, "--markdown", "-"), "name a file"), ((path, "--resample", "all"), "resample")):
        assert what in run(*args, code=2)[1], (args, what)
    foreign = {**lines[0], "model": {**lines[0]["model"], "xxh3": "11"}}
    err = run(path, write("foreign.jsonl", [foreign]), code=2)[1]
    assert "the records are of runs with model" in err, err
    moved = {**lines[0], "model": {**lines[0]["model"], "file": "elsewhere.gguf"}}
    run(path, write("moved.jsonl", [moved]))
    assert "could not be opened" in run(path, "--html", WORK / "no" / "x.html", code=3)[1]
    assert run("/dev/stdin", code=2)


def check_one_place():
    """A single place: values without intervals; nll alone; no full cache's record."""
    cell = {"record": "cell", "measure": "nll", "source": "x", "context": 64, "policy": "p", "rho": .5, "nll_by_token": [1, 2, None]}
    path = write("one.jsonl", [cell, {**cell, "policy": "q", "nll": 1.25, "nll_by_token": [1, 1.5]}])
    s = section(json.loads(run(path, "--json", "--html", WORK / "one.html", "--markdown", WORK / "one.md")[0]), "nll")
    assert score(s, group(s, "all"), "q", .5)["nll"] == [1.25, None, None] and s["baselines"] == [None]
    run(path)


def check_r6_winners():
    """Two rhos with a winner each: of the tiles, and of the tables. Five places are few, and are called so."""
    cells = [{"record": "cell", "measure": "nll", "source": "x", "context": 64, "offset": i, "policy": p, "rho": rho, "nll": nll + i / 100}
             for i in range(5) for p, rho, nll in (("a", .1, 2), ("b", .1, 3), ("c", .1, 2.5), ("full", .1, 1), ("a", .5, 3), ("b", .5, 2), ("c", .5, 2.5))]
    out, _ = run(write("two.jsonl", cells), "--html", WORK / "two.html", "--markdown", WORK / "two.md")
    data = json.loads(Page((WORK / "two.html").read_text()).scripts[0])
    s = section(data, "nll")
    assert s["rhos"] == [.1, .5] and s["best"] == ["a", "b"], s["best"]
    assert [re.findall(r"^[abc] ", t, re.M) for t in out.split("\nrho ")[1:]] == [["a ", "c ", "b "], ["b ", "c ", "a "]], out
    assert data["few"] == 20 and score(s, group(s, "all"), "a", .1)["drawn"] == 5
    for text in (out, (WORK / "two.md").read_text()):
        assert "Few: drawn from 5, under 20;" in text and re.search(r"2\.020 ?\S* \[2\.0\d+, 2\.0\d+\] few", text.replace("**", "")), text
    many = [{**c, "offset": c["offset"] + 5 * k} for c in cells for k in range(4)]
    assert "few" not in run(write("many.jsonl", many))[0].lower()
    tiles = page_text(WORK / "two.html")
    if tiles is not None: assert re.search(r"a</b><span>best at rho 0\.1.*?b</b><span>best at rho 0\.5", tiles, re.S) and "of few places (5)" in tiles, tiles


def page_text(path):
    """What the head of a page says, by node on a document that only takes HTML; None without node."""
    if not shutil.which("node"): return print("skipped: no node, the page's script was not run")
    stub = """
const nodes = [], node = () => { const e = { innerHTML: "", appendChild() {} }; nodes.push(e); return e; };
globalThis.document = { createElement: node, getElementById: () => ({ textContent: DATA }), body: node() };
globalThis.addEventListener = () => {}; globalThis.matchMedia = () => ({ addEventListener() {} });
"""
    data, script = Page(path.read_text()).scripts
    head = script[:script.index("// ---- A score by how much")]
    code = f"const DATA = {json.dumps(data)};{stub}\n{head}\nconsole.log(nodes.map(n => n.innerHTML).join(' '));"
    p = subprocess.run(["node", "-"], input=code, capture_output=True, text=True)
    assert p.returncode == 0, p.stderr[-1500:]
    return p.stdout


def check_gaps():
    """Records with gaps: no full cache's record, cells of a task without one, figures beyond all reason."""
    cell = {"record": "cell", "measure": "nll", "source": "x", "context": 64, "policy": "h2o", "rho": .5, "nll": 2.0}
    path = write("gap.jsonl", [cell, {**cell, "policy": "q", "nll": 1.5}])
    text, _ = run(path, "--html", WORK / "gap.html", "--markdown", WORK / "gap.md")
    assert re.search(r"policy +NLL +/ h2o ", text) and re.search(r"q +1\.500 +0\.75", text), text
    assert "#### NLL, nats a token" in (WORK / "gap.md").read_text()
    s = section(json.loads(run(path, "--json")[0]), "nll")
    assert s["figure"] == "nll" and s["values"]["nll"] == [[[2]], [[1.5]]] and "Over 1 place of 1 source;" in text
    task = {**cell, "measure": "needle", "task": "needle", "placement": "inside", "exact": 1, "full_exact": 1}
    cells = [{**task, "sample": i} for i in range(20)] + [{k: v for k, v in {**task, "sample": 20}.items() if k != gone}
                                                         for gone in ("task", "placement", "context")]
    s = section(json.loads(run(write("holes.jsonl", cells), "--json")[0]), "needle")
    assert len(s["units"]) == len(s["values"]["exact"][0][0]) == len(cells), len(s["units"])
    assert [g["units"] for g in s["groups"] if g["by"] == "cell"].count(20) == 1
    for field, value in (("nll", 1e300), ("held_blocks", -1e16), ("nll_by_token", [1, 1e40])):
        out, err = run(write("huge.jsonl", [cell, {**cell, "policy": "q", field: value}]), code=1)
        assert f"huge.jsonl:2: {field}: " in err and "1e15" in err and not re.search("nan|inf", out), (out, err)


class Page(html.parser.HTMLParser):
    """Fails where tags do not nest; keeps the text of the script elements and every attribute."""
    VOID = {"meta", "link", "br", "img", "input", "hr"}

    def __init__(self, text):
        super().__init__()
        self.open, self.scripts, self.attributes = [], [], []
        self.feed(text), self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.attributes += attributes
        if tag not in self.VOID: self.open.append(tag)
        if tag == "script": self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script": self.scripts[-1] += data


def check_page(path, lines):
    out, _ = run(path, "--json", "--html", WORK / "out.html")
    text = (WORK / "out.html").read_text()
    page = Page(text)
    assert text.startswith("<!doctype html>") and not re.search(r"(https?:)?//[a-z0-9-]+\.|@import|url\(", text, re.I)
    assert not [a for a in page.attributes if a[0] in ("src", "href", "srcset", "action")], page.attributes
    data, report = json.loads(page.scripts[0]), json.loads(out)
    assert "<" not in page.scripts[0] and "paintAll()" in page.scripts[1]
    assert data["sources"] == report["sources"] and len(data["sections"]) == len(report["sections"])
    s = section(data, "divergence")
    curves, n = next(g for g in s["curves"]["groups"] if g["context"] is None), 12
    assert s["curves"]["ends"] == list(range(1, n + 1))
    cells, full = cells_of(lines, policy="d2o", rho=.2, table=None), {place(t)[:3]: t for t in lines if t["record"] == "text"}
    for name, of in (("kl", lambda k, c, t: c["kl_by_token"][t]), ("nll", lambda k, c, t: c["nll_by_token"][t]),
                     ("nll_more", lambda k, c, t: c["nll_by_token"][t] - full[k[:3]]["full"]["nll_by_token"][t])):
        by_token = [mean([of(k, c, t) for k, c in cells.items()]) for t in range(n)]
        near(curves[name][s["policies"].index("d2o")][s["rhos"].index(.2)], [mean(by_token[:t + 1]) for t in range(n)], 2e-5)
    near(curves["full"][-1:], [mean([t["full"]["nll"] for t in full.values()])], 2e-5)
    shares = [[x / mean(c["sizes"]) for x in c["sizes"]] for c in cells.values()]
    near(s["budgets"][s["policies"].index("d2o")][s["rhos"].index(.2)], [mean(layer) for layer in zip(*shares)], 2e-5)
    assert not any(any(rhos) for rhos in s["head_budgets"])
    grouped = [{**x, "group_sizes": [[n - 1, n + 1] for n in x["sizes"]]} if x["record"] == "cell" and x["policy"] == "d2o" else x for x in lines]
    s2 = section(json.loads(run(write("grouped.jsonl", grouped), "--json")[0]), "divergence")
    heads = s2["head_budgets"][s2["policies"].index("d2o")][s2["rhos"].index(.2)]
    for g, more in ((0, -1), (1, 1)):
        of_group = [[(x + more) / mean(c["sizes"]) for x in c["sizes"]] for c in cells.values()]
        near([layer[g] for layer in heads], [mean(layer) for layer in zip(*of_group)], 2e-5)
    for name, field in (("density", "density_head_minmax"), ("variance", "variance")):
        near(s[name], [mean(layer) for layer in zip(*(t["layers"][field] for t in full.values()))], 2e-5)


def main():
    texts, lines, _ = check_texts()
    check_split(texts, lines)
    check_baselines(texts, lines)
    tasks = check_tasks()
    check_cells(lines)
    check_lines(lines)
    check_usage(texts, lines)
    check_one_place()
    check_r6_winners()
    check_gaps()
    check_page(texts, lines)
    run(tasks, "--html", WORK / "tasks.html", "--markdown", WORK / "tasks.md")
    assert "| fold |" in (WORK / "tasks.md").read_text()
    subprocess.run(["rm", "-r", WORK], check=True)
    print("eval_report: all in order")


if __name__ == "__main__":
    main()
