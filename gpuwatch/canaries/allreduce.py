"""All-reduce: a sum over all GPUs, as fast as their links carry it.

The value is the bus bandwidth of nccl-tests (doc/PERFORMANCE.md): bytes of a rank by seconds, by
2 (n - 1) / n, which compares with the links' rate whatever the number of ranks. Zeros stay zeros:
a sum over and over of anything else would soon be infinite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuwatch.canary_worker import Worker

WARM = 20  # reductions before it is agreed how many there are in a burst


def run(worker: Worker) -> None:
    """Tell bytes per second of the bus, and of the algorithm."""
    torch, distributed = worker.torch, worker.join()
    data = torch.zeros(worker.size // 4, device=worker.device)

    def reduce() -> None:
        distributed.all_reduce(data)

    reduce()  # the first makes the connections
    worker.synchronize()
    worker.phase("agree")
    for _ in range(WARM):
        reduce()
    if worker.rank == 0:
        # Not measured by each: all must make the same number of calls.
        count = worker.launches(reduce)
        worker.joined.set("count", str(count))
    else:
        reduce()
        count = int(worker.joined.get("count"))
    measured = worker.measure(reduce, count)
    worker.phase("leave")
    if worker.rank == 0:
        rate = worker.size / measured.pop("seconds")
        worker.tell(
            gpu=-1,
            gpus=worker.ranks,
            value=rate * 2 * (worker.ranks - 1) / worker.ranks,
            algorithm_bytes_per_second=rate,
            environment=worker.nccl(),
            **measured,
        )
