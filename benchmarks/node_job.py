"""A job that begins at once when told, on the GPUs it is told, and says how fast it was.

    echo '{"gpus": [0, 1], "seconds": 8}' | python node_job.py [--pretend]

It prints "ready" when torch is imported, without a context on any GPU, and waits for the line.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

JOB = "node-job"
EDGE, BATCH = 8192, 8
LATER_SECONDS = 3.0
SLOW = 1.4  # times what is usual: somebody else has the GPU as well


class Work:
    """Matrix products on one GPU, timed by its own clock."""

    def __init__(self, torch: Any, gpu: int) -> None:
        self.torch, self.gpu = torch, gpu
        torch.cuda.set_device(gpu)
        torch.cuda.synchronize()
        self.kernels_ns = time.monotonic_ns()  # none began before
        options = {"device": f"cuda:{gpu}", "dtype": torch.bfloat16}
        self.cells = [torch.randn(EDGE, EDGE, **options) for _ in range(3)]
        self.marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.matmul(self.cells[0], self.cells[1], out=self.cells[2])
        torch.cuda.synchronize()

    def begin(self) -> None:
        self.torch.cuda.set_device(self.gpu)
        self.marks[0].record()
        for _ in range(BATCH):
            self.torch.matmul(self.cells[0], self.cells[1], out=self.cells[2])
        self.marks[1].record()

    def end(self) -> float:
        """Return the milliseconds of a product."""
        self.marks[1].synchronize()
        return self.marks[0].elapsed_time(self.marks[1]) / BATCH


class Pretended:
    def __init__(self, torch: Any, gpu: int) -> None:
        del torch, gpu
        self.kernels_ns = time.monotonic_ns()

    def begin(self) -> None:
        time.sleep(0.01)

    def end(self) -> float:
        return 10.0


def slowed(times: list[tuple[float, float]]) -> dict[str, float]:
    """Return of the first second by how much work took longer in all, and until when it did."""
    usual = statistics.median(each for when, each in times if when >= min(1.0, times[-1][0]))
    slow = [(when, each) for when, each in times if when < 1 and each > SLOW * usual]
    return {
        "slow_ms": sum((each - usual) * BATCH for _, each in slow),
        "slow_until_ms": max((when * 1e3 + each * BATCH for when, each in slow), default=0.0),
    }


def main() -> None:
    import torch

    pretend = "--pretend" in sys.argv
    print("ready", flush=True)
    line = sys.stdin.readline()
    if not line:
        return
    told = json.loads(line)
    Path("/proc/self/comm").write_text(JOB)
    go_ns = time.monotonic_ns()
    works = [(Pretended if pretend else Work)(torch, gpu) for gpu in told["gpus"]]
    first_ns = time.monotonic_ns()
    times: list[tuple[float, float]] = []
    while (passed := (time.monotonic_ns() - first_ns) / 1e9) < told["seconds"]:
        for work in works:
            work.begin()
        times += [(passed, work.end()) for work in works]
    answer: dict[str, Any] = {"go_ns": go_ns, "start_seconds": (first_ns - go_ns) / 1e9}
    answer["kernels_ns"] = [work.kernels_ns for work in works]
    answer |= slowed(times)
    for name, low, high in (("first_second", 0.0, 1.0), ("later", LATER_SECONDS, 1e9)):
        found = [each for when, each in times if low <= when < high]
        answer[f"{name}_ms"] = sum(found) / len(found) if found else None
    print(json.dumps({**answer, "end_ns": time.monotonic_ns()}), flush=True)


if __name__ == "__main__":
    main()
