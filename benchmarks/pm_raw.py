"""Two modes of PM sampling by the product's calls in this process, on GPU 0; one JSON object each.

    python benchmarks/pm_raw.py sysclk --seconds 1.5    intervals of the sys clock, beside copies
    python benchmarks/pm_raw.py ring --seconds 6        a buffer that keeps the latest, by its size

sysclk: how long intervals are and how they follow each other, idle and beside a known load whose
bytes are compared, first by a guess of the clock and then by what was measured. ring: CPU while it
records, then what a drain before the stop gives: samples, the time from the first to the newest,
the newest's age; and once more from the same session.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pm_sampler
from pm_sampler import Load, busy

from gpuwatch.clock import SECOND_NS, read_clocks
from gpuwatch.cuda import Cuda
from gpuwatch.cupti import Cupti
from gpuwatch.cupti_library import choose, toolkits, wheels
from gpuwatch.pm_metrics import choose as fit
from gpuwatch.pm_session import MIB, Device, Sample, Session

MS = 1_000_000
GUESS_HERTZ = 1.4e9
DRAIN_SECONDS = 0.25
MARGIN_NS = 100 * MS
DRAM = ("gpu_dram_read_bytes_total", "gpu_dram_written_bytes_total")
PCIE = ("gpu_pcie_received_bytes_total",)


class Gpu:
    """GPU 0 and the metrics of a set."""

    def __init__(self, library: Path | None, chosen: str) -> None:
        cuda = Cuda()
        path = library or choose(cuda.version, [*wheels(sys.path), *toolkits()]).path
        cuda.initialise()
        cupti = Cupti(path)
        cupti.call("cuptiProfilerInitialize")
        self.device = Device(cupti, 0)
        metrics = fit(chosen, {}, self.device.passes).metrics
        self.columns = [metric.column for metric in metrics]
        self._names = tuple(metric.name for metric in metrics)
        self.sample_bytes = sum(metric.bytes for metric in metrics)

    def session(self, **mode: Any) -> Session:
        return Session(self.device, self._names, self.sample_bytes, MS, **mode)

    def place(self, column: str) -> int:
        return self.columns.index(column)


def drained(session: Session, seconds: float) -> tuple[list[Sample], dict[str, Any]]:
    """Drain for so long; return the samples, and what they and the drains were like."""
    samples: list[Sample] = []
    lost = {"left_out": 0, "overflow": 0}
    used, start, wall_ns = 0.0, time.monotonic(), 0
    while time.monotonic() - start < seconds:
        time.sleep(DRAIN_SECONDS)
        before, wall_ns = time.thread_time(), time.time_ns()
        found = session.drain()
        used += time.thread_time() - before
        samples += found.samples
        lost["left_out"] += found.left_out
        lost["overflow"] += found.overflow
    cost = used / max(1, len(samples)) * 1e6
    return samples, {**about(samples, wall_ns), **lost, "us_per_sample": cost}


def about(samples: Sequence[Sample], drained_ns: int) -> dict[str, Any]:
    """Return how samples lie in time, in milliseconds; they were drained at that wall time."""
    if len(samples) < 2:
        return {"samples": len(samples)}
    starts = np.array([sample.start_ns for sample in samples])
    ends = np.array([sample.end_ns for sample in samples])
    spans, apart, between = ends - starts, np.diff(ends), starts[1:] - ends[:-1]
    shares = (0, 1, 50, 99, 100)
    return {
        "samples": len(samples),
        "reach": (ends[-1] - starts[0]) / MS,
        "spans": (np.percentile(spans, shares) / MS).round(4).tolist(),
        "apart": (np.percentile(apart, shares) / MS).round(4).tolist(),
        "begin_at_the_end_before": float((between == 0).mean()),
        "between": (np.percentile(between, shares) / MS).round(4).tolist(),
        "newest_age": (drained_ns - int(ends[-1])) / MS,
    }


def mean(gpu: Gpu, samples: Sequence[Sample], column: str) -> float:
    place = gpu.place(column)
    return float(np.mean([sample.values[place] for sample in samples])) if samples else 0.0


def clock(gpu: Gpu, session: Session, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the sys clock by the intervals of samples, beside the counted clock of the SMs."""
    spans = np.array([sample.end_ns - sample.start_ns for sample in samples])
    hertz = session.cycles * SECOND_NS / np.median(spans) if len(spans) else 0.0
    return {
        "sys_hertz": float(hertz),
        "gpc_hertz": mean(gpu, samples, 'gpu_clock_hertz{clock="gpc"}'),
    }


def beside(
    gpu: Gpu, what: str, columns: Sequence[str], seconds: float, **mode: Any
) -> dict[str, Any]:
    """Compare bytes with those of a known load."""
    load = Load(what, seconds)
    load.ready()  # a session that is not drained meanwhile would overflow
    session = gpu.session(**mode)
    try:
        drained(session, DRAIN_SECONDS)
        load.go()
        samples, found = drained(session, seconds + 1.0)
    finally:
        session.close()
    did = load.answer()
    load.end()
    now = read_clocks()
    shift_ns = now.realtime_ns - now.monotonic_ns
    start_ns, end_ns = (did[key] + shift_ns for key in ("start_ns", "end_ns"))
    wide = [one for one in samples if start_ns - MARGIN_NS < one.end_ns <= end_ns + MARGIN_NS]
    inside = [one for one in samples if start_ns + MARGIN_NS < one.end_ns <= end_ns - MARGIN_NS]
    counted = {name: sum(one.values[gpu.place(name)] for one in wide) for name in columns}
    return {
        **found,
        "load": {**about(inside, end_ns), **clock(gpu, session, inside)},
        "bytes": did["bytes"],
        "ratio": {name: count / did["bytes"] for name, count in counted.items()},
    }


def sysclk(gpu: Gpu, options: argparse.Namespace) -> dict[str, Any]:
    seconds = options.seconds
    found: dict[str, Any] = {"by_time": beside(gpu, "copy", DRAM, seconds)}
    hertz = GUESS_HERTZ
    for name in ("guessed", "measured"):
        session = gpu.session(sys_hertz=hertz)
        try:
            samples, idle = drained(session, seconds)
        finally:
            session.close()
        found[name] = {
            "set_hertz": hertz,
            "idle": {**idle, **clock(gpu, session, samples)},
            "copy": beside(gpu, "copy", DRAM, seconds, sys_hertz=hertz),
            "h2d": beside(gpu, "h2d", PCIE, seconds, sys_hertz=hertz),
        }
        hertz = found[name]["copy"]["load"]["sys_hertz"] or hertz
    return found


def ring(gpu: Gpu, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for load in ("idle", "busy"):
        if load == "idle":
            rows += [one(gpu, load, mib, options) for mib in options.mib]
        else:
            with busy(600):
                rows += [one(gpu, load, mib, options) for mib in options.mib]
    return rows


def one(gpu: Gpu, load: str, mib: int, options: argparse.Namespace) -> dict[str, Any]:
    """Record into a buffer of that size, drain, record on and drain again."""
    start = time.monotonic()
    session = gpu.session(latest_bytes=mib * MIB)
    began = time.monotonic() - start
    found: dict[str, Any] = {"load": load, "mib": mib, "begin_seconds": began}
    try:
        for name, seconds in (("first", options.seconds), ("second", 1.0), ("third", 6.0)):
            before = time.process_time()
            time.sleep(seconds)
            recording = time.process_time() - before
            start, before, wall_ns = time.monotonic(), time.thread_time(), time.time_ns()
            drain = session.drain()
            found[name] = {
                "recorded": seconds * 1e3,
                "cpu_while_recording": recording,
                "drain_seconds": time.monotonic() - start,
                "drain_cpu": time.thread_time() - before,
                "left_out": drain.left_out,
                "overflow": drain.overflow,
                **about(drain.samples, wall_ns),
            }
    finally:
        start = time.monotonic()
        session.close()
        found["close_seconds"] = time.monotonic() - start
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("sysclk", "ring"))
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--mib", type=int, nargs="*", default=[8, 16, 32])
    parser.add_argument("--set", default="default")
    parser.add_argument("--library", type=Path)
    parser.add_argument("--pretend", action="store_true")
    options = parser.parse_args()
    if options.pretend:
        pm_sampler.PRETEND.append("--pretend")
    gpu = Gpu(options.library, options.set)
    found = {"chip": gpu.device.chip, "set": options.set, "sample_bytes": gpu.sample_bytes}
    found["found"] = sysclk(gpu, options) if options.what == "sysclk" else ring(gpu, options)
    print(json.dumps(found, default=float))
    return 0


if __name__ == "__main__":
    sys.exit(main())
