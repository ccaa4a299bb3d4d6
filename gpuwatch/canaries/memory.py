"""Memory: a copy on the device, several times larger than its caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuwatch.canary_worker import Worker


def run(worker: Worker) -> None:
    """Tell bytes per second, read and written."""
    torch = worker.torch
    size = worker.fitting(lambda size: 2 * size)
    source = torch.empty(size // 4, device=worker.device).normal_(generator=worker.generator())
    target = torch.empty_like(source)
    measured = worker.measure(lambda: target.copy_(source))
    worker.tell(size=size, value=2 * size / measured.pop("seconds"), **measured)
