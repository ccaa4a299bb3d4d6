"""The part of `node.py` in which jobs come and go, most of them while a canary runs."""

import json
import random
import subprocess
import sys
import time
from typing import Any

from measured import scrape
from node_bench import Bench, rises

from gpuwatch.clock import monotonic_ns

MS = 1_000_000


def jobs(bench: Bench, seconds: float) -> dict[str, Any]:
    """Jobs come and go, most of them while a canary runs: does it make room, and how fast."""
    bench.watch()
    before, begun_ns, order = scrape(), monotonic_ns(), random.Random(1)
    end = time.monotonic() + seconds
    ran: list[dict[str, Any]] = []
    bench.partial["jobs"] = ran
    every = list(range(bench.gpus))
    while end - time.monotonic() > 20:
        number = len(ran)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        job = bench.start("node_job.py", *bench.flags, **pipes)
        assert job.stdout
        job.stdout.readline()
        if bench.pretend:
            tiny = ["canary", "run", "matmul", "memory", "--cpu", "--size", "tiny"]
            bench.begin([sys.executable, "-m", "gpuwatch", *tiny], stdout=subprocess.DEVNULL)
        longest = min(22.0, end - time.monotonic() - 12)
        if number % 3 == 2:  # nobody is met: what others are compared with
            time.sleep(min(10.0, longest))
            bench.wait(lambda: not met(bench, every), 10)
        else:
            bench.wait(lambda: met(bench, every), longest)
            time.sleep(order.uniform(0.0, 0.4))
        who = met(bench, every)
        gpus = every if number % 2 else who or [number // 2 % bench.gpus]
        told = {
            "gpus": gpus,
            "seconds": max(5.0, min(order.uniform(6, 10), end - time.monotonic() - 4)),
        }
        text, _ = job.communicate(json.dumps(told) + "\n", timeout=60)
        if job.returncode or not text.strip():
            bench.partial.setdefault("failed", []).append(bench.errors())
            continue
        answer = json.loads(text.splitlines()[-1])
        ratio = answer["first_second_ms"] / answer["later_ms"]
        ran.append({**told, "met": who, **answer, "first_second_ratio": ratio})
        time.sleep(1)
    alone = [one["first_second_ratio"] for one in ran if not one["met"]]
    usual = sum(alone) / len(alone) if alone else None
    return {
        **bench.partial,
        "first_second_ratio_alone": usual,
        **beside(bench.seen, begun_ns),
        "runs": rises(before, "gpuwatch_canary_runs_total"),
        "skips": rises(before, "gpuwatch_canary_skipped_total"),
        "baselines": {
            key.removeprefix("gpuwatch_canary_baseline_ratio"): value
            for key, value in scrape().items()
            if key.startswith("gpuwatch_canary_baseline_ratio")
        },
        "alerts": [one["alert"] for one in bench.status()["alerts"] if "alert" in one],
    }


def met(bench: Bench, gpus: list[int]) -> list[int]:
    """Return those of the GPUs on which a canary is."""
    now = bench.on_gpu()
    return [gpu for gpu in gpus if now.get(gpu, ([], []))[0]]


def beside(seen: list[list[Any]], since_ns: int) -> dict[str, Any]:
    """Return how long canaries and jobs were on one GPU, by event, and canaries that began so."""
    overlaps, began_beside, runs = [], [], set()
    last: dict[int, tuple[int, list[int], list[int]]] = {}
    open_ns: dict[int, int] = {}
    for time_ns, gpu, canaries, others in [one for one in seen if one[0] >= since_ns]:
        _, before, busy = last.get(gpu, (0, [], []))
        runs |= set(canaries)
        if busy and others and set(canaries) - set(before):
            began_beside.append({"gpu": gpu, "pids": sorted(set(canaries) - set(before))})
        both = bool(canaries and others)
        if both and gpu not in open_ns:
            open_ns[gpu] = time_ns
        elif not both and gpu in open_ns:
            ms = (time_ns - open_ns.pop(gpu)) / MS
            overlaps.append({"gpu": gpu, "ms": ms, "end_ns": time_ns})
        last[gpu] = (time_ns, canaries, others)
    longest = max((one["ms"] for one in overlaps), default=0.0)
    return {"overlaps": overlaps, "longest_overlap_ms": longest, "still_open": sorted(open_ns),
            "began_beside": began_beside, "canary_processes": len(runs)}  # fmt: skip
