"""A load in phases: matmul held by the power limit, all-reduce, copies, rest, and again.

    python phases.py --rounds 2 --matmul 5 --allreduce 5 --copies 3 --rest 2

One process for each GPU of this host; each phase lasts as many seconds as told. Copies are of
pinned memory, to the GPU and back.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--rounds", type=int, default=2)
PARSER.add_argument("--matmul", type=float, default=5.0)
PARSER.add_argument("--allreduce", type=float, default=5.0)
PARSER.add_argument("--copies", type=float, default=0.0)
PARSER.add_argument("--rest", type=float, default=2.0)
SIZE = 8192
BUFFER_BYTES = 256 << 20


def work(rank: int, options: argparse.Namespace) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    torch.cuda.set_device(rank)
    ranks = torch.cuda.device_count()
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
    left, right, out = (
        torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    buffer = torch.zeros(BUFFER_BYTES // 2, device="cuda", dtype=torch.bfloat16)
    host = torch.zeros_like(buffer, device="cpu").pin_memory()
    calls = {
        "matmul": lambda: torch.matmul(left, right, out=out),
        "allreduce": lambda: dist.all_reduce(buffer),
        "copies": lambda: (
            buffer.copy_(host, non_blocking=True),
            host.copy_(buffer, non_blocking=True),
        ),
    }
    for _ in range(options.rounds):
        for name, call in calls.items():
            end = time.monotonic() + getattr(options, name)
            done, began = 0, time.monotonic()
            while together(time.monotonic() < end):
                for _ in range(20):
                    call()
                torch.cuda.synchronize()
                done += 20
            if rank == 0 and done:
                took = (time.monotonic() - began) / done
                summed = BUFFER_BYTES / took * 2 * (1 - 1 / ranks)
                figures = {
                    "matmul": f"{2 * SIZE**3 / took / 1e12:.0f} TFLOP/s",
                    "allreduce": f"{summed / 1e9:.0f} GB/s busbw",
                    "copies": f"{2 * BUFFER_BYTES / took / 1e9:.0f} GB/s, one way after the other",
                }
                print(f"{name}: {figures[name]}", flush=True)
        time.sleep(options.rest)
    dist.destroy_process_group()


def together(go_on: bool) -> bool:
    """Return whether all ranks go on: none may wait for one that has stopped."""
    flag = torch.tensor(int(go_on), device="cuda")
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


if __name__ == "__main__":
    mp.spawn(work, (PARSER.parse_args(),), nprocs=torch.cuda.device_count())
