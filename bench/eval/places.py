#!/usr/bin/env python3
"""A policy against all others, place by place: the rows of docs/results.md that `kvfold eval report` does not print.

    python3 bench/eval/places.py FILE... [--policy fold] [--except SOURCE,...] [--without SOURCE:CONTEXT]

FILE: records of `kvfold eval divergence`; --except leaves sources out, as a report does, and --without one place of the
second row. A policy without a figure at some place is in no mean there.
"""
import argparse
import json
import math


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--policy", default="fold")
    parser.add_argument("--except", dest="left_out", default="")
    parser.add_argument("--without", default="")
    a = parser.parse_args()
    kl, places = {}, set()
    for name in a.files:
        for line in open(name, encoding="utf-8"):
            r = json.loads(line)
            if r["record"] == "cell" and "kl" in r and r["source"] not in a.left_out.split(","):
                place = f'{r["source"]}:{r["context"]}'
                kl.setdefault((r["rho"], r["policy"]), {})[place] = r["kl"]
                places.add(place)
    for rho in sorted({k[0] for k in kl}):
        ours, others = kl[rho, a.policy], {p: v for (x, p), v in kl.items() if x == rho and p != a.policy}

        def best(mean, of):
            values, least = mean([ours[p] for p in of]), None
            for name, v in others.items():
                if set(of) <= set(v) and (least is None or mean([v[p] for p in of]) < least[0]):
                    least = mean([v[p] for p in of]), name
            return f"{values / least[0]:.3f} of {least[1]}"

        arithmetic = lambda x: sum(x) / len(x)
        geometric = lambda x: math.exp(sum(map(math.log, x)) / len(x))
        wins = sum(all(ours[p] < v[p] for v in others.values() if p in v) for p in places)
        h2o = sum(ours[p] < others["h2o"][p] for p in places) if "h2o" in others else 0
        print(f"rho {rho}: {len(places)} places: mean {best(arithmetic, places)}; "
              f"without {a.without or 'none'} {best(arithmetic, places - {a.without})}; "
              f"geometric {best(geometric, places)}; below h2o at {h2o}, below all others at {wins}")


main()
