"""A training-like job, GPU-bound: one process a GPU, steps replayed from a CUDA graph.

    python training_step.py --segments FILE --control SOCKET --classes off,off,10,1 --seconds 200
    python training_step.py --segments FILE --switch FILE --classes off,off,energy@1,gpm@10

A step is about 12 ms of matmuls, elementwise work and an all-reduce, timed by CUDA events on the
GPU, so the host's noise is not in the figure. With --steady it works for so many seconds before,
for who measures something else meanwhile. Between segments rank 0 sets the sampling interval over
the daemon's control socket, or tells `nvml_reads.py --switch` what to read; each block holds every
class once, in random order. The result is the slowdown of each class against the first, with its
95 % interval over blocks.
"""

import argparse
import itertools
import json
import math
import os
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gpuwatch.control import request

SEGMENT_STEPS = 32
WARM_STEPS = 400  # until clocks and temperature have settled
SETTLE_STEPS = 6


def choose(options: argparse.Namespace, name: str) -> None:
    """Have the next segment run beside this class of reads."""
    if options.switch:
        options.switch.write_text("" if name == "off" else name)
        return
    scale = 0.0 if name == "off" else float(name)
    messages = [
        {"command": "interval", "source": source, "scale": scale}
        for source in options.source.split(",")
    ]
    with ThreadPoolExecutor(len(messages)) as together:  # the daemon looks some ten times a second
        list(together.map(lambda message: request(options.control, message, 5.0), messages))


def captured_step(rank: int, world: int, size: int) -> torch.cuda.CUDAGraph:
    """Return a graph of one step: forward-like and backward-like matmuls, gradient exchange."""
    torch.manual_seed(rank)
    options = {"device": f"cuda:{rank}", "dtype": torch.bfloat16}
    weights = [torch.randn(size, size, **options) / size**0.5 for _ in range(2)]
    data = torch.randn(size, size, **options)
    gradient = torch.randn(32 * 1024 * 1024, **options)

    def step() -> None:
        hidden = data
        for _ in range(4):
            for weight in weights:
                hidden = torch.nn.functional.gelu(hidden @ weight)
        if world > 1:
            dist.all_reduce(gradient)
            gradient.mul_(1.0 / world)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph


class Pretended:
    """A step without a GPU."""

    def replay(self) -> None:
        dist.all_reduce(torch.ones(1000))
        time.sleep(0.002)


def segment(graph: torch.cuda.CUDAGraph, steps: int) -> list[float]:
    """Replay the step and return each step's milliseconds by the GPU's own clock."""
    if isinstance(graph, Pretended):
        return [pretended(graph) for _ in range(steps)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [one.elapsed_time(other) for one, other in itertools.pairwise(events)]


def pretended(graph: Pretended) -> float:
    start = time.perf_counter()
    graph.replay()
    return (time.perf_counter() - start) * 1e3


def worker(rank: int, world: int, options: argparse.Namespace) -> None:
    device = "cpu" if options.pretend else f"cuda:{rank}"
    if not options.pretend:
        torch.cuda.set_device(rank)
    if world > 1:
        backend = "gloo" if options.pretend else "nccl"
        dist.init_process_group(backend, rank=rank, world_size=world)
    graph = Pretended() if options.pretend else captured_step(rank, world, options.size)
    flag = torch.zeros(1, device=device)

    def over(end: float) -> bool:
        """Say whether it is time to end, the same on every rank."""
        flag.fill_(float(time.monotonic() > end))
        if world > 1:
            dist.broadcast(flag, 0)
        return bool(flag.item())

    segment(graph, WARM_STEPS)
    if options.steady:
        if rank == 0:
            print("steady", flush=True)
        end = time.monotonic() + options.steady
        while not over(end):
            segment(graph, SEGMENT_STEPS)
    classes = options.classes.split(",")
    names = [f"{name}#{index}" for index, name in enumerate(classes)]
    order = random.Random(7)  # the same on every rank
    rows = []
    end = time.monotonic() + options.seconds
    block = 0
    while True:
        order.shuffle(names)
        for name in names:
            if rank == 0:
                choose(options, name.split("#")[0])
            if world > 1:
                dist.barrier()
            segment(graph, options.settle_steps)
            times = segment(graph, options.segment_steps)
            rows.append((block, name, times))
        block += 1
        if over(end):
            break
    Path(f"{options.segments}.{rank}").write_text(json.dumps(rows))
    if rank == 0:
        choose(options, "off" if options.switch else "1")
    # Taking down a process group whose collectives are in a CUDA graph waits for ever.
    if not options.pretend:
        torch.cuda.synchronize()
    sys.stdout.flush()
    os._exit(0)


def report(rows: list[tuple[int, str, list[float]]]) -> dict[str, dict[str, float]]:
    """Compare every class with the first one, block by block."""
    means: dict[str, dict[int, float]] = {}
    tails: dict[str, list[float]] = {}
    for block, name, times in rows:
        means.setdefault(name, {})[block] = statistics.fmean(times)
        tails.setdefault(name, []).extend(times)
    base = next(name for name in means if name.endswith("#0"))
    result = {}
    for name in sorted(means, key=lambda name: int(name.split("#")[1])):
        shared = sorted(means[base].keys() & means[name].keys())
        slower = [means[name][block] / means[base][block] - 1 for block in shared]
        mean = statistics.fmean(slower)
        half = 1.96 * statistics.stdev(slower) / math.sqrt(len(slower)) if len(slower) > 1 else 0
        times = sorted(tails[name])
        result[name] = {
            "blocks": len(shared),
            "step_ms": statistics.fmean(times),
            "p99_ms": times[int(0.99 * len(times))],
            "slowdown": mean,
            "low": mean - half,
            "high": mean + half,
        }
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--segments", required=True)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--control", type=Path)
    where.add_argument("--switch", type=Path)
    parser.add_argument("--source", default="nvml_state")
    parser.add_argument("--classes", default="off,off,10,1")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--segment-steps", type=int, default=SEGMENT_STEPS)
    parser.add_argument("--settle-steps", type=int, default=SETTLE_STEPS)
    parser.add_argument("--steady", type=float, default=0.0)
    parser.add_argument("--pretend", action="store_true", help="two ranks on processors, no work")
    options = parser.parse_args()
    world = 2 if options.pretend else torch.cuda.device_count()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    mp.spawn(worker, args=(world, options), nprocs=world)
    for rank in range(world):
        print(f"rank {rank} of {world}: scale of the period (1 = as configured), or class@hertz")
        rows = json.loads(Path(f"{options.segments}.{rank}").read_text())
        for name, found in report(rows).items():
            print(
                f"  {name:20} blocks {found['blocks']:4.0f}  step {found['step_ms']:.3f} ms"
                f"  p99 {found['p99_ms']:.3f}  slowdown {found['slowdown']:+.3%}"
                f"  95 % [{found['low']:+.3%}, {found['high']:+.3%}]"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
