"""Integrity: whether the GPU computes exactly what it should, bit by bit.

Matrices of integers up to 8 are exact in tf32, and their sums of products, below 2^24, in fp32: so
each element of the product is exact in any order of summation, on any GPU. Sums over its rows and
columns are compared with those that the processor computed from the factors, which finds any wrong
element and its place; and each product with the first. That is done again and again, and the same
is asked of an all-reduce of integers between the GPUs.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuwatch.canary_worker import Worker

LARGEST = 8
REPEATS = 10


def run(worker: Worker) -> None:
    """Tell for each GPU whether its products are right, and for the host whether the sums are."""
    times: list[int] = []
    fault = products(worker, times)
    worker.tell(gpus=1, dtype="int", **verdict(fault), **taken(times))
    if worker.ranks > 1:
        if worker.on_gpu:  # torch keeps what products took, and NCCL takes its own
            worker.torch.cuda.empty_cache()
        sums(worker)


def verdict(fault: str) -> dict[str, str]:
    """Return the result that a fault, or none, is."""
    return {"result": "wrong", "detail": fault} if fault else {"result": "ok"}


def taken(times: list[int]) -> dict[str, Any]:
    """Return the seconds from one of some times to the next, and between which that was.

    The first does not count if there are others: it loads kernels and makes connections.
    """
    each = [later - earlier for earlier, later in zip(times, times[1:])]  # noqa: B905, RUF007
    seconds = statistics.median(each[1:] or each) / 1e9
    return {"value": seconds, "start_ns": times[0], "end_ns": times[-1]}


def products(worker: Worker, times: list[int]) -> str:
    """Return what is wrong with the products of two matrices, "" if nothing is.

    `times` gets when each began, and when the last had been compared.
    """
    torch = worker.torch
    torch.backends.cuda.matmul.allow_tf32 = True  # in the tensor cores, where there are some
    shape, generator = (worker.size, worker.size), worker.generator("cpu")
    left, right = (
        torch.randint(-LARGEST, LARGEST + 1, shape, generator=generator, dtype=torch.int64)
        for _ in range(2)
    )
    rows = (left * right.sum(1)).sum(1).double()
    columns = (right * left.sum(0)[:, None]).sum(0).double()
    a, b = (factor.to(worker.device, torch.float32) for factor in (left, right))
    first, fault = None, ""
    for repeat in range(REPEATS):
        worker.phase("measure")
        times.append(time.monotonic_ns())
        product = torch.matmul(a, b)
        # As they are, for a wrong element need be no integer.
        bad = [
            (product.sum(over, dtype=torch.float64).cpu() != right_sums).nonzero().flatten()
            for over, right_sums in ((1, rows), (0, columns))
        ]
        if any(len(places) for places in bad):
            fault = f"product {repeat}: rows {_some(bad[0])}, columns {_some(bad[1])} are wrong"
        elif first is None:
            first = product
        elif not torch.equal(product, first):
            fault = f"product {repeat}: other bits than the first, with the same sums"
        if fault:
            break
    times.append(time.monotonic_ns())
    return fault


def _some(places: Any) -> str:
    shown = ", ".join(map(str, places[:3].tolist()))
    return f"{shown or 'none'}{', ...' if len(places) > 3 else ''}"


def sums(worker: Worker) -> None:
    """Tell of the host whether every rank gets the right sum over all ranks, each time."""
    torch, distributed = worker.torch, worker.join()
    base = torch.randint(
        0, 1 << 20, (worker.size * 256,), generator=worker.generator("cpu"), dtype=torch.int32
    ).to(worker.device)
    right = base * worker.ranks + worker.ranks * (worker.ranks - 1) // 2
    times, fault = [], ""
    for repeat in range(REPEATS):
        worker.phase("measure")
        times.append(time.monotonic_ns())
        data = base + worker.rank
        distributed.all_reduce(data)
        wrong = int((data != right).sum())
        if wrong and not fault:
            fault = (
                f"all-reduce {repeat}: {wrong} of {len(data)} sums are wrong at rank {worker.rank}"
            )
    times.append(time.monotonic_ns())
    worker.phase("leave")
    worker.joined.set(f"fault{worker.rank}", json.dumps(fault))
    if worker.rank == 0:
        faults = [json.loads(worker.joined.get(f"fault{rank}")) for rank in range(worker.ranks)]
        worker.tell(
            gpu=-1,
            gpus=worker.ranks,
            size=len(base) * 4,
            dtype="int32",
            **taken(times),
            environment=worker.nccl(),
            **verdict("; ".join(filter(None, faults))),
        )
