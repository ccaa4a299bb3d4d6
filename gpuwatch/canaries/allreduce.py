"""All-reduce: a sum over all GPUs, as fast as their links carry it.

The value is the bus bandwidth of nccl-tests (doc/PERFORMANCE.md): bytes of a rank by seconds, by
2 (n - 1) / n, which compares with the links' rate whatever the number of ranks. Zeros stay zeros:
a sum over and over of anything else would soon be infinite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable  # noqa: UP035 - also in a Python that is older

if TYPE_CHECKING:
    from gpuwatch.canary_worker import Worker

WARM = 20  # reductions before it is agreed how many there are in a burst
WARM_AGAIN = 3  # of every further size
SLOW_SECONDS = 0.2  # a reduction that takes longer is the last of a sweep


def run(worker: Worker) -> None:
    """Tell bytes per second of the bus, and of the algorithm, for each size."""
    worker.join()
    sizes = list(worker.settings["sizes"])
    if len(sizes) > 1:
        most = least_free(worker) // 2
        sizes = [size for size in sizes if size <= most] or sizes[:1]
    for number, size in enumerate(sizes):
        if not reduced(worker, number, size):
            break
    worker.phase("leave")


def least_free(worker: Worker) -> int:
    """Return the free bytes of the rank that has least: all must take the same sizes."""
    free = worker.torch.cuda.mem_get_info(worker.device)[0] if worker.on_gpu else 1 << 32
    worker.joined.set(f"free{worker.rank}", str(free))
    return min(int(worker.joined.get(f"free{rank}")) for rank in range(worker.ranks))


def links(worker: Worker) -> dict[str, Any]:
    """Return what a reading says of how the ranks are joined."""
    return {"transports": worker.transports(), "environment": worker.nccl()}


def reduced(
    worker: Worker, number: int, size: int, way: Callable[[Worker], dict[str, Any]] = links
) -> bool:
    """Tell of one size, and by which way; say whether the next is worth it.

    Rank 0 has decided that for all.
    """
    torch, distributed = worker.torch, worker.torch.distributed
    data = torch.zeros(size // 4, device=worker.device)

    def reduce() -> None:
        distributed.all_reduce(data)

    reduce()  # the first makes the connections
    worker.synchronize()
    worker.phase("agree")
    for _ in range(WARM_AGAIN if number else WARM):
        reduce()
    if worker.rank == 0:
        # Not measured by each: all must make the same number of calls.
        count = worker.launches(reduce)
        worker.joined.set(f"count{number}", str(count))
    else:
        reduce()
        count = int(worker.joined.get(f"count{number}"))
    measured = worker.measure(reduce, count)
    seconds = measured.pop("seconds")
    if worker.rank == 0:
        rate = size / seconds
        worker.tell(
            gpu=-1,
            gpus=worker.ranks,
            size=size,
            value=rate * 2 * (worker.ranks - 1) / worker.ranks,
            algorithm_bytes_per_second=rate,
            **way(worker),
            **measured,
        )
        worker.joined.set(f"more{number}", "1" if seconds < SLOW_SECONDS else "0")
    return bool(worker.joined.get(f"more{number}") == b"1")
