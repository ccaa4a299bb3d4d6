"""A load in phases, for pictures: matmul held by the power limit, all-reduce, rest, and again.

    python phases.py --rounds 2 --matmul 5 --allreduce 5 --rest 2

One process for each GPU of this host; each phase lasts as many seconds as told.
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
    for _ in range(options.rounds):
        for name, seconds in (("matmul", options.matmul), ("allreduce", options.allreduce)):
            end = time.monotonic() + seconds
            done, began = 0, time.monotonic()
            while together(time.monotonic() < end):
                for _ in range(20):
                    if name == "matmul":
                        torch.matmul(left, right, out=out)
                    else:
                        dist.all_reduce(buffer)
                torch.cuda.synchronize()
                done += 20
            if rank == 0:
                took = (time.monotonic() - began) / done
                flops, share = 2 * SIZE**3 / took, 2 * (ranks - 1) / ranks
                figure = (
                    f"{flops / 1e12:.0f} TFLOP/s"
                    if name == "matmul"
                    else f"{BUFFER_BYTES / took * share / 1e9:.0f} GB/s busbw"
                )
                print(f"{name}: {figure}", flush=True)
        time.sleep(options.rest)
    dist.destroy_process_group()


def together(go_on: bool) -> bool:
    """Return whether all ranks go on: none may wait for one that has stopped."""
    flag = torch.tensor(int(go_on), device="cuda")
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


if __name__ == "__main__":
    mp.spawn(work, (PARSER.parse_args(),), nprocs=torch.cuda.device_count())
