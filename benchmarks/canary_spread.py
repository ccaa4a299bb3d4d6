"""Parts of `canary_gpu.py`: how equal readings differ, and what a node says after a job."""

import json
import statistics
import subprocess
import sys
import time
from typing import Any

from canary_bench import Bench, finished

from gpuwatch.canaries import CANARIES
from gpuwatch.canary import Run

REDUCTIONS = 6  # readings of an all-reduce by the same processes
ROUNDS = 3
IMPORTS = 6
JOB_SECONDS = 6.0
BUDGET = "15s"
MAD_TO_DEVIATION = 1.4826  # of a normal distribution


def spread(bench: Bench) -> dict[str, Any]:
    """See how `--readings` equal readings of one process on each GPU differ.

    GPUs are at work at the same time, but not on the way to the host, which they share.
    """
    bench.settle()
    ranks, count = range(1 if bench.cpu else bench.ranks), bench.readings
    told = {"count": count, "seconds": min(9.0 * count, bench.left - 10)}
    blocks = ["matmul", "memory", "pcie"]
    children = [
        bench.child("readings", {**told, "gpu": rank, "canaries": blocks[:: 1 - 2 * (rank % 2)]})
        for rank in ranks
    ]
    found = {f"GPU {rank}": bench.result(one) for rank, one in enumerate(children)}
    return judged(bench, found)


def spread_starts(bench: Bench) -> dict[str, Any]:
    """See the same of startups, each by a new process, and of all-reduces, some by each."""
    ranks, count = range(1 if bench.cpu else bench.ranks), bench.readings
    bench.settle()
    found = {f"GPU {rank}": {"startup": startups(bench, rank)} for rank in ranks}
    bench.settle()
    reduced: list[float] = []
    size = CANARIES["allreduce"].sizes[bench.size]
    while bench.ranks > 1 and len(reduced) < count and bench.left > 15:
        sizes = [size] * min(REDUCTIONS, count - len(reduced))
        with Run(bench.task("allreduce", bench.uuids, sizes=sizes), sys.executable) as run:
            outcome = finished(run)
        if outcome.ended != "ok":
            raise RuntimeError(f"{outcome.ended}: {outcome.fault}; before: {found}")
        reduced += [one["value"] for one in outcome.readings]
    return judged(bench, {**found, "host": {"allreduce": reduced}})


def judged(bench: Bench, found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Return values with how they differ, and whether that is little."""
    spreads = {
        f"{where} {name}": about(values)
        for where, one in found.items()
        for name, values in one.items()
        if len(values) > 1
    }
    speeds = {name: one for name, one in spreads.items() if not name.endswith("startup")}
    wide = [name for name, one in speeds.items() if one["robust_cv"] > 0.01]
    short = [name for name, one in spreads.items() if one["n"] < bench.readings]
    return {
        "values": found,
        "spreads": spreads,
        "checks": {"robust CV of 1 % at most": not wide, "all readings made": not short},
    }


def startups(bench: Bench, rank: int) -> list[float]:
    """Return what it took to begin on a GPU, each time in a new process, one after the other."""
    found: list[float] = []
    while len(found) < bench.readings:
        # Some at once import torch, which takes longest and is no part of it.
        number = min(IMPORTS, bench.readings - len(found))
        how = {"stdin": subprocess.PIPE}
        children = [bench.child("startup", {"gpu": rank}, **how) for _ in range(number)]
        for one in children:
            assert one.stdout
            one.stdout.readline()
        for one in children:
            assert one.stdin
            one.stdin.write("go\n")
            one.stdin.flush()
            found.append(bench.result(one))
    return found


def about(values: list[float]) -> dict[str, float]:
    """Return how values differ, as shares of their median; the robust CV is by the MAD."""
    middle = statistics.median(values)
    away = statistics.median(abs(one - middle) for one in values)
    return {
        "n": len(values),
        "median": middle,
        "cv": statistics.stdev(values) / statistics.fmean(values),
        "robust_cv": MAD_TO_DEVIATION * away / middle,
        "least": min(values) / middle - 1,
        "most": max(values) / middle - 1,
        "first": values[0] / middle - 1,
    }


def between_jobs(bench: Bench) -> dict[str, Any]:
    """Try the node as an epilog does, at once after a job on all GPUs has ended."""
    rounds, rows = [], []
    for _ in range(ROUNDS):
        bench.settle()
        jobs = [
            bench.child("job", {"seconds": JOB_SECONDS, "gpu": rank}, stdin=subprocess.PIPE)
            for rank in range(bench.ranks)
        ]
        for job in jobs:
            assert job.stdout
            job.stdout.readline()
        for job in jobs:
            assert job.stdin
            job.stdin.write("go\n")
            job.stdin.flush()
        for job in jobs:
            bench.result(job)
        start = time.monotonic()
        running = bench.command("--between-jobs", "--budget", BUDGET)
        results = json.loads(running.communicate()[0])
        rounds.append({"seconds": time.monotonic() - start, "code": running.returncode})
        shown = ("canary", "gpu", "dtype", "direction", "at_once", "result", "value", "detail")
        rows += [{name: one.get(name) for name in shown} for one in results]
        (bench.output / "between_jobs.json").write_text(json.dumps([rounds, rows]))
    return {
        "rounds": rounds,
        "results": rows,
        "checks": {
            "exit code is 0": all(one["code"] == 0 for one in rounds),
            "over in 16 s": all(one["seconds"] <= 16 for one in rounds),
            "matmul on every GPU at once": bench.cpu
            or all(len(one["at_once"]) == bench.ranks for one in rows if one["canary"] == "matmul"),
        },
    }
