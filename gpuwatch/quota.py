"""How much of the disk may be taken: old files go first, and some of the disk stays free."""

import os
import re
import time
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from gpuwatch.clock import SECOND_NS

DAY_NS = 86400 * SECOND_NS
STAMP = "%Y%m%dT%H%M%SZ"

_STAMPED = re.compile(r"\d{8}T\d{6}Z")


class Limits(NamedTuple):
    """What may be kept of one sort of file."""

    days: float
    size: int  # bytes
    files: int = 2**63 - 1

    def within(self, other: "Limits") -> "Limits":
        """Return the stricter of both in all."""
        return Limits(
            min(self.days, other.days), min(self.size, other.size), min(self.files, other.files)
        )


def stamp(realtime_ns: int) -> str:
    """Return how a wall time begins a file's name: 20261129T101500Z."""
    return time.strftime(STAMP, time.gmtime(realtime_ns // SECOND_NS))


def stamped_ns(name: str) -> int | None:
    """Return the wall time that a file's name begins with, None if it does not."""
    found = _STAMPED.match(name)
    try:
        when = datetime.strptime(f"{found[0]}+0000", f"{STAMP}%z") if found else None
    except ValueError:  # month 13
        return None
    return int(when.timestamp()) * SECOND_NS if when else None


def sweep(
    directory: Path,
    suffix: str,
    limits: Limits,
    now_ns: int,
    kept: Collection[str] = (),
    first: str = "",
) -> list[Path]:
    """Remove the oldest files beyond the limits, and return them; those named in `kept` stay.

    Those with `first` in their name go before all others. Only files of ours count: their names
    begin with a time, which is their age. Raises OSError.
    """
    files = []
    for path in directory.glob(f"*{suffix}"):
        since_ns = stamped_ns(path.name)
        if since_ns is not None:
            files.append((first not in path.name, since_ns, path, path.stat().st_size))
    files.sort()
    number, total = len(files), sum(size for *_, size in files)
    removed = []
    for _, since_ns, path, size in files:
        old = now_ns - since_ns > limits.days * DAY_NS
        if (old or number > limits.files or total > limits.size) and path.name not in kept:
            path.unlink(missing_ok=True)
            removed.append(path)
            number, total = number - 1, total - size
    return removed


def is_full(directory: Path, free_ratio: float) -> bool:
    """Say whether less of the file system is free than must stay free. Raises OSError."""
    found = os.statvfs(directory)
    return found.f_bavail < free_ratio * found.f_blocks
