"""What storage has moved: bytes read and written, by disk, export or mount, each counted once.

What the kernel or a file system does not offer is nothing, not an error. Sources: admin-guide/
iostats.rst; nfs_show_stats of the kernel for mountstats; lprocfs of Lustre.
"""

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

SECTOR_BYTES = 512  # of /proc/diskstats, whatever the disk's own are
NVME_PATH = re.compile(r"nvme\d+c\d+n\d+")  # one of several ways to a disk

Moved = tuple[str, int, int]  # device, bytes read, bytes written


def disks(procfs: Path, sysfs: Path) -> Iterator[Moved]:
    """Yield whole disks; partitions, and what is made of disks (md, dm), would count twice."""
    for line in _lines(procfs / "diskstats"):
        fields = line.split()
        if _is_disk(sysfs, fields[2]):
            yield fields[2], int(fields[5]) * SECTOR_BYTES, int(fields[9]) * SECTOR_BYTES


def nfs(procfs: Path, sysfs: Path) -> Iterator[Moved]:
    """Yield exports by what went over the network; one that is mounted twice comes once."""
    device, seen = "", set[str]()
    for line in _lines(procfs / "self/mountstats"):
        if line.startswith("device "):
            device = line.split()[1] if " fstype nfs" in line else ""
        elif device not in seen and device and line.startswith("\tbytes:"):
            seen.add(device)
            fields = line.split()
            yield device, int(fields[5]), int(fields[6])


def lustre(procfs: Path, sysfs: Path) -> Iterator[Moved]:
    """Yield mounts; newer versions keep the numbers where only root may read them."""
    for root in (procfs / "fs/lustre/llite", sysfs / "kernel/debug/lustre/llite"):
        for stats in root.glob("*/stats"):
            sums = {"read_bytes": 0, "write_bytes": 0}
            for line in _lines(stats):  # read_bytes 9 samples [bytes] MINIMUM MAXIMUM SUM
                fields = line.split()
                if fields[0] in sums:
                    sums[fields[0]] = int(fields[6])
            yield stats.parent.name, sums["read_bytes"], sums["write_bytes"]


MOVED: dict[str, Callable[[Path, Path], Iterator[Moved]]] = {
    "disk": disks,
    "nfs": nfs,
    "lustre": lustre,
}


@lru_cache(maxsize=4096)
def _is_disk(sysfs: Path, name: str) -> bool:
    device = sysfs / "block" / name
    made = "/virtual/block/" in str(device.resolve()) or NVME_PATH.fullmatch(name)
    return device.exists() and not made


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
