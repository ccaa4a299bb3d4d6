"""The parts of `node.py`: what each does to the node, and what it finds."""

import argparse
import contextlib
import gzip
import http.client
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pm
import pm_sampler
from measured import PORT, scrape, total
from node_bench import Bench, quantiles, rises

from gpuwatch.clock import monotonic_ns

MS = 1_000_000
RECORDING_BYTES = 14 << 20
DUTIES = ("state", "counters", "pm", "host", "network")
SETTLE_STEPS, SEGMENT_STEPS = 70, 64
POWER_CAP = 1 << 2  # as nvml.h has it: SW power cap


def soak(bench: Bench, seconds: float) -> dict[str, Any]:
    """Everything on beside a training-like job: costs, and what the job loses."""
    steady = 0.33 * seconds
    segments = bench.work / "segments"
    job = bench.start(
        *("training_step.py", "--segments", str(segments), "--control", str(bench.host.control)),
        *("--source", ",".join(bench.sources()), "--classes", "off,off,1"),
        *("--seconds", str(0.52 * seconds), "--steady", str(steady)),
        *("--settle-steps", str(SETTLE_STEPS), "--segment-steps", str(SEGMENT_STEPS)),
        *bench.flags,
        stdout=subprocess.PIPE,
    )
    found = bench.partial
    found["power_cap"] = cap_shown(bench, job)
    assert job.stdout
    if job.stdout.readline().strip() != "steady":
        raise RuntimeError(f"the job did not start: {bench.errors()}")
    begun, end = time.monotonic(), time.monotonic() + steady - 3
    time.sleep(2)
    before, start_ns = scrape(), monotonic_ns()
    found["scrape"] = scraped(end)
    passed = (monotonic_ns() - start_ns) / 1e9
    cpu = rises(before, "gpuwatch_process_cpu_seconds_total")
    found["cpu_percent"] = {duty.split('"')[1]: 100 * used / passed for duty, used in cpu.items()}
    time.sleep(1)
    found["uncovered"] = rises(before, "gpuwatch_gpu_counters_uncovered_seconds_total")
    found |= delivered(bench, start_ns, start_ns + int(passed * 1e9))
    lines = job.stdout.read().splitlines()
    found["memory"] = bench.memory.since(begun)
    if job.wait(10) or not lines:
        raise RuntimeError(f"the job ended early, {found}: {bench.errors()}")
    found["slowdown"] = slowdown(segments, 2 if bench.pretend else bench.gpus)
    return found


def cap_shown(bench: Bench, job: subprocess.Popen[str]) -> dict[str, Any]:
    """Return how long after the first sample with it a job's power cap is on the page."""
    name, start_ns = 'reason="sw_power_cap"', monotonic_ns()
    series = "gpuwatch_gpu_throttle_active{"
    seen = False

    def over() -> bool:
        nonlocal seen
        seen = total(scrape(), series, name) > 0
        return seen or bool(select.select([job.stdout], [], [], 0)[0])

    bench.wait(over, 60)
    if not seen:
        return {"shown": "not before the job was steady"}
    shown_ns = monotonic_ns()
    first: list[int] = []
    for _, rows in bench.rows("state", start_ns, shown_ns):
        if "gpu_throttle_active" in rows.cells:
            capped = rows.times[rows.cells["gpu_throttle_active"] & POWER_CAP != 0]
            first += [int(one) for one in capped[:1]]
    return {"shown_after_ms": (shown_ns - min(first)) / MS if first else None}


def scraped(end: float) -> dict[str, Any]:
    """Scrape five times a second, plain and compressed in turn; return times and sizes."""
    times: dict[str, list[float]] = {"identity": [], "gzip": []}
    sizes: dict[str, int] = {}
    body = b""
    while time.monotonic() < end:
        for coding, took in times.items():
            start = time.monotonic()
            connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=10)
            connection.request("GET", "/metrics", headers={"Accept-Encoding": coding})
            answer = connection.getresponse()
            body = answer.read()
            took.append((time.monotonic() - start) * 1e3)
            connection.close()
            sizes[coding] = len(body)
            if answer.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            time.sleep(0.1)
    series = sum(not line.startswith(b"#") for line in body.splitlines())
    found = {one: quantiles(took, 0.5, 0.99) for one, took in times.items()}
    return {"series": series, "bytes": sizes, "count": len(times["gzip"]), "ms_p50_p99": found}


def delivered(bench: Bench, start_ns: int, end_ns: int) -> dict[str, Any]:
    """Return lateness of each ring, and whether hardware counters left nothing out."""
    late: dict[str, Any] = {}
    counters: dict[str, float] = Counter()
    for duty in DUTIES:
        for name, rows in bench.rows(duty, start_ns, end_ns):
            if duty == "pm":
                about = rows.about()
                for key in ("rows", "gaps", "uncovered"):
                    counters[key] += about[key]
                counters["expected"] += (end_ns - start_ns) / rows.period_ns
            elif len(rows.late) > 1:
                spent = (rows.times[-1] - rows.times[0]) / 1e9
                late[name] = {
                    "hertz": (len(rows.late) - 1) / spent,
                    "us_p50_p99_max": [
                        1e6 * x for x in quantiles(rows.late.tolist(), 0.5, 0.99, 1)
                    ],
                }
    status = bench.status()
    return {
        "late": late,
        "pm": dict(counters),
        "errors": {name: one["errors"] for name, one in status["sources"].items() if one["errors"]},
        "periods": {name: one["period_seconds"] for name, one in status["sources"].items()},
        "states": {
            name: f"{one['state']}: {one['reason']}"
            for name, one in status["sources"].items()
            if one["state"] != "on"
        },
        "events": [
            f"{one['name']} {one['entity'][1]}: {one['detail']}"
            for one in status["events"]
            if one["name"] in ("pm_mode", "sampling_budget")
        ][-40:],
    }


def slowdown(segments: Path, ranks: int) -> dict[str, Any]:
    """Return the worst rank's figures, of all on and of the control, and all ranks' means."""
    from training_step import report

    ranked = [report(json.loads(Path(f"{segments}.{rank}").read_text())) for rank in range(ranks)]
    worst = max(ranked, key=lambda one: one["1#2"]["high"])
    found = {
        name: {**worst[key], "p99_ratio": worst[key]["p99_ms"] / worst["off#0"]["p99_ms"] - 1}
        for name, key in (("off", "off#0"), ("control", "off#1"), ("on", "1#2"))
    }
    return {**found, "by_rank": [one["1#2"]["slowdown"] for one in ranked]}


def verify(bench: Bench, _: float) -> dict[str, Any]:
    """`gpuwatch verify --quick` beside the daemon."""
    told = bench.output / "verify.json"
    return verified(bench, told, "--quick", "--html", str(bench.output / "verify.html"))


def verified(bench: Bench, path: Path, *flags: str) -> dict[str, Any]:
    # It is refused while they are paused, and waits for the one that runs.
    bench.ask(command="resume", what="canaries")
    start = time.monotonic()
    python = ["--canary.python", sys.executable]
    code, text = bench.gpuwatch("verify", "--json", str(path), *flags, *python, seconds=bench.left)
    report = json.loads(path.read_text()) if path.exists() else {}
    checks = report.get("checks", [])
    shown = ("name", "measure", "entity", "verdict", "value", "expectation", "reason")
    return {
        "code": code,
        "verdict": report.get("verdict"),
        "seconds": time.monotonic() - start,
        "counts": Counter(one["verdict"] for one in checks),
        "not_passed": [
            {key: one.get(key) for key in shown} for one in checks if one["verdict"] != "PASS"
        ],
        "curve": next((one["curve"] for one in checks if one.get("curve")), []),
        "printed": "" if checks else text[-800:] + bench.errors(),
    }


def allreduce(bench: Bench, _: float) -> dict[str, Any]:
    """Bus bandwidth by size."""
    path = bench.work / "allreduce.json"
    found = verified(bench, path, "--deep", "--only", "allreduce")
    found["bus_bytes_per_second"] = {f"{size / 2**20:g} MiB": v for size, v in found.pop("curve")}
    return found


def quiet(bench: Bench) -> None:
    """Have the daemon run no canaries any more."""
    bench.ask(command="release", what="canaries", seconds=3600)


def recording(bench: Bench, seconds: float) -> dict[str, Any]:
    """Record matmul under the power cap, an all-reduce, copies and rests."""
    quiet(bench)
    start = time.monotonic()
    flags = ["--rounds", "2", "--matmul", "6", "--allreduce", "4", "--rest", "4"]
    if bench.pretend:
        load = bench.begin(["sleep", "5"], stdout=subprocess.PIPE)
    else:
        load = bench.start("phases.py", *flags, "--copies", "3", stdout=subprocess.PIPE)
    text = "it did not end in time"
    with contextlib.suppress(subprocess.TimeoutExpired):
        text, _ = load.communicate(timeout=seconds - 8)
    time.sleep(1)
    last, path, size = 40.0, Path(), RECORDING_BYTES
    while last > 5 and size >= RECORDING_BYTES:
        code, printed = bench.gpuwatch("record", "--last", f"{last:g}s", seconds=60)
        path = Path(printed.strip())
        if code or not path.is_file():
            raise RuntimeError(f"no recording: {code} {printed} {bench.errors()}")
        size = path.stat().st_size
        lasts, last = last, last * min(0.9, 0.95 * RECORDING_BYTES / size)
    shutil.copy(path, bench.output / "host.gwr")
    return {"bytes": size, "seconds": lasts, "load": text.splitlines(), "status": load.returncode,
            "load_seconds": time.monotonic() - start}  # fmt: skip


def pm_sets(bench: Bench, seconds: float) -> dict[str, Any]:
    """Tell what both sets of hardware counters cost under load; the daemon lets go of its own."""
    quiet(bench)
    found: dict[str, Any] = {"released": bench.ask(command="release", what="counters", seconds=600)}
    each = min(10.0, (seconds - 12) / 2)
    options = argparse.Namespace(library="", sysfs="/sys", cost=each)
    try:
        with pm_sampler.busy(seconds + 20):
            for chosen in ("default", "full"):
                found[chosen] = pm.guarded(lambda c=chosen: pm.one(options, "busy", c, "1ms"))
                if "core_per_gpu" in found[chosen]:
                    used = found[chosen]["core_per_gpu"] * found[chosen]["gpus"]
                    found[chosen]["core"] = used
    finally:
        found["resumed"] = bench.ask(command="resume", what="counters")
    start_ns = monotonic_ns()
    found["back_after_seconds"] = bench.wait(lambda: fresh(bench, "pm", start_ns), 15)
    return found


def fresh(bench: Bench, duty: str, since_ns: int) -> bool:
    """Say whether all rings of a sampler have rows of after a moment."""
    rings = bench.rows(duty, since_ns, 2**62)
    return bool(rings) and all(len(rows.times) for _, rows in rings)


def killed(bench: Bench, seconds: float) -> dict[str, Any]:
    """Each sampler killed in turn: how soon it is back, and what others lose."""
    quiet(bench)
    end = time.monotonic() + seconds
    found: dict[str, Any] = {}
    for duty in ("state", "counters", "pm"):
        if end - time.monotonic() < 6:
            found[duty] = {"left_out": "no time left"}
            continue
        pid = bench.child(duty)["pid"]
        start_ns = monotonic_ns()
        os.kill(pid, signal.SIGKILL)
        noticed = bench.wait(lambda d=duty, p=pid: bench.child(d)["pid"] not in (p, None), 10)
        back = bench.wait(lambda d=duty, p=pid, at=start_ns: returned(bench, d, p, at), 15)
        back_seconds = None if back is None else (monotonic_ns() - start_ns) / 1e9
        time.sleep(1.5)
        others = [one for one in DUTIES if one != duty]
        found[duty] = {
            "noticed_after_seconds": noticed,
            "back_after_seconds": back_seconds,
            "widest_gap_ms": {
                one: [
                    widest(bench, one, start_ns - 3000 * MS, start_ns),
                    widest(bench, one, start_ns, monotonic_ns()),
                ]
                for one in others
            },
            "restarts": total(scrape(), "gpuwatch_child_restarts_total"),
        }
    return found


def returned(bench: Bench, duty: str, pid: int, since_ns: int) -> bool:
    """Say whether another process does what this one did."""
    return bench.manifest(duty)["pid"] != pid and fresh(bench, duty, since_ns)


def widest(bench: Bench, duty: str, start_ns: int, end_ns: int) -> dict[str, list[float]]:
    """Return of each ring the widest gap between two rows, and its period, in milliseconds."""
    found = {}
    for name, rows in bench.rows(duty, start_ns, end_ns):
        if len(rows.times) > 1:
            found[name] = [float(max(rows.times[1:] - rows.times[:-1])) / MS, rows.period_ns / MS]
    return found
