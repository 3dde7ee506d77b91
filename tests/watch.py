#!/usr/bin/env python3
"""Runs a test and ends it when it makes no progress: its processes used no CPU time for --idle seconds, or more than --cpu
seconds of it in all. So a slow machine meets no limit, while a deadlock and an endless loop still end.
Usage: watch.py [--idle SECONDS] [--cpu SECONDS] COMMAND..., or --self-test
"""
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
LEAST = 0.05  # seconds of CPU time in a pause that count as progress


def used(session):
    """CPU seconds of the processes of a session, those that they have waited for included."""
    seconds = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[3]) == session:
            seconds += sum(int(ticks) for ticks in fields[11:15]) / TICKS
    return seconds


def watch(command, idle, cpu):
    """The command's exit status; 124 when it was ended, 128 and its number for a signal."""
    child = subprocess.Popen(command, start_new_session=True)
    try:
        return wait(child, idle, cpu)
    except BaseException:  # an interrupt
        os.killpg(child.pid, signal.SIGKILL)
        raise


def wait(child, idle, cpu):
    pause, most, moved = min(2.0, idle / 4), 0.0, time.monotonic()
    while True:
        try:
            status = child.wait(pause)
            return 128 - status if status < 0 else status
        except subprocess.TimeoutExpired:
            now = used(child.pid)
        if now >= most + LEAST:
            most, moved = now, time.monotonic()
        why = None
        if time.monotonic() - moved > idle:
            why = f"no CPU time for {idle:g} s"
        elif now > cpu:
            why = f"more than {cpu:g} s of CPU time"
        if why:
            print(f"watch: {why}: ended", flush=True)
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return 124


def self_test():
    began = time.monotonic()
    cases = [  # command, idle, cpu, status
        (["true"], 5, 5, 0),
        (["sh", "-c", "exit 77"], 5, 5, 77),
        (["sh", "-c", "kill -9 $$"], 5, 5, 137),
        (["sleep", "1000"], 1, 5, 124),
        (["sh", "-c", "while :; do :; done"], 5, 1, 124),
        (["sh", "-c", "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; sleep 0.1"], 60, 60, 0),
    ]
    wrong = [c for c in cases if watch(c[0], c[1], c[2]) != c[3]]
    print(f"watch: {len(cases)} commands in {time.monotonic() - began:.0f} s, wrong: {wrong or 'none'}")
    return 1 if wrong else 0


def main():
    arguments, limits = sys.argv[1:], {"--idle": 300.0, "--cpu": 3600.0}
    if arguments == ["--self-test"]:
        return self_test()
    while arguments and arguments[0] in limits:
        limits[arguments[0]] = float(arguments[1])
        arguments = arguments[2:]
    if not arguments:
        sys.exit(__doc__)
    return watch(arguments, limits["--idle"], limits["--cpu"])


if __name__ == "__main__":
    sys.exit(main())
