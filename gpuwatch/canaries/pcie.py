"""PCIe: copies between the GPU and pinned memory of the host, one way and the other.

The parent keeps the process on the processors that are nearest to the GPU, and so the memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuwatch.canary_worker import Worker


def run(worker: Worker) -> None:
    """Tell bytes per second in each direction."""
    torch = worker.torch
    size = worker.fitting(lambda size: size)
    host = torch.empty(size // 4, pin_memory=worker.on_gpu)
    host.normal_(generator=worker.generator("cpu"))
    there = torch.empty_like(host, device=worker.device)
    for direction, target, source in (("to_gpu", there, host), ("from_gpu", host, there)):

        def copy(target: object = target, source: object = source) -> None:
            target.copy_(source, non_blocking=True)  # type: ignore[attr-defined]

        measured = worker.measure(copy)
        worker.tell(
            size=size, direction=direction, value=size / measured.pop("seconds"), **measured
        )
