"""How long a matmul takes to settle under the power limit, in bursts and without a pause.

    python benchmarks/matmul_settling.py --output DIRECTORY [--gpu 0] [--seconds 4] [--pause 2.5]
    python benchmarks/matmul_settling.py --output DIRECTORY --cpu    # the script itself

Each dtype of the matmul canary runs twice from an idle GPU: in bursts, by the worker's own code,
and with the queue never empty; at last all dtypes go one after the other without a pause between,
as the canary has them. A process beside reads NVML each 10 ms. In the last part a kernel that spins
for a number of cycles follows each burst, so that its clock is known from the GPU itself.
`settling.json` has each burst and each read; times are those of the monotonic clock.
"""

import argparse
import collections
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpuwatch.canaries import matmul
from gpuwatch.canary_worker import Worker

SETTINGS = {"ranks": 1, "scratch": ".", "seed": 1, "bursts": 10, "burst_seconds": 0.02}
QUEUED = 3  # bursts that wait on the GPU when it must never be without work
SPIN_CYCLES = 1_000_000
TURN_SECONDS = 0.8
SHOWN = (0.1, 0.3, 0.5, 1.0, 2.0, 4.0)
ABOUT_SECONDS = 0.1  # before such a time, over which a value is taken


def watch(index: int) -> None:
    """Write what NVML says, each 10 ms, until the other end is closed."""
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
    with contextlib.suppress(BrokenPipeError):
        while True:
            told = (
                time.monotonic_ns(),
                pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
                pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
                pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
                pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu),
            )
            os.write(1, json.dumps(told).encode() + b"\n")
            time.sleep(0.01)


def bursts(worker: Worker, launch: Callable[[], object], seconds: float) -> Iterator[Any]:
    """Yield (end, seconds of a launch) of bursts, as the worker makes them."""
    worker.burst(launch, 1)
    count, end = worker.launches(launch), time.monotonic() + seconds
    while time.monotonic() < end:
        took = worker.burst(launch, count) / count
        yield time.monotonic_ns(), took


def unbroken(worker: Worker, launch: Callable[[], object], seconds: float) -> Iterator[Any]:
    """Yield the same of a GPU that always has work queued."""
    if not worker.on_gpu:
        yield from bursts(worker, launch, seconds)
        return
    worker.burst(launch, 1)
    count, end = worker.launches(launch), time.monotonic() + seconds
    events: collections.deque[Any] = collections.deque()
    while time.monotonic() < end:
        while len(events) <= QUEUED:
            if events:
                for _ in range(count):
                    launch()
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
        events[1].synchronize()
        took = events.popleft().elapsed_time(events[0]) / 1e3 / count
        yield time.monotonic_ns(), took
    worker.synchronize()


def clocked(worker: Worker, launch: Callable[[], object], seconds: float) -> Iterator[Any]:
    """Yield the same of bursts, and the clock in hertz right after each."""
    for ended, took in bursts(worker, launch, seconds):
        hertz = None
        if worker.on_gpu:
            spun = worker.burst(lambda: torch.cuda._sleep(SPIN_CYCLES), 1)
            hertz = SPIN_CYCLES / spun
        yield ended, took, hertz


def noted(dtype: str, how: str, edge: int, made: Iterator[Any]) -> dict[str, Any]:
    """Return the bursts of one run."""
    start = time.monotonic_ns()
    rows = [(ended, 2 * edge**3 / took, *more) for ended, took, *more in made]
    return {"dtype": dtype, "how": how, "start_ns": start, "bursts": rows}


def shown(run: dict[str, Any], reads: list[Any]) -> None:
    """Print what a run was like at some times after its start."""
    for seconds in SHOWN:
        end = run["start_ns"] + int(seconds * 1e9)
        start = end - int(ABOUT_SECONDS * 1e9)
        values = [row[1] for row in run["bursts"] if start <= row[0] < end]
        seen = [read for read in reads if start <= read[0] < end]
        if not values:
            continue
        value = statistics.median(values)
        line = f"{run['dtype']:5} {run['how']:9} {seconds:4.1f} s {value / 1e12:8.1f} TFLOPS"
        spins = [row[2] for row in run["bursts"] if start <= row[0] < end and row[2:] and row[2]]
        if seen:
            clock = statistics.fmean(read[1] for read in seen)
            watts = statistics.fmean(read[2] for read in seen)
            line += f" {clock:6.0f} MHz {value / clock / 1e6:9.0f} a hertz {watts:5.0f} W"
            line += f" {seen[-1][3]:3} C {seen[-1][4]:#x}"
        if spins:
            clock = statistics.fmean(spins) / 1e6
            line += f"  spun {clock:6.0f} MHz {value / clock / 1e6:9.0f} a hertz"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--pause", type=float, default=2.5)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--watch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watch:
        watch(options.gpu)
        return
    options.output.mkdir(parents=True, exist_ok=True)
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as NVML numbers them
    edge = 256 if options.cpu else 8192
    worker = Worker({**SETTINGS, "device": "cpu" if options.cpu else "gpu", "size": edge}, 1)
    worker.torch = torch
    worker.device = torch.device("cpu" if options.cpu else f"cuda:{options.gpu}")
    if not options.cpu:
        torch.cuda.set_device(worker.device)
    generator = worker.generator()
    numbers = [
        torch.empty(edge, edge, device=worker.device).normal_(generator=generator) for _ in range(2)
    ]
    file, watcher = options.output / "nvml.jsonl", None
    if not options.cpu:
        command = [sys.executable, __file__, "--watch", "--gpu", str(options.gpu)]
        with file.open("wb") as output:
            watcher = subprocess.Popen(command, stdout=output)
    runs = []
    try:
        dtypes = matmul.dtypes(worker)
        for dtype in dtypes:
            torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
            launch = matmul.multiplication(torch, dtype, *numbers)
            for how, made in (("bursts", bursts), ("unbroken", unbroken)):
                worker.synchronize()
                time.sleep(options.pause)
                runs.append(noted(dtype, how, edge, made(worker, launch, options.seconds)))
        time.sleep(options.pause)
        for dtype in dtypes:
            torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
            launch = matmul.multiplication(torch, dtype, *numbers)
            runs.append(noted(dtype, "in turn", edge, clocked(worker, launch, TURN_SECONDS)))
    finally:
        if watcher is not None:
            watcher.terminate()
            watcher.wait()
    lines = file.read_text().splitlines() if watcher is not None else []
    reads = [json.loads(line) for line in lines if line.endswith("]")]
    (options.output / "settling.json").write_text(json.dumps({"runs": runs, "nvml": reads}))
    for run in runs:
        shown(run, reads)


if __name__ == "__main__":
    main()
