"""The parts of `canary_gpu.py`: each returns what it found, and "checks", whether that is right."""

import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from canary_bench import PASSED_ON, Bench, about, cost, finished, read, workers

from gpuwatch.busy import intruder
from gpuwatch.canaries import CANARIES
from gpuwatch.canary import NCCL, Run, members
from gpuwatch.clock import monotonic_ns
from gpuwatch.gpu_readings import memory
from gpuwatch.look import Looks

LOG_LINE = re.compile(r"Algo|NCCL version|tuning", re.IGNORECASE)


def commands(bench: Bench) -> dict[str, Any]:
    """Run all canaries by the command: results, memory, environment, and whom NVML lists."""
    settled = bench.settle()
    before = [memory(gpu)[0] or 0 for gpu in bench.handles]
    start = time.monotonic()
    seen: dict[int, dict[str, str]] = {}
    with bench.sampled() as sampler:
        running = bench.command("all")
        text: list[str] = []
        reader = threading.Thread(target=lambda: text.append(running.communicate()[0]))
        reader.start()
        while reader.is_alive():
            for pid in workers(running.pid):
                if read(f"/proc/{pid}/environ"):  # it has none while it ends
                    seen[pid] = about(pid)
            reader.join(0.1)
    seconds = time.monotonic() - start
    results = json.loads(text[0])
    rows = [
        {name: one.get(name) for name in ("canary", "gpu", "dtype", "direction", "result")}
        | {
            name: one.get(name)
            for name in ("value", "spread", "expected_ratio", "seconds", "detail")
        }
        for one in results
    ]
    most = [peak - idle for peak, idle in zip(sampler.most, before, strict=True)]
    strangers = {pid: who for pid, who in sampler.who.items() if pid not in seen}
    right = [one for one in seen.values() if all(one[key] == PASSED_ON[key] for key in PASSED_ON)]
    gpus = {
        "at most 2 GiB": bool(sampler.bytes) and max(most) <= 2 << 30,
        "NVML lists the workers' own ids": bool(sampler.first) and not strangers,
        "nobody is listed afterwards": not bench.listed(),
    }
    return {
        "exit_code": running.returncode,
        "wall_seconds": seconds,
        "settle_seconds": settled,
        "used_when_idle_bytes": before,
        "most_bytes": most,
        "sampler_fault": sampler.fault,
        "listed": {
            pid: {
                **sampler.who[pid],
                "seconds": (sampler.last[pid] - sampler.first[pid]) / 1e9,
                "bytes": sampler.bytes[pid],
            }
            for pid in sampler.first
        },
        "results": rows,
        "raw": results,
        "checks": {
            "exit code is 0": running.returncode == 0,
            "every result is ok": all(one["result"] == "ok" for one in rows),
            "NVLS off in every worker": bool(seen) and len(right) == len(seen),
            **({} if bench.cpu else gpus),
        },
    }


def allreduce(bench: Bench) -> dict[str, Any]:
    """Compare the bus bandwidth with that of a loop of our own, in turn; keep NCCL's log."""
    mine, theirs, told, lines = [], [], {}, []
    size = CANARIES["allreduce"].sizes[bench.size]
    for turn in range(2):
        with Run(bench.task("allreduce", bench.uuids), sys.executable) as run:
            outcome = finished(run)
            for log in Path(run.scratch).glob("nccl.*"):
                shutil.copy(log, bench.output / f"{turn}-{log.name}.log")
                lines += [line for line in log.read_text().splitlines() if LOG_LINE.search(line)]
        if outcome.ended != "ok":
            raise RuntimeError(f"{outcome.ended}: {outcome.fault}")
        told = outcome.readings[0]
        mine.append(told["value"])
        bench.settle()
        quiet = {name: value for name, value in NCCL.items() if "DEBUG" not in name}
        shared = {"ranks": bench.ranks, "size": size, "port": 29531 + turn}
        ranks = [
            bench.child("allreduce", {**shared, "gpu": rank}, env={**os.environ, **quiet})
            for rank in range(bench.ranks)
        ]
        rates = [bench.result(rank)["rate"] for rank in ranks]
        theirs.append(statistics.fmean(rates) * 2 * (bench.ranks - 1) / bench.ranks)
        bench.settle()
    ratio = statistics.fmean(mine) / statistics.fmean(theirs)
    for line in dict.fromkeys(lines[-6:]):
        print("   ", line)
    environment = told.get("environment", {})
    return {
        "canary": mine,
        "loop": theirs,
        "ratio": ratio,
        "environment": environment,
        "log": lines[:60],
        "checks": {
            "within 2 % of a loop": abs(ratio - 1) <= 0.02,
            "algorithm known": environment.get("algorithm")
            in ("ring", "tree", "nvls", "nvls_tree", "gloo"),
        },
    }


def intruded(bench: Bench) -> dict[str, Any]:
    """Start a job beside a canary: who leaves when, and what it cost the job."""
    bench.settle()
    job = bench.child("job", {"seconds": 5}, stdin=subprocess.PIPE)
    assert job.stdin is not None
    assert job.stdout is not None
    job.stdout.readline()
    task = bench.task("matmul", bench.uuids[:1], warm_seconds=9.0)
    times: dict[str, int] = {}
    phased = 0
    with contextlib.ExitStack() as stack:
        sampler = stack.enter_context(bench.sampled())
        looks = None
        if not bench.cpu:
            looks = stack.enter_context(closing(Looks(Path("/sys"), {}, [0])))
        run = stack.enter_context(Run(task, sys.executable))
        worker = run.group
        while (outcome := run.poll()) is None:
            now = monotonic_ns()
            if run.phase == "warm_up":
                phased = phased or now
                if now - phased > 1e9 and "go" not in times:
                    times["go"] = now
                    job.stdin.write("go\n")
                    job.stdin.flush()
            why = ""
            if looks is not None:
                looks.poll()
                why = looks.fault or intruder(looks.newest(0), run.owns)
            elif "go" in times and now - times["go"] > 3e8:
                why = "dry run"
            if why and "seen" not in times:
                times["seen"] = now
                run.stop(why)
            time.sleep(0.01)
        times["ended"] = monotonic_ns()
        if "go" not in times:
            raise RuntimeError(f"ended before the job came: {outcome.ended}: {outcome.fault}")
        told = bench.result(job)
    steps = told["steps"]
    listed = sampler.first.get(job.pid, times["go"])
    usual = statistics.median(end - begin for begin, end in steps[len(steps) // 2 :])
    opening = [(begin, end) for begin, end in steps if begin - steps[0][0] < 1e9]
    slow = [end for begin, end in opening[1:] if end - begin > 1.5 * usual]
    lost = sum(end - begin - usual for begin, end in opening[1:]) / 1e6
    ms = {name: (at - listed) / 1e6 for name, at in times.items()}
    return {
        "ms_after_the_job_was_listed": {
            **ms,
            "job_opens": (told["opened_ns"] - listed) / 1e6,
            "job_first_step_began": (steps[0][0] - listed) / 1e6,
            "worker_left_nvml": (sampler.last.get(worker, listed) - listed) / 1e6,
            "last_slow_step": (slow[-1] - listed) / 1e6 if slow else None,
        },
        "outcome": [outcome.ended, outcome.fault],
        "step_ms": usual / 1e6,
        "first_step_ms": (steps[0][1] - steps[0][0]) / 1e6,
        "slow_steps": len(slow),
        "lost_ms_of_first_second": lost,
        "checks": {
            "aborted": outcome.ended == "aborted",
            "gone within 500 ms": "seen" in ms and ms["ended"] <= 500,
            **({} if bench.cpu else {"job was seen in NVML": job.pid in sampler.first}),
        },
    }


def killed(bench: Bench) -> dict[str, Any]:
    """Kill a rank in a collective, then a session; run a canary once more."""
    bench.settle()
    with Run(bench.task("allreduce", bench.uuids, bursts=100_000), sys.executable) as run:
        while run.phase != "measure":
            if outcome := run.poll():
                raise RuntimeError(f"{outcome.ended}: {outcome.fault}")
            time.sleep(0.01)
        time.sleep(0.5)
        other = next(pid for pid in members(run.group) if pid != run.group)
        start = time.monotonic()
        os.kill(other, signal.SIGKILL)
        outcome = finished(run)
        rank_seconds = time.monotonic() - start
    rank_left = [bench.settle(), bench.listed()]
    with bench.sampled() as sampler:
        running = bench.command("allreduce")
        groups: set[int] = set()
        busy_since = 0.0
        while running.poll() is None and not (busy_since and time.monotonic() - busy_since > 1.2):
            for pid in workers(running.pid):
                with contextlib.suppress(OSError):
                    groups.add(os.getpgid(pid))
            if groups and (bench.cpu or len(sampler.first) >= bench.ranks):
                busy_since = busy_since or time.monotonic()
            time.sleep(0.02)
        early = running.poll() is not None
        start = time.monotonic()
        running.kill()
        running.wait()
        while any(map(members, groups)) and time.monotonic() - start < 10:
            time.sleep(0.005)
        session_seconds = time.monotonic() - start
    running.communicate()
    session_left = [bench.settle(), bench.listed(), [pid for one in groups for pid in members(one)]]
    again = bench.command("allreduce")
    results = json.loads(again.communicate()[0])
    looking = [
        path.name
        for path in Path("/proc").glob("[0-9]*")
        if "gpuwatch.look_child" in read(f"{path}/cmdline")
    ]
    return {
        "rank": [outcome.ended, outcome.fault, rank_seconds, rank_left],
        "session": [session_seconds, session_left],
        "afterwards": [[one["canary"], one["gpu"], one["result"], one["value"]] for one in results],
        "checks": {
            "a dead rank ends the run": outcome.ended == "failed" and not outcome.stuck,
            "nobody left after the rank": not rank_left[1],
            "the session died in a run": not early,
            "nobody left after the session": not any(session_left[1:]) and not looking,
            "a canary passes afterwards": again.returncode == 0,
        },
    }


def integrity(bench: Bench) -> dict[str, Any]:
    """Check products and sums many times, and what memory that takes."""
    rows = []
    with bench.session() as session, bench.sampled() as sampler:
        for _ in range(2):
            for one in session.run("integrity"):
                value = one.reading.value if one.reading else None
                rows.append([one.gpu, one.result, value, one.detail])
    checks = {"right": bool(rows) and all(row[1] == "ok" for row in rows)}
    if not bench.cpu:
        most = max(sampler.bytes.values(), default=0)
        checks["at most 2 GiB"] = 0 < most <= 2 << 30
    return {"runs": rows, "bytes": [*sampler.bytes.values()], "checks": checks}


def flips(bench: Bench) -> dict[str, Any]:
    """Check whether bits that were flipped in a product are found."""
    bench.settle()
    told = bench.asked("flipped")
    found = {name: [one["result"], one.get("detail")] for name, one in told.items()}
    wrong = [one[0] == "wrong" for name, one in found.items() if name != "none"]
    return {
        "flips": found,
        "checks": {
            "right without a flip": found["none"][0] == "ok",
            "every flip found": all(wrong),
        },
    }


def looks(bench: Bench) -> dict[str, Any]:
    """Measure what looks cost: CPU time, and the time of the calls."""
    if bench.cpu:
        return {"checks": {}}
    bench.settle()
    found = {}
    with closing(Looks(Path("/sys"), {}, [])) as looking:
        for name in ("idle", "busy"):
            task = bench.task("matmul", bench.uuids[:1], warm_seconds=4.0)
            with Run(task, sys.executable) if name == "busy" else contextlib.nullcontext() as run:
                while run is not None and run.phase != "warm_up" and run.poll() is None:
                    looking.poll()  # else its pipe fills up, and it waits
                    time.sleep(0.05)
                found[name] = cost(looking)
            bench.settle()
    return {**found, "checks": {"forty looks a second": found["busy"]["looks_per_second"] >= 40}}


def reference(bench: Bench) -> dict[str, Any]:
    """Compare matmul, memory and PCIe with other timers, in turn."""
    bench.settle()
    lengths = {"seconds": 0.1, "pause": 0.1} if bench.cpu else {"seconds": 3.0, "pause": 1.0}
    told = bench.asked("reference", rounds=3, **lengths)
    middles = [
        {name: statistics.median(values) for name, values in told[key].items()}
        for key in ("canary", "benchmark")
    ]
    ratios = {name: value / middles[1][name] for name, value in middles[0].items()}
    return {
        **told,
        "ratios": ratios,
        "checks": {
            f"{name} within {part:.0%}": abs(ratios[name] - 1) <= part
            for name, part in zip(ratios, (0.01, 0.02, 0.02, 0.02), strict=True)
        },
    }


def startup(bench: Bench) -> dict[str, Any]:
    """Run the startup canary five times, a process each."""
    with bench.session(0) as session:
        results = [one for _ in range(5) for one in session.run("startup")]
    values = [one.reading.value for one in results if one.reading and one.reading.value]
    return {
        "seconds": values,
        "said": [one.detail for one in results if one.detail],
        "checks": {"five values": len(values) == 5},
    }


def per_hertz(bench: Bench) -> dict[str, Any]:
    """See how values and values by the clock of equal runs differ, of all GPUs at once."""
    with bench.session() as session:
        runs = [session.run("matmul", at_once=bench.ranks) for _ in range(4)]
        readings = [one.reading for run in runs for one in run if one.reading]
    found: dict[str, dict[str, list[float]]] = {}
    for one in readings:
        where = found.setdefault(f"{one.entity.id[:8]} {one.dtype}", {})
        for name in ("value", "value_per_hertz", "spread", "seconds"):
            if (value := getattr(one, name)) is not None:
                where.setdefault(name, []).append(value)
    wide = {
        name: [max(one[key]) / min(one[key]) - 1 for key in ("value", "value_per_hertz")]
        for name, one in found.items()
        if len(one.get("value_per_hertz", ())) > 1
    }
    steady = bool(wide) and all(hertz <= 0.02 for _, hertz in wide.values())
    checks = {} if bench.cpu else {"a hertz within 2 %": steady}
    return {"values": found, "most_by_least": wide, "checks": checks}
