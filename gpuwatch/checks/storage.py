"""How fast the storage is that jobs will read and write: with fio, where it is installed.

Nothing here has a figure of its own to be judged by but the trade's for small random reads; an
error of the storage is one. The file is small, is refused where it would fill a disk, and is gone
afterwards.
"""

import json
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gpuwatch.capabilities import follow
from gpuwatch.matter import Matter
from gpuwatch.verify import Finding, Node

PREFIX = "gpuwatch-verify-"
QUICK_BYTES, DEEP_BYTES = 256 << 20, 4 << 30
QUICK_SECONDS, DEEP_SECONDS = 1.5, 15.0
FREE = 2  # times the file
THUMB_READS = 100_000  # of 4 KiB, in a second
RATE = "bytes_per_second"


class Run(NamedTuple):
    """A run of fio: its flags, and where its result has the value that is measured."""

    measure: str
    part: str
    key: str
    unit: str
    flags: tuple[str, ...]


RUNS = (
    Run("write", "write", "bw_bytes", RATE, ("--rw=write", "--bs=1M", "--iodepth=8")),
    Run("read", "read", "bw_bytes", RATE, ("--rw=read", "--bs=1M", "--iodepth=8")),
    Run(
        "4K reads/s",
        "read",
        "iops",
        "",
        ("--rw=randread", "--bs=4k", "--iodepth=64", "--numjobs=4", "--time_based"),
    ),
)


class Storage:
    """A checkpoint's write, a data set's read, and small random reads, past the page cache."""

    name = "storage"
    help = "bytes and random reads per second of the storage"
    phase: Literal["static", "load"] = "load"
    deep_only = False
    essential = False

    def bound_seconds(self, gpus: int, deep: bool) -> float:
        """Return how long it may take; the number of GPUs is nothing to it."""
        return 4 * DEEP_SECONDS if deep else 6 * QUICK_SECONDS

    def run(self, node: Node) -> Iterator[Finding]:
        """Measure in the node's scratch directory."""
        size = DEEP_BYTES if node.deep else QUICK_BYTES
        seconds = DEEP_SECONDS if node.deep else QUICK_SECONDS
        place = str(node.scratch.resolve())
        if (fault := _fault(node.scratch, size)) is not None:
            yield Matter(self.name, place).skipped(*fault)
            return
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=node.scratch) as folder:
            path = Path(folder) / "file"
            for run in RUNS:
                told = _fio(
                    path, path.stat().st_size if path.exists() else size, seconds, run.flags
                )
                yield finding(place, run, told)
                if isinstance(told, str):
                    return


def _fault(scratch: Path, size: int) -> tuple[str, str] | None:
    """Return why nothing is measured there, and what to do; None if it may be."""
    if shutil.which("fio") is None:
        return "fio is not installed", "apt-get install fio, or dnf install fio"
    try:
        free = shutil.disk_usage(scratch).free
    except OSError as error:
        return f"{scratch}: {error.strerror}", "name a directory: --storage PATH"
    if free < FREE * size:
        return (
            f"{scratch}: {free >> 20} MiB free, and a file of {size >> 20} MiB is to leave as much",
            "name a directory with more room: --storage PATH",
        )
    return None


def _fio(path: Path, size: int, seconds: float, flags: tuple[str, ...]) -> dict[str, Any] | str:
    """Return what fio says of its one job, or what went wrong."""
    command = [
        *("fio", "--name=gpuwatch", f"--filename={path}", f"--size={size}"),
        *(f"--runtime={seconds}s", "--ioengine=libaio", "--direct=1", "--end_fsync=1"),
        *("--group_reporting", "--output-format=json", *flags),
    ]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            preexec_fn=follow(signal.SIGKILL),
        )
    except OSError as error:
        return f"fio: {error.strerror}"
    said = (done.stderr or done.stdout).strip().splitlines()
    try:
        # It may print a warning before the object.
        job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    except (ValueError, KeyError, IndexError, TypeError):
        return said[-1][:200] if said else f"fio ended with status {done.returncode}"
    if job.get("error") or done.returncode:
        return f"fio: error {job.get('error')}" + (f": {said[0][:200]}" if done.stderr else "")
    return job


def finding(place: str, run: Run, told: dict[str, Any] | str) -> Finding:
    """Return what is to be said of a run: `told` is what fio said, or what went wrong."""
    matter = Matter("storage", place, run.measure)
    value = None if isinstance(told, str) else (told.get(run.part) or {}).get(run.key)
    if not isinstance(value, int | float):
        reason = told if isinstance(told, str) else "fio tells no value"
        if "Input/output error" in reason:
            return matter.bad(reason, "host", "look at the kernel log for errors of the disk")
        return matter.unknown(reason, "host", "name a directory on a disk: --storage PATH")
    matter = replace(matter, unit=run.unit).by_thumb().seen(float(value))
    if run.unit:
        step = "compare it with what was promised"
        return matter.unknown("nothing to compare with", "", step)
    matter = matter.seen(float(value), float(THUMB_READS), "rule of thumb: a local NVMe disk")
    return matter.judged(
        "fewer than a local NVMe disk reads" if value < THUMB_READS else "",
        "host",
        "keep data sets of many small files elsewhere: --storage PATH",
    )
