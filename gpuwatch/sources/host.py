"""The host beside its GPUs: what work waits for, what storage delivers, who is stuck.

All of it is read from /proc. Pressure that a kernel does not offer is left out, and told once:
it may be compiled in but switched off (psi=0), which shows only when a file of it is read.
"""

import math
import os
import re
from collections.abc import Iterable, Sequence

from gpuwatch.clock import MILLISECOND_NS, SECOND_NS, monotonic_ns
from gpuwatch.host_signals import (
    BLOCKED,
    IO_COLUMNS,
    NUMA_EVENTS,
    PRESSURE_COLUMNS,
    RESOURCES,
    STORAGES,
)
from gpuwatch.signals import HOST, UNKNOWN_INTEGER, Column, Event
from gpuwatch.source import Context, Findings, Group, Opened
from gpuwatch.storage import MOVED

IO_PERIOD_NS = SECOND_NS
BLOCKED_PERIOD_NS = 10 * SECOND_NS  # a look at every process

KERNEL_THREAD = 0x00200000  # PF_KTHREAD of include/linux/sched.h

_PRESSURE = re.compile(rb"^(some|full) .*total=(\d+)$", re.MULTILINE)


class Host:
    """Source of the duty `host`."""

    name = "host"

    def __init__(self) -> None:
        self.findings = Findings()
        self._pressures: dict[str, tuple[int, list[str]]] = {}  # open file, kinds it has
        self._seen: dict[tuple[str, str], tuple[int, int]] = {}  # by storage and device
        self._moved: dict[str, list[float]] = {}  # by storage: bytes read, bytes written
        self._waited = 0
        self._asleep: set[str] = set()  # processes in uninterruptible sleep at the last look
        self._told: set[str] = set()

    def open(self, context: Context) -> Opened:
        """See what this kernel offers."""
        self._procfs, self._sysfs = context.procfs, context.sysfs
        groups = [
            Group("io", IO_COLUMNS, IO_PERIOD_NS, self._read_io),
            Group("blocked", (Column(HOST, BLOCKED),), BLOCKED_PERIOD_NS, self._read_blocked),
        ]
        pressure = self._open_pressure()
        if pressure:
            period_ns = int(context.settings["config"]["host"]["period_ms"] * MILLISECOND_NS)
            groups.append(Group("pressure", pressure, period_ns, self._read_pressure))
        return Opened(tuple(groups))

    def housekeep(self, now_ns: int) -> None:
        """Nothing needs upkeep."""

    def close(self) -> None:
        """Let go of the open files."""
        for file, _ in self._pressures.values():
            os.close(file)

    def _open_pressure(self) -> tuple[Column, ...]:
        """Open what can be read of pressure; return its columns."""
        refused, why = [], ""
        for resource, wanted in RESOURCES.items():
            path = self._procfs / "pressure" / resource
            try:
                offered = {kind.decode() for kind, _ in _PRESSURE.findall(path.read_bytes())}
                kinds = [kind for kind in wanted if kind in offered]
                if kinds:
                    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    self._pressures[resource] = file, kinds
            except OSError as fault:
                refused.append(resource)
                why = f"{fault.strerror}: boot the kernel with psi=1 to have it"
        if refused:
            text = f"{self._procfs / 'pressure'}: {', '.join(refused)}: {why}"
            self.findings.events.append(Event(monotonic_ns(), HOST, "pressure_off", text))
        return tuple(
            column
            for column in PRESSURE_COLUMNS
            if column.label in self._pressures.get(column.entity.id, (0, ()))[1]
        )

    def _read_pressure(self) -> Sequence[float]:
        cells: list[float] = []
        for file, kinds in self._pressures.values():
            try:
                found = dict(_PRESSURE.findall(os.pread(file, 4096, 0)))
            except OSError as fault:
                self._fail("pressure", fault)
                found = {}
            cells += [int(found.get(kind.encode(), UNKNOWN_INTEGER)) for kind in kinds]
        return cells

    def _read_io(self) -> Sequence[float]:
        cells: list[float] = []
        for storage in STORAGES:
            try:
                cells += self._look(storage)
            except (OSError, ValueError, IndexError) as fault:
                self._fail(storage, fault)
                cells += [UNKNOWN_INTEGER, UNKNOWN_INTEGER]
        try:
            # The kernel's own sum falls now and then.
            fields = (self._procfs / "stat").read_text().split(maxsplit=6)
            self._waited = max(self._waited, int(fields[5]))
            cells.append(self._waited)
        except (OSError, ValueError, IndexError) as fault:
            self._fail("stat", fault)
            cells.append(UNKNOWN_INTEGER)
        return [*cells, *self._numa()]

    def _look(self, storage: str) -> Sequence[float]:
        """Return the bytes moved since the start; unknown until there is any such storage."""
        for device, *now in MOVED[storage](self._procfs, self._sysfs):
            before = self._seen.get((storage, device), now)
            self._seen[storage, device] = (now[0], now[1])
            total = self._moved.setdefault(storage, [0, 0])
            for index in (0, 1):  # what fell was made anew
                total[index] += max(0, now[index] - before[index])
        return self._moved.get(storage, (UNKNOWN_INTEGER, UNKNOWN_INTEGER))

    def _numa(self) -> Iterable[float]:
        """Return counts of pages, unknown of a kernel without NUMA."""
        try:
            lines = (self._procfs / "vmstat").read_text().splitlines()
            counts = {
                name: int(value) for name, _, value in (line.partition(" ") for line in lines)
            }
        except (OSError, ValueError) as fault:
            self._fail("vmstat", fault)
            counts = {}
        return [counts.get(f"numa_{event}", UNKNOWN_INTEGER) for event in NUMA_EVENTS]

    def _read_blocked(self) -> Sequence[float]:
        """Count processes that hold a GPU and sleep so that no signal wakes them."""
        pids = filter(str.isdigit, os.listdir(self._procfs))  # noqa: PTH208 - names are wanted
        asleep = {pid for pid in pids if self._sleeps(pid)}
        stuck, self._asleep = asleep & self._asleep, asleep
        holders = {pid: self._holds_gpu(pid) for pid in stuck}
        blocked = {pid for pid, holds in holders.items() if holds}
        for pid in blocked - self._told:
            text = f"process {pid} ({self._name(pid)}) cannot be interrupted"
            self.findings.events.append(Event(monotonic_ns(), HOST, "gpu_process_blocked", text))
        self._told = blocked
        return [math.nan if None in holders.values() else float(len(blocked))]

    def _sleeps(self, pid: str) -> bool:
        """Say whether a process of users is in uninterruptible sleep."""
        try:
            file = os.open(f"{self._procfs}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # it has ended
            return False
        try:
            # The name, in parentheses, may hold anything.
            fields = os.read(file, 1024).rpartition(b")")[2].split()
        except OSError:
            return False
        finally:
            os.close(file)
        return len(fields) > 6 and fields[0] == b"D" and not int(fields[6]) & KERNEL_THREAD

    def _holds_gpu(self, pid: str) -> bool | None:
        """Say whether a process has a GPU open; None if we may not know."""
        try:
            with os.scandir(self._procfs / pid / "fd") as files:
                return any(
                    os.readlink(file).startswith("/dev/nvidia")  # noqa: PTH115 - of many files
                    for file in files
                )
        except PermissionError:
            return None
        except OSError:  # it has ended
            return False

    def _name(self, pid: str) -> str:
        try:
            return (self._procfs / pid / "comm").read_text(errors="replace").strip()
        except OSError:
            return "?"

    def _fail(self, what: str, fault: Exception) -> None:
        self.findings.errors[f"{what}: {type(fault).__name__}"] += 1
