"""Does known work on the GPUs and says how much of it, as JSON lines on standard output.

    python pm_load.py copy --seconds 2        copies in GPU 0's memory, far larger than its L2
    python pm_load.py h2d|d2h --seconds 2     pinned copies to GPU 0, or from it
    python pm_load.py matmul --seconds 2      bf16 matrices of 8192 on GPU 0
    python pm_load.py allreduce --seconds 2   NCCL over all GPUs, protocol Simple, algorithm Ring
    python pm_load.py burst --seconds 1       idle, then 5 ms of copies, then idle

It prints "ready", waits for a line, works, and prints what it did with its times on the monotonic
clock. With --pretend it works on nothing, where there is no GPU.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

GIB = 2**30
MATRIX = 8192
MESSAGE = 256 * 2**20


def begin() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def end(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def timed(step: Callable[[], Any], seconds: float, batch: int) -> dict[str, Any]:
    """Make steps for so long; return how many, and from when to when."""
    step()
    torch.cuda.synchronize()
    begin()
    start_ns, count = time.monotonic_ns(), 0
    while time.monotonic_ns() - start_ns < seconds * 1e9:
        for _ in range(batch):
            step()
        count += batch
        torch.cuda.synchronize()
    return {"count": count, "start_ns": start_ns, "end_ns": time.monotonic_ns()}


def copy(seconds: float) -> None:
    source = torch.randint(0, 255, (2 * GIB,), dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source)
    done = timed(lambda: target.copy_(source), seconds, 20)
    end(bytes=done["count"] * 2 * GIB, **done)


def host_copy(direction: str, seconds: float) -> None:
    host = torch.randint(0, 255, (GIB // 4,), dtype=torch.uint8).pin_memory()
    device = torch.empty(GIB // 4, dtype=torch.uint8, device="cuda:0")
    source, target = (host, device) if direction == "h2d" else (device, host)
    done = timed(lambda: target.copy_(source, non_blocking=True), seconds, 8)
    end(bytes=done["count"] * GIB // 4, **done)


def matmul(seconds: float) -> None:
    left, right, out = (
        torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda:0") for _ in range(3)
    )
    done = timed(lambda: torch.matmul(left, right, out=out), seconds, 20)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    end(flops=done["count"] * 2 * MATRIX**3, sms=sms, **done)


def burst(seconds: float) -> None:
    source = torch.randint(0, 255, (GIB,), dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    begin()
    time.sleep(seconds / 2)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    start_ns = time.monotonic_ns()
    marks[0].record()
    for _ in range(10):
        target.copy_(source)
    marks[1].record()
    torch.cuda.synchronize()
    end_ns = time.monotonic_ns()
    time.sleep(seconds / 2)
    spent = marks[0].elapsed_time(marks[1]) / 1e3
    end(bytes=10 * GIB, seconds=spent, start_ns=start_ns, end_ns=end_ns)


def reducer(rank: int, world: int, seconds: float) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    data = torch.ones(MESSAGE // 4, device=f"cuda:{rank}")
    flag = torch.zeros(1, device=f"cuda:{rank}")
    dist.all_reduce(data)
    torch.cuda.synchronize()
    if rank == 0:
        print("ready", flush=True)
        time.sleep(2.5)
    dist.barrier()
    torch.cuda.synchronize()
    start_ns, count = time.monotonic_ns(), 0
    while not flag.item():
        for _ in range(50):
            dist.all_reduce(data)
        count += 50
        flag.fill_(float(time.monotonic_ns() - start_ns > seconds * 1e9))
        dist.broadcast(flag, 0)
    torch.cuda.synchronize()
    if rank == 0:
        # What a ring sends from each GPU: 2 (n - 1) / n of the data.
        sent = 2 * (world - 1) * MESSAGE * count // world
        end(bytes=sent, count=count, start_ns=start_ns, end_ns=time.monotonic_ns())
    time.sleep(1.5)
    os._exit(0)  # taking down the process group may wait for ever


def pretend(what: str, seconds: float) -> None:
    begin()
    start_ns = time.monotonic_ns()
    time.sleep(seconds)
    done = {"start_ns": start_ns, "end_ns": time.monotonic_ns(), "count": 1, "seconds": 0.005}
    end(bytes=int(1e12 * seconds), flops=1e15 * seconds, sms=132, what=what, **done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("copy", "h2d", "d2h", "matmul", "allreduce", "burst"))
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--pretend", action="store_true")
    options = parser.parse_args()
    if options.pretend:
        pretend(options.what, options.seconds)
    elif options.what == "copy":
        copy(options.seconds)
    elif options.what == "matmul":
        matmul(options.seconds)
    elif options.what == "burst":
        burst(options.seconds)
    elif options.what == "allreduce":
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT="29523", NCCL_PROTO="Simple", NCCL_ALGO="Ring"
        )
        world = torch.cuda.device_count()
        mp.spawn(reducer, args=(world, options.seconds), nprocs=world)
    else:
        host_copy(options.what, options.seconds)


if __name__ == "__main__":
    main()
