"""What `canary_gpu.py` runs in a process with torch: `python canary_child.py PART JSON`.

The last line of standard output is the result, as JSON.
"""

import functools
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.benchmark import Timer

from gpuwatch.canaries import CANARIES
from gpuwatch.canary_worker import Worker

MIB = 1 << 20
SETTINGS = {
    "ranks": 1,
    "scratch": ".",
    "seed": 1,
    "bursts": 10,
    "burst_seconds": 0.02,
    "warm_seconds": 0.2,
    "rest_seconds": 0.4,
}


def place(told: dict[str, Any]) -> torch.device:
    if told["cpu"]:
        torch.set_num_threads(1)
        return torch.device("cpu")
    torch.cuda.set_device(told["gpu"])
    return torch.device("cuda", told["gpu"])


def product(name: str, told: dict[str, Any], device: Any, like: Any = torch) -> list[Any]:
    """Run a canary in this process, as a worker would; return what it tells."""
    output = os.memfd_create(name)
    size = CANARIES[name].sizes["tiny" if told["cpu"] else "full"]
    kind = "cpu" if told["cpu"] else "gpu"
    worker = Worker({**SETTINGS, "device": kind, "size": size}, output)
    worker.torch, worker.device = like, device
    importlib.import_module(f"gpuwatch.canaries.{name}").run(worker)
    lines = os.pread(output, MIB, 0).splitlines()
    os.close(output)
    return [json.loads(line)["reading"] for line in lines if b'"reading"' in line]


def only(*dtypes: str) -> None:
    """Have the matmul canary take these dtypes alone."""
    importlib.import_module("gpuwatch.canaries.matmul").dtypes = lambda _: list(dtypes)


def readings(told: dict[str, Any]) -> dict[str, Any]:
    """Return values of many readings, canary after canary."""
    device, end = place(told), time.monotonic() + told["seconds"]
    found: dict[str, list[float]] = {}
    for name in told["canaries"]:
        for _ in range(told["count"]):
            if time.monotonic() > end:
                break
            time.sleep(0 if told["cpu"] else SETTINGS["rest_seconds"])
            for one in product(name, told, device):
                key = f"{name} {one.get('dtype') or one.get('direction') or ''}".strip()
                found.setdefault(key, []).append(one["value"])
    return found


def startup(told: dict[str, Any]) -> float:
    """Return what it takes to begin on a device, once told to on standard input."""
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.monotonic()
    torch.ones(1, device=place(told)).add_(1)
    if not told["cpu"]:
        torch.cuda.synchronize()
    return time.monotonic() - start


def timed(statement: str, **names: Any) -> float:
    """Return the seconds of a statement by torch's own benchmark, by the host's clock."""
    timer = Timer(statement, globals={"torch": torch, **names})
    count = max(20, int(0.25 / timer.timeit(20).mean))  # of one wait for the device
    timer.timeit(count)  # as warm as the canary makes it
    return float(timer.timeit(count).mean)


def paced(launch: Callable[[], object], pause: float) -> float:
    """Return the seconds of a launch by the host's clock, at the same time of a load as the canary.

    Under a power limit the clock depends on how long the load has lasted. So there is a pause
    before, and what counts are ten bursts, 0.3 s later.
    """

    def burst(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            launch()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    burst(1)
    time.sleep(pause)
    count, end = max(1, int(SETTINGS["burst_seconds"] / burst(5))), time.monotonic() + 0.3
    while time.monotonic() < end:
        burst(count)
    return statistics.median(burst(count) for _ in range(10))


def reference(told: dict[str, Any]) -> dict[str, Any]:
    """Return the canary's figures and those of other timers, in turn; matmul for seconds, too."""
    device = place(told)
    sizes = {name: one.sizes["tiny" if told["cpu"] else "full"] for name, one in CANARIES.items()}
    edge = sizes["matmul"]
    numbers = torch.Generator(device).manual_seed(1)
    left, right = (
        torch.empty(edge, edge, device=device).normal_(generator=numbers).to(torch.bfloat16)
        for _ in range(2)
    )
    out = torch.empty_like(left)
    source = torch.randn(sizes["memory"] // 4, device=device)
    target = torch.empty_like(source)
    host = torch.randn(sizes["pcie"] // 4).to("cpu")
    host = host if told["cpu"] else host.pin_memory()
    there = torch.empty_like(host, device=device)
    only("bf16")
    mine: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    sustained: dict[str, list[float]] = {}

    def note(where: dict[str, list[float]], name: str, value: float) -> None:
        where.setdefault(name, []).append(value)

    for _ in range(told["rounds"]):
        for name in ("matmul", "memory", "pcie"):
            for one in product(name, told, device):
                note(mine, f"{name} {one.get('direction', '')}".strip(), one["value"])
            if name == "matmul":
                launch = functools.partial(torch.matmul, left, right, out=out)
                note(theirs, "matmul", 2 * edge**3 / paced(launch, told["pause"]))
                timer = Timer("f()", globals={"f": launch})
                count = max(1, int(told["seconds"] / timer.timeit(20).mean))
                note(sustained, "matmul", 2 * edge**3 / timer.timeit(count).mean)
            elif name == "memory":
                seconds = timed("b.copy_(a)", a=source, b=target)
                note(theirs, "memory", 2 * sizes["memory"] / seconds)
            else:
                copy = "b.copy_(a, non_blocking=True)"
                note(theirs, "pcie to_gpu", sizes["pcie"] / timed(copy, a=host, b=there))
                note(theirs, "pcie from_gpu", sizes["pcie"] / timed(copy, a=there, b=host))
    found = {"canary": mine, "benchmark": theirs, "sustained": sustained}
    return {**found, **({} if told["cpu"] else fp8(left, right))}


def fp8(left: Any, right: Any) -> dict[str, Any]:
    """Return operations per second of fp8 with sums of full and of less precision."""
    eighths, one = torch.float8_e4m3fn, torch.ones((), device=left.device)
    call = functools.partial(
        torch._scaled_mm,
        left.to(eighths),
        right.to(eighths).t(),
        scale_a=one,
        scale_b=one,
        out_dtype=torch.bfloat16,
    )
    return {
        f"fp8 {name}": 2 * len(left) ** 3 / paced(functools.partial(call, use_fast_accum=fast), 1.0)
        for name, fast in (("exact sums", False), ("fast sums", True))
    }


def allreduce(told: dict[str, Any]) -> dict[str, Any]:
    """Return bytes per second of an all-reduce, by the host's clock; a process for each rank."""
    device, dist = place(told), torch.distributed
    dist.init_process_group(
        "gloo" if told["cpu"] else "nccl",
        init_method=f"tcp://127.0.0.1:{told['port']}",
        rank=told["gpu"],
        world_size=told["ranks"],
    )
    synchronize: Callable[[], object] = (
        (lambda: None) if told["cpu"] else lambda: torch.cuda.synchronize(device)
    )
    data = torch.zeros(told["size"] // 4, device=device)
    for _ in range(50):
        dist.all_reduce(data)
    rates = []
    for _ in range(20):
        synchronize()
        start = time.perf_counter()
        for _ in range(20):
            dist.all_reduce(data)
        synchronize()
        rates.append(20 * told["size"] / (time.perf_counter() - start))
    return {"rate": statistics.median(rates), "rates": rates}


def job(told: dict[str, Any]) -> dict[str, Any]:
    """Be a job that starts on a GPU once it is told to on standard input, and times its steps."""
    print("ready", flush=True)
    sys.stdin.readline()
    opened = time.monotonic_ns()
    device = place(told)
    edge = 128 if told["cpu"] else 4096
    a = torch.randn(edge, edge, device=device, dtype=torch.bfloat16)
    steps, end = [], time.monotonic() + told["seconds"]
    while time.monotonic() < end:
        start = time.monotonic_ns()
        for _ in range(4):
            torch.matmul(a, a)
        if not told["cpu"]:
            torch.cuda.synchronize()
        steps.append((start, time.monotonic_ns()))
    return {"opened_ns": opened, "steps": steps}


class Flips:
    """Torch, but for one bit of one element in one of its products."""

    def __init__(self, call: int, bit: int) -> None:
        self._left, self._bit = call, bit

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def matmul(self, a: Any, b: Any) -> Any:
        found = torch.matmul(a, b)
        self._left -= 1
        if self._left == 0:
            number = (1 << self._bit) - (1 << 32 if self._bit == 31 else 0)
            found.view(torch.int32)[17, 23].bitwise_xor_(number)
        return found


def flipped(told: dict[str, Any]) -> dict[str, Any]:
    """Return what the integrity canary says of a product with a bit that was flipped."""
    device = place(told)
    found = {"none": product("integrity", told, device)[0]}
    for call, bit in ((1, 0), (1, 13), (6, 0), (6, 22), (6, 30), (10, 31)):
        name = f"product {call}, bit {bit}"
        found[name] = product("integrity", told, device, Flips(call, bit))[0]
    return found


if __name__ == "__main__":
    parts = (readings, startup, reference, allreduce, job, flipped)
    part = {one.__name__: one for one in parts}
    print(json.dumps(part[sys.argv[1]](json.loads(sys.argv[2]))), flush=True)
    os._exit(0)  # not by way of NCCL's end, which may wait
