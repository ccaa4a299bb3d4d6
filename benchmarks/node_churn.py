"""The part of `node.py` in which jobs come and go for minutes, while canaries run often.

What became of every canary and job, and whether the samplers beside them lost anything.
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from measured import scrape
from node_bench import Bench, rises
from node_jobs import MS, beside, met
from node_parts import DUTIES, fresh

from gpuwatch.clock import monotonic_ns

LENGTH_SECONDS, GAP_SECONDS = (5.0, 40.0), (2.0, 30.0)
AIM_SECONDS = 12.0  # that a job waits to meet a canary
CLOSING_SECONDS = 8.0
JOB_END_SECONDS = 3.0
LOOK_SECONDS = 20.0
ARRIVE_NS = 1500 * MS  # until the rows of a moment are in their ring
KERNELS_MS = 50.0  # after which no kernel of a canary may begin beside a job
BESIDE = ("gone_ms", "overlap_at_most_ms", "slow_ms", "slow_until_ms")


def plan(gpus: int, order: random.Random) -> Iterator[dict[str, Any]]:
    """Yield jobs: on which GPUs, how long after these were left, for how long, and who waits."""
    while True:
        every = list(range(gpus))
        chosen = every if order.random() < 0.35 else [order.choice(every)]
        gap, length = (
            low * (high / low) ** order.random() for low, high in (GAP_SECONDS, LENGTH_SECONDS)
        )
        yield {"gpus": chosen, "gap": gap, "seconds": length, "aimed": order.random() < 0.5}


class Rings:
    """What samplers delivered, ring by ring, taken in before the rings go round."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._from_ns = bench, monotonic_ns()
        self._rows: dict[str, list[tuple[Any, Any]]] = {}
        self._expected: dict[str, float] = {}
        self._period_ns: dict[str, int] = {}

    def look(self) -> None:
        """Take in what came since the last look."""
        until_ns = monotonic_ns() - ARRIVE_NS
        if until_ns <= self._from_ns:
            return
        for duty in DUTIES:
            for ring, rows in self._bench.rows(duty, self._from_ns, until_ns - 1):
                name = f"{duty}.{ring}"
                self._rows.setdefault(name, []).append((rows.times, rows.late))
                share = (until_ns - self._from_ns) / rows.period_ns
                self._expected[name] = self._expected.get(name, 0.0) + share
                self._period_ns[name] = rows.period_ns
        self._from_ns = until_ns

    def about(self) -> dict[str, Any]:
        """Return of each ring rows that were due and that came, gaps, and lateness."""
        found = {}
        for name, parts in self._rows.items():
            times, late = (np.concatenate(part) for part in zip(*parts, strict=True))
            gaps = np.diff(times) / MS
            wide = gaps[gaps > 1.5 * self._period_ns[name] / MS]
            found[name] = {
                "expected": round(self._expected[name], 1),
                "rows": len(times),
                "period_ms": self._period_ns[name] / MS,
                "gaps": len(wide),
                "gaps_ms": float(wide.sum()),
                "widest_ms": float(gaps.max()) if len(gaps) else None,
            }
            if len(late) and not name.startswith("pm."):
                marks = np.percentile(late, (50, 99, 99.9, 100)) * 1e6
                found[name]["late_us_p50_p99_p999_max"] = marks.round(1).tolist()
        return found


class Churn:
    """Jobs that run and have run, beside the daemon and its canaries."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.rings = bench, Rings(bench)
        self.before, self.begun_ns = scrape(), monotonic_ns()
        self.running: list[tuple[dict[str, Any], subprocess.Popen[str]]] = []
        self.ran: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.left_at = dict.fromkeys(range(bench.gpus), time.monotonic())
        self.looked = time.monotonic()

    def until(self, condition: Callable[[], bool], end: float) -> bool:
        """Wait for a condition, and see after jobs and rings meanwhile; False at the end."""
        while not condition():
            if time.monotonic() > end:
                return False
            self.see()
            time.sleep(0.01)
        return True

    def see(self) -> None:
        """Take in jobs that have ended, and now and then what samplers delivered."""
        for one in list(self.running):
            told, job = one
            if job.poll() is None:
                continue
            self.running.remove(one)
            self.left_at |= dict.fromkeys(told["gpus"], time.monotonic())
            text = job.stdout.read() if job.stdout else ""
            if job.returncode or not text.strip():
                self.failed.append(f"status {job.returncode}: {self.bench.errors()}")
            else:
                self.ran.append({**told, **json.loads(text.splitlines()[-1])})
        if time.monotonic() - self.looked > LOOK_SECONDS:
            self.looked = time.monotonic()
            self.rings.look()
            self.write()

    def start(self, told: dict[str, Any], end: float) -> None:
        """Have a job begin when its GPUs were left for long enough, or a canary is there."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        job = self.bench.start("node_job.py", *self.bench.flags, **pipes)
        assert job.stdin
        assert job.stdout
        job.stdout.readline()

        def free() -> bool:
            taken = {gpu for one, _ in self.running for gpu in one["gpus"]}
            since = max(self.left_at[gpu] for gpu in told["gpus"])
            return taken.isdisjoint(told["gpus"]) and time.monotonic() - since >= told["gap"]

        least = LENGTH_SECONDS[0] + JOB_END_SECONDS
        if not self.until(free, end - least):
            job.kill()
            return
        if told["aimed"]:
            if self.bench.pretend:
                tiny = ["canary", "run", "matmul", "memory", "--cpu", "--size", "tiny"]
                command = [sys.executable, "-m", "gpuwatch", *tiny]
                self.bench.begin(command, stdout=subprocess.DEVNULL)
            here = told["gpus"]
            self.until(
                lambda: bool(met(self.bench, here)),
                min(end - least, time.monotonic() + AIM_SECONDS),
            )
        told["met"] = met(self.bench, told["gpus"])
        told["seconds"] = min(told["seconds"], end - time.monotonic() - JOB_END_SECONDS)
        job.stdin.write(json.dumps(told) + "\n")
        job.stdin.flush()
        self.running.append((told, job))

    def about(self) -> dict[str, Any]:
        """Return what is known so far."""
        together = beside(self.bench.seen, self.begun_ns)
        jobs = [self.judged(one) for one in self.ran]
        ratios = {
            name: [one["first_second_ratio"] for one in jobs if bool(one["met"]) == among]
            for name, among in (("met", True), ("alone", False))
        }
        status = self.bench.status()
        passed = (monotonic_ns() - self.begun_ns) / 1e9
        cpu = rises(self.before, "gpuwatch_process_cpu_seconds_total")
        return {
            "seconds": passed,
            "jobs": jobs,
            "failed": self.failed,
            "first_second_ratio": {
                name: {"n": len(found), "mean": float(np.mean(found)), "most": max(found)}
                for name, found in ratios.items()
                if found
            },
            **together,
            "gone_after_listed_ms": [round(one["ms"], 1) for one in together["overlaps"]],
            "overlapped": [
                {"gpus": one["gpus"], **{key: one[key] for key in BESIDE}}
                for one in jobs
                if max(one["overlap_at_most_ms"] or 0, one["slow_ms"]) > KERNELS_MS
            ],
            "runs": rises(self.before, "gpuwatch_canary_runs_total"),
            "skips": rises(self.before, "gpuwatch_canary_skipped_total"),
            "rings": self.rings.about(),
            "uncovered": rises(self.before, "gpuwatch_gpu_counters_uncovered_seconds_total"),
            "errors": rises(self.before, "gpuwatch_source_errors_total"),
            "missing": rises(self.before, "gpuwatch_samples_missing_total"),
            "restarts": rises(self.before, "gpuwatch_child_restarts_total"),
            "cpu_percent": {duty: 100 * used / passed for duty, used in cpu.items()},
            "states": {
                name: f"{one['state']}: {one['reason']}"
                for name, one in status["sources"].items()
                if one["state"] != "on"
            },
            "events": [
                f"{one['name']} {one['entity'][1]}: {one['detail']}" for one in status["events"]
            ][-60:],
            "alerts": [one["alert"] for one in status["alerts"] if "alert" in one],
        }

    def judged(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return a job with how long canaries were still there, and might have had kernels."""
        gone, most = None, None
        for gpu, first_ns in zip(job["gpus"], job["kernels_ns"], strict=True):
            left_ns = [
                one["end_ns"]
                for one in beside(self.bench.seen, job["go_ns"])["overlaps"]
                if one["gpu"] == gpu and one["end_ns"] < job["end_ns"]
            ]
            if left_ns:
                gone = max(gone or 0.0, (max(left_ns) - job["go_ns"]) / MS)
                most = max(most or 0.0, (max(left_ns) - first_ns) / MS)
        ratio = job["first_second_ms"] / job["later_ms"] if job["later_ms"] else None
        return {**job, "gone_ms": gone, "overlap_at_most_ms": most, "first_second_ratio": ratio}

    def write(self) -> None:
        """Keep what is known so far, whatever becomes of the rest."""
        self.bench.partial = self.about()
        text = json.dumps(self.bench.partial, indent=1, default=str)
        (self.bench.output / "churn.json").write_text(text)


def churn(bench: Bench, seconds: float) -> dict[str, Any]:
    """Jobs come and go, most of them on GPUs where a canary runs or may run at any time."""
    end = time.monotonic() + seconds - CLOSING_SECONDS
    bench.watch("--period", "0.02")
    start_ns = monotonic_ns()
    bench.wait(lambda: fresh(bench, "pm", start_ns), 20)
    found = Churn(bench)
    for told in plan(bench.gpus, random.Random(1)):
        if end - time.monotonic() < LENGTH_SECONDS[0] + JOB_END_SECONDS + 8:
            break
        found.start(told, end)
    found.until(lambda: not found.running, end)
    found.until(lambda: False, min(end, time.monotonic() + 2))
    found.rings.look()
    found.write()
    return bench.partial
