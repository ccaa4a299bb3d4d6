"""Moves a known number of bytes over PCIe or NVLink and says how many, as JSON.

python moves.py pcie --direction h2d --gib 400      pinned 256 MiB copies to GPU 0, or from it
python moves.py allreduce --mib 256 --count 200     NCCL over all GPUs, NCCL_PROTO=Simple
"""

import argparse
import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MIB = 1024 * 1024


def pcie(direction: str, gib: float) -> None:
    size = 256 * MIB
    host = torch.randint(0, 256, (size,), dtype=torch.uint8).pin_memory()
    device = torch.empty(size, dtype=torch.uint8, device="cuda:0")
    source, target = (host, device) if direction == "h2d" else (device, host)
    torch.cuda.synchronize()
    count = max(1, int(gib * 1024 / 256))
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.monotonic()
    for _ in range(count):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    seconds = time.monotonic() - start
    print(json.dumps({"bytes": count * size, "seconds": seconds}), flush=True)
    sys.stdin.readline()


def reducer(rank: int, world: int, mib: int, count: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    data = torch.ones(mib * MIB // 4, device=f"cuda:{rank}")
    dist.all_reduce(data)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    if rank == 0:
        print("ready", flush=True)
        time.sleep(3)
    dist.barrier()
    torch.cuda.synchronize()
    start = time.monotonic()
    for _ in range(count):
        dist.all_reduce(data)
    torch.cuda.synchronize()
    if rank == 0:
        seconds = time.monotonic() - start
        # What a ring sends from each GPU: 2 (n - 1) / n of the data.
        sent = 2 * (world - 1) * mib * MIB * count // world
        print(json.dumps({"bytes": sent, "seconds": seconds}), flush=True)
    time.sleep(3)
    os._exit(0)  # taking down the process group may wait for ever


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("pcie", "allreduce"))
    parser.add_argument("--direction", choices=("h2d", "d2h"), default="h2d")
    parser.add_argument("--gib", type=float, default=100.0)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--count", type=int, default=200)
    options = parser.parse_args()
    if options.what == "pcie":
        pcie(options.direction, options.gib)
    else:
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT="29519", NCCL_PROTO="Simple", NCCL_ALGO="Ring"
        )
        world = torch.cuda.device_count()
        mp.spawn(reducer, args=(world, options.mib, options.count), nprocs=world)


if __name__ == "__main__":
    main()
