"""What the size of the image costs into which samples are decoded, and what a sampler's memory is.

    python benchmarks/pm_image.py --sizes 128,750,1250 --seconds 2

Uses the product's calls in this process, on GPU 0, and prints one JSON object: by metric set and
size the CPU of decoding and evaluating a sample, the samples lost, how old the newest one was at
each drain, and the memory; and what each step of a start adds to it, by mapping.
"""

import argparse
import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

from pm_sampler import memory

from gpuwatch import pm_session
from gpuwatch.cuda import Cuda
from gpuwatch.cupti import Cupti
from gpuwatch.cupti_library import choose, toolkits, wheels
from gpuwatch.pm_metrics import choose as fit
from gpuwatch.pm_session import Device, Session

MS = 1_000_000


def measure(device: Device, chosen: str, size: int, seconds: float) -> dict[str, Any]:
    """Sample for a while with an image of so many samples."""
    metrics = fit(chosen, {}, device.passes).metrics
    sample_bytes = sum(metric.bytes for metric in metrics)
    pm_session.IMAGE_ROOM = size * sample_bytes / pm_session.buffer_bytes(sample_bytes, MS)
    names = tuple(metric.name for metric in metrics)
    start = time.monotonic()
    session = Session(device, names, sample_bytes, MS)
    began = time.monotonic() - start
    time.sleep(0.5)
    session.drain()
    used, ends, ages, lost = 0.0, [], [], 0
    while time.monotonic() - start < seconds + 0.5:
        time.sleep(0.5)
        before, wall_ns = time.thread_time(), time.time_ns()
        drained = session.drain()
        used += time.thread_time() - before
        ends += [sample.end_ns for sample in drained.samples]
        lost += drained.left_out + drained.overflow  # an overflow is one, however many it lost
        ages.append(round((wall_ns - ends[-1]) / MS, 3) if ends else None)
    found = {
        "set": chosen, "size": size, "samples": len(ends), "lost": lost,
        "expected": (ends[-1] - ends[0]) / MS + 1 if ends else 0,
        "us_per_sample": used / max(1, len(ends)) * 1e6, "begin_seconds": began,
        "newest_age_ms": ages, "pss_mib": sum(memory("self").values()),
    }  # fmt: skip
    start = time.monotonic()
    session.close()
    return {**found, "close_seconds": time.monotonic() - start}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="128,750,1250")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--library", type=Path)
    options = parser.parse_args()
    steps = {"python": memory("self")}
    cuda = Cuda()
    path = options.library or choose(cuda.version, [*wheels(sys.path), *toolkits()]).path
    cuda.initialise()
    steps["cuInit"] = memory("self")
    cupti = Cupti(path)
    cupti.call("cuptiProfilerInitialize")
    device = Device(cupti, 0)
    steps["library"] = memory("self")
    sizes = [int(size) for size in options.sizes.split(",")]
    rows = [measure(device, "default", sizes[0], 0.5)]
    steps["session closed"] = memory("self")
    ctypes.CDLL(None).malloc_trim(0)
    steps["malloc_trim"] = memory("self")
    for chosen in ("default", "full"):
        rows += [measure(device, chosen, size, options.seconds) for size in sizes]
    print(json.dumps({"steps": steps, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
