#!/usr/bin/env python3
"""A plot of each benchmark's lines: values beside their floors, or beside the peer's.

    python3 bench/plot.py [FILE.jsonl ...]      all of bench/results/ when none is named

FILE-pool.svg, FILE-attention.svg and so on go beside each file: a bar for every case, labelled with what sets it apart from
the others, and a mark where its floor (or the peer) stands; products with weights as lines over the rows; the shares of
policies as bars of their parts, in percent. Needs
PyPI matplotlib; scripts/bench.sh --plots brings it.
"""
import io
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import LogLocator  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"
BAR, MARK, GRID = "#4c78a8", "#d62728", "#dddddd"
# Fields that say how a case went, or where, and not which it is.
OUTCOME = {"value", "unit", "median", "p5", "p95", "repetitions", "bytes", "load", "commit", "cpu", "flags", "floor"}
OUTCOME |= {"ratio", "ratio_p5", "ratio_p95", "share", "floor_header", "ratio_header", "floor_by", "bound", "clock"}
OUTCOME |= {"match", "gate", "apply", "gflop", "gflop_per_s", "sgemm_gflop_per_s", "gb_per_s", "read_gb_per_s"}
OUTCOME |= {"multiply_adds_per_ns", "cache_bytes", "metadata_bytes", "cpu_ms_median", "blas", "step_ms", "forward_ms"}
OUTCOME |= {"per_step", "of_attention", "observe", "layers", "weights", "attention", "for_mass", "budget", "of_full"}
OUTCOME |= {"policy_ms", "seqs", "queries", "slots", "keep", "peer", "peer_p5", "peer_p95", "peer_name"}


def style():
    plt.rcParams.update(
        {
            "svg.fonttype": "none",  # text stays text: small files
            "svg.hashsalt": "kvfold",  # the same lines give the same file
            "font.size": 8,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "figure.facecolor": "white",
            "axes.facecolor": "white",
        }
    )


def labels(lines):
    """What sets each line apart from the others of its plot."""
    keys = [k for k in dict.fromkeys(k for line in lines for k in line) if k not in OUTCOME | {"threads"}]
    keys = [k for k in keys if len({str(line.get(k)) for line in lines}) > 1]
    return [
        ", ".join(str(v).split("/")[-1] if k in ("name", "policy", "order", "how", "activations") else f"{k.replace('_', ' ')} {v}"
                  for k in keys if (v := line.get(k)) is not None)
        for line in lines
    ]


def beside(axis, x, y, text):
    axis.annotate(text, (x, y), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7)


def bars(lines, title):
    """A panel for each unit and number of threads."""
    panels = defaultdict(list)
    for line in lines:
        own = line["unit"] == "tokens/s" or line["name"].startswith("policy/")
        panels[(line["name"] if own else "", line["unit"], line["threads"])].append(line)
    heights = [len(p) + 1.5 for p in panels.values()]
    figure, axes = plt.subplots(len(panels), 1, figsize=(8, 0.24 * sum(heights) + 0.6), squeeze=False,
                                height_ratios=heights, layout="constrained")
    for (axis,), ((name, unit, threads), some) in zip(axes, panels.items()):
        rate = unit.endswith("/s")
        marks = [line.get("peer", line.get("floor")) for line in some]
        axis.barh(range(len(some)), [line["value"] for line in some], height=0.62, color=BAR, label="kvfold")
        known = [(m, i) for i, m in enumerate(marks) if m is not None]
        if known:
            what = some[known[0][1]].get("peer_name", "floor")
            axis.scatter([m for m, _ in known], [i for _, i in known], marker="|", s=90, linewidths=2, color=MARK,
                         zorder=3, label=what)
        for i, line in enumerate(some):
            text = f"{line['value']:.4g}" + (f"  ({line['ratio']:.2f} x)" if "ratio" in line else "")
            beside(axis, max(line["value"], marks[i] or 0), i, text)
        axis.set_yticks(range(len(some)), labels(some) if len(some) > 1 else [some[0]["name"]])
        axis.invert_yaxis()
        spread = max(line["value"] for line in some) / min(line["value"] for line in some)
        if spread > 30 and not rate:
            axis.set_xscale("log")
        left, right = axis.get_xlim()
        axis.set_xlim(left, right * (1.5 if axis.get_xscale() == "log" else 1.12))
        axis.set_xlabel(unit + (", more is better" if rate else ", less is better"))
        axis.set_title(f"{name or title}, {threads} thread{'s' if threads > 1 else ''}", loc="left")
        axis.minorticks_off()
        axis.grid(axis="x", color=GRID)
        axis.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), borderpad=0, ncols=2, fontsize=7)
    return figure


def curves(lines):
    """Products with weights: milliseconds over rows, a line for each way, the floor of each broken."""
    panels = defaultdict(lambda: defaultdict(list))
    for line in lines:
        panels[(line["what"], line["threads"])][line["way"]].append(line)
    figure, axes = plt.subplots(1, len(panels), figsize=(3.4 * len(panels), 4), squeeze=False, layout="constrained")
    ways = list(dict.fromkeys(line["way"] for line in lines))
    floors = {}
    for axis, ((what, threads), by_way) in zip(axes[0], panels.items()):
        for way, some in by_way.items():
            some.sort(key=lambda line: line["rows"])
            x = [line["rows"] for line in some]
            color = f"C{ways.index(way)}"
            axis.plot(x, [line["value"] for line in some], marker="." if len(x) == 1 else "", lw=1.2, color=color,
                      label=way)
            floors[way.split()[0] == "q4_1"] = (x, [line["floor"] for line in some])
        for quantised, (x, y) in floors.items():
            axis.plot(x, y, ls="--", lw=0.9, color="#555555" if quantised else "#aaaaaa",
                      label="reading " + ("q4_1" if quantised else "fp32"))
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("rows of the input")
        axis.set_ylabel("ms, less is better")
        axis.set_title(f"{what}, {threads} thread{'s' if threads > 1 else ''}", loc="left")
        axis.set_xticks(sorted({line["rows"] for line in lines}), sorted({line["rows"] for line in lines}))
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.grid(color=GRID)
    axes[0][-1].legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def shares(lines):
    """What part of a layer's time each policy takes, and for what: a panel for prompts, one for decoding."""
    parts = ["for_mass", "observe", "budget", "match", "gate", "apply"]
    panels = defaultdict(list)
    for line in lines:
        panels[(line["name"], line["threads"])].append(line)
    figure, axes = plt.subplots(len(panels), 1, figsize=(8, sum(0.24 * len(p) + 0.8 for p in panels.values())), squeeze=False,
                                height_ratios=[len(p) + 2 for p in panels.values()], layout="constrained")
    for (axis,), ((name, threads), some) in zip(axes, panels.items()):
        ends = [0.0] * len(some)
        for number, part in enumerate(parts):
            width = [max(100 * line.get(part, 0) / line["value"], 0) for line in some]
            if any(width):
                axis.barh(range(len(some)), width, left=ends, height=0.62, color=f"C{number}", label=part.replace("_", " "))
            ends = [a + b for a, b in zip(ends, width)]
        for i, line in enumerate(some):
            digits = 0 if line["value"] >= 1000 else 2
            text = f"{100 * line['share']:.2f} % of {line['value']:,.{digits}f} {line['unit']}"
            if line.get("of_full", 1) != 1:
                text += f", {line['of_full']:.2f} of full"
            beside(axis, ends[i], i, text)
        axis.set_yticks(range(len(some)), [line["policy"] + (f", k {line['k']}" if "k" in line else "") for line in some])
        axis.invert_yaxis()
        axis.set_xlim(0, max(max(ends), 0.1) * 1.45)
        axis.set_xlabel("% of the layer's time, less is better")
        axis.set_title(f"{name}, {threads} thread{'s' if threads > 1 else ''}", loc="left")
        axis.minorticks_off()
        axis.grid(axis="x", color=GRID)
        axis.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), borderpad=0, ncols=6, fontsize=7)
    return figure


def plot(path):
    groups = defaultdict(list)
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
            name = "policy-share" if line["name"].startswith("policy/share/") else line["name"].split("/")[0]
            groups["peer" if "peer" in line else name].append(line)
        except (ValueError, KeyError, TypeError):
            sys.exit(f"{path}: line {number} is no result of kvfold-bench")
    for name, lines in groups.items():
        draw = curves if "way" in lines[0] else shares if name == "policy-share" else None
        figure = draw(lines) if draw else bars(lines, name)
        about = f"{lines[0].get('cpu', '')}, commit {lines[0].get('commit', '')}"
        figure.supxlabel(about, fontsize=6, color="#777777", x=0.01, ha="left")
        stem = path.stem.removesuffix(f"-{name}")
        out = path.with_name(f"{stem}-{name}.svg")
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        plt.close(figure)
        small = re.sub(r"<!--.*?-->\s*", "", text.getvalue(), flags=re.DOTALL)
        tenths = lambda tag: re.sub(r"(\d\.\d)\d+", r"\1", tag.group())  # of a point are enough; text stays
        small = re.sub(r"<[^>]*>", tenths, small)
        # A line for each group that has a name, so that files are short and differences can still be read.
        small = re.sub(r"\s*\n\s*(<g id=)?", lambda end: f"\n{end[1]}" if end[1] else " ", small)
        out.write_text(small.strip() + "\n")
        print(f"{out}: {len(lines)} cases", file=sys.stderr)


def main():
    files = [Path(p) for p in sys.argv[1:]] or sorted(RESULTS.glob("*.jsonl"))
    if not files:
        sys.exit(f"plot: no .jsonl in {RESULTS}; scripts/bench.sh writes one")
    style()
    for path in files:
        plot(path)


if __name__ == "__main__":
    main()
