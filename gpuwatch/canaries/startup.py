"""Startup: the time from no context on the GPU until a first kernel has run.

Without the import of torch, which tells of the disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuwatch.canary_worker import Worker


def run(worker: Worker) -> None:
    """Tell what getting ready took."""
    start, end = worker.settings["context_ns"]
    worker.tell(value=(end - start) / 1e9, start_ns=start, end_ns=end)
