"""Sustained: matrix multiplication without a pause, in the dtype that most work is done in.

A card that is well cooled and fed does in the last minute what it did in the first.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Callable  # noqa: UP035 - also in a Python that is older

if TYPE_CHECKING:
    from gpuwatch.canary_worker import Worker

SLICES = 60  # results of a run, at most
LEAST_SECONDS = 0.5  # of a slice
USUAL = ("bf16", "fp16", "fp32")


def run(worker: Worker) -> None:
    """Tell operations per second, slice after slice."""
    torch, matmul = worker.torch, worker.canary("matmul")
    size = worker.fitting(lambda size: 5 * 4 * size * size)
    generator = worker.generator()
    numbers = [
        torch.empty(size, size, device=worker.device).normal_(generator=generator) for _ in range(2)
    ]
    known = matmul.dtypes(worker)
    dtype = next(dtype for dtype in USUAL if dtype in known)
    launch = matmul.multiplication(torch, dtype, *numbers)
    del numbers
    worker.phase("warm_up")
    last(worker, launch, worker.settings["warm_seconds"])
    wanted = worker.settings["seconds"]
    slice_seconds = max(wanted / SLICES, LEAST_SECONDS)
    for _ in range(max(1, round(wanted / slice_seconds))):
        worker.phase("measure")
        start = time.monotonic_ns()
        value = 2 * size**3 / last(worker, launch, slice_seconds)
        end = time.monotonic_ns()
        worker.tell(size=size, dtype=dtype, value=value, start_ns=start, end_ns=end)


def last(worker: Worker, launch: Callable[[], object], seconds: float) -> float:
    """Keep the device at work for some seconds; return those that a launch took."""
    count, done, busy = worker.launches(launch), 0, 0.0
    while not done or busy < seconds:
        busy += worker.burst(launch, count)
        done += count
    return busy / done
